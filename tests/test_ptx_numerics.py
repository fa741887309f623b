"""The executor's arithmetic against exact rational numbers, PyTorch and the project's rounding rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch

from replayssm_cute.rounding import RANDOM_BITS, round_stochastic
from tests.ptx import numerics

F32 = np.float32
COUNT = 4000
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 1.5, 2.0 ** -126, -(2.0 ** -126), 2.0 ** -149, 3 * 2.0 ** -149,
                    65504.0, 65519.9, 65520.0, 65536.0,
                    2.0 ** -24, 2.0 ** -25, 3 * 2.0 ** -25, 2.0 ** -14, 3.4028235e38, -3e38], F32)
NOT_FINITE = np.array([np.inf, -np.inf, np.nan], F32)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Overflow and NaN are among the cases."""
    with np.errstate(all="ignore"):
        yield


def floats(seed: int, count: int = COUNT, low: int = -149, high: int = 127) -> np.ndarray:
    """Finite float32 over many binades, the special ones among them."""
    gen = np.random.default_rng(seed)
    mantissa = gen.integers(-(1 << 24), 1 << 24, count) * 2.0 ** -23
    values = (mantissa * 2.0 ** gen.integers(low, high, count)).astype(F32)
    values[:SPECIAL.size] = SPECIAL
    return np.where(np.isfinite(values), values, F32(1))


