"""Rounding of the stored checkpoint: the stochastic rule, its random words, and 8-bit codes, in PyTorch.

This module is the specification; the kernels give the same bits. Three parts:

* The stochastic rule is that of PTX ``cvt.rs``: r random bits are added, as an integer, to the
  magnitude's mantissa bits that the narrow type drops, and the rest is cut off; r is 13 for fp16, else
  16. So representable values never move, the rule is symmetric in the sign, and the probability of
  rounding up is the dropped fraction, up to 2^-r. Where more bits are dropped than there are random
  ones, these are aligned to the top of the dropped part. Overflow and infinities give the largest
  finite value (``.satfinite``), NaN gives the canonical NaN. int8, which has no instruction, follows
  the same rule in fixed point.
* The random words are those of Philox4x32 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers:
  as easy as 1, 2, 3", 2011). Its key is the 64-bit seed; its counter is (call, step), both 64 bits,
  where one call serves 16 bytes of the state pool. A draw therefore depends on the seed, the step and
  the element's position alone: not on the batch's order, the tile shape, the backend or the device.
* An 8-bit checkpoint (int8, float8_e4m3fn) keeps one fp32 scale per slot, head and row of P: the row's
  largest magnitude over the largest code. A value is its code times the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm_cute.errors import ArgumentError, UnsupportedError

DEFAULT_ROUNDS = 10                    # what ``rounds = 0`` means
MAX_ROUNDS = 16
RANDOM_BITS = {torch.float16: 13, torch.bfloat16: 16, torch.int8: 16, torch.float8_e4m3fn: 16}
#: The largest code of the 8-bit checkpoints.
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = 2.0 ** -126           # so that its reciprocal is finite; a row of zeros has it
#: Mantissa bits, biased fp32 exponent of the smallest normal number, largest magnitude as a pattern.
#: int8 is a format whose smallest normal number would be 128: all of its numbers are multiples of 1.
_FORMATS = {torch.float16: (10, 113, 0x7BFF), torch.bfloat16: (7, 1, 0x7F7F), torch.int8: (7, 134, 0x7F),
            torch.float8_e4m3fn: (3, 121, 0x7E)}

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
                               f"a {dtype} checkpoint drops no bits; it takes a 16-bit or an 8-bit one")


def check_columns(dtype: torch.dtype, dstate: int) -> None:
    """Raises ArgumentError where rows of ``dstate`` elements do not consist of whole calls of the generator."""
    columns = elements_per_call(dtype)
    if dstate % columns:
        raise ArgumentError("state", f"a multiple of {columns} columns for stochastic rounding", dstate)


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


def elements_per_call(dtype: torch.dtype) -> int:
    """Neighbours of the state pool that one call of the generator serves: 16 bytes of them."""
    return 16 // dtype.itemsize


def random_bits(position: Tensor, seed: int, step: int, dtype: torch.dtype,
                rounds: int = DEFAULT_ROUNDS) -> Tensor:
    """The random bits with which the elements at ``position`` are rounded to ``dtype``.

    The elements of a call take its words in order, as the instructions do that round them:

    * 16-bit types (``cvt.rs.f16x2``, ``cvt.rs.bf16x2``): two elements a word, the even one its low
      bits, the odd one bits 16 and up.
    * 8-bit types (``cvt.rs.e4m3x4``): four elements a word. The first takes the low half, the third
      the high half; the second and the fourth take the same halves with their bits in reverse order.

    Args:
        position: int64, index in the dense state pool (slots, H, P, N).
        seed: key of the generator, 64 bits.
        step: launches before this one, 64 bits.

    Returns:
        int64 of the shape of ``position``, in [0, 2^r).
    """
    per_call = elements_per_call(dtype)
    per_word = per_call // 4
    call = position // per_call
    full = torch.full_like(call, 0)
    counter = (call & _MASK, call >> 32 & _MASK, full + (step & _MASK), full + (step >> 32 & _MASK))
    words = torch.stack(philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK), rounds), -1)
    word = words.gather(-1, (position % per_call // per_word)[..., None])[..., 0]
    if per_word == 2:
        return (word >> position % 2 * 16) & ((1 << RANDOM_BITS[dtype]) - 1)
    half = (word >> position % 4 // 2 * 16) & 0xFFFF
    return torch.where(position % 2 == 0, half, reverse16(half))


def reverse16(half: Tensor) -> Tensor:
    """Integers of 16 bits with their bits in reverse order."""
    for shift, mask in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
        half = (half >> shift & mask) | (half & mask) << shift
    return half


def round_stochastic(value: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to fp16, bf16, int8 or e4m3 with the given random bits.

    Args:
        value: float32. For an 8-bit type it has been divided by its scale; see ``quantize``.
        bits: int64 of the same shape, in [0, 2^r).
        dtype: a key of ``RANDOM_BITS``.
    """
    check_state_dtype(dtype)
    r, (kept, least, largest) = RANDOM_BITS[dtype], _FORMATS[dtype]
    raw = value.contiguous().view(torch.int32) & 0x7FFFFFFF
    exponent = raw >> 23                                     # biased by 127
    mantissa = (raw & 0x7FFFFF) | (exponent > 0).int() << 23
    dropped = 23 - kept + (least - exponent.clamp(min=1)).clamp(min=0)
    units = ((mantissa >> (dropped - r).clamp(max=31)) + bits.int()) >> r
    # A normal result carries its leading bit in ``units``; both forms add up to the pattern.
    magnitude = (units + ((exponent - least).clamp(min=0) << kept)).clamp(max=largest)
    is_nan = raw > 0x7F800000
    if dtype is torch.int8:
        return torch.where(is_nan, 0, torch.where(value.signbit(), -magnitude, magnitude)).to(torch.int8)
    top = 8 * dtype.itemsize - 1                             # the sign's bit; NaN has all bits below it
    pattern = torch.where(is_nan, (1 << top) - 1, magnitude | value.signbit().int() << top)
    signed = torch.where(pattern >> top > 0, pattern - (2 << top), pattern)
    return signed.to(torch.int8 if top == 7 else torch.int16).view(dtype)


def row_scale(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale of every row of an 8-bit checkpoint: (..., N) float32 -> (...) float32.

    NaN where the row holds an infinity or a NaN, which has no code: the whole row is then NaN.
    """
    largest = value.abs().amax(-1)
    # Not by a scalar: torch multiplies by its reciprocal on a GPU, which is another number.
    scale = (largest / torch.full_like(largest, LARGEST_CODE[dtype])).clamp(min=SMALLEST_SCALE)
    return torch.where(largest < torch.inf, scale, torch.nan)


def quantize(value: Tensor, dtype: torch.dtype, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows of an 8-bit checkpoint.

    Args:
        value: (..., N) float32.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
        bits: random bits of ``random_bits``, of the shape of ``value``; None rounds to nearest, ties
            to even.

    Returns:
        (codes (..., N) of ``dtype``, scales (...) float32). A value is multiplied by the reciprocal of
        its scale, both rounded to fp32, and then rounded to a code.
    """
    scale = row_scale(value, dtype)
    largest = LARGEST_CODE[dtype]
    bad = scale.isnan()[..., None]
    scaled = torch.where(bad, 0, value * (1 / scale)[..., None])
    if bits is not None:
        return round_stochastic(scaled, bits, dtype), scale
    if dtype is torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(dtype), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of an 8-bit checkpoint: (..., N) codes times (...) scales, in ``dtype``."""
    return codes.to(dtype) * scale.to(dtype)[..., None]
