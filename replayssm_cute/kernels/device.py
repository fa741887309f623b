"""Device-side pieces that carry no kernel's name: small products, reductions over lanes, softplus.

Every function here is traced: lists are Python lists of Float32 registers, unrolled while the
kernel is built.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2E = 1.4426950408889634
SOFTPLUS_THRESHOLD = 20.0


def select(condition, a, b):
    """condition ? a : b without a branch; the side not taken may be NaN."""
    return Float32(cutlass.select_(condition, a, b))


def absolute(value):
    """|value|, also of zeros and NaNs: the sign bit cleared."""
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def fma(a, b, acc, packed):
    """acc[i] += a[i] * b[i]; ``packed`` takes two at a time (sm_100 and later)."""
    if not packed:
        return [x * y + z for x, y, z in zip(a, b, acc)]
    out = []
    for i in range(0, len(acc) - 1, 2):
        out += cute.arch.fma_packed_f32x2((a[i], a[i + 1]), (b[i], b[i + 1]), (acc[i], acc[i + 1]))
    return out + [a[i] * b[i] + acc[i] for i in range(len(out), len(acc))]


def dot(a, b, packed):
    """sum_i a[i] * b[i] over four accumulators; the length is a multiple of four."""
    acc = [Float32(0.0)] * 4
    for i in range(0, len(a), 4):
        acc = fma(a[i:i + 4], b[i:i + 4], acc, packed)
    return (acc[0] + acc[1]) + (acc[2] + acc[3])


def to_f32(fragment, n):
    """A register fragment of n elements as a list of Float32."""
    f = cute.make_rmem_tensor((n,), Float32)
    f.store(fragment.load().to(Float32))
    return [f[i] for i in range(n)]


def load_f32(tile, n, dtype):
    """Load a tile of n elements, vectorised as far as its alignment is known, as Float32."""
    fragment = cute.make_rmem_tensor((n,), dtype)
    cute.autovec_copy(tile, fragment)
    return to_f32(fragment, n)


def reduce_scatter(values, lane, strides):
    """Sum ``values`` over the lanes that differ in the bits ``strides``, halving while it can.

    Each step with an even count sends one half and keeps the other, so that n values over 2^k
    lanes take about n shuffles and not n*k.

    Returns:
        (sums, offset, owner): this lane holds the sums of entries offset..offset+len-1 and is the
        one to store them where ``owner`` is true.
    """
    offset, owner = cutlass.Int32(0), cutlass.Boolean(True)
    for stride in strides:
        bit, half = (lane // stride) % 2, len(values) // 2
        if len(values) % 2 == 0:
            keep = [select(bit == 0, values[i], values[i + half]) for i in range(half)]
            send = [select(bit == 0, values[i + half], values[i]) for i in range(half)]
            values = [k + cute.arch.shuffle_sync_bfly(s, stride) for k, s in zip(keep, send)]
            offset = offset + bit * half
        else:
            values = [v + cute.arch.shuffle_sync_bfly(v, stride) for v in values]
            owner = owner & (bit == 0)
    return values, offset, owner


def lane_sum(value, strides):
    """Sum over the lanes that differ in the bits ``strides``; every lane gets it."""
    for stride in strides:
        value = value + cute.arch.shuffle_sync_bfly(value, stride)
    return value


def suffix_sums(parts, lane, length):
    """Sums of all later entries of a sequence held as entry 32 k + lane in ``parts[k]``.

    An exclusive reverse scan: nothing is subtracted, so the last entry's sum is exactly zero and
    no entry suffers cancellation.

    Returns:
        (list like ``parts``, total over all entries)
    """
    later, carry = [], None
    for part in reversed(parts):
        s = part
        for o in (1, 2, 4, 8, 16):
            if o < length:
                s = s + select(lane + o < 32, cute.arch.shuffle_sync_down(s, o), Float32(0.0))
        behind = select(lane < 31, cute.arch.shuffle_sync_down(s, 1), Float32(0.0))
        total = cute.arch.shuffle_sync(s, 0)
        later.insert(0, behind if carry is None else behind + carry)
        carry = total if carry is None else total + carry
    return later, carry


def softplus(d):
    """log(1 + exp(d)) up to the threshold, d above it, accurate also where exp(d) is tiny.

    max(d, 0) + log1p(u), u = exp(-|d|) <= 1, with log1p(u) = 2 atanh(u / (2 + u)) as an odd
    series: its argument is at most 1/3, so eight terms reach fp32 accuracy, and a small u keeps
    its relative accuracy, which the hardware logarithm of 1 + u does not.
    """
    u = cute.math.exp2(absolute(d) * (-LOG2E), fastmath=True)
    s = u * cute.arch.rcp_approx(u + 2.0)
    q = s * s
    series = Float32(1.0 / 15.0)
    for k in (13, 11, 9, 7, 5, 3, 1):
        series = series * q + Float32(1.0 / k)
    value = select(d > 0.0, d, Float32(0.0)) + 2.0 * s * series
    return select(d <= SOFTPLUS_THRESHOLD, value, d)


def silu(z):
    """z * sigmoid(z)."""
    return z * cute.arch.rcp_approx(1.0 + cute.math.exp2(z * (-LOG2E), fastmath=True))
