"""Rounding of the checkpoint on the device: the same bits as ``replayssm_cute.rounding``, its specification.

Numbers of two bytes may be rounded in pairs, as they lie under one random word and are stored in one.
An 8-bit checkpoint is handled as the integers that its codes are, whatever their type: Triton converts
e4m3 on some targets only. ``CODES`` names the type, ``"int8"`` or ``"e4m3"``, and is empty for wider ones.
"""

import triton
import triton.language as tl

# Words of the seed state, int64 each; see ``replayssm_cute.rounding.seed_state``.
SEED, STEP, ARRIVALS, FIRST_HEAD, TOTAL_HEADS = (tl.constexpr(i) for i in range(5))


@triton.jit
def four_each(w0, w1, w2, w3):
    """(ROWS, 4 C) words in their order from four (ROWS, C) ones."""
    return tl.reshape(tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 1, 3, 2)),
                      (w0.shape[0], 4 * w0.shape[1]))


@triton.jit
def reverse_halves(words):
    """Words with the bits of both their halves in reverse order."""
    words = ((words >> 1) & 0x55555555) | ((words & 0x55555555) << 1)
    words = ((words >> 2) & 0x33333333) | ((words & 0x33333333) << 2)
    words = ((words >> 4) & 0x0F0F0F0F) | ((words & 0x0F0F0F0F) << 4)
    return ((words >> 8) & 0x00FF00FF) | ((words & 0x00FF00FF) << 8)


@triton.jit
def load_dice(seed_ptr, head, NHEADS: tl.constexpr):
    """(seed, step, heads of a slot, this head among them): what a launch's random words depend on."""
    total = tl.load(seed_ptr + TOTAL_HEADS)
    return (tl.load(seed_ptr + SEED), tl.load(seed_ptr + STEP), tl.where(total == 0, NHEADS, total),
            tl.load(seed_ptr + FIRST_HEAD) + head)


@triton.jit
def philox(c0, c1, step, key, ROUNDS: tl.constexpr):
    """The four words of Philox4x32 for counters (c0, c1, 64 bits of ``step``) under a 64-bit key.

    A product of 64 bits is one instruction where Triton's own form, made of halves, takes two. c1 may be a column:
    half of the products of the first two rounds are then those of a row.
    """
    shape: tl.constexpr = c0.shape
    c2, c3 = step.to(tl.uint32), (step >> 32).to(tl.uint32)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    zero = tl.zeros(shape, tl.uint32)
    return c0 + zero, c1 + zero, c2 + zero, c3 + zero


@triton.jit
def random_words(dice, slot, p, n0, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, COLUMNS: tl.constexpr,
                 ROUNDS: tl.constexpr, PER_CALL: tl.constexpr):
    """(ROWS, 4 COLUMNS / PER_CALL) random words for the rows p and columns n0.. of a head's state.

    One call of the generator serves PER_CALL neighbours of the pool, 8 of 16 bits or 16 of 8 bits, so it
    runs on that part of the tile. The calls of a row share the upper half of their number where 2^32 is a
    multiple of them.
    """
    CALLS: tl.constexpr = DSTATE // PER_CALL
    row = ((slot * dice[2] + dice[3]) * HEADDIM + p[:, None]) * CALLS
    along = n0 // PER_CALL + tl.arange(0, COLUMNS // PER_CALL)[None, :]
    if CALLS & (CALLS - 1) == 0:
        low, high = row.to(tl.uint32) + along.to(tl.uint32), (row >> 32).to(tl.uint32)
    else:
        low, high = (row + along).to(tl.uint32), ((row + along) >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox(low, high, dice[1], dice[0], ROUNDS)
    return four_each(w0, w1, w2, w3)


@triton.jit
def code_bits(words):
    """(ROWS, 4 C) numbers of 16 bits from (ROWS, C) words: low half, low reversed, high half, high reversed."""
    mirrored = reverse_halves(words)
    halves = tl.join(tl.join(words & 0xFFFF, words >> 16), tl.join(mirrored & 0xFFFF, mirrored >> 16))
    return tl.reshape(halves, (words.shape[0], 4 * words.shape[1])).to(tl.int32)


@triton.jit
def random_bits(dice, slot, p, n0, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, COLUMNS: tl.constexpr,
                ROUNDS: tl.constexpr):
    """(ROWS, COLUMNS) random numbers of 16 bits for elements of two bytes; see ``random_words``."""
    words = random_words(dice, slot, p, n0, HEADDIM, DSTATE, COLUMNS, ROUNDS, 8)
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (words.shape[0], 2 * words.shape[1])).to(tl.int32)


