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

    def words(self, call):
        """The four words of a call."""
        return philox4x32(call, self.step, self.seed, self.rounds)


def uniform(value):
    """A 64-bit value that all lanes share, known as such: ten rounds' keys then take no registers of the lanes."""
    low, high = (cute.arch.make_warp_uniform(Int32(value >> shift)) for shift in (0, 32))
    return Uint64(Uint32(low)) | Uint64(Uint32(high)) << 32


def philox4x32(low, high, key, rounds):
    """Four output words of the counter (low, high), 64 bits each, under a 64-bit key."""
    c = [Uint32(low), Uint32(low >> 32), Uint32(high), Uint32(high >> 32)]
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
        kind = "f16x2" if dtype is Float16 else "bf16x2"
        if hardware:
            packed[i] = cute.arch.inline_ptx(
                f"cvt.rs.satfinite.{kind}.f32 " "{$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32],
                read_only_args=[high, low, words[i]])
        elif dtype is Float16:
            low, high = raised(low, words[i]), raised(high, words[i] >> 16)
            packed[i] = cute.arch.inline_ptx("cvt.rz.satfinite.f16x2.f32 {$w0}, {$r0}, {$r1};",
                                             write_only_types=[Uint32], read_only_args=[high, low])
        else:
            packed[i] = to_bf16(low, words[i]) >> 16 | to_bf16(high, words[i] >> 16) & Uint32(0xFFFF0000)
    return out


def raised(value, word):
    """value moved away from zero by the low 13 bits of a word, in units that make fp16 keep the sum's top.

    The unit is the value's own last bit, which is 13 bits below fp16's, and 13 bits below fp16's
    smallest number where the result is subnormal. Cutting the sum off at fp16's last bit is the rule.
    """
    exponent = Int32(bits(value) & Uint32(0x7F800000))
    unit = cute.arch.fmax(from_bits(exponent - Int32(23 << 23)), Float32(2.0 ** -37))
    signed = from_bits(bits(unit) | bits(value) & Uint32(0x80000000))
    random = from_bits(word & Uint32(0x1FFF) | Uint32(0x4B000000)) - Float32(2.0 ** 23)  # an integer as a float
    return cute.arch.inline_ptx("fma.rz.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32],
                                read_only_args=[random, signed, value])


def to_bf16(value, word):
    """value rounded to bf16 with the low 16 bits of a word, in the upper half of a register."""
    raw = bits(value)
    finite = cutlass.min((raw & Uint32(0x7FFFFFFF)) + (word & Uint32(0xFFFF)), Uint32(0x7F7FFFFF))
    return Uint32(cutlass.select_(value != value, Uint32(0x7FFF0000), finite | raw & Uint32(0x80000000)))


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
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def from_bits(raw):
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[raw])
