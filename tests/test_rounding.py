"""Rounding of the checkpoint: the generator, the stochastic rule and its statistics, 8-bit codes, the seed."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.reference.mamba2 import replay_step
from replayssm_cute.rounding import (
    LARGEST_CODE,
    RANDOM_BITS,
    SMALLEST_SCALE,
    check_rounds,
    dequantize,
    philox4x32,
    quantize,
    random_bits,
    reverse16,
    round_stochastic,
    seed_state,
)
from tests.cases import bits as patterns_of

F16, BF16, I8, E4M3 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
DTYPES = (F16, BF16, I8, E4M3)
LARGEST = {F16: 65504.0, BF16: torch.finfo(BF16).max, **LARGEST_CODE}
# Mantissa bits and exponent of the smallest normal number; int8 has the unit 1 throughout.
FORMS = {F16: (10, -14), BF16: (7, -126), I8: (7, 7), E4M3: (3, -6)}


def values(dtype: torch.dtype) -> torch.Tensor:
    """Values over the exponent range of a type, representable and not, with subnormal results among them."""
    every = torch.tensor([1.0, 1.0 + 2 ** -12, -1.2345678, 0.1, 3.14159, 1e-3, -7e-5, 6.2e-5, 5e-5, -3.3e-6, 1.3e-7,
                          4e-8, -0.0131, 2e-3, 17.5, 100.3, -126.5, 300.1, -447.9, 1000.7, -31234.5, 65503.9])
    return every[every.abs() <= LARGEST[dtype]]


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a type; the codes of int8 are symmetric, so -128 is none."""
    if dtype is I8:
        return torch.arange(-127, 128).to(I8)
    bits = 8 * dtype.itemsize
    every = torch.arange(-2 ** (bits - 1), 2 ** (bits - 1)).to(torch.int8 if bits == 8 else torch.int16).view(dtype)
    return every[every.float().isfinite()]


def neighbours(value: float, dtype: torch.dtype) -> tuple[Fraction, Fraction]:
    """The representable magnitudes at or below and above |value|, in exact arithmetic."""
    bits, low = FORMS[dtype]
    magnitude = Fraction(abs(value))
    exponent = max(low, math.frexp(abs(value))[1] - 1) if value else low
    unit = Fraction(2) ** (exponent - bits)
    down = magnitude // unit * unit
    return down, down + unit


@pytest.mark.parametrize(("counter", "key", "words"), [
    # The known answers that the generator's authors publish for ten rounds.
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))])
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    got = philox4x32(tuple(torch.tensor([c]) for c in counter), key, 10)  # type: ignore[arg-type]
    assert tuple(int(w) for w in got) == words


def test_rounds_change_the_words_and_are_checked() -> None:
    position = torch.arange(64)
    draws = [random_bits(position, 1, 2, F16, r) for r in (5, 10)]
    assert not torch.equal(*draws)
    assert check_rounds(0) == 10 and check_rounds(5) == 5 and check_rounds(16) == 16
    for bad in (-1, 17, 2.5, True, None):
        with pytest.raises(ArgumentError, match="cache_philox_rounds"):
            check_rounds(bad)  # type: ignore[arg-type]


def test_all_four_words_of_a_call_are_used_in_both_halves() -> None:
    words = [int(w) for w in philox4x32((torch.tensor([5]), *(torch.tensor([0]),) * 3), (9, 0), 10)]
    draws = random_bits(torch.arange(40, 48), 9, 0, BF16)
    assert draws.tolist() == [half for w in words for half in (w & 0xFFFF, w >> 16)]
    assert random_bits(torch.arange(40, 48), 9, 0, F16).tolist() == [d & 0x1FFF for d in draws.tolist()]


def test_four_elements_of_8_bits_share_a_word_as_in_the_instruction() -> None:
    """The order of cvt.rs.e4m3x4 {a, b, e, f}: f takes the low half, e the same reversed, b and a the high one."""
    words = [int(w) for w in philox4x32((torch.tensor([5]), *(torch.tensor([0]),) * 3), (9, 0), 10)]
    for dtype in (I8, E4M3):
        draws = random_bits(torch.arange(80, 96), 9, 0, dtype)
        assert draws.tolist() == [bits for w in words for half in (w & 0xFFFF, w >> 16)
                                  for bits in (half, int(f"{half:016b}"[::-1], 2))]


