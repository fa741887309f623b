"""Stochastic rounding on the device: the same bits as ``replayssm_cute.rounding``, its specification."""

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
def eight_each(w0, w1, w2, w3):
    """(ROWS, 8 C) numbers of 16 bits from four (ROWS, C) words: w0 low, w0 high, w1 low, and so on."""
    words = tl.reshape(tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 1, 3, 2)),
                       (w0.shape[0], 4 * w0.shape[1]))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (w0.shape[0], 8 * w0.shape[1])).to(tl.int32)


@triton.jit
def load_dice(seed_ptr, head, NHEADS: tl.constexpr):
    """(seed, step, heads of a slot, this head among them): what a launch's random words depend on."""
    total = tl.load(seed_ptr + TOTAL_HEADS)
    return (tl.load(seed_ptr + SEED), tl.load(seed_ptr + STEP), tl.where(total == 0, NHEADS, total),
            tl.load(seed_ptr + FIRST_HEAD) + head)


@triton.jit
def random_bits(dice, slot, p, n0, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, COLUMNS: tl.constexpr,
                ROUNDS: tl.constexpr):
    """(ROWS, COLUMNS) random numbers of 16 bits for the rows p and columns n0.. of a head's state.

    One call of the generator serves eight neighbours of the pool, so it runs on an eighth of the tile.
    """
    row = (slot * dice[2] + dice[3]) * HEADDIM + p
    call = row[:, None] * (DSTATE // 8) + (n0 // 8 + tl.arange(0, COLUMNS // 8))[None, :]
    step = tl.zeros(call.shape, tl.int64) + dice[1]
    w0, w1, w2, w3 = tl.philox_impl(low_word(call), high_word(call), low_word(step), high_word(step),
                                    low_word(dice[0]), high_word(dice[0]), ROUNDS)
    return eight_each(w0, w1, w2, w3)


@triton.jit
def round_stochastic(value, bits, DTYPE: tl.constexpr):
    """fp32 ``value`` as fp16 or bf16: the random bits are added to those that the narrow type drops."""
    raw = value.to(tl.int32, bitcast=True)
    magnitude = raw & 0x7FFFFFFF
    if DTYPE == tl.bfloat16:  # noqa: SIM300  a constant only by its spelling
        rounded = tl.minimum((magnitude + bits) >> 16, 0x7F7F)
    else:
        exponent = magnitude >> 23
        mantissa = (magnitude & 0x7FFFFF) | tl.where(exponent > 0, 1 << 23, 0)
        below = tl.minimum(tl.maximum(113 - tl.maximum(exponent, 1), 0), 31)
        units = ((mantissa >> below) + (bits & 0x1FFF)) >> 13
        rounded = tl.minimum(units + (tl.maximum(exponent - 113, 0) << 10), 0x7BFF)
    is_nan = magnitude > 0x7F800000
    sign = (raw >> 16) & 0x8000
    return tl.where(is_nan, 0x7FFF, rounded | sign).to(tl.int16).to(DTYPE, bitcast=True)


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
