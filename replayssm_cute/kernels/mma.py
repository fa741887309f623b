"""Warp-level tensor-core products of a few 2-byte rows with a vector, exact to fp32.

An ``m16n8k16`` product has eight result columns where a matrix-vector product needs one. The
spare columns are put to two uses:

* A vector that does not fit the operands' type is split into parts (high, low) that do; each part
  takes a column, and the columns' sums are added in fp32.
* The 16-byte chunks of a row are handed to the k axis in two orders, natural and with neighbouring
  64-byte blocks swapped; even rows use one, odd rows the other, each with its own columns. Rows
  whose stride is a multiple of 128 bytes are then read from shared memory without bank conflicts.

Lane layout (g = lane // 4, q = lane % 4): a lane loads chunks of rows g and g + 8; of the result it
holds columns 2q and 2q + 1 of these two rows. The columns that fit row g are those of lanes with
q % 2 == g % 2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from replayssm_cute.kernels import codes

K_BLOCK = 32          # elements of a row that one pair of products takes: four lanes x 8
CHUNK = 8             # elements of a 16-byte load
LOW_SHIFT = 12        # an fp16 low part is stored times 2^12, to stay clear of fp16's subnormals
PARTS = 3             # bf16 parts that carry an fp32 value


def mma(dtype, a, b, acc):
    """acc + A B for one m16n8k16 product; a: 4, b: 2 packed registers, acc: 4 Float32.

    A lane's a: rows g, g + 8, g, g + 8 at k = 2q, 2q, 2q + 8, 2q + 8 and one more; b: column g at
    k = 2q, 2q + 8 and one more; acc: row g columns 2q, 2q + 1, then row g + 8.
    """
    t = "bf16" if dtype is cutlass.BFloat16 else "f16"
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4, read_only_args=[*a, *b, *acc])


def zeros():
    """Four zero accumulators. In a register: the oldest DSL takes no floating-point constant as an operand."""
    return [cute.arch.inline_ptx("mov.b32 {$w0}, 0;", write_only_types=[Float32], read_only_args=[])] * 4


def load_transposed(pointer):
    """Four 8x8 matrices of 2-byte elements, transposed; lane l names row l % 8 of matrix l // 8."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4, read_only_args=[pointer])


def chunk(row, block, swap, q):
    """The lane's eight elements of a k block of a row, as four packed registers of 2-byte elements."""
    fragment = cute.make_rmem_tensor((CHUNK,), row.element_type)
    cute.autovec_copy(cute.local_tile(row, (CHUNK,), ((block ^ swap) * (K_BLOCK // CHUNK) + q,)), fragment)
    packed = cute.recast_tensor(fragment, Uint32)
    if row.element_type.width == 8:
        return codes.to_fp16([packed[0], packed[1]], row.element_type is cutlass.Int8)
    return [packed[i] for i in range(4)]


def rows_times_vector(low_row, high_row, vector, length, lane):
    """Products of 16 rows with a vector, k accumulated in fp32.

    Args:
        low_row, high_row: this lane's rows g and g + 8, of ``length`` 2-byte elements or 8-bit codes.
        vector: the part of the vector that column g takes; of the rows' type, fp16 beside codes.
        length: a multiple of 64.

    Returns:
        four Float32: rows g, g, g + 8, g + 8 with columns 2q, 2q + 1, 2q, 2q + 1.
    """
    g, q = lane // 4, lane % 4
    row_swap, column_swap = g % 2, (g // 2) % 2
    even, odd = zeros(), zeros()
    for block in range(length // K_BLOCK):
        lo, hi = chunk(low_row, block, row_swap, q), chunk(high_row, block, row_swap, q)
        v = chunk(vector, block, column_swap, q)
        even = mma(vector.element_type, (lo[0], hi[0], lo[1], hi[1]), v[:2], even)
        odd = mma(vector.element_type, (lo[2], hi[2], lo[3], hi[3]), v[2:], odd)
    return [a + b for a, b in zip(even, odd)]


def split(value):
    """An fp32 value as the sum of three bf16 values, exact up to 2^-24 of it."""
    parts = []
    for _ in range(PARTS):
        parts.append(value.to(cutlass.BFloat16))
        value = value - parts[-1].to(Float32)
    return parts


def split_packed(values):
    """``split`` of an even number of values: PARTS lists of packed registers."""
    n = len(values)
    rest = cute.make_rmem_tensor((n,), Float32)
    for i in range(n):
        rest[i] = values[i]
    parts = []
    for _ in range(PARTS):
        part = cute.make_rmem_tensor((n,), cutlass.BFloat16)
        part.store(rest.load().to(cutlass.BFloat16))
        rest.store(rest.load() - part.load().to(Float32))
        packed = cute.recast_tensor(part, Uint32)
        parts.append([packed[i] for i in range(n // 2)])
    return parts


def unpack(registers):
    """Packed bf16 registers as Float32, low half first."""
    packed = cute.make_rmem_tensor((len(registers),), Uint32)
    for i, register in enumerate(registers):
        packed[i] = register
    halves = cute.recast_tensor(packed, cutlass.BFloat16)
    return [halves[i].to(Float32) for i in range(2 * len(registers))]


def power_of_two(largest):
    """(s, 1/s) with s the power of two at or below a positive Float32.

    s is 0 for subnormal arguments, infinite for infinite ones and NaNs.
    """
    bits = cutlass.Int32(_bits(largest)) & Int32(0x7F800000)
    return _float(bits), _float(Int32(0x7F000000) - bits)


def _bits(value):
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def _float(bits):
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])
