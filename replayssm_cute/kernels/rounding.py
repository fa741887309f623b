"""Stochastic rounding on the device: the same bits as ``replayssm_cute.rounding``, its specification.

The random words come from Philox4x32, one call for 16 bytes of the state pool. They are used by
``cvt.rs`` where the target has it, else by its software twin; 8-bit codes are in ``codes.py``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32, Uint64

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
# Words of the seed state, int64 each; see ``replayssm_cute.rounding.seed_state``.
SEED, STEP, ARRIVALS, FIRST_HEAD, TOTAL_HEADS = range(5)


class Dice:
    """The random words of one launch: seed, step, and where this rank's heads lie in the pool."""

    def __init__(self, mSeed, nheads, headdim, row_calls, rounds):
        """``row_calls``: calls of the generator for a row of N elements."""
        self.seed, self.step = uniform(mSeed[SEED]), uniform(mSeed[STEP])
        self.first, total = (cute.arch.make_warp_uniform(Int32(mSeed[i])) for i in (FIRST_HEAD, TOTAL_HEADS))
        self.total = Int32(cutlass.select_(total == 0, Int32(nheads), total))
        self.headdim, self.row_calls, self.rounds = headdim, row_calls, rounds

    def call_of(self, slot, head, row):
        """Number of the generator's call for the first 16 bytes of a row of a head's state."""
        head = slot * Int64(self.total) + Int64(self.first + head)
        return Uint64((head * self.headdim + row) * self.row_calls)

    def words(self, call, along=0):
        """The four words of a call, ``along`` calls behind the given one in the same row.

        The calls of a row share the upper half of their number where 2^32 is a multiple of them. Of a row's
        products in the generator's first two rounds one of two is then the same.
        """
        if self.row_calls & (self.row_calls - 1):
            call, along = call + Uint64(along), 0
        low, high = Uint32(call) + Uint32(along), Uint32(call >> 32)
        return philox4x32([low, high, Uint32(self.step), Uint32(self.step >> 32)], self.seed, self.rounds)


def uniform(value):
    """A 64-bit value that all lanes share, known as such: ten rounds' keys then take no registers of the lanes."""
    low, high = (cute.arch.make_warp_uniform(Int32(value >> shift)) for shift in (0, 32))
    return Uint64(Uint32(low)) | Uint64(Uint32(high)) << 32


def philox4x32(c, key, rounds):
    """Four output words of a counter of four words, the lowest first, under a 64-bit key."""
    k = [Uint32(key), Uint32(key >> 32)]
    for _ in range(rounds):
        p0 = Uint64(c[0]) * Uint64(MULTIPLIERS[0])
        p1 = Uint64(c[2]) * Uint64(MULTIPLIERS[1])
        c = [Uint32(p1 >> 32) ^ c[1] ^ k[0], Uint32(p1), Uint32(p0 >> 32) ^ c[3] ^ k[1], Uint32(p0)]
        k = [k[0] + Uint32(WEYL[0]), k[1] + Uint32(WEYL[1])]
    return c


def stored(values, words, dtype, hardware):
    """Float32 values as a fragment of the state's type, eight of them under four random words; None: to nearest."""
    return nearest(values, dtype) if words is None else round_eight(values, words, dtype, hardware)


def nearest(values, dtype):
    """Float32 values, rounded to nearest, as a fragment."""
    exact, out = (cute.make_rmem_tensor((len(values),), kind) for kind in (Float32, dtype))
    for i, value in enumerate(values):
        exact[i] = value
    out.store(exact.load().to(dtype))
    return out


def round_eight(values, words, dtype, hardware):
    """Eight Float32 under four words -> fragment of eight fp16 or bf16."""
    out = cute.make_rmem_tensor((8,), dtype)
    packed = cute.recast_tensor(out, Uint32)
    for i in range(4):
        low, high = values[2 * i], values[2 * i + 1]
        if hardware:
            kind = "f16x2" if dtype is Float16 else "bf16x2"
            packed[i] = ptx(f"cvt.rs.satfinite.{kind}.f32", Uint32, high, low, words[i])
        else:
            packed[i] = (pair_of_fp16 if dtype is Float16 else pair_of_bf16)(low, high, words[i])
    return out


def pair_of_fp16(low, high, word):
    """Two values rounded to fp16, each with the low 13 bits of a half of ``word``: the lower half is ``low``'s.

    Cut off, a value keeps the upper bits; where the 13 dropped bits and the random ones add up to a carry, the
    pattern grows by one. Divided by 2^112 a value has fp16's exponents, its subnormal numbers among them, so the
    dropped bits are its last 13 whatever the value.
    """
    kept = ptx("cvt.rz.satfinite.f16x2.f32", Uint32, high, low)
    last = [bits(ptx("mul.rz.f32", Float32, value, "0f07800000")) for value in (low, high)]
    total = (pack(*last, "lower") & Uint32(0x1FFF1FFF)) + (word & Uint32(0x1FFF1FFF))
    return kept + ((total & Uint32(0x20002000) & below(kept, "f16x2", 0x7BFF)) >> 13)


def pair_of_bf16(low, high, word):
    """Two values rounded to bf16, each with the 16 bits of a half of ``word``; the lower half is ``low``'s."""
    kept = ptx("cvt.rz.satfinite.bf16x2.f32", Uint32, high, low)
    moved = pack(bits(low) + (word & Uint32(0xFFFF)), bits(high) + (word >> 16), "upper")
    mask = below(kept, "bf16x2", 0x7F7F)
    return (moved & mask) | (kept & ~mask)


def below(pair, kind, largest):
    """All bits of a half set where its magnitude is less than the largest one's pattern: it may still grow.

    Not so where the value overflowed and where it is no number.
    """
    limit = ptx("mov.b32", Uint32, f"{largest << 16 | largest:#x}")  # the comparison takes no constant
    return ptx(f"set.lt.u32.{kind}", Uint32, ptx(f"abs.{kind}", Uint32, pair), limit)


def pack(low, high, halves):
    """The lower or upper halves of two words in one."""
    return ptx("prmt.b32", Uint32, low, high, "0x5410" if halves == "lower" else "0x7632")


@cute.jit
def advance(mSeed, ctas):
    """Count this CTA's arrival; the last of ``ctas`` moves the step on, for the next launch.

    One thread calls it after all threads of its CTA have read the step, and a barrier. Relaxed: what was read is in
    registers, where no later write reaches it.
    """
    arrivals = cute.recast_tensor(mSeed, Int32)
    before = cute.arch.atomic_add(arrivals.iterator + 2 * ARRIVALS, Int32(1), sem="relaxed", scope="gpu")
    if before == ctas - 1:
        mSeed[ARRIVALS] = Int64(0)
        mSeed[STEP] = mSeed[STEP] + Int64(1)


def bits(value):
    return ptx("mov.b32", Uint32, value)


def from_bits(raw):
    return ptx("mov.b32", Float32, raw)


def ptx(instruction, result, *operands):
    """What an instruction of PTX makes of the operands, the last of which may be constants as PTX spells them."""
    values = [operand for operand in operands if not isinstance(operand, str)]
    places = [f"{{$r{i}}}" for i in range(len(values))] + list(operands[len(values):])
    return cute.arch.inline_ptx(f"{instruction} {{$w0}}, {', '.join(places)};", write_only_types=[result],
                                read_only_args=values)
