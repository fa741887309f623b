"""Cases of the Mamba2 replay step: arguments with every trap of the contract in them, and the check.

A case owns flat buffers and hands out the step's arguments as views of them, so that after a step the
check sees everything: the rows that had to be written, compared with the float64 oracle, and every other
byte (ring rows past the cursor, unnamed slots, padding between rows and slots, guards around the pools,
``out`` of padded rows), which must not have changed. All that may not be read holds NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from replayssm_cute.reference.mamba2 import replay_step, replay_step_naive
from tests import tolerance

ARGUMENTS = ("state", "x", "dt", "A", "B", "C", "D", "dt_bias", "z", "x_cache", "dt_cache", "B_cache", "write_pos",
             "is_flush", "state_batch_indices", "null_block_id", "out")
POOLS = ("state", "x_cache", "dt_cache", "B_cache")
#: Bytes in front of and behind a pool; a multiple of every alignment that a kernel may rely on.
GUARD = 256


@dataclass(frozen=True)
class View:
    """A tensor's place in its flat buffer."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def of(self, buffer: Tensor) -> Tensor:
        return buffer.as_strided(self.size, self.stride, self.offset)


@dataclass
class Case:
    """The arguments of one replay step.

    Attributes:
        buffers: flat tensors by argument name, paddings and guards included.
        views: where in its buffer each argument lies.
        null_block_id, dt_softplus: as in the step.
        cursors: per batch row, (write_pos, flush).
        slots: per batch row, the slot; a padded row has ``null_block_id`` or a negative one.
    """

    buffers: dict[str, Tensor]
    views: dict[str, View]
    null_block_id: int
    dt_softplus: bool
    cursors: list[tuple[int, bool]]
    slots: list[int]
    notes: str = field(default="", compare=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name].of(self.buffers[name])

    def get(self, name: str) -> Any:
        """An argument by name; None where it is absent."""
        return self.null_block_id if name == "null_block_id" else self[name] if name in self.buffers else None

    def args(self) -> tuple[Any, ...]:
        """The arguments in their canonical order."""
        return tuple(self.get(name) for name in ARGUMENTS)

    def clone(self) -> Case:
        return replace(self, buffers={k: v.clone() for k, v in self.buffers.items()})

    def to(self, device: torch.device | str) -> Case:
        return replace(self, buffers={k: v.to(device) for k, v in self.buffers.items()})

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Case:
        """A copy with every floating-point buffer replaced."""
        return replace(self, buffers={k: change(k, v) if v.is_floating_point() else v.clone()
                                      for k, v in self.buffers.items()})

    @property
    def live(self) -> list[int]:
        """Batch rows that are not padding."""
        return [b for b, s in enumerate(self.slots) if s != self.null_block_id and s >= 0]

    @property
    def buffer_len(self) -> int:
        return self.views["x_cache"].size[2]

    def set_cursors(self, cursors: list[tuple[int, bool]]) -> None:
        """Move to other cursors: ring rows that become invalid are poisoned."""
        self.cursors = cursors
        for b, (w, flush) in enumerate(cursors):
            self["write_pos"][b], self["is_flush"][b] = w, flush
        for b in self.live:
            for name in POOLS[1:]:
                self[name][self.slots[b], :, cursors[b][0]:] = math.nan