def test_elements_that_share_a_half_round_independently() -> None:
    """(R, R reversed) is a Hammersley point set: any two events "rounds up" meet as often as independent ones."""
    every = torch.arange(1 << 16)
    mirrored = reverse16(every)
    assert torch.equal(reverse16(mirrored), every)
    gen = torch.Generator().manual_seed(3)
    for one, other in torch.randint(0, 1 << 16, (200, 2), generator=gen).tolist():
        both = int(((every >= one) & (mirrored >= other)).sum())
        expected = ((1 << 16) - one) * ((1 << 16) - other) / (1 << 16)
        assert abs(both - expected) <= 16


def test_counters_and_seeds_are_64_bit() -> None:
    low = random_bits(torch.arange(8), 3, 4, BF16)
    for position, seed, step in ((8 * 2 ** 32, 3, 4), (0, 3 + 2 ** 32, 4), (0, 3, 4 + 2 ** 32)):
        assert not torch.equal(random_bits(torch.arange(8) + position, seed, step, BF16), low)
    assert torch.equal(random_bits(torch.arange(8), 2 ** 64 - 1, 0, F16), random_bits(torch.arange(8), -1, 0, F16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_representable_values_never_move(dtype: torch.dtype) -> None:
    exact = patterns(dtype)
    for bits in (0, 1, (1 << RANDOM_BITS[dtype]) - 1):
        rounded = round_stochastic(exact.float(), torch.full(exact.shape, bits), dtype)
        assert torch.equal(patterns_of(rounded), patterns_of(exact))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_random_value_gives_a_neighbour_and_the_dropped_fraction_rounds_up(dtype: torch.dtype) -> None:
    r = RANDOM_BITS[dtype]
    every = torch.arange(1 << r)
    for value in values(dtype).tolist():
        rounded = round_stochastic(torch.full((1 << r,), value), every, dtype).double()
        down, up = neighbours(value, dtype)
        assert {Fraction(v) for v in rounded.abs().unique().tolist()} <= {down, up}
        assert (rounded.sign() * math.copysign(1, value) >= 0).all()
        share = int((rounded.abs() > float(down)).sum())
        fraction = (Fraction(abs(value)) - down) / (up - down)
        assert abs(Fraction(share, 1 << r) - fraction) <= Fraction(1, 1 << r)
        mirrored = round_stochastic(torch.full((1 << r,), -value), every, dtype)
        assert torch.equal(mirrored.double(), -rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: torch.dtype) -> None:
    top, sign = LARGEST[dtype], -2 ** (8 * dtype.itemsize - 1)
    for bits in (0, (1 << RANDOM_BITS[dtype]) - 1):
        special = torch.tensor([math.inf, -math.inf, 3.4e38, -3.4e38, 0.0, -0.0, math.nan, -math.nan, 1e-45])
        got = round_stochastic(special, torch.full(special.shape, bits), dtype)
        assert got[:4].tolist() == [top, -top, top, -top]
        assert patterns_of(got[4:8]).tolist() == ([0, 0, 0, 0] if dtype is I8 else [0, sign, ~sign, ~sign])
        assert 0 <= float(got[8]) < 1e-40


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds", [5, 10])
def test_unbiased_over_seeds(dtype: torch.dtype, rounds: int) -> None:
    seeds, given = 4096, values(dtype)
    position = torch.arange(given.numel())
    draws = torch.stack([random_bits(position, seed, 0, dtype, rounds) for seed in range(seeds)])
    rounded = round_stochastic(given.expand(seeds, -1).contiguous(), draws, dtype).double()
    for i, value in enumerate(given.double().tolist()):
        down, up = neighbours(value, dtype)
        p = float((Fraction(abs(value)) - down) / (up - down))
        error = float(up - down) * math.sqrt(p * (1 - p) / seeds)
        assert abs(float(rounded[:, i].mean()) - value) <= 4 * error + float(up - down) * 2 ** -RANDOM_BITS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds", [5, 10])
def test_rounding_up_is_as_frequent_as_the_dropped_fraction(dtype: torch.dtype, rounds: int) -> None:
    """Chi-squared over 64 classes of the dropped fraction, 4,096 values in each, with the generator's own bits."""
    classes, count = 64, 4096
    gen = torch.Generator().manual_seed(7)
    grid = torch.randint(8, 16, (classes, count), generator=gen).float()      # numbers of four bits, one binade
    unit = 1.0 if dtype is I8 else 2.0 ** (3 - FORMS[dtype][0])
    fraction = (torch.arange(classes)[:, None] + torch.rand(classes, count, generator=gen)) / classes
    value = grid + unit * (fraction * 1024).floor() / 1024                     # exact in fp32
    p = (value - grid).double() / unit
    draws = random_bits(torch.arange(value.numel()).view(value.shape), 99, 3, dtype, rounds)
    up = (round_stochastic(value, draws, dtype).double() > grid).sum(1)
    chi2 = float(((up - p.sum(1)) ** 2 / (p * (1 - p)).sum(1)).sum())
    assert classes - 5 * math.sqrt(2 * classes) < chi2 < classes + 5 * math.sqrt(2 * classes)


@pytest.mark.parametrize("rounds", [5, 10])
def test_bits_are_uniform_and_independent(rounds: int) -> None:
    """Chi-squared over 256 buckets, of the draws and of the differences of neighbours."""
    draws = random_bits(torch.arange(1 << 18), 12345, 6, BF16, rounds)
    for sample in (draws >> 8, draws & 0xFF, (draws[1:] - draws[:-1]) & 0xFF, (draws[8:] ^ draws[:-8]) >> 8):
        counts = torch.bincount(sample, minlength=256).double()
        expected = sample.numel() / 256
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert 255 - 5 * math.sqrt(510) < chi2 < 255 + 5 * math.sqrt(510)


def flushing_layer(heads: slice, first: int, seed: int, step: int, order: list[int]) -> torch.Tensor:
    """Flush rows of a layer of eight heads, those of ``heads`` only; returns the checkpoints by slot."""
    gen = torch.Generator().manual_seed(0)
    H, P, N, L, batch = 8, 4, 16, 3, 3
    state = torch.randn(5, H, P, N, generator=gen).half()[:, heads].contiguous()
    x, dt = torch.randn(batch, H, P, generator=gen)[:, heads], torch.rand(batch, H, generator=gen)[:, heads]
    B = torch.randn(batch, 1, N, generator=gen)
    h = x.shape[1]
    A = -torch.ones(h)[:, None, None].expand(h, P, N)
    slots = torch.tensor([1, 4, 2])
    rings = torch.zeros(5, h, L, P), torch.zeros(5, h, L), torch.zeros(5, 1, L, N)
    rand_seed = seed_state(seed, "cpu", step=step, first_head=first, total_heads=H)
    replay_step(state, x[order], dt[order][:, :, None].expand(-1, -1, P), A, B[order], B[order], None, None, None,
                *rings, torch.zeros(batch, dtype=torch.int32), torch.ones(batch, dtype=torch.int8), slots[order], 0,
                torch.zeros(batch, h, P), rand_seed, dt_softplus=False, philox_rounds=10)
    assert rand_seed[1] == step + 1
    return state


def test_draws_depend_on_seed_step_and_position_alone() -> None:
    whole = flushing_layer(slice(0, 8), 0, 1, 2, [0, 1, 2])
    assert torch.equal(whole, flushing_layer(slice(0, 8), 0, 1, 2, [2, 0, 1])), "batch order"
    halves = [flushing_layer(slice(f, f + 4), f, 1, 2, [0, 1, 2]) for f in (0, 4)]
    assert torch.equal(whole, torch.cat(halves, 1)), "tensor-parallel layout"
    assert not torch.equal(whole, flushing_layer(slice(0, 8), 0, 1, 3, [0, 1, 2])), "the step"
    assert not torch.equal(whole, flushing_layer(slice(0, 8), 0, 2, 2, [0, 1, 2])), "the seed"


def test_an_fp32_checkpoint_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="float32 checkpoint"):
        round_stochastic(torch.zeros(1), torch.zeros(1, dtype=torch.long), torch.float32)


# ---- 8-bit codes with a scale a row --------------------------------------------------------------

def spread_rows(seed: int = 0) -> torch.Tensor:
    """Rows whose magnitudes span 30 binades, and within a row 8."""
    gen = torch.Generator().manual_seed(seed)
    wide = torch.exp2(torch.randint(-20, 10, (64, 1), generator=gen) + 8 * torch.rand(64, 128, generator=gen))
    return torch.randn(64, 128, generator=gen) * wide


@pytest.mark.parametrize("dtype", [I8, E4M3])
def test_codes_to_nearest(dtype: torch.dtype) -> None:
    value = spread_rows()
    codes, scale = quantize(value, dtype)
    largest = value.abs().amax(-1)
    assert torch.equal(scale, largest / LARGEST_CODE[dtype])
    assert torch.equal(codes.float().abs().amax(-1), torch.full((64,), LARGEST_CODE[dtype])), "the range is used"
    error = (dequantize(codes, scale) - value).abs()
    unit = scale[:, None] if dtype is I8 else torch.maximum(value.abs() / 8, scale[:, None] * 2.0 ** -9)
    assert bool((error <= unit / 2 * (1 + 1e-5)).all())
    assert torch.equal(quantize(-value, dtype)[0].float(), -codes.float())


@pytest.mark.parametrize("dtype", [I8, E4M3])
def test_codes_that_are_stored_again_stay(dtype: torch.dtype) -> None:
    """Exactly to nearest; stochastically all but the few whose scaled value an fp32 rounding moved off the code."""
    codes, scale = quantize(spread_rows(1), dtype)
    value = dequantize(codes, scale)
    assert torch.equal(patterns_of(quantize(value, dtype)[0]), patterns_of(codes))
    draws = random_bits(torch.arange(value.numel()).view(value.shape), 5, 0, dtype)
    assert int((patterns_of(quantize(value, dtype, draws)[0]) != patterns_of(codes)).sum()) <= 2


@pytest.mark.parametrize("dtype", [I8, E4M3])
def test_codes_are_unbiased(dtype: torch.dtype) -> None:
    """The mean over 4,096 launches, within 4 standard errors of the fp32 value for all but chance's share."""
    value = spread_rows(2)[:4]
    position = torch.arange(value.numel()).view(value.shape)
    total, square = torch.zeros(value.shape).double(), torch.zeros(value.shape).double()
    for step in range(4096):
        stored = dequantize(*quantize(value, dtype, random_bits(position, 11, step, dtype, 5)), torch.float64)
        total += stored - value
        square += (stored - value) ** 2
    spread = (square / 4096 / 4096).sqrt() + quantize(value, dtype)[1][:, None] * 2.0 ** -16
    assert float(((total / 4096).abs() > 4 * spread).double().mean()) < 0.005
    assert abs(float((total / 4096 / spread).mean())) < 4 / math.sqrt(value.numel())


@pytest.mark.parametrize("dtype", [I8, E4M3])
@pytest.mark.parametrize("stochastic", [False, True])
def test_rows_without_a_scale_of_their_own(dtype: torch.dtype, stochastic: bool) -> None:
    """Zeros keep their codes and a finite scale; a row with a NaN or an infinity is NaN as a whole, alone."""
    value = torch.ones(5, 16)
    value[0] = 0
    value[1] = 1e-44                       # its scale would be subnormal, and its reciprocal infinite
    value[2, 3], value[3, 5] = math.nan, -math.inf
    bits = torch.full(value.shape, 0x7FFF) if stochastic else None
    codes, scale = quantize(value, dtype, bits)
    assert scale[:2].tolist() == [SMALLEST_SCALE] * 2 and codes[:4].float().count_nonzero() == 0
    assert scale[2:4].isnan().all() and dequantize(codes, scale)[2:4].isnan().all()
    torch.testing.assert_close(dequantize(codes, scale)[4], value[4])
