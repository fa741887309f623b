"""Arithmetic of the GPU on NumPy arrays, rounded exactly as PTX documents it.

Floats travel as float32 arrays, 16-bit floats as their bits in uint16. Approximate instructions are
computed in float64 and rounded once, which lies within their documented error.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

_HALF = np.int64(0x10000000)           # of the 29 mantissa bits of a float64 that float32 drops
_DROPPED = np.int64(0x1FFFFFFF)
_MIN_NORMAL = np.float64(2.0 ** -126)


def _exact_fma(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """(s, e) with s = fl64(a b + c) and s + e = a b + c; the product of two float32 is exact in float64."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    s = product + addend
    t = s - product
    return s, (product - (s - t)) + (addend - t)


def _toward(s: Array, up: Array, where: Array) -> Array:
    """``s`` moved one float64 away from zero where ``up``, else toward it, at the places ``where``."""
    bits = s.view(np.int64) + np.where(where, np.where(up, 1, -1), 0)
    return bits.view(np.float64)


def fma(a: Array, b: Array, c: Array) -> Array:
    """``fma.rn.f32``: a b + c rounded once.

    The float64 result is rounded to float32; where that would round twice (it lies half-way between two
    float32, or the result is subnormal) it is first made odd by the error of the float64 sum.
    """
    s, error = _exact_fma(a, b, c)
    suspicious = ((s.view(np.int64) & _DROPPED) == _HALF) | (np.abs(s) < _MIN_NORMAL)
    if suspicious.any():
        inexact = suspicious & (error != 0) & np.isfinite(error) & (s.view(np.int64) & 1 == 0)
        s = _toward(s, (error > 0) == (s > 0), inexact)
    return s.astype(np.float32)


def fma_toward_zero(a: Array, b: Array, c: Array) -> Array:
    """``fma.rz.f32``."""
    s, error = _exact_fma(a, b, c)
    return _cut(_toward(s, np.False_, (error != 0) & np.isfinite(error) & ((error > 0) != (s > 0))))


def mul_toward_zero(a: Array, b: Array) -> Array:
    """``mul.rz.f32``."""
    return _cut(a.astype(np.float64) * b)


def _cut(s: Array) -> Array:
    """float64 -> float32, toward zero; infinities and NaNs stay."""
    tiny = np.copysign(np.trunc(s * 2.0 ** 149) * 2.0 ** -149, s)
    cut = np.where(np.abs(s) < _MIN_NORMAL, tiny, (s.view(np.int64) & ~_DROPPED).view(np.float64))
    largest = np.float64(np.finfo(np.float32).max)
    return np.where(np.isfinite(s), np.clip(cut, -largest, largest), s).astype(np.float32)


def maximum(a: Array, b: Array) -> Array:
    """``max.f32``: the other operand where one is NaN; +0 is larger than -0."""
    return np.where((a == 0) & (b == 0), a + b, np.fmax(a, b)).astype(np.float32)


def minimum(a: Array, b: Array) -> Array:
    """``min.f32``."""
    return -maximum(-a, -b)


def flush(x: Array) -> Array:
    """``.ftz``: subnormals become zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0 ** -126), np.copysign(np.float32(0), x), x)


# ---- conversions ------------------------------------------------------------------------------------

def from_f16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_f16(x: Array) -> Array:
    """``cvt.rn.f16.f32``."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


