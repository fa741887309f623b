"""Rounding of the checkpoint on the device: the same bits as ``replayssm_cute.rounding``, its specification.

An 8-bit checkpoint is handled as the integers that its codes are, whatever their type: Triton converts
e4m3 on some targets only. ``CODES`` names the type, ``"int8"`` or ``"e4m3"``, and is empty for wider ones.
"""

import triton
import triton.language as tl

# Words of the seed state, int64 each; see ``replayssm_cute.rounding.seed_state``.
SEED, STEP, ARRIVALS, FIRST_HEAD, TOTAL_HEADS = (tl.constexpr(i) for i in range(5))


@triton.jit
def low_word(v):
    return (v & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def high_word(v):
    return ((v >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def four_each(w0, w1, w2, w3):
    """(ROWS, 4 C) words in their order from four (ROWS, C) ones."""
    return tl.reshape(tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 1, 3, 2)),
                      (w0.shape[0], 4 * w0.shape[1]))


@triton.jit
def eight_each(w0, w1, w2, w3):
    """(ROWS, 8 C) numbers of 16 bits from four (ROWS, C) words: w0 low, w0 high, w1 low, and so on."""
    words = four_each(w0, w1, w2, w3)
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (w0.shape[0], 8 * w0.shape[1])).to(tl.int32)


@triton.jit
def reverse_halves(words):
    """Words with the bits of both their halves in reverse order."""
    words = ((words >> 1) & 0x55555555) | ((words & 0x55555555) << 1)
    words = ((words >> 2) & 0x33333333) | ((words & 0x33333333) << 2)
    words = ((words >> 4) & 0x0F0F0F0F) | ((words & 0x0F0F0F0F) << 4)
    return ((words >> 8) & 0x00FF00FF) | ((words & 0x00FF00FF) << 8)


@triton.jit
def sixteen_each(w0, w1, w2, w3):
    """(ROWS, 16 C) numbers of 16 bits from four (ROWS, C) words: w0 low, low reversed, high, high reversed, ..."""
    words = four_each(w0, w1, w2, w3)
    mirrored = reverse_halves(words)
    halves = tl.join(tl.join(words & 0xFFFF, words >> 16), tl.join(mirrored & 0xFFFF, mirrored >> 16))
    return tl.reshape(halves, (w0.shape[0], 16 * w0.shape[1])).to(tl.int32)


@triton.jit
def load_dice(seed_ptr, head, NHEADS: tl.constexpr):
    """(seed, step, heads of a slot, this head among them): what a launch's random words depend on."""
    total = tl.load(seed_ptr + TOTAL_HEADS)
    return (tl.load(seed_ptr + SEED), tl.load(seed_ptr + STEP), tl.where(total == 0, NHEADS, total),
            tl.load(seed_ptr + FIRST_HEAD) + head)


@triton.jit
def random_bits(dice, slot, p, n0, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, COLUMNS: tl.constexpr,
                ROUNDS: tl.constexpr, PER_CALL: tl.constexpr = 8):
    """(ROWS, COLUMNS) random numbers of 16 bits for the rows p and columns n0.. of a head's state.

    One call of the generator serves PER_CALL neighbours of the pool, 8 of 16 bits or 16 of 8 bits, so it
    runs on that part of the tile.
    """
    row = (slot * dice[2] + dice[3]) * HEADDIM + p
    call = row[:, None] * (DSTATE // PER_CALL) + (n0 // PER_CALL + tl.arange(0, COLUMNS // PER_CALL))[None, :]
    step = tl.zeros(call.shape, tl.int64) + dice[1]
    w0, w1, w2, w3 = tl.philox_impl(low_word(call), high_word(call), low_word(step), high_word(step),
                                    low_word(dice[0]), high_word(dice[0]), ROUNDS)
    return sixteen_each(w0, w1, w2, w3) if PER_CALL == 16 else eight_each(w0, w1, w2, w3)


@triton.jit
def round_stochastic(value, bits, DTYPE: tl.constexpr):
    """fp32 ``value`` as fp16 or bf16: the random bits are added to those that the narrow type drops."""
    raw = value.to(tl.int32, bitcast=True)
    magnitude = raw & 0x7FFFFFFF
    if DTYPE == tl.bfloat16:  # noqa: SIM300  a constant only by its spelling
        rounded = tl.minimum((magnitude + bits) >> 16, 0x7F7F)
    else:
        drawn = bits & 0x1FFF
        normal = ((magnitude + drawn) >> 13) - (112 << 10)
        # Below fp16's smallest normal number: fixed point, 13 bits behind its last digit of 2^-24.
        small = tl.minimum(magnitude, 0x38800000).to(tl.float32, bitcast=True) * 137438953472.0
        subnormal = (small.to(tl.int32) + drawn) >> 13
        rounded = tl.minimum(tl.where(magnitude < 0x38800000, subnormal, normal), 0x7BFF)
    is_nan = magnitude > 0x7F800000
    sign = (raw >> 16) & 0x8000
    return tl.where(is_nan, 0x7FFF, rounded | sign).to(tl.int16).to(DTYPE, bitcast=True)


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
def arrive(seed_ptr):
    """Count this program, which has loaded its dice; returns how many came before."""
    return tl.atomic_add(seed_ptr + ARRIVALS, 1)


@triton.jit
def leave(seed_ptr, before):
    """The last program of a launch to arrive moves the step on, for the next launch."""
    if before == tl.num_programs(0) - 1:
        tl.store(seed_ptr + ARRIVALS, 0)
        tl.store(seed_ptr + STEP, tl.load(seed_ptr + STEP) + 1)
