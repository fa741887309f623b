"""Gated DeltaNet layers at one batch size: whole ring cycles, rows at different cursors, states cold in L2."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm_cute.gdn_layout import (
    RAW_NAMES,
    RING_NAMES,
    GdnPool,
    allocate_gdn_pool,
    committed_records,
    gdn_state_bytes,
    gdn_step_bytes,
)
from replayssm_cute.gdn_types import GdnGeometry, GdnProblem
from replayssm_cute.gdn_validate import decode_problem, verify_problem
from replayssm_tune.workload import COLD_BYTES

INPUTS = ("q", "k", "v", "a", "b", "A_log", "dt_bias")


def accepted_of(tokens: int) -> int:
    """Tokens of a window of ``tokens`` that every row keeps, the bonus token included: three of four."""
    return -(-3 * tokens // 4)


@dataclass
class GdnWorkload:
    """Inputs of a layer at one batch size, with the layers' pools that a graph rotates through.

    Attributes:
        tokens: T of a verify step, 0 for standard decode.
        exact: the rings keep the raw inputs, and a fold replays them.
        pool: checkpoints and rings of as many layers as make the checkpoints exceed ``cold_bytes``, stacked; slot 0 is
            nobody's. Ring i is that of slot i.
        inputs: by argument name. Tokens (q, k, v, a, b, out) are (batch * T, heads, width) or (batch * T, heads);
            ``mixed`` holds the same q, k and v as (batch * T, 2 Hk K + HV V). ``slots`` (batch,) int32, a random
            permutation of 1..batch; ``starts`` (batch + 1,) int32, the rows' first tokens.
        phases: by step of a cycle the cursors: ``write_pos``, of rows in standard decode and of slots in verify steps,
            and for these ``cache_base`` and ``is_flush``. Rows are at random places of the cycle, in which each
            flushes once.
        offset: (batch,) the rows' random places, 0..L-1 in equal shares.
        seed: of all noise.
    """

    geometry: GdnGeometry
    tokens: int
    exact: bool
    batch: int
    buffer_len: int
    pool: GdnPool
    inputs: dict[str, Tensor]
    phases: list[dict[str, Tensor]]
    offset: Tensor
    seed: int

    @functools.cached_property
    def pools(self) -> list[GdnPool]:
        """The pools of single layers."""
        return [GdnPool(state, {name: ring[layer] for name, ring in self.pool.rings.items()})
                for layer, state in enumerate(self.pool.state)]

    @property
    def accepted(self) -> int:
        """Tokens of a window that every row keeps; 0 in standard decode."""
        return accepted_of(self.tokens)

    @property
    def flushes(self) -> int:
        """Flushing rows of one pass over all phases, counted from the cursors themselves."""
        if not self.tokens:
            return sum(int((c["write_pos"] == self.buffer_len - 1).sum()) for c in self.phases)
        return sum(int(c["is_flush"][self.inputs["slots"].long()].sum()) for c in self.phases)

    def restore(self) -> None:
        """The noise in checkpoints, rings and inputs that the workload began with."""
        gen = torch.Generator(self.offset.device).manual_seed(self.seed + 1)  # not the noise of the gates
        self.pool.state.normal_(0, 0.05, generator=gen)
        for name, ring in self.pool.rings.items():
            if name == "g_cache":
                ring.uniform_(-0.2, -0.001, generator=gen)
            elif name == "beta_cache":
                ring.uniform_(generator=gen)
            else:
                ring.normal_(0, 0.09 if name == "k_cache" else 0.5, generator=gen)
        self.draw(gen)

    def draw(self, gen: torch.Generator) -> None:
        """Other tokens."""
        for name in ("mixed", "a", "b"):
            self.inputs[name].normal_(generator=gen)
        for name, view in zip(("q", "k", "v"), self.packed(), strict=True):
            self.inputs[name].copy_(view)

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as views of ``mixed``, as an engine's convolution leaves them."""
        g = self.geometry
        q, k, v = self.inputs["mixed"].split([g.num_k_heads * g.head_k_dim] * 2 + [g.num_v_heads * g.head_v_dim], 1)
        return (q.unflatten(1, (g.num_k_heads, g.head_k_dim)), k.unflatten(1, (g.num_k_heads, g.head_k_dim)),
                v.unflatten(1, (g.num_v_heads, g.head_v_dim)))

    def window(self, tensor: Tensor) -> Tensor:
        """A tensor of tokens as (batch, T, ...); T is 1 in standard decode."""
        return tensor.unflatten(0, (self.batch, self.tokens or 1))

    def arguments(self, phase: int, pool: int) -> tuple[Any, ...]:
        """The canonical arguments of a step."""
        i, p, c = self.inputs, self.pools[pool], self.phases[phase]
        first = (p.state, *(i[name] for name in INPUTS))
        if not self.tokens:
            return (*first, *(p.rings[n] for n in RING_NAMES), c["write_pos"], None, i["slots"], -1, i["out"], None)
        rings = (p.rings.get(n) for n in RING_NAMES + RAW_NAMES)
        return (*first, *rings, i["out"], i["starts"], i["slots"], i["slots"], c["write_pos"], c["cache_base"],
                c["is_flush"], -1)

    def problem(self) -> GdnProblem:
        """The problem that every step poses."""
        args, scale = self.arguments(0, 0), self.geometry.head_k_dim ** -0.5
        if not self.tokens:
            return decode_problem(*args, scale=scale, l2norm=True)
        rings = dict(zip(RING_NAMES + RAW_NAMES, args[8:14], strict=True))
        values: tuple[Any, ...] = (*args[:8], rings, *args[14:])
        return verify_problem(*values, max_cache_len=self.buffer_len, max_spec_len=self.tokens, scale=scale,
                              l2norm=True, launch_mode="both")

    def step_bytes(self, replay: bool = True) -> float:
        """Bytes that the mean step of a cycle must move, by replay or with the state stored at every token."""
        return self.batch * gdn_step_bytes(
            self.geometry, self.buffer_len, self.pool.state.dtype, self.inputs["v"].dtype,
            self.pool.rings["d_cache"].dtype, tokens=self.tokens, accepted=self.accepted, exact_fold=self.exact,
            replay=replay)


