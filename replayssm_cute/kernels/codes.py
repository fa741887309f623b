"""The codes of an 8-bit checkpoint on the device: the same bits as ``replayssm_cute.rounding``.

A code is int8 or e4m3, and its value is the code times its row's scale. Both kinds of code are exact in
fp16, which is how the tensor cores take them.
"""

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from replayssm_cute.kernels.device import absolute, select
from replayssm_cute.kernels.rounding import bits, from_bits
from replayssm_cute.rounding import SMALLEST_SCALE

INFINITY = 0x7F800000


def to_fp16(words, signed):
    """Four packed registers of fp16 from two of codes; ``signed``: the codes are int8, else e4m3."""
    out = []
    for word in words:
        if signed:
            out += _signed_to_fp16(word ^ Uint32(0x80808080))
        else:
            out += cute.arch.inline_ptx(
                "{ .reg .b16 lo16, hi16; mov.b32 {lo16, hi16}, {$r0}; "
                "cvt.rn.f16x2.e4m3x2 {$w0}, lo16; cvt.rn.f16x2.e4m3x2 {$w1}, hi16; }",
                write_only_types=[Uint32] * 2, read_only_args=[word])
    return out


def _signed_to_fp16(unsigned):
    """Codes plus 128 become 1024 + code + 128 as the low byte of an fp16; 1152 is taken off again, exactly."""
    out = []
    for selector in (0x4140, 0x4342):
        out.append(cute.arch.inline_ptx(
            f"{{ .reg .b32 raised, bias; prmt.b32 raised, {{$r0}}, 0x64646464, {selector:#x}; "
            "mov.b32 bias, 0x64806480; sub.rn.f16x2 {$w0}, raised, bias; }",
            write_only_types=[Uint32], read_only_args=[unsigned]))
    return out


def magnitude(value):
    """|value| as an integer that orders like it; NaN is the largest."""
    return bits(value) & Uint32(0x7FFFFFFF)


def row_scale(largest, largest_code):
    """(scale, its reciprocal, a mask of the codes) of a row from its largest ``magnitude``.

    A row with an infinity or a NaN has scale NaN and codes of 0.
    """
    finite = largest < Uint32(INFINITY)
    divisor = f"0f{struct.pack('>f', largest_code).hex()}"  # no operand: see ``mma.zeros``
    scale = cute.arch.inline_ptx(f"div.rn.f32 {{$w0}}, {{$r0}}, {divisor};", write_only_types=[Float32],
                                 read_only_args=[from_bits(largest)])
    scale = cute.arch.fmax(scale, Float32(SMALLEST_SCALE))
    reciprocal = cute.arch.inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[scale])
    return select(finite, scale, from_bits(Uint32(0x7FFFFFFF))), reciprocal, \
        Uint32(cutlass.select_(finite, Uint32(0xFFFFFFFF), Uint32(0)))


def encode(values, words, signed, hardware):
    """Eight values over their scale -> two packed registers of codes.

    Args:
        words: two random words of four codes each (see ``replayssm_cute.rounding.random_bits``); None
            rounds to nearest.
        hardware: e4m3 codes are rounded by ``cvt.rs``.
    """
    out = []
    for i in range(2):
        four = values[4 * i:4 * i + 4]
        if words is None:
            out.append(pack([to_nearest_int(v) for v in four]) if signed else to_nearest_e4m3(four))
        elif hardware and not signed:
            out.append(cute.arch.inline_ptx(
                "cvt.rs.satfinite.e4m3x4.f32 {$w0}, {{$r0}, {$r1}, {$r2}, {$r3}}, {$r4};", write_only_types=[Uint32],
                read_only_args=[*reversed(four), words[i]]))
        else:
            stochastic = stochastic_int if signed else stochastic_e4m3
            out.append(pack([stochastic(v, b) for v, b in zip(four, shares(words[i]))]))
    return out


def shares(word):
    """The 16 random bits of each of four codes, as ``cvt.rs`` deals them out."""
    mirrored = cute.arch.inline_ptx("brev.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[word])
    low, high = Uint32(0xFFFF), 16
    return [word & low, mirrored >> high, word >> high, mirrored & low]


def pack(codes):
    """Four integers -> their low bytes in one register."""
    pairs = [cute.arch.inline_ptx("prmt.b32 {$w0}, {$r0}, {$r1}, 0x0040;", write_only_types=[Uint32],
                                  read_only_args=[codes[i], codes[i + 1]]) for i in (0, 2)]
    return cute.arch.inline_ptx("prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410;", write_only_types=[Uint32],
                                read_only_args=pairs)


def to_nearest_int(value):
    """The nearest integer, ties to even."""
    return cute.arch.inline_ptx("cvt.rni.s32.f32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def to_nearest_e4m3(four):
    """Four values as packed e4m3 codes."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 lo16, hi16; cvt.rn.satfinite.e4m3x2.f32 lo16, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 hi16, {$r3}, {$r2}; mov.b32 {$w0}, {lo16, hi16}; }",
        write_only_types=[Uint32], read_only_args=list(four))


def truncated(value):
    """A value of no sign as an integer, cut off."""
    return cute.arch.inline_ptx("cvt.rzi.u32.f32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def stochastic_int(value, random):
    """An int8 code: 16 random bits are added behind the point, and the rest is cut off."""
    steps = Int32(cutlass.min((truncated(absolute(value) * Float32(2.0 ** 16)) + random) >> 16, Uint32(127)))
    return Int32(cutlass.select_(value < Float32(0.0), -steps, steps))


def stochastic_e4m3(value, random):
    """An e4m3 code: 16 random bits are added to the top of what its mantissa drops."""
    raw = magnitude(value)
    normal = ((raw + (random << 4)) >> 20) - Uint32((127 - 7) << 3)
    subnormal = (truncated(absolute(value) * Float32(2.0 ** 25)) + random) >> 16    # in units of 2^-9
    code = cutlass.min(Uint32(cutlass.select_(raw < Uint32(0x3C800000), subnormal, normal)), Uint32(0x7E))
    return Int32(code | (bits(value) >> 24 & Uint32(0x80)))
