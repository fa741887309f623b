"""Cases of the Gated DeltaNet steps: arguments with every trap of the contract in them, and the check.

As in ``tests.cases``: a case owns flat buffers and hands out views of them, so that the check sees every byte. All
that may not be read (ring rows without a record, unnamed slots, paddings, guards) holds NaN and must stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.gdn_validate import decode_problem, verify_problem
from replayssm_cute.reference import gdn, gdn_spec
from tests import tolerance
from tests.cases import GUARD, View, bits, narrowed

#: Roundings allowed beyond those of Mamba2's sums (``tests.tolerance``): see ``limits``.
ROUNDINGS = 12
DECODE = ("state", "q", "k", "v", "a", "b", "A_log", "dt_bias", "d_cache", "k_cache", "g_cache", "write_pos",
          "force_flush", "ssm_state_indices", "null_block_id", "out")
RINGS = ("d_cache", "k_cache", "g_cache", "rawv_cache", "rawk_cache", "beta_cache")
POOLS = ("state", *RINGS)
NARROW = ("rawv_cache", "rawk_cache")


@dataclass
class Case:
    """The arguments of one step; ``spec`` says whether it is a verify step (T tokens a row) or standard decode.

    Attributes:
        buffers, views: flat tensors, and where in them each argument lies.
        cursors: per batch row (records, base, flush).
        lengths: per batch row its tokens.
        slots, keys: per batch row its checkpoint slot and its ring row; equal in standard decode.
    """

    buffers: dict[str, Tensor]
    views: dict[str, View]
    null_block_id: int
    cursors: list[tuple[int, int, bool]]
    lengths: list[int]
    slots: list[int]
    keys: list[int]
    spec: bool
    l2norm: bool = True

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name].of(self.buffers[name])

    def get(self, name: str) -> Any:
        return self.null_block_id if name == "null_block_id" else self[name] if name in self.buffers else None

    @property
    def scale(self) -> float:
        return self.views["k"].size[-1] ** -0.5

    @property
    def buffer_len(self) -> int:
        return self.views["g_cache"].size[2]

    @property
    def ratio(self) -> int:
        return self.views["v"].size[1] // self.views["k"].size[1]

    @property
    def live(self) -> list[int]:
        return [b for b, s in enumerate(self.slots) if s != self.null_block_id and s >= 0]

    @property
    def rings(self) -> dict[str, Tensor | None]:
        return {name: self.get(name) for name in RINGS}

    def op_args(self) -> tuple[Any, ...]:
        """The canonical arguments of the operation, as a backend's launch takes them."""
        if not self.spec:
            return self.decode_args()
        args = self.verify_args()
        return (*args[:8], *self.rings.values(), *args[9:])

    def decode_args(self) -> tuple[Any, ...]:
        return tuple(self.get(name) for name in DECODE)

    def verify_args(self) -> tuple[Any, ...]:
        names = ("state", "q", "k", "v", "a", "b", "A_log", "dt_bias")
        rest = ("out", "query_start_loc", "ssm_state_indices", "replay_indices", "write_pos", "cache_base", "is_flush",
                "null_block_id")
        return (*(self.get(n) for n in names), self.rings, *(self.get(n) for n in rest))

    def clone(self) -> Case:
        return replace(self, buffers={k: v.clone() for k, v in self.buffers.items()})

    def to(self, device: torch.device | str) -> Case:
        return replace(self, buffers={k: v.to(device) for k, v in self.buffers.items()})

    def double(self) -> Case:
        return replace(self, buffers={k: v.double() if v.is_floating_point() else v.clone()
                                      for k, v in self.buffers.items()})

    def tokens(self, row: int) -> range:
        """The row's tokens in q, k, v and out."""
        start = sum(self.lengths[:row])
        return range(start, start + self.lengths[row])

    def window_rows(self, row: int) -> list[int]:
        """Physical ring rows that the row's tokens are appended to."""
        m, base, flush = self.cursors[row]
        if not self.spec:
            return [] if flush else [m]
        return [(base + m + s) % self.buffer_len for s in range(self.lengths[row])]


def problem_of(case: Case, launch_mode: str = "both") -> GdnProblem:
    """The problem that the case poses."""
    if not case.spec:
        return decode_problem(*case.decode_args(), scale=case.scale, l2norm=case.l2norm)
    return verify_problem(*case.verify_args(), max_cache_len=case.buffer_len, max_spec_len=max(case.lengths),
                          scale=case.scale, l2norm=case.l2norm, launch_mode=launch_mode)


