"""The reference against itself: naive and vectorised replay, and both against the plain recurrence."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_cute.reference.mamba2 import discretize, recurrent_step, replay_step, replay_step_naive
from tests import tolerance
from tests.cases import Case, check, check_step, make_case, oracle

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EXTREME_DT = (-100.0, 19.9, 20.0, 20.1, 88.0, 89.0, 1e4, -8.0)


def in_fp32(case: Case, *args: Any) -> Tensor:
    return replay_step(*args, dt_softplus=case.dt_softplus)


def check_reference(case: Case) -> float:
    return check_step(case, functools.partial(in_fp32, case))


@pytest.mark.parametrize("state", [F32, F16, BF16])
@pytest.mark.parametrize("act", [F32, F16, BF16])
def test_dtypes(state: torch.dtype, act: torch.dtype) -> None:
    for ring in {act, F16}:
        check_reference(make_case(batch=4, state=state, act=act, ring=ring, z=True))


@pytest.mark.parametrize(("nheads", "ngroups"), [(1, 1), (3, 1), (4, 2), (7, 1), (6, 3), (14, 2), (16, 1)])
def test_head_ratios(nheads: int, ngroups: int) -> None:
    check_reference(make_case(nheads=nheads, ngroups=ngroups, headdim=5, dstate=7))


@pytest.mark.parametrize("buffer_len", [1, 2, 3, 5, 16, 33, 64])
def test_ring_lengths(buffer_len: int) -> None:
    cursors = [(w, flush) for w in {0, buffer_len // 2, buffer_len - 1} for flush in (False, True)]
    check_reference(make_case(batch=len(cursors), buffer_len=buffer_len, cursors=cursors))


@pytest.mark.parametrize("options", [
    {"D": None}, {"D": "full"}, {"D": "full", "D_dtype": F32}, {"dt_bias": False}, {"dt": F32}, {"dt_softplus": False},
    {"z": True}, {"index_columns": 2}, {"index_dtype": torch.int64}, {"flush_dtype": torch.bool},
    {"slot_padding": 24, "row_padding": 3}, {"dt_values": EXTREME_DT, "batch": 4}], ids=str)
def test_options(options: dict[str, Any]) -> None:
    check_reference(make_case(**options))


def test_one_large_dt_does_not_spoil_the_weights_behind_it() -> None:
    """Weights behind a row of dt' = 200 depend on the later dt' alone; total minus prefix would cancel to noise."""
    check_reference(make_case(act=F32, D=None, buffer_len=6, dt_ring=(200.0, 0.01, 0.3, 0.002, 0.05, 0.1),
                              dt_values=(-3.0, -5.0, -4.0), cursors=[(5, False), (4, False), (5, True)]))


def test_padded_rows_beside_a_live_slot_0() -> None:
    check_reference(make_case(batch=6, null_block_id=-1, slots=[3, 0, 5, 1, 2, 4], padded=(0, 3, 4)))
    check_reference(make_case(batch=4, padded=(0, 1, 2, 3)))  # nothing at all may change


def test_naive_form_leaves_everything_else_alone() -> None:
    """The oracle itself obeys the rules that it is used to check, bit for bit."""
    case = make_case(batch=5, nheads=4, ngroups=2, padded=(1, 4), slot_padding=8, row_padding=2, z=True)
    before = case.clone()
    replay_step_naive(*case.args(), dtype=torch.float64)
    check(before, case)


def test_vectorised_oracle_equals_the_naive_one() -> None:
    """In float64 the two forms agree to rounding, so that either may serve as the oracle."""
    case = make_case(batch=8, nheads=6, ngroups=3, buffer_len=16, dt_values=EXTREME_DT, padded=(2,))
    one, other = oracle(case), oracle(case, replay_step)
    for name in ("out", "state", "dt_cache", "x_cache", "B_cache"):
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-300, equal_nan=True)


def test_y_comes_from_the_unrounded_state() -> None:
    """A step whose output is read from the rounded checkpoint is caught by the tolerance."""
    case = make_case(state=BF16, act=F32, D=None, dt_bias=False, cursors=[(2, True)] * 3)
    before = case.clone()
    replay_step(*case.args())
    slots = torch.tensor(case.slots)
    case["out"].copy_((case["state"][slots].float() @ case["C"][:, 0, None, :, None].float())[..., 0])
    with pytest.raises(AssertionError, match="out: error"):
        check(before, case)


FAULTS = {"stale ring row": "out: .* not finite", "total minus prefix": "state: error", "out in bf16": "out: error",
          "padded row written": "out: .* not its own", "appended on a flush": "dt_cache: .* not its own",
          "ring row rounded": "x_cache: not the input's bits", "padding written": "x: .* not its own"}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_catches(fault: str) -> None:
    """Each kind of fault, put into an otherwise correct result, fails the check for its own reason."""
    case = make_case(batch=3, act=F32, cursors=[(2, False), (3, True), (1, False)], padded=(2,), row_padding=2,
                     dt_values=(25.0, 0.01, 0.001))
    before = case.clone()
    replay_step(*case.args())
    read, folded = case.slots[0], case.slots[1]
    if fault == "stale ring row":
        case["out"][0, 0, 0] += 0 * before["x_cache"][read, 0, 3, 0]
    elif fault == "total minus prefix":
        case["state"][folded] *= 1 + 4e-6
    elif fault == "out in bf16":
        case["out"][0] = case["out"][0].bfloat16().float()
    elif fault == "padded row written":
        case["out"][2] = 0
    elif fault == "appended on a flush":
        case["dt_cache"][folded, :, 3] = 0.1
    elif fault == "ring row rounded":
        case["x_cache"][read, :, 2] = case["x_cache"][read, :, 2].bfloat16().float()
    else:
        case.buffers["x"][-1] = 0
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check(before, case)


def test_discretize_is_accurate_at_both_ends() -> None:
    raw = torch.tensor([-100.0, -30.0, -8.0, 0.0, 19.9, 20.0, 20.1, 88.0, 89.0, 1e4])
    exact = torch.log1p(raw.double().clamp(max=20).exp())
    exact[raw > 20] = raw[raw > 20].double()
    got = discretize(raw, None, True).double()
    assert bool(((got - exact).abs() <= tolerance.step_size_bound(exact, raw.double())).all())
    assert torch.equal(discretize(raw, None, False), raw)


def decode(step: Any, L: int, dtype: torch.dtype, tokens: int, force: frozenset[int] = frozenset()) -> float:
    """Decode by replay and by recurrence, state carried; the worst relative error of outputs and final state."""
    H, P, N, G, batch = 4, 6, 10, 2, 3
    gen = torch.Generator().manual_seed(L)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)

    exact = normal(batch, H, P, N).double()
    pool, slots = torch.full((batch + 2, H, P, N), math.nan, dtype=dtype), torch.tensor([3, 1, 4])
    pool[slots] = exact.to(dtype)
    rings = [torch.full(s, math.nan, dtype=dtype) for s in ((5, H, L, P), (5, H, L), (5, G, L, N))]
    A, dt_bias, D = -torch.rand(H, generator=gen).double().to(dtype) * 4, normal(H), normal(H)
    wide = (A[:, None, None].expand(H, P, N), D[:, None].expand(H, P), dt_bias[:, None].expand(H, P))
    w = torch.tensor([0, L // 2, L - 1], dtype=torch.int32)  # rows join at different cursors, with empty rings
    for ring in rings:
        ring[slots] = 0
    worst = 0.0
    for token in range(tokens):
        x, z, dt = normal(batch, H, P), normal(batch, H, P), normal(batch, H)
        B, C, out = normal(batch, G, N), normal(batch, G, N), torch.empty(batch, H, P, dtype=dtype)
        y, exact = recurrent_step(exact, x, dt, A, B, C, D, dt_bias, z)
        flush = (w == L - 1) | (token == tokens - 1) | (token in force)
        step(pool, x, dt[:, :, None].expand(-1, -1, P), wide[0], B, C, wide[1], wide[2], z, *rings, w, flush,
             slots, 0, out, dtype=dtype)
        worst = max(worst, float((out.double() - y).abs().max() / y.abs().max()))
        w = torch.where(flush, 0, w + 1).int()
        for ring in rings:
            for row, slot in enumerate(slots):
                ring[slot, :, w[row]:] = math.nan
    return max(worst, float((pool[slots].double() - exact).abs().max() / exact.abs().max()))


@pytest.mark.parametrize("step", [replay_step, replay_step_naive])
@pytest.mark.parametrize("L", [1, 4, 7])
def test_ring_cycles_equal_the_recurrence(step: Any, L: int) -> None:
    assert decode(step, L, torch.float64, 3 * L + 2) < 1e-12
    assert decode(step, L, torch.float64, 3 * L + 2, force=frozenset({2, 3, 2 * L})) < 1e-12
    assert decode(step, L, torch.float32, 3 * L + 2) < 1e-5


def test_flushing_every_step_is_the_recurrence() -> None:
    """L = 1: the replay step and the plain recurrence do the same arithmetic, to the last bit."""
    case = make_case(buffer_len=1, cursors=[(0, True)] * 3, act=F32, D="full", z=True, nheads=4, ngroups=2)
    slots = torch.tensor(case.slots)
    y, state = recurrent_step(case["state"][slots].double(), case["x"], case["dt"][..., 0], case["A"][:, 0, 0],
                              case["B"], case["C"], case["D"], case["dt_bias"][:, 0], case["z"])
    exact = oracle(case)
    torch.testing.assert_close(exact["out"], y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(exact["state"][slots], state, rtol=1e-12, atol=1e-12)
    check_reference(case)