def rounded(value: Fraction, toward_zero: bool) -> float:
    """A rational number as float32: to nearest even, or cut off."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(math.frexp(float(magnitude))[1] - 1 if float(magnitude) else -150, -126)
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    units = math.floor(magnitude / unit) if toward_zero else round(magnitude / unit)  # round() goes to even
    result = units * unit
    largest = Fraction(float(np.finfo(F32).max))
    if result > largest:
        return math.copysign(float(largest) if toward_zero else math.inf, value)
    return math.copysign(float(result), value)


@pytest.mark.parametrize(("f", "toward_zero"), [(numerics.fma, False), (numerics.fma_toward_zero, True)])
@pytest.mark.parametrize("span", [(-149, 127), (-3, 3), (-80, -60)], ids=str)
def test_fma_is_rounded_once(f: Callable[..., np.ndarray], toward_zero: bool, span: tuple[int, int]) -> None:
    a, b, c = (floats(seed, 1500, *span) for seed in (1, 2, 3))
    b[500:1000] = F32(2.0 ** -24) * np.where(b[500:1000] > 0, F32(1), F32(-1.5))   # close calls: c is a b times 2^24
    c[500:1000] = a[500:1000]
    got = f(a, b, c)
    for x, y, z, r in zip(*(v.tolist() for v in (a, b, c, got)), strict=True):
        want = rounded(Fraction(x) * Fraction(y) + Fraction(z), toward_zero)
        assert r == want, (x.hex(), y.hex(), z.hex(), r.hex(), want.hex())


@pytest.mark.parametrize("exponent", [-149, -140, -127, -126, -100, 0, 60])
def test_fma_where_two_roundings_differ_from_one(exponent: int) -> None:
    """c plus almost half of its last place, as near to it as float64 cannot hold: it looks like a tie and is none."""
    odd = 2 * np.random.default_rng(9).integers(1 << 22 if exponent > -126 else 100, 1 << 23, 200) + 1
    last_place = 2.0 ** max(exponent - 23, -149)
    c = np.concatenate([odd, -odd]) * last_place
    a = np.full(c.size, 2.0 ** (max(exponent, -126) // 2 - 24) * (1 + 2.0 ** -23))
    b = last_place / 2 / 2.0 ** (max(exponent, -126) // 2 - 24) * (1 - 2.0 ** -23) * np.sign(c)
    a, b, c = (v.astype(F32) for v in (a, b, c))
    wide = c.astype(np.float64) + a.astype(np.float64) * b
    assert (np.abs(wide) - np.abs(c) == last_place / 2).any(), "rounding twice must show"
    np.testing.assert_array_equal(numerics.fma(a, b, c), c, "a little less than half: down")
    np.testing.assert_array_equal(numerics.fma(a, -b, c), c)


def test_fma_of_infinities_and_nan() -> None:
    x, y = (v.reshape(-1) for v in np.meshgrid(np.append(NOT_FINITE, [F32(0), F32(2)]), np.append(NOT_FINITE, F32(1))))
    for f in (numerics.fma, numerics.fma_toward_zero):
        got = f(x, x, y)
        want = x * x + y
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("f", "dtype"), [(numerics.to_f16, torch.float16), (numerics.to_bf16, torch.bfloat16)])
def test_conversions_to_nearest(f: Callable[..., np.ndarray], dtype: torch.dtype) -> None:
    x = np.append(floats(4), NOT_FINITE[:2])
    want = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(f(x), want)
    assert f(NOT_FINITE[2:])[0] == 0x7FFF


def test_conversions_back_are_exact() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    words = torch.from_numpy(every.view(np.int16))
    for f, dtype in ((numerics.from_f16, torch.float16), (numerics.from_bf16, torch.bfloat16)):
        np.testing.assert_array_equal(f(every), words.view(dtype).float().numpy())


def test_conversion_toward_zero() -> None:
    x = floats(5, low=-30, high=20)
    got = numerics.to_f16_toward_zero(x).view(np.float16)
    assert np.isfinite(got).all() and (np.abs(got.astype(np.float64)) <= np.abs(x)).all()
    after = (got.view(np.uint16) + 1).view(np.float16).astype(np.float64)     # the next larger magnitude
    finite = np.abs(x) < 65504
    assert (np.abs(after)[finite] > np.abs(x)[finite]).all()
    np.testing.assert_array_equal(numerics.to_f16_toward_zero(NOT_FINITE), [0x7BFF, 0xFBFF, 0x7FFF])


@pytest.mark.parametrize(("f", "dtype"), [(numerics.to_f16_stochastic, torch.float16),
                                          (numerics.to_bf16_stochastic, torch.bfloat16)])
def test_stochastic_conversion_is_the_specification(f: Callable[..., np.ndarray], dtype: torch.dtype) -> None:
    x = np.concatenate([floats(6), floats(7, low=-45, high=20), NOT_FINITE])
    random = np.random.default_rng(8).integers(0, 1 << RANDOM_BITS[dtype], x.size)
    want = round_stochastic(torch.from_numpy(x), torch.from_numpy(random), dtype).view(torch.int16).numpy()
    np.testing.assert_array_equal(f(x, random), want.view(np.uint16))


def test_codes_of_eight_bits() -> None:
    every = np.arange(256, dtype=np.uint16)
    words = torch.from_numpy(every.astype(np.uint8)).view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(numerics.from_e4m3(every), words.float().numpy())
    x = np.concatenate([floats(10, low=-12, high=12), NOT_FINITE, numerics.from_e4m3(every)])
    nearest = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(numerics.to_e4m3(x), np.where(np.isnan(x), 0x7F, nearest))
    random = np.random.default_rng(8).integers(0, 1 << 16, x.size)
    want = round_stochastic(torch.from_numpy(x), torch.from_numpy(random), torch.float8_e4m3fn).view(torch.uint8)
    np.testing.assert_array_equal(numerics.to_e4m3_stochastic(x, random), want.numpy())


def test_conversions_to_integers() -> None:
    x = np.array([0.5, 1.5, -2.5, 2.7, -2.7, 3e9, -3e9, 5e9, np.nan, np.inf], F32)
    assert numerics.to_integer(x, True, np.int32).tolist() == [
        0, 2, -2, 3, -3, 2 ** 31 - 1, -2 ** 31, 2 ** 31 - 1, 0, 2 ** 31 - 1]
    assert numerics.to_integer(x, False, np.uint32).tolist() == [
        0, 1, 0, 2, 0, 3000000000, 0, 2 ** 32 - 1, 0, 2 ** 32 - 1]


@pytest.mark.parametrize(("f", "exact", "low", "high", "error"), [
    (numerics.ex2, np.exp2, -120, 120, 2.0 ** -22), (numerics.rcp, np.reciprocal, 1e-30, 1e30, 2.0 ** -23),
    (numerics.rsqrt, lambda x: 1 / np.sqrt(x), 1e-30, 1e30, 2.0 ** -22.9), (numerics.tanh, np.tanh, -5, 5, 2.0 ** -11),
    (numerics.lg2, np.log2, 2.0, 1e30, 2.0 ** -22)], ids=["ex2", "rcp", "rsqrt", "tanh", "lg2"])
def test_approximations_lie_within_the_documented_error(f: Callable[..., np.ndarray], exact: Callable[..., np.ndarray],
                                                        low: float, high: float, error: float) -> None:
    x = np.linspace(low, high, COUNT).astype(F32)
    want = exact(x.astype(np.float64))
    assert (np.abs(f(x) - want) <= error * np.abs(want)).all()


def test_maximum_and_flush() -> None:
    x, y = np.array([np.nan, 1, 0.0, -0.0, -2], F32), np.array([3, np.nan, -0.0, -0.0, -1], F32)
    np.testing.assert_array_equal(numerics.maximum(x, y), [3, 1, 0, 0, -1])
    assert np.signbit(numerics.maximum(x, y)).tolist() == [False, False, False, True, True]
    np.testing.assert_array_equal(numerics.minimum(x, y), [3, 1, 0, 0, -2])
    assert np.signbit(numerics.minimum(x, y)).tolist() == [False, False, True, True, True]
    tiny = np.array([2.0 ** -127, -(2.0 ** -130), 2.0 ** -126], F32)
    assert numerics.flush(tiny).tolist() == [0.0, 0.0, 2.0 ** -126] and np.signbit(numerics.flush(tiny)[1])
