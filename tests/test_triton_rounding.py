"""Stochastic rounding in the Triton kernels: bit for bit that of ``replayssm_cute.rounding``, in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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

mamba2 = interpreted_import("fallback_triton.mamba2")
kernels = interpreted_import("fallback_triton.rounding")
triton, tl = interpreted_import("triton"), interpreted_import("triton.language")

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SEED = 0x123456789ABCDEF


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter asks for the variable again while it runs."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_rule(dtype: torch.dtype) -> None:
    """Normal and subnormal results, representable values, overflow, infinities and NaN, under any random bits."""
    @triton.jit
    def kernel(value, random, out):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 4096)
        tl.store(out + at, kernels.round_stochastic(tl.load(value + at), tl.load(random + at), out.dtype.element_ty))

    gen = torch.Generator().manual_seed(0)
    value = torch.randn(4096, generator=gen) * torch.exp2(torch.randint(-45, 20, (4096,), generator=gen).float())
    value[:12] = torch.tensor([0.0, -0.0, 1.0, -1.5, 65504.0, 65519.9, 65536.0, -3e38, float("inf"), -float("inf"),
                               float("nan"), 2.0 ** -24])
    value[12:200] = value[12:200].to(dtype).float()  # these must not move
    drawn = torch.randint(0, 1 << (13 if dtype is F16 else 16), (4096,), generator=gen)
    out = torch.empty(4096, dtype=dtype)
    kernel[(1,)](value, drawn.int(), out)
    assert torch.equal(bits(out), bits(round_stochastic(value, drawn, dtype)))


@pytest.mark.parametrize("rounds", [1, 5, 10])
def test_random_bits(rounds: int) -> None:
    """Tiles anywhere in a pool past 2^32 elements, with a seed and a step of 64 bits, on a rank of a split layer."""
    H, P, N, columns, slot, head = 4, 6, 48, 16, 70_000_001, 2

    @triton.jit
    def kernel(seed, out, slot, head, n0, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,  # type: ignore[no-untyped-def]
               COLUMNS: tl.constexpr, ROUNDS: tl.constexpr):
        p, n = tl.arange(0, 8), tl.arange(0, COLUMNS)
        dice = kernels.load_dice(seed, head, H)
        drawn = kernels.random_bits(dice, slot, p, n0, P, N, COLUMNS, ROUNDS)
        tl.store(out + p[:, None] * COLUMNS + n[None, :], drawn, mask=(p < P)[:, None] & (n < COLUMNS)[None, :])

    state = seed_state(SEED, "cpu", step=2 ** 40 + 3, first_head=5, total_heads=16)
    out = torch.empty(P, columns, dtype=torch.int32)
    kernel[(1,)](state, out, 3 * slot, head, 32, H=H, P=P, N=N, COLUMNS=columns, ROUNDS=rounds)
    position = (((3 * slot) * 16 + 5 + head) * P + torch.arange(P)[:, None]) * N + 32 + torch.arange(columns)
    assert int(position.max()) > 2 ** 32
    assert torch.equal(out.long(), random_bits(position, SEED, 2 ** 40 + 3, BF16, rounds))


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
