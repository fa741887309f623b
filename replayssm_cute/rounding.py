"""Stochastic rounding of the stored checkpoint: the rule and its random words, in PyTorch.

This module is the specification; the kernels give the same bits. Two parts:

* The rule is that of PTX ``cvt.rs``: r random bits are added, as an integer, to the magnitude's
  mantissa bits that the narrow type drops, and the rest is cut off; r is 13 for fp16, 16 for bf16. So
  representable values never move, the rule is symmetric in the sign, and the probability of rounding
  up is the dropped fraction, up to 2^-r. Where a result is subnormal, more bits are dropped than there
  are random ones; they are aligned to the top of the dropped part. Overflow and infinities give the
  largest finite value (``.satfinite``), NaN gives the canonical NaN.
* The random words are those of Philox4x32 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers:
  as easy as 1, 2, 3", 2011). Its key is the 64-bit seed; its counter is (position / 8, step), both 64
  bits: one call serves eight neighbours of the state pool, two an output word. A draw therefore
  depends on the seed, the step and the element's position alone: not on the batch's order, the tile
  shape, the backend or the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm_cute.errors import ArgumentError, UnsupportedError

DEFAULT_ROUNDS = 10                    # what ``rounds = 0`` means
MAX_ROUNDS = 16
RANDOM_BITS = {torch.float16: 13, torch.bfloat16: 16}
ELEMENTS_PER_CALL = 8

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def check_rounds(rounds: int) -> int:
    """Philox rounds of a call; 0 is the default.

    Raises:
        ArgumentError: not an integer in 0..16.
    """
    if not isinstance(rounds, int) or isinstance(rounds, bool) or not 0 <= rounds <= MAX_ROUNDS:
        raise ArgumentError("cache_philox_rounds", f"an integer in 0..{MAX_ROUNDS}, where 0 means {DEFAULT_ROUNDS}",
                            rounds)
    return rounds or DEFAULT_ROUNDS


def check_state_dtype(dtype: torch.dtype) -> None:
    """Raises UnsupportedError for a checkpoint dtype that is not rounded stochastically."""
    if dtype not in RANDOM_BITS:
        raise UnsupportedError("enable_stochastic_rounding",
                               f"a {dtype} checkpoint drops no bits; it takes a float16 or bfloat16 one")


def seed_state(seed: int, device: torch.device | str, *, step: int = 0, first_head: int = 0,
               total_heads: int = 0) -> Tensor:
    """The generator's state on the device: (8,) int64, the caller's; every launch adds 1 to the step.

    Launches that share a state must be ordered, as launches on one stream are. It advances also when
    a captured graph is replayed. From (seed, step) every draw can be reproduced.

    Args:
        seed: 64-bit key.
        step: launches to count as made.
        first_head, total_heads: the rank's first head and the layer's heads over all ranks, where a
            layer is split; a draw then does not depend on the split. 0 heads: the rank has them all.
    """
    words = [seed & (1 << 64) - 1, step, 0, first_head, total_heads, 0, 0, 0]
    signed = [w - (1 << 64) if w >= 1 << 63 else w for w in words]
    return torch.tensor(signed, dtype=torch.int64, device=device)


_default_states: dict[torch.device, Tensor] = {}


def default_seed_state(device: torch.device) -> Tensor:
    """The state of callers that bring none: one a device, seeded by torch's seed at its first use."""
    state = _default_states.get(device)
    if state is None:
        state = _default_states[device] = seed_state(torch.initial_seed(), device)
    return state


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int],
               rounds: int = DEFAULT_ROUNDS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 on int64 tensors that hold unsigned 32-bit words.

    Args:
        counter: four tensors of one shape, words 0 (lowest) to 3.
        key: two words, the lower first.
        rounds: 1 or more.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wraps past 2^63: the words are right
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_bits(position: Tensor, seed: int, step: int, dtype: torch.dtype,
                rounds: int = DEFAULT_ROUNDS) -> Tensor:
    """The random bits with which the elements at ``position`` are rounded to ``dtype``.

    Element p takes word p % 8 // 2 of call p // 8: the low bits where p is even, bits 16 and up
    where it is odd, as ``cvt.rs.f16x2`` and ``cvt.rs.bf16x2`` do.

    Args:
        position: int64, index in the dense state pool (slots, H, P, N).
        seed: key of the generator, 64 bits.
        step: launches before this one, 64 bits.

    Returns:
        int64 of the shape of ``position``, in [0, 2^r).
    """
    call = position // ELEMENTS_PER_CALL
    full = torch.full_like(call, 0)
    counter = (call & _MASK, call >> 32 & _MASK, full + (step & _MASK), full + (step >> 32 & _MASK))
    words = torch.stack(philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK), rounds), -1)
    word = words.gather(-1, (position % ELEMENTS_PER_CALL // 2)[..., None])[..., 0]
    return (word >> position % 2 * 16) & ((1 << RANDOM_BITS[dtype]) - 1)


def round_stochastic(value: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to fp16 or bf16 with the given random bits.

    Args:
        value: float32.
        bits: int64 of the same shape, in [0, 2^r).
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """
    check_state_dtype(dtype)
    raw = value.contiguous().view(torch.int32).long() & 0x7FFFFFFF
    if dtype is torch.bfloat16:
        magnitude = ((raw + bits) >> 16).clamp(max=0x7F7F)
    else:
        exponent = raw >> 23                                     # biased by 127
        mantissa = (raw & 0x7FFFFF) | (exponent > 0).long() << 23
        below = (113 - exponent.clamp(min=1)).clamp(min=0)       # binades below the smallest normal fp16
        units = ((mantissa >> below.clamp(max=31)) + bits) >> 13
        # A normal result carries its leading bit in ``units``; both forms add up to the fp16 pattern.
        magnitude = (units + ((exponent - 113).clamp(min=0) << 10)).clamp(max=0x7BFF)
    magnitude = torch.where(raw > 0x7F800000, 0x7FFF, magnitude)
    sign = torch.where(raw > 0x7F800000, 0, value.signbit().long() << 15)
    pattern = magnitude | sign
    return torch.where(pattern >= 0x8000, pattern - 0x10000, pattern).to(torch.int16).view(dtype)
