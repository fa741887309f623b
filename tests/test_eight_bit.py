"""8-bit checkpoints: the reference against float64, the Triton kernel against the reference bit for bit, refusals.

The rule of the codes itself is tested in ``test_rounding``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_cute import dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.backends import cute
from replayssm_cute.errors import UnsupportedError
from replayssm_cute.layout import allocate_mamba2_pool, mamba2_state_bytes, mamba2_step_bytes
from replayssm_cute.mamba2 import selective_state_update_replayssm_output_only
from replayssm_cute.reference.mamba2 import replay_step, replay_step_naive
from replayssm_cute.rounding import LARGEST_CODE, dequantize, quantize, random_bits, seed_state
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from tests import tolerance
from tests.cases import Case, bits, check, make_case, oracle, scale_of
from tests.interpreter import interpreted_import
from tests.test_triton_rounding import exact_case

mamba2 = interpreted_import("fallback_triton.mamba2")
kernels = interpreted_import("fallback_triton.rounding")
triton, tl = interpreted_import("triton"), interpreted_import("triton.language")

F32, BF16, I8, E4M3 = torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn
NAMES = {I8: "int8", E4M3: "e4m3"}
SEED = 0x123456789ABCDEF
POOL_PADDING, SCALE_PADDING = 48, 3


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter asks for the variable again while it runs; flushing rows go ahead of any batch."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("fallback_triton.order.AT_ONCE", 0)
    yield


def padded(values: Tensor, padding: int) -> Tensor:
    """The same values with ``padding`` junk elements behind every slot."""
    inner = math.prod(values.shape[1:])
    flat = torch.full((values.shape[0], inner + padding), 77).to(values.dtype)
    flat[:, :inner] = values.flatten(1)
    strides = (inner + padding, *torch.empty(values.shape[1:], device="meta").stride())
    return flat.flatten().as_strided(values.shape, strides)


class EightBit:
    """A case whose checkpoint is stored in 8 bits, and the same case in fp32."""

    def __init__(self, case: Case, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = padded(codes, POOL_PADDING), padded(scale, SCALE_PADDING)
        self.case = case.clone()
        self.case["state"].copy_(self.value())
        self.seed = seed_state(SEED, "cpu", step=9, first_head=1, total_heads=5)

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype) -> EightBit:
        return cls(case, *quantize(case["state"], dtype))

    def value(self) -> Tensor:
        """The checkpoints as fp32."""
        return dequantize(self.codes, self.scale)

    def clone(self) -> EightBit:
        other = EightBit(self.case, self.codes, self.scale)
        other.seed = self.seed.clone()
        return other

    def run(self, step: Callable[..., object], rounds: int = 0, **options: Any) -> EightBit:
        """The case after a step; this one is left as it is."""
        after = self.clone()
        args = list(after.case.args())
        args[0] = after.codes
        step(*args, after.seed if rounds else None, after.scale, dt_softplus=self.case.dt_softplus,
             philox_rounds=rounds, **options)
        return after

    def bytes(self) -> list[Tensor]:
        """Pool and scales, padding included."""
        return [bits(torch.as_strided(t, (t.shape[0] * t.stride(0),), (1,))) for t in (self.codes, self.scale)]


def check_against_oracle(before: EightBit, after: EightBit, units: float) -> None:
    """y and rings as in ``cases.check``; stored values within ``units`` spacings of float64; the rest untouched."""
    exact = oracle(before.case)
    result = after.case.clone()
    result["state"].copy_(exact["state"])               # what the fp32 case would have stored
    check(before.case, result, exact)
    flushed = [before.case.slots[b] for b in before.case.live if before.case.cursors[b][1]]
    want, got = exact["state"][flushed], after.value()[flushed].double()
    slack = tolerance.bound(want, scale_of(before.case)["state"][flushed], F32)
    scale = after.scale[flushed].double()
    largest = want.abs().amax(-1)
    assert bool(((scale * LARGEST_CODE[after.codes.dtype] - largest).abs() <= slack.amax(-1) + 1e-6 * largest).all())
    spacing = scale[..., None]
    if after.codes.dtype is E4M3:
        binade = torch.exp2(torch.floor(torch.log2(want.abs() / spacing * (1 + 1e-5))))
        spacing = spacing * torch.maximum(binade / 8, torch.tensor(2.0 ** -9))
    assert bool(((got - want).abs() <= units * spacing * (1 + 1e-5) + slack).all())
    others = [s for s in range(before.codes.shape[0]) if s not in flushed]
    for ours, theirs in ((before.codes, after.codes), (before.scale, after.scale)):
        assert torch.equal(bits(ours[others]), bits(theirs[others]))
    for buffer, same, padding in zip(before.bytes(), after.bytes(), (POOL_PADDING, SCALE_PADDING), strict=True):
        rows = before.codes.shape[0]
        assert torch.equal(buffer.view(rows, -1)[:, -padding:], same.view(rows, -1)[:, -padding:]), "padding"


@pytest.mark.parametrize("dtype", [I8, E4M3])
@pytest.mark.parametrize("step", [replay_step, replay_step_naive, mamba2.replay_step], ids=["torch", "naive", "triton"])
@pytest.mark.parametrize("options", [
    {}, {"headdim": 20, "dstate": 48, "buffer_len": 6, "nheads": 4, "ngroups": 2, "z": True, "D": "full"},
    {"padded": (1,)}, {"headdim": 80, "nheads": 1, "dstate": 128}], ids=str)
@pytest.mark.parametrize("rounds", [0, 5])
def test_a_step_against_float64(dtype: torch.dtype, step: Any, options: dict[str, Any], rounds: int) -> None:
    L = options.get("buffer_len", 4)
    cursors = [(L - 1, True), (1, False), (2, True)]
    before = EightBit.of(make_case(act=F32, **{"batch": 3, "cursors": cursors, **options}), dtype)
    extra = {"dtype": F32} if step is replay_step_naive else {}
    check_against_oracle(before, before.run(step, rounds, **extra), 1.0 if rounds else 0.5)


def exact_codes(dtype: torch.dtype, **options: Any) -> EightBit:
    """Codes and scales that keep the fp32 arithmetic of ``exact_case`` exact: the scales are powers of two."""
    case = exact_case(state=F32, **options)
    gen = torch.Generator().manual_seed(4)
    shape = case["state"].shape
    codes = torch.randint(-127, 128, shape, generator=gen).to(I8)
    if dtype is E4M3:
        codes = torch.where(codes.view(E4M3).float().isnan(), 0, codes).view(E4M3)
    return EightBit(case, codes, 2.0 ** torch.randint(-3, 1, shape[:3], generator=gen).float())


@pytest.mark.parametrize("dtype", [I8, E4M3])
@pytest.mark.parametrize("rounds", [0, 5])
@pytest.mark.parametrize("options", [{}, {"headdim": 20, "dstate": 48}, {"headdim": 80, "dstate": 128, "nheads": 1},
                                     {"padded": (1,)}, {"padded": (0, 1, 2)}], ids=str)
def test_triton_stores_the_bits_of_the_specification(dtype: torch.dtype, rounds: int, options: dict[str, Any]) -> None:
    before = exact_codes(dtype, cursors=[(3, True), (1, False), (2, True)], **options)
    ours, theirs = before.run(mamba2.replay_step, rounds), before.run(replay_step, rounds)
    for one, other in zip(ours.bytes(), theirs.bytes(), strict=True):
        assert torch.equal(one, other)
    for name in ("x_cache", "dt_cache", "B_cache"):
        assert torch.equal(bits(ours.case.buffers[name]), bits(theirs.case.buffers[name])), name
    assert torch.equal(ours.seed, theirs.seed) and ours.seed.tolist()[1:3] == [10 if rounds else 9, 0]
    if before.case.live:
        assert not torch.equal(ours.bytes()[0], before.bytes()[0])
        nearest = before.run(mamba2.replay_step)
        assert torch.equal(bits(ours.case["out"]), bits(nearest.case["out"])), "y is not rounded"
        assert torch.equal(ours.bytes()[0], nearest.bytes()[0]) == (rounds == 0)


@pytest.mark.parametrize("dtype", [I8, E4M3])
@pytest.mark.parametrize("stochastic", [False, True])
def test_triton_encodes_by_the_rule(dtype: torch.dtype, stochastic: bool) -> None:
    """Rows of all magnitudes, ties, zeros, tiny values, and rows with a NaN or an infinity."""
    @triton.jit
    def kernel(value, random, codes, scale, CODES: tl.constexpr, SR: tl.constexpr):  # type: ignore[no-untyped-def]
        p, n = tl.arange(0, 64), tl.arange(0, 64)
        at = p[:, None] * 64 + n[None, :]
        v = tl.load(value + at)
        stored, reciprocal, finite = kernels.row_scale(tl.max(kernels.magnitude_bits(v), 1), CODES)
        tl.store(scale + p, stored)
        tl.store(codes + at, kernels.encode(v, reciprocal, finite, tl.load(random + at), CODES, SR))

    gen = torch.Generator().manual_seed(0)
    value = torch.randn(64, 64, generator=gen) * torch.exp2(torch.randint(-60, 60, (64, 1), generator=gen).float()) \
        * torch.exp2(torch.randint(-12, 1, (64, 64), generator=gen).float())
    largest = LARGEST_CODE[dtype]
    value[0], value[1], value[2] = 0, 1e-44, 3.4e38
    value[3] = torch.arange(64) / 2 - 16                 # ties of int8, its scale 1
    value[4] = torch.arange(-32, 32) * 2.0 ** -10        # ties of e4m3's subnormal numbers, its scale 1
    value[3:5, 63] = largest
    value[5, 7], value[6, 9], value[7, 11] = math.nan, math.inf, -math.inf
    value[8] = -value[9]
    drawn = torch.randint(0, 1 << 16, (64, 64), generator=gen)
    codes, scale = torch.empty(64, 64, dtype=I8), torch.empty(64)
    kernel[(1,)](value, drawn.int(), codes, scale, CODES=NAMES[dtype], SR=stochastic)
    want_codes, want_scale = quantize(value, dtype, drawn if stochastic else None)
    assert torch.equal(bits(scale.nan_to_num(-1)), bits(want_scale.nan_to_num(-1)))
    assert torch.equal(codes, bits(want_codes))


@pytest.mark.parametrize("dtype", [I8, E4M3])
def test_triton_decodes_every_code(dtype: torch.dtype) -> None:
    @triton.jit
    def kernel(codes, scale, out, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 256)
        factor = kernels.load_scale(scale, at, 256, CODES)
        tl.store(out + at, kernels.decode(tl.load(codes + at), CODES) * factor)

    codes = torch.arange(-128, 128).to(I8)
    scale = torch.rand(256, generator=torch.Generator().manual_seed(1)) * 1e-3
    out = torch.empty(256)
    kernel[(1,)](codes, scale, out, CODES=NAMES[dtype])
    want = dequantize(codes.view(dtype)[:, None], scale)[:, 0]
    stored = ~want.isnan()                               # the two NaN of e4m3 are never stored
    assert int(stored.sum()) == (254 if dtype is E4M3 else 256)
    assert torch.equal(bits(out[stored]), bits(want[stored]))


def test_triton_draws_the_bits_of_the_specification() -> None:
    H, P, N, columns, slot, head = 4, 6, 48, 32, 70_000_001, 2

    @triton.jit
    def kernel(seed, out, slot, head, n0, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,  # type: ignore[no-untyped-def]
               COLUMNS: tl.constexpr):
        p, n = tl.arange(0, 8), tl.arange(0, COLUMNS)
        dice = kernels.load_dice(seed, head, H)
        drawn = kernels.code_bits(kernels.random_words(dice, slot, p, n0, P, N, COLUMNS, 5, 16))
        tl.store(out + p[:, None] * COLUMNS + n[None, :], drawn, mask=(p < P)[:, None])

    state = seed_state(SEED, "cpu", step=2 ** 40 + 3, first_head=5, total_heads=16)
    out = torch.empty(P, columns, dtype=torch.int32)
    kernel[(1,)](state, out, 3 * slot, head, 16, H=H, P=P, N=N, COLUMNS=columns)
    position = (((3 * slot) * 16 + 5 + head) * P + torch.arange(P)[:, None]) * N + 16 + torch.arange(columns)
    assert torch.equal(out.long(), random_bits(position, SEED, 2 ** 40 + 3, I8, 5))


@pytest.mark.parametrize("dtype", [I8, E4M3])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_public_operation(dtype: torch.dtype, backend: str) -> None:
    before = exact_codes(dtype, cursors=[(3, True), (1, False), (2, True)])
    want, got = before.run(replay_step, 5), before.clone()
    args = list(got.case.args())
    args[0] = got.codes
    names = ("x_cache", "dt_cache", "B_cache", "write_pos", "is_flush", "state_batch_indices", "null_block_id", "out")
    selective_state_update_replayssm_output_only(
        *args[:9], **dict(zip(names, args[9:], strict=True)), max_cache_len=4, enable_stochastic_rounding=True,
        cache_philox_rounds=5, rand_seed=got.seed, state_scale=got.scale, backend=backend)
    for one, other in zip(got.bytes(), want.bytes(), strict=True):
        assert torch.equal(one, other)


def problem(dtype: torch.dtype) -> Mamba2Problem:
    return Mamba2Problem(Mamba2Geometry(64, 64, 128, 8), 16, dtype, BF16, BF16, BF16, torch.int8, torch.int32)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
@pytest.mark.parametrize("dtype", [I8, E4M3])
def test_cute_says_what_it_serves(dtype: torch.dtype, capability: tuple[int, int],
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    arch = Arch("cuda", capability, "Some_GPU", 100)
    assert cute.supports(problem(dtype), arch)
    for change, reason in (({"act_dtype": F32, "ring_dtype": F32}, "bf16 inputs"), ({"buffer_len": 6}, "state_scale"),
                           ({"dt_align": 4}, "state_scale"), ({"geometry": Mamba2Geometry(6, 20, 48, 2)}, "P=20")):
        other = replace(problem(dtype), **change)
        found = {c.backend: c.support for c in dispatch.candidates(other, 64, arch)}
        assert not found["cute"] and reason in found["cute"].reason, found["cute"]
        assert next(name for name, support in found.items() if support) == "triton"
        monkeypatch.setattr(dispatch.archs, "of", lambda device: arch)
        with pytest.raises(UnsupportedError, match=rf"'cute'.*{reason}"):
            dispatch.prepare(other, 64, torch.device("cpu"), "cute")


@pytest.mark.parametrize("dtype", [I8, E4M3])
def test_bytes(dtype: torch.dtype) -> None:
    g = Mamba2Geometry(6, 80, 96, 3)
    pool = allocate_mamba2_pool(3, g, 5, dtype)
    assert pool.state.dtype is dtype and pool.state_scale is not None
    assert pool.state_scale.shape == (3, 6, 80) and pool.state_scale.dtype is F32
    held = pool.state.untyped_storage().nbytes() + pool.state_scale.untyped_storage().nbytes()
    assert held == 3 * mamba2_state_bytes(g, dtype) == 3 * 6 * 80 * (96 + 4)
    assert pool.nbytes == held + sum(t.untyped_storage().nbytes() for t in (pool.x_cache, pool.dt_cache, pool.B_cache))
    assert allocate_mamba2_pool(3, g, 5, BF16).state_scale is None
    # A step reads the state and its scales once and writes both on a flush.
    nano = problem(dtype).geometry
    saved = mamba2_step_bytes(nano, 16, BF16) - mamba2_step_bytes(nano, 16, dtype)
    assert saved == (mamba2_state_bytes(nano, BF16) - mamba2_state_bytes(nano, dtype)) * (1 + 1 / 16)
    assert round(mamba2_step_bytes(nano, 16, BF16) / mamba2_step_bytes(nano, 16, dtype), 2) == 1.79, "docs/rounding.md"
