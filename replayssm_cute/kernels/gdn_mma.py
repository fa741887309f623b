"""Warp-level pieces of the Gated DeltaNet kernels: tensor-core products and packed pairs in registers.

Lane layout as in ``mma.py``: g = lane // 4, q = lane % 4.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from replayssm_cute.kernels import device, mma
from replayssm_cute.kernels.rounding import bits, from_bits

TF32_MASK = 0xFFFFE000        # sign, exponent and ten bits of mantissa: what a tf32 operand keeps
BF16_PARTS = {cutlass.BFloat16: 1, cutlass.Float16: 2, Float32: mma.PARTS}      # that make up a value of a dtype


def mma_tf32(a, b, acc):
    """acc + A B for one m16n8k8 product of fp32 words, of which the hardware takes what ``TF32_MASK`` keeps.

    A lane's a: rows g, g + 8 at k = q, then at k = q + 4; b: column g at k = q, q + 4; acc as in ``mma.mma``.
    """
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4, read_only_args=[*a, *b, *acc])


def split_tf32(values):
    """fp32 values as (words, words of the rest): tf32 operands keep the former, and most of the latter."""
    high = [bits(x) & Uint32(TF32_MASK) for x in values]
    return high, [bits(x - from_bits(h)) for x, h in zip(values, high)]


def transpose(word):
    """An 8x8 matrix of 2-byte elements, a packed pair a lane (row g, columns 2q and 2q + 1), transposed."""
    return cute.arch.inline_ptx("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Uint32],
                                read_only_args=[word])


def pack(low, high, kind="bf16x2"):
    """Two Float32, rounded to nearest, as one register."""
    return cute.arch.inline_ptx(f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32],
                                read_only_args=[high, low])


def unpack(word):
    """The two Float32 of a packed pair of bf16, low half first."""
    return from_bits(word << 16), from_bits(word & Uint32(0xFFFF0000))


def words(fragment):
    """A fragment of 2-byte elements as packed registers."""
    return cute.recast_tensor(fragment, Uint32)


def split(low, high, count=mma.PARTS):
    """A pair of fp32 values as packed pairs of bf16, largest first; three make up 24 bits, two fp16's eleven."""
    parts = []
    for _ in range(count):
        parts.append(pack(low, high))
        a, b = unpack(parts[-1])
        low, high = low - a, high - b
    return parts


def bf16_parts(fragment):
    """A fragment as packed pairs of bf16 whose sum each pair is: [part][pair], largest first."""
    dtype, n = fragment.element_type, cute.size(fragment)
    if dtype is cutlass.BFloat16:
        packed = words(fragment)
        return [[packed[i] for i in range(n // 2)]]
    values = device.to_f32(fragment, n)
    return list(zip(*[split(values[i], values[i + 1], BF16_PARTS[dtype]) for i in range(0, n, 2)]))


def transposed_parts(fragment):
    """8x8 matrices, a pair of columns a word (see ``transpose``), transposed: [part][pair] as ``bf16_parts``."""
    if fragment.element_type is not cutlass.Float16:
        return [[transpose(word) for word in part] for part in bf16_parts(fragment)]
    turned, packed = cute.make_rmem_tensor((cute.size(fragment),), cutlass.Float16), words(fragment)
    for i in range(cute.size(fragment) // 2):
        words(turned)[i] = transpose(packed[i])
    return bf16_parts(turned)


def whole(parts):
    """The two Float32 of which ``parts`` are the packed parts; exact."""
    sums = unpack(parts[-1])
    for part in reversed(parts[:-1]):
        sums = [a + b for a, b in zip(unpack(part), sums)]
    return sums


def product_of_parts(left, right, acc):
    """acc + A B of operands in bf16 parts, the small terms first; those below 2^-24 of the product are left out."""
    terms = [(i, j) for i in range(len(left)) for j in range(len(right)) if i + j < mma.PARTS]
    for i, j in sorted(terms, key=lambda term: -sum(term)):
        acc = mma.mma(cutlass.BFloat16, left[i], right[j], acc)
    return acc
