"""The fixed cases whose results a GPU has stored; see ``tests/ptx/vectors.py``.

Every number comes out of the project's own integer generator, so that all machines and versions of the
libraries see the same inputs and only results need storing.

Two kinds of numbers. With ``exact`` ones every sum is exact in fp32 in any order (no decay, step sizes that softplus
passes through, few bits in every factor), so that nothing is left to the hardware but rounding. ``general`` ones have
all the bits of their types, and reach the approximate instructions and the sums of the tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from replayssm_cute.rounding import LARGEST_CODE, dequantize, philox4x32, seed_state
from tests.cases import ARGUMENTS, Case, View, make_case
from tests.ptx.kernels import CODED_NAMES, REGISTER, Spec, spec_of

KINDS = ("exact", "general")
KERNELS = ("bulk-f32", "bulk-f16", "bulk-bf16", "bulk-f16-sr", "bulk-bf16-sr", "bulk-p80-f16-sr", "bulk-p80-bf16",
           "bulk-n256-f16", "bulk-l36-f16", *CODED_NAMES, *(f"register-{name}" for name in REGISTER))
SEED, STEP = 2 ** 62 + 4321, 2 ** 35 + 3
SLOTS, POOL_SLOTS = [4, 1, 7, 2, 0], 9       # the last row is padding

Draw = Callable[[int, int, int], Tensor]      # (count, low, high) -> integers low .. high


def case_of(name: str, kind: str) -> Case:
    """A kernel's case."""
    return make(spec_of(name), kind, 2 * KERNELS.index(name) + KINDS.index(kind))


def make(spec: Spec, kind: str, number: int) -> Case:
    """An append in the middle and at the start of the ring, a flush, a forced one, a padded row.

    Args:
        number: of the case; its random numbers depend on it.
    """
    (H, P, N, G), L, coded = spec.shape, spec.buffer_len, spec.state in LARGEST_CODE
    case = make_case(batch=len(SLOTS), nheads=H, headdim=P, dstate=N, ngroups=G, buffer_len=L, act=spec.act,
                     state=torch.float32 if coded else spec.state, slots=SLOTS, pool_slots=POOL_SLOTS, padded=(4,),
                     cursors=[(L // 3, False), (L - 1, True), (L // 4, True), (0, False), (1, False)], **spec.case)
    fill = {"exact": exact, "general": general}[kind]
    for argument in ARGUMENTS:
        buffer = case.buffers.get(argument)
        if buffer is not None and buffer.is_floating_point():
            draw = drawer(1000 * number + ARGUMENTS.index(argument))
            values = fill(argument, buffer.numel(), draw)
            buffer.copy_(torch.where(buffer.isnan(), buffer.float(), values))
    return with_codes(case, spec.state, drawer(1000 * number + 999)) if coded else case


def drawer(key: int) -> Draw:
    def draw(count: int, low: int, high: int) -> Tensor:
        counter = torch.arange(count)
        zero = torch.zeros_like(counter)
        words = philox4x32((counter, zero, zero, zero), (key, 0))[0]
        return low + words % (high - low + 1)
    return draw


def exact(argument: str, count: int, draw: Draw) -> Tensor:
    match argument:
        case "A":
            return torch.zeros(count)
        case "dt":
            return torch.full((count,), 24.0)
        case "dt_bias":
            return torch.zeros(count)
        case "dt_cache":
            return draw(count, 1, 3) * 0.25
        case "state":
            return draw(count, -3, 3) * 2.0 ** -3
        case "x" | "x_cache":
            return draw(count, -3, 3) * 2.0 ** -11
    return draw(count, -3, 3).float()


def general(argument: str, count: int, draw: Draw) -> Tensor:
    """About what a model has; fp32 values of up to 23 bits."""
    span = 1 << 23
    unit = draw(count, -span, span).float() / span
    match argument:
        case "A":
            return -4 * unit.abs() - 0.25
        case "dt":
            return 3 * unit - 1
        case "dt_cache":
            return 0.25 * unit.abs()
    return 2 * unit


def with_codes(case: Case, dtype: torch.dtype, draw: Draw) -> Case:
    """The case with an 8-bit checkpoint: random codes, scales that are powers of two; NaN in unnamed slots' scales."""
    view = case.views["state"]
    codes = draw(math.prod(view.size), -126, 126).to(torch.int8).view(view.size)
    if dtype is torch.float8_e4m3fn:
        codes = torch.where(codes == -1, 0, codes).view(dtype)      # -1 is a NaN
    scale = 2.0 ** draw(math.prod(view.size[:3]), -7, -4).float().view(view.size[:3])
    scale[[s for s in range(view.size[0]) if s not in {case.slots[b] for b in case.live}]] = math.nan
    plain = {"state": codes, "state_scale": scale}
    return replace(case, views={**case.views, **{k: View(tuple(t.shape), tuple(t.stride())) for k, t in plain.items()}},
                   buffers={**case.buffers, **{k: t.flatten() for k, t in plain.items()}})


def without_codes(case: Case) -> Case:
    """The same with its checkpoint in fp32; the case itself where it has no codes."""
    if "state_scale" not in case.buffers:
        return case
    state = dequantize(case["state"], case["state_scale"])
    buffers = {k: b for k, b in case.buffers.items() if k != "state_scale"}
    return replace(case, buffers={**buffers, "state": state.flatten()})


def dice_of(name: str) -> Tensor | None:
    """The generator's state on a rank that holds the second quarter of the heads; None where it rounds to nearest."""
    return dice(spec_of(name))


def dice(spec: Spec) -> Tensor | None:
    if not spec.rounds:
        return None
    return seed_state(SEED, "cpu", step=STEP, first_head=spec.shape[0], total_heads=4 * spec.shape[0])