def make_case(*, batch: int = 3, nheads: int = 2, headdim: int = 16, dstate: int = 32, ngroups: int = 1,
              buffer_len: int = 4, state: torch.dtype = torch.float32, act: torch.dtype = torch.bfloat16,
              ring: torch.dtype | None = None, dt: torch.dtype | None = None, D: str | None = "tied",
              D_dtype: torch.dtype | None = None, dt_bias: bool = True, z: bool = False, dt_softplus: bool = True,
              cursors: Sequence[tuple[int, bool]] | None = None, flush_dtype: torch.dtype = torch.int8,
              index_dtype: torch.dtype = torch.int32, index_columns: int = 0, padded: Sequence[int] = (),
              null_block_id: int = 0, slots: Sequence[int] | None = None, pool_slots: int | None = None,
              slot_padding: int = 0, row_padding: int = 0, dt_values: Sequence[float] | None = None,
              dt_ring: Sequence[float] | None = None, seed: int = 0, device: torch.device | str = "cpu") -> Case:
    """A case on ``device`` (random numbers are drawn on the CPU, so every device sees the same).

    Args:
        ring, dt, D_dtype: dtypes, by default that of the inputs.
        D: "tied" (one value a head), "full" (one a row of the state) or None.
        cursors: (write_pos, flush) of each row; by default all different, with forced flushes among them.
        index_columns: 0 gives a 1-D index tensor, k a (batch, k) one whose other columns are garbage.
        padded: batch rows that are padding; they get ``null_block_id``, every second one a negative slot.
        slots: slots of the rows; by default a permutation that skips the null block and some others.
        slot_padding, row_padding: elements between slots, and between rows of x, B, C, z and out.
        dt_values: raw step sizes, dealt out to rows and heads in turn, instead of random ones.
        dt_ring: the dt' of the ring's rows, the same for all heads, instead of random ones.
    """
    gen = torch.Generator().manual_seed(seed)
    H, P, N, G, L = nheads, headdim, dstate, ngroups, buffer_len
    ring, dt = ring or act, dt or act
    cursors = list(cursors or [((3 * b + seed) % L, (3 * b + seed) % L == L - 1 or b % 3 == 1) for b in range(batch)])
    total = pool_slots or batch + 3
    chosen = list(slots) if slots is not None else _spread_slots(batch, total, null_block_id, gen)
    for i, b in enumerate(padded):
        chosen[b] = null_block_id if i % 2 == 0 else -3 - i

    buffers: dict[str, Tensor] = {}
    views: dict[str, View] = {}

    def add(name: str, values: Tensor, dtype: torch.dtype, gap: int = 0, guard: int = 0) -> None:
        """Lay ``values`` out row by row with ``gap`` elements of NaN between rows and guards around them."""
        inner = math.prod(values.shape[1:])
        flat = torch.full((2 * guard + values.shape[0] * (inner + gap),), math.nan).to(dtype)
        strides = (inner + gap, *(math.prod(values.shape[i + 1:]) for i in range(1, values.dim())))
        views[name] = View(tuple(values.shape), strides, guard)
        views[name].of(flat).copy_(values)
        buffers[name] = flat.to(device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    def tied(name: str, values: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> None:
        """One value per leading index, expanded with zero strides."""
        add(name, values, dtype)
        strides = views[name].stride + (0,) * (len(size) - values.dim())
        views[name] = View(size, strides)

    held = torch.rand(total, H, L, generator=gen) * 0.2
    if dt_ring is not None:
        held = torch.tensor(dt_ring).expand(total, H, L)
    for name, values, dtype in (("state", normal(total, H, P, N), state), ("x_cache", normal(total, H, L, P), ring),
                                ("dt_cache", held, torch.float32),
                                ("B_cache", normal(total, G, L, N), ring)):
        add(name, values, dtype, slot_padding, GUARD // dtype.itemsize)
    for name, values in (("x", normal(batch, H, P)), ("B", normal(batch, G, N)), ("C", normal(batch, G, N))):
        add(name, values, act, row_padding)
    add("out", torch.full((batch, H, P), math.nan), act, row_padding)
    if z:
        add("z", normal(batch, H, P), act, row_padding)
    raw = normal(batch, H) - 1
    if dt_values is not None:
        raw = torch.tensor([dt_values[i % len(dt_values)] for i in range(batch * H)]).view(batch, H)
    tied("dt", raw, (batch, H, P), dt)
    tied("A", -torch.rand(H, generator=gen) * 4 - 0.25, (H, P, N), torch.float32)
    if dt_bias:
        tied("dt_bias", torch.zeros(H) if dt_values is not None else normal(H) * 0.5, (H, P), act)
    if D == "tied":
        tied("D", normal(H), (H, P), D_dtype or act)
    elif D == "full":
        add("D", normal(H, P), D_dtype or act)

    def garbage(values: Sequence[int], dtype: torch.dtype, junk: int, columns: int = 0) -> Tensor:
        """The values of the batch's rows, with two junk entries behind them and junk in further columns."""
        rows = torch.tensor([*values, junk, junk], dtype=dtype)
        return rows if not columns else torch.stack([rows, *[torch.full_like(rows, junk)] * (columns - 1)], 1)

    for name, tensor in (("write_pos", garbage([w for w, _ in cursors], torch.int32, 1 << 20)),
                         ("is_flush", garbage([int(f) for _, f in cursors], flush_dtype, 1)),
                         ("state_batch_indices", garbage(chosen, index_dtype, 1 << 20, index_columns))):
        views[name] = View(tuple(tensor.shape), tuple(tensor.stride()))
        buffers[name] = tensor.flatten().to(device)
    case = Case(buffers, views, null_block_id, dt_softplus, cursors, chosen)
    _poison_unnamed(case)
    case.set_cursors(cursors)
    return case


def _spread_slots(batch: int, total: int, null_block_id: int, gen: torch.Generator) -> list[int]:
    free = [s for s in range(total) if s != null_block_id]
    return [free[i] for i in torch.randperm(len(free), generator=gen)[:batch].tolist()]


def _poison_unnamed(case: Case) -> None:
    named = {case.slots[b] for b in case.live}
    unnamed = [s for s in range(case.views["state"].size[0]) if s not in named]
    for name in POOLS:
        case[name][unnamed] = math.nan


def oracle(case: Case, step: Callable[..., object] = replay_step_naive) -> Case:
    """The case after an exact step: float64 throughout, nothing rounded to its storage type."""
    exact = case.map(lambda _, t: t.double())
    step(*exact.args(), dt_softplus=case.dt_softplus, dtype=torch.float64)
    return exact


def scale_of(case: Case) -> Case:
    """The case after a step in which no two terms cancel: the scale of every result's sum."""
    def magnitude(name: str, t: Tensor) -> Tensor:
        return t.double() if name in ("dt", "A", "dt_bias", "dt_cache", "z") else t.double().abs()

    return _stepped(case.map(magnitude))


def _stepped(case: Case) -> Case:
    replay_step(*case.args(), dt_softplus=case.dt_softplus, dtype=torch.float64)
    return case


def written(case: Case) -> dict[str, Tensor]:
    """For each tensor that a step may change, which elements of its buffer it must write."""
    masks = {name: torch.zeros(case.buffers[name].shape, dtype=torch.bool, device=case.buffers[name].device)
             for name in (*POOLS, "out")}
    for b in case.live:
        slot, (w, flush) = case.slots[b], case.cursors[b]
        case.views["out"].of(masks["out"])[b] = True
        if flush:
            case.views["state"].of(masks["state"])[slot] = True
        else:
            for name in POOLS[1:]:
                case.views[name].of(masks[name])[slot, :, w] = True
    return masks


def bits(t: Tensor) -> Tensor:
    """The bit patterns, so that NaN equals itself."""
    return t.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def narrowed(t: Tensor, dtype: torch.dtype, truncating: bool) -> Tensor:
    """Values in a ring's dtype, to nearest, or as ``tolerance.bound`` describes ``truncating``."""
    if not truncating or dtype is not torch.bfloat16:
        return t.to(dtype)
    return (bits(t.float()) & -65536).view(torch.float32).to(dtype)


def check(before: Case, after: Case, exact: Case | None = None, *,
          roundings: float | None = None, truncating: bool = False) -> float:
    """Assert that ``after`` is ``before`` plus one correct step; the oracle is run unless given.

    Args:
        roundings, truncating: see ``tolerance.bound``; None is ``tolerance.fp32_roundings`` of the case's L.

    Returns:
        The worst error as a fraction of its tolerance, for those who collect margins.
    """
    exact, scale, masks = exact or oracle(before), scale_of(before), written(before)
    if roundings is None:
        roundings = tolerance.fp32_roundings(before.buffer_len)
    worst = 0.0
    for name, buffer in after.buffers.items():
        mask = masks.get(name, torch.zeros_like(buffer, dtype=torch.bool))
        same = bits(buffer) == bits(before.buffers[name])
        assert bool(same[~mask].all()), f"{name}: {int((~same & ~mask).sum())} elements changed that are not its own"
        if not mask.any():
            continue
        got, want = buffer[mask].double(), exact.buffers[name][mask]
        if name in ("x_cache", "B_cache"):  # the appended row is the input itself, in the ring's dtype
            expected = narrowed(want, buffer.dtype, truncating)
            assert bool((bits(buffer[mask]) == bits(expected)).all()), f"{name}: not the input's bits"
            continue
        limit = _dt_limit(before, want) if name == "dt_cache" \
            else tolerance.bound(want, scale.buffers[name][mask], buffer.dtype, roundings, truncating)
        assert bool(torch.isfinite(got).all()), f"{name}: {int((~torch.isfinite(got)).sum())} results are not finite"
        ratio = float(((got - want).abs() / limit).max())
        assert ratio <= 1, f"{name}: error is {ratio:.3g} times its tolerance"
        worst = max(worst, ratio)
    return worst


def _dt_limit(case: Case, exact: Tensor) -> Tensor:
    """Tolerance of the appended dt', in the order of the written elements of the buffer."""
    raw = case["dt"][..., 0].double()
    if "dt_bias" in case.buffers:
        raw = raw + case["dt_bias"][:, 0].double()
    rows = sorted((b for b in case.live if not case.cursors[b][1]), key=lambda b: case.slots[b])
    return tolerance.step_size_bound(exact, raw[rows].flatten())


def check_step(case: Case, step: Callable[..., object], **options: Any) -> float:
    """Run ``step(*arguments)`` on the case, in place, and check it against the oracle."""
    before = case.clone()
    step(*case.args())
    return check(before, case, **options)