def to_bf16(x: Array) -> Array:
    """``cvt.rn.bf16.f32``."""
    raw = x.view(np.uint32)
    rounded = (raw + 0x7FFF + (raw >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def to_f16_toward_zero(x: Array) -> Array:
    """``cvt.rz.satfinite.f16.f32``."""
    nearest = x.astype(np.float16)
    beyond = np.abs(nearest.astype(np.float32)) > np.abs(x)
    bits = nearest.view(np.uint16) - beyond.astype(np.uint16)
    return _finite(bits, x, 0x7BFF)


def to_bf16_toward_zero(x: Array) -> Array:
    """``cvt.rz.satfinite.bf16.f32``."""
    return _finite((x.view(np.uint32) >> 16).astype(np.uint16), x, 0x7F7F)


def to_f16_stochastic(x: Array, random: Array) -> Array:
    """``cvt.rs.satfinite.f16.f32`` with 13 random bits.

    Where the result is subnormal the random bits are aligned to the top of the dropped ones (the
    project's rule; the instruction's documentation leaves it open).
    """
    raw = x.view(np.uint32).astype(np.int64)
    exponent, mantissa = raw >> 23 & 0xFF, raw & 0x7FFFFF
    significand = np.where(exponent > 0, mantissa | 0x800000, mantissa)
    shift = np.minimum(np.maximum(113 - np.maximum(exponent, 1), 0), 40)
    units = ((significand >> shift) + random) >> 13          # of fp16's last place
    pattern = np.where(exponent > 113, units + (exponent - 113 << 10), units)
    pattern = np.minimum(pattern, 0x7BFF) | (raw >> 31) << 15
    return _finite(pattern.astype(np.uint16), x, 0x7BFF)


def to_bf16_stochastic(x: Array, random: Array) -> Array:
    """``cvt.rs.satfinite.bf16.f32`` with 16 random bits."""
    raw = x.view(np.uint32).astype(np.int64)
    pattern = np.minimum((raw & 0x7FFFFFFF) + random, 0x7F7FFFFF) >> 16 | raw >> 31 << 15
    return _finite(pattern.astype(np.uint16), x, 0x7F7F)


def from_e4m3(code: Array) -> Array:
    """Low bytes -> float32; exponent biased by 7, no infinities, a NaN of each sign."""
    exponent, mantissa = code.astype(np.int64) >> 3 & 15, code.astype(np.int64) & 7
    magnitude = np.ldexp(np.where(exponent > 0, mantissa + 8, mantissa), np.maximum(exponent, 1) - 10)
    magnitude = np.where(code & 0x7F == 0x7F, np.nan, magnitude)
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


def to_e4m3(x: Array) -> Array:
    """``cvt.rn.satfinite.e4m3x2.f32``, one half of it."""
    magnitude, exponent = _binade_of_e4m3(x)
    return _e4m3(x, (exponent + 6 << 3) + np.rint(np.ldexp(magnitude, 3 - exponent)))


def to_e4m3_stochastic(x: Array, random: Array) -> Array:
    """``cvt.rs.satfinite.e4m3x4.f32``, one value of it, with 16 random bits."""
    magnitude, exponent = _binade_of_e4m3(x)
    steps = np.floor(np.floor(np.ldexp(magnitude, 19 - exponent)) / 65536 + random / 65536)
    return _e4m3(x, (exponent + 6 << 3) + steps)


def _binade_of_e4m3(x: Array) -> tuple[Array, Array]:
    """(magnitude, its exponent) as float64 and an integer; that of the smallest normal number or more."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 1024.0)
    return magnitude, np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, -6), -6)


def _e4m3(x: Array, code: Array) -> Array:
    """Codes of given magnitudes, with the sign of x; the largest finite one where they are larger, NaN of NaN."""
    finite = np.minimum(np.nan_to_num(code, nan=0.0), 0x7E).astype(np.uint16) | np.signbit(x).astype(np.uint16) << 7
    return np.where(np.isnan(x), 0x7F, finite).astype(np.uint16)


def to_integer(x: Array, nearest: bool, dtype: type[np.generic]) -> Array:
    """``cvt.rni`` or ``cvt.rzi``: saturating, 0 of NaN."""
    limits, whole = np.iinfo(dtype), np.rint(x) if nearest else np.trunc(x)
    return np.clip(np.nan_to_num(whole.astype(np.float64), nan=0.0), limits.min, limits.max).astype(dtype)


def halves(f: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    """A function of fp16 applied to both halves of packed words."""
    a, b = np.broadcast_arrays(x, y)
    return f(np.ascontiguousarray(a).view(np.float16), np.ascontiguousarray(b).view(np.float16)).view(np.uint32)


def halves_below(widen: Callable[[Array], Array], x: Array, y: Array) -> Array:
    """``set.lt.u32`` of packed words: all bits of a half where x's is less than y's."""
    def half(shift: int) -> Array:
        a, b = (widen((word >> shift & 0xFFFF).astype(np.uint16)) for word in (x, y))
        return (a < b) * np.uint32(0xFFFF << shift)
    return (half(0) | half(16)).astype(np.uint32)


def permute(low: Array, high: Array, selector: Array) -> Array:
    """``prmt.b32``: four bytes out of the eight of two words; a selector's top bit takes the byte's sign instead."""
    pool, result = high.astype(np.uint64) << 32 | low, np.zeros(1, np.uint32)
    for i in range(4):
        pick = selector >> 4 * i & 15
        byte = (pool >> (pick & 7).astype(np.uint64) * 8 & 255).astype(np.uint32)
        byte = np.where(pick & 8, (byte >> 7) * 255, byte)
        result = result | byte << 8 * i
    return result.astype(np.uint32)


def reverse_bits(x: Array) -> Array:
    """Words of 32 bits, the lowest bit first."""
    for distance, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        x = (x >> distance & mask) | (x & mask) << distance
    return x


def _finite(bits: Array, x: Array, largest: int) -> Array:
    """``.satfinite``: infinities of either sign become the largest value, NaN the canonical one."""
    clamped = np.where(np.isinf(x), np.uint16(largest) | (np.signbit(x).astype(np.uint16) << 15), bits)
    return np.where(np.isnan(x), 0x7FFF, clamped).astype(np.uint16)


# ---- approximate instructions -----------------------------------------------------------------------

def ex2(x: Array) -> Array:
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def lg2(x: Array) -> Array:
    return np.log2(x.astype(np.float64)).astype(np.float32)


def rcp(x: Array) -> Array:
    return (1.0 / x.astype(np.float64)).astype(np.float32)


def rsqrt(x: Array) -> Array:
    return (1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32)


def tanh(x: Array) -> Array:
    return np.tanh(x.astype(np.float64)).astype(np.float32)