class Builder:
    """Lays arguments out in guarded, padded buffers."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.gen, self.device = torch.Generator().manual_seed(seed), device
        self.buffers: dict[str, Tensor] = {}
        self.views: dict[str, View] = {}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.gen)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.gen)

    def add(self, name: str, values: Tensor, dtype: torch.dtype, gap: int = 0, guard: int = 0) -> None:
        """Row by row with ``gap`` elements of NaN between rows, guards of NaN around the whole."""
        inner = math.prod(values.shape[1:])
        flat = torch.full((2 * guard + values.shape[0] * (inner + gap),), math.nan).to(dtype)
        strides = (inner + gap, *(math.prod(values.shape[i + 1:]) for i in range(1, values.dim())))
        self.views[name] = View(tuple(values.shape), strides, guard)
        self.views[name].of(flat).copy_(values)
        self.buffers[name] = flat.to(self.device)

    def integers(self, name: str, values: Sequence[int], dtype: torch.dtype) -> None:
        tensor = torch.tensor(values, dtype=dtype)
        self.views[name] = View(tuple(tensor.shape), tuple(tensor.stride()))
        self.buffers[name] = tensor.to(self.device)


def make_case(*, spec: bool = False, batch: int = 3, k_heads: int = 1, ratio: int = 2, K: int = 16, V: int = 16,
              buffer_len: int = 8, tokens: int = 3, state: torch.dtype = torch.float32,
              act: torch.dtype = torch.bfloat16, ring: torch.dtype | None = None, exact: bool = True,
              cursors: Sequence[tuple[int, int, bool]] | None = None, lengths: Sequence[int] | None = None,
              padded: Sequence[int] = (), null_block_id: int = -1, index_dtype: torch.dtype = torch.int32,
              slot_padding: int = 0, row_padding: int = 0, gate_dtype: torch.dtype | None = None, force: bool = True,
              raw_gates: Sequence[float] | None = None, packed: bool = False, l2norm: bool = True, seed: int = 0,
              device: torch.device | str = "cpu") -> Case:
    """A case on ``device`` (random numbers are drawn on the CPU, so every device sees the same).

    Args:
        spec: a verify step; ``tokens`` a row unless ``lengths`` says otherwise. Else one token a row.
        exact: the ring keeps the raw inputs (verify steps).
        cursors: (records, base, flush) of each row; by default all different, flushes among them.
        padded: batch rows that are padding: ``null_block_id``, every second one a negative slot.
        force: a ``force_flush`` tensor is given (standard decode).
        raw_gates: values of ``a`` dealt out to tokens and heads in turn, instead of random ones.
        packed: q, k and v are views of one (tokens, 2 Hk K + HV V) tensor.
    """
    make, L, HV = Builder(seed, device), buffer_len, k_heads * ratio
    T, ring, gate_dtype = tokens if spec else 1, ring or act, gate_dtype or act
    room = L - T if spec else L - 1
    cursors = list(cursors or [((5 * b + 1 + seed) % (room + 1), (3 * b) % L if spec else 0,
                                b % 3 == 1 or (not spec and (5 * b + 1 + seed) % L == L - 1)) for b in range(batch)])
    lengths = list(lengths or [T] * batch)
    pool, keys_pool, n = batch + 3, batch + 2, sum(lengths)
    free = [s for s in range(pool) if s != null_block_id]
    slots = [free[i] for i in torch.randperm(len(free), generator=make.gen)[:batch].tolist()]
    free = [s for s in range(keys_pool) if s != null_block_id]
    keys = [free[i] for i in torch.randperm(len(free), generator=make.gen)[:batch].tolist()] if spec else slots
    for i, b in enumerate(padded):
        slots[b] = keys[b] = null_block_id if i % 2 == 0 else -3 - i
    rows = keys_pool if spec else pool

    def pool_of(name: str, values: Tensor, dtype: torch.dtype) -> None:
        make.add(name, values, dtype, slot_padding, GUARD // dtype.itemsize)

    pool_of("state", make.normal(pool, HV, V, K) * 0.5, state)
    pool_of("d_cache", make.normal(rows, HV, L, V), ring)
    pool_of("k_cache", gdn.unit(make.normal(rows, k_heads, L, K), torch.float32), ring)
    pool_of("g_cache", -make.uniform(rows, HV, L) * 0.3, torch.float32)
    if spec and exact:
        pool_of("rawv_cache", make.normal(rows, HV, L, V), act)
        pool_of("rawk_cache", make.normal(rows, k_heads, L, K) * (1 if l2norm else K ** -0.5), act)
        pool_of("beta_cache", make.uniform(rows, HV, L), torch.float32)
    shapes = {"q": (n, k_heads, K), "k": (n, k_heads, K), "v": (n, HV, V)}
    size = 1 if l2norm else K ** -0.5
    if packed:
        make.add("mixed_qkv", make.normal(n, 2 * k_heads * K + HV * V) * size, act, row_padding)
        base = make.views["mixed_qkv"]
        for name, at in (("q", 0), ("k", k_heads * K), ("v", 2 * k_heads * K)):
            make.views[name] = View(shapes[name], (base.stride[0], shapes[name][2], 1), at)
            make.buffers[name] = make.buffers["mixed_qkv"]
    else:
        for name, shape in shapes.items():
            make.add(name, make.normal(*shape) * size, act, row_padding)
    raw = make.normal(n, HV)
    if raw_gates is not None:
        raw = torch.tensor([raw_gates[i % len(raw_gates)] for i in range(n * HV)]).view(n, HV)
    make.add("a", raw, gate_dtype, row_padding)
    make.add("b", make.normal(n, HV) * 2, gate_dtype, row_padding)
    make.add("A_log", torch.log(make.uniform(HV) * 4 + 0.1), torch.float32)
    make.add("dt_bias", torch.zeros(HV) if raw_gates is not None else make.normal(HV) * 0.5 - 1, torch.float32)
    make.add("out", torch.full((n, HV, V), math.nan), act, row_padding)
    make.integers("ssm_state_indices", slots, index_dtype)
    if spec:
        make.integers("replay_indices", keys, torch.int64)
        make.integers("query_start_loc", [sum(lengths[:b]) for b in range(batch + 1)], torch.int32)
        for name, dtype in (("write_pos", torch.int32), ("cache_base", torch.int32), ("is_flush", torch.int8)):
            make.integers(name, [99] * rows, dtype)
    else:
        make.integers("write_pos", [99] * batch, torch.int32)
        if force:
            make.integers("force_flush", [0] * batch, torch.int32)
    case = Case(make.buffers, make.views, null_block_id, list(cursors), lengths, slots, keys, spec, l2norm)
    if not force and not spec:
        case.cursors = [(m, base, m == L - 1) for m, base, _ in case.cursors]
    poison(case)
    return case


def poison(case: Case) -> None:
    """Write the cursors and put NaN wherever they leave nothing valid."""
    L = case.buffer_len
    for name in POOLS:
        if name in case.buffers:
            named = {(case.slots if name == "state" else case.keys)[b] for b in case.live}
            case[name][[s for s in range(case[name].shape[0]) if s not in named]] = math.nan
    for b in case.live:
        m, base, flush = case.cursors[b]
        if case.spec:
            key = case.keys[b]
            case["write_pos"][key], case["cache_base"][key], case["is_flush"][key] = m, base, flush
        else:
            case["write_pos"][b] = m
            if "force_flush" in case.buffers:
                case["force_flush"][b] = int(flush and m != L - 1)
        unused = [(base + j) % L for j in range(m, L)]
        for name in RINGS:
            if name in case.buffers:
                case[name][case.keys[b], :, unused] = math.nan


def masks(case: Case) -> dict[str, Tensor]:
    """For each tensor that the step may change, which elements of its buffer it must write."""
    found = {name: torch.zeros(t.shape, dtype=torch.bool, device=t.device) for name, t in case.buffers.items()}
    for b in range(len(case.lengths)):
        case.views["out"].of(found["out"])[list(case.tokens(b))] = True
        if b not in case.live:
            continue
        if case.cursors[b][2]:
            case.views["state"].of(found["state"])[case.slots[b]] = True
        for name in RINGS:
            if name in case.buffers:
                case.views[name].of(found[name])[case.keys[b], :, case.window_rows(b)] = True
    return found


def states_before(case: Case, row: int) -> Tensor:
    """The float64 state (HV, V, K) of a row before its tokens; a flush of a verify step counts as made."""
    m, base, flush = case.cursors[row]
    key = torch.tensor([case.keys[row]], device=case["state"].device)
    exact = case.double()
    count, start = (torch.tensor([n], device=key.device) for n in (0 if case.spec and flush else m, base))
    d, k, g = gdn.ring_window(exact["d_cache"], exact["k_cache"], exact["g_cache"], key, count, start, torch.float64)
    return gdn.materialise(exact["state"][case.slots[row]], d[0], k[0].repeat_interleave(case.ratio, 0), g[0])


def limits(before: Case, after: Case, truncating: bool) -> dict[str, Tensor]:
    """Elementwise tolerance of every written tensor, in its buffer's shape; NaN where nothing is written.

    The scale of a row's sums is taken from the exact states: sigma_v = max over tokens of |v| + |S| |k|, row by row
    of V, bounds the terms of d (|beta| <= 1), |S| |q| + sigma |q.k| those of o. Errors do not grow from token to
    token: the rule contracts along k and leaves the rest. ``ROUNDINGS`` is about twice what was measured over the
    suite.
    """
    found = {name: torch.full_like(t, math.nan, dtype=torch.float64) for name, t in after.buffers.items()}
    exact = after.double()

    def put(name: str, where: Any, value: Tensor, scale: Tensor) -> None:
        limit = tolerance.bound(value, scale, after.buffers[name].dtype, ROUNDINGS, truncating)
        before.views[name].of(found[name])[where] = limit

    for b in before.live:
        slot, key, flush = before.slots[b], before.keys[b], before.cursors[b][2]
        ahead = before if not (before.spec and flush) else after
        S = states_before(ahead, b)
        at = list(before.tokens(b))
        g, beta = gdn.gates(exact["a"][at], exact["b"][at], exact["A_log"], exact["dt_bias"], torch.float64)
        raw = (exact["a"][at] + exact["dt_bias"]).abs()
        qs, ks = gdn.query_and_key(exact["q"][at], exact["k"][at], before.ratio, before.scale, before.l2norm,
                                   torch.float64)
        sigma, records = torch.zeros_like(S[..., 0]), []
        for s, token in enumerate(at):
            v = exact["v"][token]
            sigma = torch.maximum(sigma, v.abs() + torch.exp(g[s])[:, None] * (S.abs() @ ks[s].abs()[..., None])[..., 0]
                                  + _history_scale(ahead, b, ks[s]))
            S, d = gdn.advance(S, ks[s], v, g[s], beta[s])
            o = (S @ qs[s][..., None])[..., 0]
            put("out", token, o, (S.abs() @ qs[s].abs()[..., None])[..., 0]
                + sigma * qs[s].norm(dim=-1, keepdim=True) + _history_scale(ahead, b, qs[s]))
            records.append((d, sigma, ks[s][::before.ratio], g[s], beta[s], raw[s]))
        for (d, top, k, gate, bet, rw), p in zip(records, before.window_rows(b), strict=False):
            put("d_cache", (key, slice(None), p), d, top)
            put("k_cache", (key, slice(None), p), k, k)
            put("g_cache", (key, slice(None), p), gate, gate * (1 + rw.clamp(max=90)))
            if "beta_cache" in before.buffers:
                put("beta_cache", (key, slice(None), p), bet, bet * 4)
        if flush:
            put("state", slot, *_folded(before, b, S, sigma))
    return found


def _history_scale(case: Case, row: int, z: Tensor) -> Tensor:
    """(HV, V) magnitude of the ring's share of S z: its records may cancel in the state but not in the scores."""
    m, base, flush = case.cursors[row]
    at = [(base + j) % case.buffer_len for j in range(0 if case.spec and flush else m)]
    d, k = case["d_cache"][case.keys[row]][:, at].double().abs(), case["k_cache"][case.keys[row]][:, at].double()
    return torch.einsum("hjv,hjk,hk->hv", d, k.repeat_interleave(case.ratio, 0).abs(), z.abs())


