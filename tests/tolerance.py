"""The one tolerance policy of the numerical tests.

A result may differ from the float64 oracle by the rounding of its storage type, and by a small multiple
of fp32 rounding relative to the *scale* of its sum: the same formula with every factor replaced by its
magnitude. Errors of a sum are proportional to that, not to a result in which terms have cancelled.

    |got - exact| <= u * (|exact| + e) + e,    e = FP32_ROUNDINGS * 2^-24 * scale

``u`` is half a unit in the last place. Measured over all cases of this suite, ``e`` needs 5 roundings in
PyTorch and 7 in the Triton kernels under the interpreter, most of them in softplus and the exponential of
the decay; a GPU's approximate ``ex2`` and division are allowed as much again. Kernels add a window's L
entries one after the other: at L = 16, 24, 33, 48 and 64 Triton's needs are 6.9, 7.9, 11.1, 12.6 and 11.8
(``fp32_roundings``). A weight taken from total
minus prefix needs 67 in the case that shows it, one rounded to bf16 needs tens of thousands.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Half a unit in the last place, relative.
STORAGE = {torch.float32: 2.0 ** -24, torch.float16: 2.0 ** -11, torch.bfloat16: 2.0 ** -8}
#: Half a unit of the subnormal range, absolute; below the normal range of fp32, results may flush to zero.
FLOOR = {torch.float32: 2.0 ** -126, torch.float16: 2.0 ** -25, torch.bfloat16: 2.0 ** -126}
FP32_ROUNDINGS = 16


def fp32_roundings(buffer_len: int) -> float:
    """Roundings of a step whose window may hold ``buffer_len`` entries."""
    return FP32_ROUNDINGS + 0.3 * max(0, buffer_len - 16)


def bound(exact: Tensor, scale: Tensor, dtype: torch.dtype, roundings: float = FP32_ROUNDINGS,
          truncating: bool = False) -> Tensor:
    """Largest allowed distance from ``exact`` of a result of ``dtype`` whose sum has this ``scale``.

    ``truncating`` allows a whole unit instead of half a one where the result is bf16: Triton's interpreter
    cuts the dropped bits off, which the same kernel on a GPU does not.
    """
    unit = STORAGE[dtype] * (2 if truncating and dtype is torch.bfloat16 else 1)
    arithmetic = roundings * 2.0 ** -24 * scale.abs()
    return unit * (exact.abs() + arithmetic) + arithmetic + FLOOR[dtype]


def step_size_bound(exact: Tensor, raw: Tensor) -> Tensor:
    """Largest allowed distance of a stored dt' from ``exact`` = softplus(raw).

    exp(raw) carries the rounding of its argument, relative 2^-24 * |raw|, besides a few roundings of its own.
    """
    return exact.abs() * 2.0 ** -24 * (8 + 2 * raw.abs().clamp(max=90)) + FLOOR[torch.float32]
