"""Stochastic rounding: the generator, the rule, its statistics, and the seed state."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.reference.mamba2 import replay_step
from replayssm_cute.rounding import (
    RANDOM_BITS,
    check_rounds,
    philox4x32,
    random_bits,
    round_stochastic,
    seed_state,
)

F16, BF16 = torch.float16, torch.bfloat16
DTYPES = (F16, BF16)
# Values over the exponent range, representable and not, with subnormal results among them.
VALUES = torch.tensor([1.0, 1.0 + 2 ** -12, -1.2345678, 0.1, 3.14159, 1e-3, -7e-5, 6.2e-5, 5e-5, -3.3e-6, 1.3e-7,
                       4e-8, 1000.7, -31234.5, 65503.9])


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a 2-byte type."""
    every = torch.arange(-2 ** 15, 2 ** 15).to(torch.int16).view(dtype)
    return every[every.isfinite()]


def neighbours(value: float, dtype: torch.dtype) -> tuple[Fraction, Fraction]:
    """The representable magnitudes at or below and above |value|, in exact arithmetic."""
    bits, low = (10, -14) if dtype is F16 else (7, -126)
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
        assert torch.equal(rounded.view(torch.int16), exact.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_random_value_gives_a_neighbour_and_the_dropped_fraction_rounds_up(dtype: torch.dtype) -> None:
    r = RANDOM_BITS[dtype]
    every = torch.arange(1 << r)
    for value in VALUES.tolist():
        value = float(torch.tensor(value))
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
    top = torch.finfo(dtype).max
    for bits in (0, (1 << RANDOM_BITS[dtype]) - 1):
        special = torch.tensor([math.inf, -math.inf, 3.4e38, -3.4e38, 0.0, -0.0, math.nan, -math.nan, 1e-45])
        got = round_stochastic(special, torch.full(special.shape, bits), dtype)
        assert got[:4].tolist() == [top, -top, top, -top]
        assert got[4:6].view(torch.int16).tolist() == [0, -2 ** 15]
        assert got[6:8].view(torch.int16).tolist() == [0x7FFF, 0x7FFF]
        assert 0 <= float(got[8]) < 1e-40


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds", [5, 10])
def test_unbiased_over_seeds(dtype: torch.dtype, rounds: int) -> None:
    seeds, position = 4096, torch.arange(VALUES.numel())
    draws = torch.stack([random_bits(position, seed, 0, dtype, rounds) for seed in range(seeds)])
    rounded = round_stochastic(VALUES.expand(seeds, -1).contiguous(), draws, dtype).double()
    for i, value in enumerate(VALUES.double().tolist()):
        down, up = neighbours(value, dtype)
        p = float((Fraction(abs(value)) - down) / (up - down))
        error = float(up - down) * math.sqrt(p * (1 - p) / seeds)
        assert abs(float(rounded[:, i].mean()) - value) <= 4 * error + float(up - down) * 2 ** -RANDOM_BITS[dtype]


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