def _folded(before: Case, row: int, S: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """(exact folded state, scale) of a row that flushes."""
    m, base, _ = before.cursors[row]
    if not before.spec:
        return S, S.abs() + sigma[..., None] + _ring_state_scale(before, row)
    exact, key = before.double(), torch.tensor([before.keys[row]], device=S.device)
    count, start = torch.tensor([m], device=S.device), torch.tensor([base], device=S.device)
    first = exact["state"][before.slots[row]][None]
    want = gdn_spec.folded(first, exact.rings, key, count, start, before.l2norm, torch.float64)[0]
    if "rawv_cache" not in before.buffers:
        return want, want.abs() + first[0].abs() + _ring_state_scale(before, row)
    at = [(base + j) % before.buffer_len for j in range(m)]
    top = exact["rawv_cache"][before.keys[row]][:, at].abs().amax(1, keepdim=True).transpose(1, 2) if m else 0
    return want, want.abs() + first[0].norm(dim=-1, keepdim=True) + top


def _ring_state_scale(case: Case, row: int) -> Tensor:
    m, base, _ = case.cursors[row]
    at = [(base + j) % case.buffer_len for j in range(m)]
    d, k = case["d_cache"][case.keys[row]][:, at].double().abs(), case["k_cache"][case.keys[row]][:, at].double().abs()
    return d.transpose(1, 2) @ k.repeat_interleave(case.ratio, 0)


def oracle(before: Case, after: Case) -> Case:
    """The exact step in float64. A flush row of a verify step reads the window from the checkpoint it has stored."""
    exact = before.double()
    if not before.spec:
        gdn.replay_decode_naive(*exact.decode_args(), scale=exact.scale, l2norm=exact.l2norm)
        return exact
    gdn_spec.verify_naive(*exact.verify_args(), scale=exact.scale, l2norm=exact.l2norm)
    folded = {b: exact["state"][before.slots[b]].clone() for b in before.live if before.cursors[b][2]}
    if folded and before["state"].dtype != torch.float32:
        again = before.double()
        for b in folded:
            again["state"][before.slots[b]] = after["state"][before.slots[b]].double()
            again["write_pos"][before.keys[b]] = 0
            again["cache_base"][before.keys[b]] = (before.cursors[b][0] + before.cursors[b][1]) % before.buffer_len
        gdn_spec.verify_naive(*again.verify_args(), scale=exact.scale, l2norm=exact.l2norm)
        for b, value in folded.items():
            again["state"][before.slots[b]] = value
        for name in ("write_pos", "cache_base"):
            again[name].copy_(exact[name])
        return again
    return exact


def check(before: Case, after: Case, truncating: bool = False) -> float:
    """Assert that ``after`` is ``before`` plus one correct step; returns the worst error as a part of its tolerance."""
    exact, must, allowed = oracle(before, after), masks(before), limits(before, after, truncating)
    padded = [t for b in range(len(before.lengths)) if b not in before.live for t in before.tokens(b)]
    assert bool((after["out"][padded] == 0).all()), "out: a padded row is not zero"
    for name, buffer in after.buffers.items():
        same = bits(buffer) == bits(before.buffers[name])
        stray = ~same & ~must[name]
        assert not bool(stray.any()), f"{name}: {int(stray.sum())} elements changed that are not its own"
    worst = 0.0
    for name in ("out", *POOLS):
        if name not in after.buffers:
            continue
        mask = must[name].clone()
        if name == "out":
            before.views[name].of(mask)[padded] = False
        got, want = after.buffers[name][mask], exact.buffers[name][mask]
        if name in NARROW:
            same = bits(got) == bits(narrowed(want, got.dtype, truncating))
            assert bool(same.all()), f"{name}: not the input's bits"
            continue
        assert bool(torch.isfinite(got).all()), f"{name}: {int((~torch.isfinite(got)).sum())} results are not finite"
        if got.numel():
            ratio = float(((got.double() - want).abs() / allowed[name][mask]).max())
            assert ratio <= 1, f"{name}: error is {ratio:.3g} times its tolerance"
            worst = max(worst, ratio)
    return worst


def check_step(case: Case, step: Callable[[Case], object], truncating: bool = False) -> float:
    """Run ``step(case)``, which works in place, and check it against the oracle."""
    before = case.clone()
    step(case)
    return check(before, case, truncating)


def make_exact(case: Case) -> None:
    """Give a decode case without decay (``raw_gates``) inputs of four bits and beta = 1: its fp32 sums are exact."""
    gen = torch.Generator().manual_seed(2)
    for name in ("q", "k", "v", "d_cache", "k_cache", "state"):
        buffer, old = case.buffers[name], case.buffers[name].float()
        values = torch.randint(-7, 8, old.shape, generator=gen) * 2.0 ** torch.randint(-3, 3, old.shape, generator=gen)
        buffer.copy_(torch.where(old.isnan(), old, values))
    case["b"].fill_(200.0)
    case.buffers["g_cache"].copy_(torch.where(case.buffers["g_cache"].isnan(), case.buffers["g_cache"], -0.0))