@triton.jit
def bf16_above(value, word):
    """fp32 ``value`` rounded with the low 16 bits of a word: bf16 in the upper half of an integer, noise below it.

    The greatest number has no bits to drop, so nothing rounds past it.
    """
    finite = tl.clamp(value, -3.3895313892515355e38, 3.3895313892515355e38).to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFF0000, finite + (word & 0xFFFF).to(tl.int32))


@triton.jit
def fp16_below(value, word):
    """fp32 ``value`` rounded with the low 13 bits of a word: fp16 in the low half of an integer, zeros above it."""
    magnitude = tl.minimum(tl.abs(value), 65504.0)
    # Results below the smallest normal number, in fixed point: 13 bits behind their last digit of 2^-24. There this is
    # the greater of the two, and from that number on the smaller one.
    fixed = (tl.minimum(magnitude, 6.103515625e-05) * 137438953472.0).to(tl.int32)
    units = tl.maximum(fixed, magnitude.to(tl.int32, bitcast=True) - (112 << 23)) + (word & 0x1FFF).to(tl.int32)
    sign = (value.to(tl.int32, bitcast=True) >> 16) & 0x8000
    return tl.where(value != value, 0x7FFF, (units >> 13) | sign)


@triton.jit
def round_stochastic(value, bits, DTYPE: tl.constexpr):
    """fp32 ``value`` as fp16 or bf16: the random bits are added to those that the narrow type drops."""
    pattern = fp16_below(value, bits) if DTYPE == tl.float16 else bf16_above(value, bits) >> 16  # noqa: SIM300
    return pattern.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def round_pairs(value, words, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """``round_stochastic`` of (ROWS, 2 C) fp32 with (ROWS, C) random words, in half the instructions.

    Returns (ROWS, C) integers, each two results, the first in its low half, as both lie in memory.
    """
    first, second = tl.split(tl.reshape(value, (words.shape[0], words.shape[1], 2)))
    if PTX:
        pairs = fp16_pair(first, second, words) if DTYPE == tl.float16 else bf16_pair(first, second, words)  # noqa: SIM300
    elif DTYPE == tl.bfloat16:  # noqa: SIM300  a constant only by its spelling
        pairs = ((bf16_above(first, words) >> 16) & 0xFFFF) | (bf16_above(second, words >> 16) & -65536)
    else:
        pairs = fp16_below(first, words) | (fp16_below(second, words >> 16) << 16)
    return pairs


@triton.jit
def fp16_pair(first, second, word):
    """Two fp32 as fp16 in one integer, the second in its upper half, each with the low 13 bits of a half of ``word``.

    Cut off, a value keeps the upper bits; where the 13 dropped bits and the random ones add up to a carry, the
    pattern grows by one, unless it is the largest one or no number. Divided by 2^112 a value has fp16's exponents,
    its subnormal numbers among them, so the dropped bits are its last 13 whatever the value.
    """
    kept = _instruction("cvt.rz.satfinite.f16x2.f32 $0, $1, $2;", [second, first])
    low = _instruction("mul.rz.f32 $0, $1, 0f07800000;", [first])
    high = _instruction("mul.rz.f32 $0, $1, 0f07800000;", [second])
    last = _instruction("prmt.b32 $0, $1, $2, 0x5410;", [low, high])
    total = (last & 0x1FFF1FFF) + (word & 0x1FFF1FFF).to(tl.int32)
    return kept + ((total & 0x20002000 & _growing(kept, 0x0401)) >> 13)


@triton.jit
def bf16_pair(first, second, word):
    """Two fp32 as bf16 in one integer, the second in its upper half, each with the 16 bits of a half of ``word``."""
    kept = _instruction("cvt.rz.satfinite.bf16x2.f32 $0, $1, $2;", [second, first])
    low = first.to(tl.int32, bitcast=True) + (word & 0xFFFF).to(tl.int32)
    high = second.to(tl.int32, bitcast=True) + (word >> 16 & 0xFFFF).to(tl.int32)
    moved = _instruction("prmt.b32 $0, $1, $2, 0x7632;", [low, high])
    mask = _growing(kept, 0x0081)
    return (moved & mask) | (kept & ~mask)


@triton.jit
def _growing(pair, BEYOND: tl.constexpr):
    """All bits of a half set where its pattern is below the largest number's, which ``BEYOND`` lifts to the sign."""
    above = (pair & 0x7FFF7FFF) + (BEYOND << 16 | BEYOND)
    return ~_instruction("prmt.b32 $0, $1, $1, 0xBB99;", [above])  # the sign of each half, everywhere in it


@triton.jit
def _instruction(ASM: tl.constexpr, operands):
    """The integers that an instruction of PTX makes of 32-bit operands."""
    return tl.inline_asm_elementwise(ASM, "=r" + ",r" * len(operands), operands, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def load_scale(scale_row, p, HEADDIM: tl.constexpr, CODES: tl.constexpr):
    """What ``decode`` of the rows p is to be multiplied with."""
    scale = tl.load(scale_row + p, mask=p < HEADDIM, other=0.0)
    if CODES == "e4m3":
        scale *= 256.0
    return scale


@triton.jit
def decode(codes, CODES: tl.constexpr):
    """8-bit codes in fp32; those of e4m3 divided by 256, which makes them fp16 numbers of the same digits.

    No code that is stored is e4m3's NaN; it would read as 480.
    """
    if CODES == "e4m3":
        wide = codes.to(tl.int16)
        value = (((wide & 0x7F) << 7) | (wide & -32768)).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = codes.to(tl.float32)
    return value


@triton.jit
def decode_rows(tiles, CODES: tl.constexpr):
    """``decode`` of a tuple of tiles."""
    out = ()
    for i in tl.static_range(len(tiles)):
        out += (decode(tiles[i], CODES),)  # type: ignore[assignment]
    return out


@triton.jit
def magnitude_bits(value):
    """|value| as an integer: the greatest of them is that of the greatest magnitude, or a NaN."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scale(largest, CODES: tl.constexpr):
    """(scale, its reciprocal, whether it is one) of rows whose greatest magnitude has the bits ``largest``."""
    finite = largest < 0x7F800000
    code = tl.full(largest.shape, 448.0 if CODES == "e4m3" else 127.0, tl.float32)
    scale = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), code), 1.1754943508222875e-38)
    reciprocal = tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), scale)
    return tl.where(finite, scale, float("nan")), reciprocal, finite


@triton.jit
def encode(value, reciprocal, finite, bits, CODES: tl.constexpr, STOCHASTIC: tl.constexpr):
    """fp32 rows as 8-bit codes: to nearest, ties to even, or with the random bits; 0 in rows without a scale."""
    KEPT: tl.constexpr = 3 if CODES == "e4m3" else 7
    LEAST: tl.constexpr = 121 if CODES == "e4m3" else 134
    LARGEST: tl.constexpr = 0x7E if CODES == "e4m3" else 0x7F
    raw = (value * reciprocal[:, None]).to(tl.int32, bitcast=True)
    exponent = (raw & 0x7FFFFFFF) >> 23
    mantissa = (raw & 0x7FFFFF) | tl.where(exponent > 0, 1 << 23, 0)
    dropped = 23 - KEPT + tl.maximum(LEAST - tl.maximum(exponent, 1), 0)
    if STOCHASTIC:
        units = ((mantissa >> tl.minimum(dropped - 16, 31)) + bits) >> 16
    else:
        dropped = tl.minimum(dropped, 31)
        units = (mantissa + (1 << (dropped - 1)) - 1 + ((mantissa >> dropped) & 1)) >> dropped
    code = tl.minimum(units + (tl.maximum(exponent - LEAST, 0) << KEPT), LARGEST)
    if CODES == "e4m3":
        code |= (raw >> 24) & 0x80
    else:
        code = tl.where(raw < 0, -code, code)
    return tl.where(finite[:, None], code, 0).to(tl.int8)


@triton.jit
def count(seed_ptr, n):
    """Add ``n`` to the arrivals of a launch; who brings them to zero moves the step on, for the next launch.

    Each program that draws adds 1 behind its draws, and one program subtracts their number: whatever the
    order, the sum is zero only when all have been here. So the programs that draw nothing, nearly all of them,
    need not count: an atomic of every program took 5% of a step, and one that orders memory 15%.
    """
    tl.debug_barrier()  # the other threads have drawn, too: what they stored depends on the step that they read
    if tl.atomic_add(seed_ptr + ARRIVALS, n, sem="relaxed") == -n:
        tl.atomic_add(seed_ptr + STEP, 1, sem="relaxed")
