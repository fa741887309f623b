"""Stochastic rounding in the Triton kernels: bit for bit that of ``replayssm_cute.rounding``, in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replayssm_cute.arch import CPU
from replayssm_cute.backends import triton as backend
from replayssm_cute.reference.mamba2 import replay_step
from replayssm_cute.rounding import random_bits, round_stochastic, seed_state
from replayssm_cute.validate import mamba2_problem
from tests.cases import Case, bits, make_case
from tests.interpreter import interpreted_import
from tests.ptx import numerics

mamba2 = interpreted_import("fallback_triton.mamba2")
kernels = interpreted_import("fallback_triton.rounding")
triton, tl = interpreted_import("triton"), interpreted_import("triton.language")
InterpreterBuilder = interpreted_import("triton.runtime.interpreter").InterpreterBuilder

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SEED = 0x123456789ABCDEF


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter asks for the variable again while it runs; flushing rows go ahead of any batch."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("fallback_triton.order.AT_ONCE", 0)
    yield


def emulate(asm: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int) -> Any:
    """The instructions that the kernels write in PTX, on the interpreter's arrays."""
    name, _, places = asm.rstrip(";").partition(" ")
    data = [v.data for v in values]
    if name == "mul.rz.f32":
        assert places == "$0, $1, 0f07800000"
        out = numerics.mul_toward_zero(data[0], np.float32(2.0 ** -112)).view(np.int32)
    elif name == "prmt.b32":
        first, second, selector = places.split(", ")[1:]
        low, high = (data[int(place[1:]) - 1].astype(np.uint32) for place in (first, second))
        out = numerics.permute(low, high, np.uint32(int(selector, 16))).view(np.int32)
    else:
        assert places == "$0, $1, $2" and name.startswith("cvt.rz.satfinite")
        narrow = {"f16x2": numerics.to_f16_toward_zero, "bf16x2": numerics.to_bf16_toward_zero}[name.split(".")[3]]
        high, low = (narrow(v).astype(np.uint32) for v in data)
        out = (high << 16 | low).view(np.int32)
    handle = type(values[0])(out, types[0].scalar)
    return SimpleNamespace(get_result=lambda i: handle)