def make_gdn_workload(geometry: GdnGeometry, batch: int, state_dtype: torch.dtype, buffer_len: int = 16,
                      act_dtype: torch.dtype = torch.bfloat16, ring_dtype: torch.dtype = torch.bfloat16, *,
                      tokens: int = 0, exact: bool = False, device: str = "cuda", seed: int = 0,
                      cold_bytes: float = COLD_BYTES) -> GdnWorkload:
    """Random tokens and pools, decays as those of trained layers, a random stagger.

    Args:
        ring_dtype: of the d and k rings; the raw ones have that of the inputs.
        tokens: T of a verify step, 0 for standard decode.
        exact: verify with the raw rings.
    """
    g, gen = geometry, torch.Generator(device).manual_seed(seed)
    layers = max(2, int(-(-cold_bytes // (batch * gdn_state_bytes(g, state_dtype)))))
    pool = allocate_gdn_pool(batch + 1, g, buffer_len, layers=layers, exact_fold=exact, state_dtype=state_dtype,
                             ring_dtype=ring_dtype, act_dtype=act_dtype, device=device)
    offset = torch.randperm(batch, generator=gen, device=device) % buffer_len
    inputs = _inputs(g, batch, tokens or 1, act_dtype, gen)
    phases = _verify_phases(offset, inputs["slots"].long(), tokens, buffer_len, gen) if tokens else \
        [{"write_pos": ((offset + i) % buffer_len).int()} for i in range(buffer_len)]
    w = GdnWorkload(g, tokens, exact, batch, buffer_len, pool, inputs, phases, offset, seed)
    w.restore()
    return w


def _inputs(g: GdnGeometry, batch: int, tokens: int, act_dtype: torch.dtype, gen: torch.Generator) -> dict[str, Tensor]:
    """The tensors of ``GdnWorkload.inputs``; the tokens are not drawn yet."""
    n, device = batch * tokens, gen.device

    def empty(*shape: int) -> Tensor:
        return torch.empty((n, *shape), dtype=act_dtype, device=device)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(g.num_v_heads, device=device).uniform_(low, high, generator=gen)

    return {"mixed": empty(2 * g.num_k_heads * g.head_k_dim + g.num_v_heads * g.head_v_dim),
            "q": empty(g.num_k_heads, g.head_k_dim), "k": empty(g.num_k_heads, g.head_k_dim),
            "v": empty(g.num_v_heads, g.head_v_dim), "out": empty(g.num_v_heads, g.head_v_dim),
            "a": empty(g.num_v_heads), "b": empty(g.num_v_heads),
            "A_log": uniform(0.5, 4.0).log(), "dt_bias": uniform(-3.0, -1.0),
            "slots": torch.randperm(batch, generator=gen, device=device).int() + 1,
            "starts": torch.arange(0, n + 1, tokens, dtype=torch.int32, device=device)}


def _verify_phases(offset: Tensor, slots: Tensor, tokens: int, buffer_len: int,
                   gen: torch.Generator) -> list[dict[str, Tensor]]:
    """Cursors of a whole cycle; a row flushes when two more windows would not fit. Those of slot 0 mean nothing."""
    held = torch.tensor(committed_records(buffer_len, tokens, accepted_of(tokens)), device=offset.device)
    place = torch.zeros(len(offset) + 1, dtype=torch.long, device=offset.device)
    place[slots] = offset
    base = torch.randint(0, buffer_len, place.shape, generator=gen, device=offset.device)
    phases = []
    for at in range(len(held)):
        records, laps = held[(place + at) % len(held)], (place + at) // len(held)
        phases.append({"write_pos": records.int(), "cache_base": ((base + laps * held[-1]) % buffer_len).int(),
                       "is_flush": (records + 2 * tokens > buffer_len).to(torch.int8)})
    return phases
