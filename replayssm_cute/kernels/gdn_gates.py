"""Gates of Gated DeltaNet, and the elementary functions whose bits the exact fold depends on.

Each is the instruction sequence of the Triton kernels (``fallback_triton.gdn_device.gates``) on an NVIDIA GPU: what the
ring keeps, and what a fold makes of it, then has the same bits whichever backend serves.
"""

import struct

import cutlass.cute as cute
from cutlass import Float32

from replayssm_cute.kernels.device import LOG2E, absolute

EPSILON = 1e-6
SERIES = tuple(1.0 / k for k in (15, 13, 11, 9, 7, 5, 3, 1))      # of 2 atanh(t), highest power first


def constant(value):
    """A Float32 in a register: the oldest DSL takes no floating-point constant as an operand of inline PTX."""
    return cute.arch.inline_ptx(f"mov.b32 {{$w0}}, 0f{struct.pack('>f', value).hex()};", write_only_types=[Float32],
                                read_only_args=[])


def fma(a, b, c):
    """a b + c, rounded once."""
    return cute.arch.inline_ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32],
                                read_only_args=[a, b, c])


def exp(x):
    """e^x."""
    return cute.arch.inline_ptx("ex2.approx.f32 {$w0}, {$r0};", write_only_types=[Float32],
                                read_only_args=[x * LOG2E])


def divide(a, b):
    """a / b, to two units in the last place."""
    return cute.arch.inline_ptx("div.full.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32],
                                read_only_args=[a, b])


def inverse_norm(squares):
    """1 / sqrt(squares + 1e-6)."""
    return cute.arch.inline_ptx("rsqrt.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32],
                                read_only_args=[squares + Float32(EPSILON)])


def softplus(x):
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|), the logarithm by its series in u / (2 + u)."""
    u = exp(Float32(0.0) - absolute(x))
    t = divide(u, u + Float32(2.0))
    square, series = t * t, constant(SERIES[0])
    for term in SERIES[1:]:
        series = fma(square, series, constant(term))
    return fma(t + t, series, cute.arch.fmax(x, Float32(0.0)))


def gates(a, b, A_log, dt_bias):
    """(log decay g, beta) of a token and head, all Float32."""
    g = (Float32(0.0) - exp(A_log)) * softplus(a + dt_bias)
    return g, divide(constant(1.0), exp(Float32(0.0) - b) + Float32(1.0))