def values(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(8192,) fp32 and random numbers of 16 bits: normal and subnormal results, representable ones, overflow, NaN."""
    gen = torch.Generator().manual_seed(0)
    value = torch.randn(8192, generator=gen) * torch.exp2(torch.randint(-45, 20, (8192,), generator=gen).float())
    value[:12] = torch.tensor([0.0, -0.0, 1.0, -1.5, 65504.0, 65519.9, 65536.0, -3e38, float("inf"), -float("inf"),
                               float("nan"), 2.0 ** -24])
    value[12:200] = value[12:200].to(dtype).float()  # these must not move
    drawn = torch.randint(0, 1 << 16, (8192,), generator=gen)
    short = 2.0 ** -37 * (8192 - (drawn[200:600] & 0x1FFF)).float()  # with the random bits just below fp16's least
    value[200:600] = torch.nextafter(short, torch.zeros(()))
    return value, drawn


@pytest.mark.parametrize(("dtype", "ptx"), [(F16, False), (F16, True), (BF16, False), (BF16, True)])
def test_rule_in_pairs(dtype: torch.dtype, ptx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    @triton.jit
    def kernel(value, words, out, DTYPE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        row, pair, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :], tl.arange(0, 128)[None, :]
        pairs = kernels.round_pairs(tl.load(value + row * 128 + column), tl.load(words + row * 64 + pair), DTYPE, PTX)
        tl.store(out + row * 64 + pair, pairs)

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", staticmethod(emulate))
    value, drawn = values(dtype)
    out = torch.empty(8192, dtype=dtype)
    kernel[(1,)](value, (drawn[::2] | drawn[1::2] << 16).int(), out.view(torch.int32),
                 DTYPE=tl.float16 if dtype is F16 else tl.bfloat16, PTX=ptx)
    want = round_stochastic(value, drawn & (0x1FFF if dtype is F16 else 0xFFFF), dtype)
    assert torch.equal(bits(out), bits(want))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_one_at_a_time_as_in_pairs(dtype: torch.dtype) -> None:
    @triton.jit
    def kernel(value, random, out):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 8192)
        tl.store(out + at, kernels.round_stochastic(tl.load(value + at), tl.load(random + at), out.dtype.element_ty))

    value, drawn = values(dtype)
    out = torch.empty(8192, dtype=dtype)
    kernel[(1,)](value, drawn.int(), out)
    assert torch.equal(bits(out), bits(round_stochastic(value, drawn & (0x1FFF if dtype is F16 else 0xFFFF), dtype)))


@pytest.mark.parametrize("rounds", [1, 5, 10])
def test_random_words(rounds: int) -> None:
    """Tiles anywhere in a pool past 2^32 elements, with a seed and a step of 64 bits, on a rank of a split layer."""
    H, P, N, columns, slot, head = 4, 6, 48, 16, 70_000_001, 2

    @triton.jit
    def kernel(seed, out, slot, head, n0, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,  # type: ignore[no-untyped-def]
               COLUMNS: tl.constexpr, ROUNDS: tl.constexpr):
        p, pair = tl.arange(0, 8), tl.arange(0, COLUMNS // 2)
        dice = kernels.load_dice(seed, head, H)
        words = kernels.random_words(dice, slot, p, n0, P, N, COLUMNS, ROUNDS, 8)
        tl.store(out + p[:, None] * (COLUMNS // 2) + pair[None, :], words.to(tl.int32), mask=(p < P)[:, None])

    state = seed_state(SEED, "cpu", step=2 ** 40 + 3, first_head=5, total_heads=16)
    out = torch.empty(P, columns // 2, dtype=torch.int32)
    kernel[(1,)](state, out, 3 * slot, head, 32, H=H, P=P, N=N, COLUMNS=columns, ROUNDS=rounds)
    position = (((3 * slot) * 16 + 5 + head) * P + torch.arange(P)[:, None]) * N + 32 + torch.arange(columns)
    assert int(position.max()) > 2 ** 32
    halves = torch.stack((out & 0xFFFF, out >> 16 & 0xFFFF), -1).flatten(1)
    assert torch.equal(halves.long(), random_bits(position, SEED, 2 ** 40 + 3, BF16, rounds))


@pytest.mark.parametrize("place", range(4))
def test_the_last_to_come_moves_the_step_on(place: int) -> None:
    """Three programs that draw and one that says so, in any order."""
    @triton.jit
    def kernel(seed, numbers, steps):  # type: ignore[no-untyped-def]
        program = tl.program_id(0)
        kernels.count(seed, tl.load(numbers + program))
        tl.store(steps + program, tl.load(seed + kernels.STEP))

    seed, steps = seed_state(SEED, "cpu", step=9), torch.empty(4, dtype=torch.int64)
    numbers = torch.ones(4, dtype=torch.int64)
    numbers[place] = -3
    kernel[(4,)](seed, numbers, steps)
    assert steps.tolist() == [9, 9, 9, 10] and seed.tolist()[1:3] == [10, 0]


def exact_case(**options: Any) -> Case:
    """A case whose fp32 arithmetic is exact in any order, so that folded states are the same in every bit.

    No decay (A so small that every exponential is 1), dt' = 1, inputs of four bits; the sums need more bits
    than a narrow state has, and fewer than fp32's.
    """
    case = make_case(act=F32, dt_softplus=False, dt_bias=False, dt_values=(1.0,), D=None, **options)
    gen = torch.Generator().manual_seed(2)
    case.buffers["A"].fill_(-1e-30)
    for name in ("x", "B", "C", "x_cache", "B_cache", "state"):
        buffer, old = case.buffers[name], case.buffers[name].float()
        values = torch.randint(-7, 8, old.shape, generator=gen) * 2.0 ** torch.randint(-5, 3, old.shape, generator=gen)
        buffer.copy_(torch.where(old.isnan(), old, values))
    held = case.buffers["dt_cache"]
    held.copy_(torch.where(held.isnan(), held, 1.0))
    return case


def run_both(case: Case, seed: Tensor, rounds: int = 5) -> tuple[Case, Case]:
    """The case after a step of the kernel and of the reference, which share nothing but the seed's value."""
    ours, theirs, other = case.clone(), case.clone(), seed.clone()
    mamba2.replay_step(*ours.args(), seed, dt_softplus=False, philox_rounds=rounds)
    replay_step(*theirs.args(), other, dt_softplus=False, philox_rounds=rounds)
    assert torch.equal(seed, other), "the step has been counted once"
    return ours, theirs


@pytest.mark.parametrize("state", [F16, BF16])
@pytest.mark.parametrize("options", [{}, {"headdim": 20, "dstate": 24}, {"headdim": 80, "dstate": 128, "nheads": 1},
                                     {"padded": (1,), "slot_padding": 16}, {"padded": (0, 1, 2)}], ids=str)
def test_stored_states_are_those_of_the_specification(state: torch.dtype, options: dict[str, Any]) -> None:
    case = exact_case(state=state, cursors=[(3, True), (1, False), (2, True)], **options)
    seed = seed_state(SEED, "cpu", step=9, first_head=1, total_heads=5)
    ours, theirs = run_both(case, seed)
    assert seed.tolist()[1:3] == [10, 0]
    for name in ("state", "x_cache", "dt_cache", "B_cache"):
        assert torch.equal(bits(ours.buffers[name]), bits(theirs.buffers[name])), name
    nearest = case.clone()
    mamba2.replay_step(*nearest.args(), dt_softplus=False)
    assert torch.equal(bits(nearest["out"]), bits(ours["out"])), "y is not rounded"
    if case.live:
        assert not torch.equal(bits(nearest.buffers["state"]), bits(ours.buffers["state"]))


def test_every_launch_draws_other_words() -> None:
    case = exact_case(state=F16, cursors=[(3, True)] * 3)
    seed = seed_state(SEED, "cpu")
    first, second = (run_both(case, seed)[0] for _ in range(2))
    assert seed[1] == 2 and not torch.equal(bits(first.buffers["state"]), bits(second.buffers["state"]))


def test_backend_takes_the_seed() -> None:
    case = exact_case(state=F16, cursors=[(3, True)] * 3)
    seed = seed_state(SEED, "cpu")
    problem = mamba2_problem(*case.args(), seed, dt_softplus=False, max_cache_len=4, philox_rounds=5)
    assert backend.supports(problem, CPU)
    theirs, _ = run_both(case, seed.clone())
    backend.prepare(problem, CPU, 3, None)(*case.args(), seed)
    assert torch.equal(bits(case.buffers["state"]), bits(theirs.buffers["state"]))
