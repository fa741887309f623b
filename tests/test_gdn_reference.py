"""The Gated DeltaNet reference against itself: replay and verify against the plain recurrence."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_cute.reference import gdn, gdn_spec
from tests.cases import bits
from tests.gdn_cases import Case, check, check_step, make_case, poison
from tests.gdn_chain import Chain, Shape, acceptance, reference_commit, reference_reset, reference_verify

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
EXTREME = (-100.0, 19.9, 20.0, 20.1, 88.0, 89.0, 1e4, -8.0)


def decode(case: Case) -> None:
    gdn.replay_decode(*case.decode_args(), scale=case.scale, l2norm=case.l2norm)


def verify(case: Case, launch_mode: str = "both") -> None:
    gdn_spec.verify(*case.verify_args(), scale=case.scale, l2norm=case.l2norm, launch_mode=launch_mode)


def run(case: Case) -> None:
    (verify if case.spec else decode)(case)


@pytest.mark.parametrize("spec", [False, True], ids=["decode", "verify"])
@pytest.mark.parametrize("state", [F32, F16, BF16])
@pytest.mark.parametrize(("act", "ring"), [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (BF16, F16)])
def test_dtypes(spec: bool, state: torch.dtype, act: torch.dtype, ring: torch.dtype) -> None:
    for exact in (True, False)[:1 + spec]:
        check_step(make_case(spec=spec, exact=exact, state=state, act=act, ring=ring, batch=4, padded=(2,)), run)


@pytest.mark.parametrize("spec", [False, True], ids=["decode", "verify"])
@pytest.mark.parametrize("options", [
    {"ratio": 1, "k_heads": 3}, {"ratio": 3, "k_heads": 2}, {"ratio": 4}, {"K": 5, "V": 7}, {"K": 64, "V": 80},
    {"l2norm": False}, {"gate_dtype": F32}, {"raw_gates": EXTREME, "batch": 4}, {"index_dtype": torch.int64},
    {"slot_padding": 3, "row_padding": 5}, {"packed": True, "row_padding": 2}, {"padded": (0, 1, 2)},
    {"null_block_id": 0, "padded": (1,)}], ids=str)
def test_options(spec: bool, options: dict[str, Any]) -> None:
    check_step(make_case(spec=spec, **options), run)


def test_flushing_at_every_cursor() -> None:
    """Standard decode forced to flush at any cursor, and a ring of one row, which flushes every step."""
    check_step(make_case(batch=6, buffer_len=6, cursors=[(w, 0, True) for w in range(6)]), run)
    check_step(make_case(batch=2, buffer_len=1, cursors=[(0, 0, True)] * 2, force=False), run)
    check_step(make_case(batch=6, buffer_len=6, cursors=[(w, 0, w == 5) for w in range(6)], force=False), run)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "ring"])
def test_verify_wraps_at_every_base(exact: bool) -> None:
    L, T = 8, 3
    for m in (0, 2, L - T):
        cursors = [(m, base, base % 2 == 0) for base in range(L)]
        check_step(make_case(spec=True, exact=exact, batch=L, buffer_len=L, tokens=T, cursors=cursors), run)


def test_windows_of_unequal_length() -> None:
    """A row may bring fewer tokens than T, and none: then it only folds, if it is to."""
    case = make_case(spec=True, batch=5, tokens=4, lengths=[4, 1, 0, 0, 3], buffer_len=8,
                     cursors=[(2, 7, False), (3, 1, True), (4, 5, True), (1, 0, False), (4, 6, False)])
    check_step(case, run)


def test_launch_modes_split_the_rows() -> None:
    """"verify" serves the rows that do not flush, "flush" the others; together they are "both", bit for bit."""
    case = make_case(spec=True, batch=4, state=BF16)
    whole, parts = case.clone(), case.clone()
    verify(whole)
    for mode in ("verify", "flush"):
        verify(parts, mode)
    for name in ("out", "state", "d_cache", "rawk_cache", "beta_cache"):
        assert torch.equal(bits(whole.buffers[name]), bits(parts.buffers[name])), name


def test_the_window_is_solved_as_a_recurrence() -> None:
    """T = 16 without history or checkpoint error: the triangular solve equals 16 steps."""
    gen = torch.Generator().manual_seed(0)
    HV, T, K, V = 2, 16, 12, 10
    state, q, k, v = (torch.randn(1, HV, *s, generator=gen, dtype=F64) for s in ((V, K), (T, K), (T, K), (T, V)))
    g, beta = -torch.rand(1, HV, T, generator=gen).double(), torch.rand(1, HV, T, generator=gen).double()
    q, k = gdn.unit(q, F64), gdn.unit(k, F64)
    empty = torch.zeros(1, HV, 0, V).double(), torch.zeros(1, HV, 0, K).double(), torch.zeros(1, HV, 0).double()
    d, o = gdn_spec.solve_window(state, empty, q, k, v, g, beta)
    for t in range(T):
        state, exact = gdn.advance(state, k[:, :, t], v[:, :, t], g[..., t], beta[..., t])
        torch.testing.assert_close(d[:, :, t], exact, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(o[:, :, t], (state @ q[:, :, t, :, None])[..., 0], rtol=1e-11, atol=1e-12)


def decode_cycles(step: Any, L: int, dtype: torch.dtype, tokens: int, force: frozenset[int] = frozenset()) -> float:
    """Decode by replay and by recurrence, state carried; the worst relative error of outputs and final state."""
    Hk, ratio, K, V, batch = 2, 3, 10, 6, 3
    HV, gen = Hk * ratio, torch.Generator().manual_seed(L)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=F64).to(dtype)

    exact, pool, slots = normal(batch, HV, V, K).double(), torch.full((5, HV, V, K), math.nan, dtype=dtype), [3, 0, 4]
    pool[slots] = exact.to(dtype)
    rings = [torch.full(s, math.nan, dtype=dtype) for s in ((5, HV, L, V), (5, Hk, L, K), (5, HV, L))]
    A_log, dt_bias, index = normal(HV) * 0.3, normal(HV), torch.tensor(slots)
    w = torch.tensor([0, L // 2, L - 1], dtype=torch.int32)  # rows join at different cursors, their records empty
    for ring in rings:
        ring[slots] = 0
    worst = 0.0
    for token in range(tokens):
        for ring in rings:
            for row, slot in enumerate(slots):
                ring[slot, :, w[row]:] = math.nan
        q, k, v, out = normal(batch, Hk, K), normal(batch, Hk, K), normal(batch, HV, V), normal(batch, HV, V)
        a, b = normal(batch, HV), normal(batch, HV)
        o, exact = gdn.recurrent_step(exact, q, k, v, a, b, A_log, dt_bias)
        flush = torch.full((batch,), int(token == tokens - 1 or token in force), dtype=torch.int32)
        step(pool, q, k, v, a, b, A_log, dt_bias, *rings, w, flush, index, -1, out, scale=K ** -0.5, dtype=dtype)
        worst = max(worst, float((out.double() - o).abs().max() / o.abs().max()))
        w = torch.where((flush != 0) | (w == L - 1), 0, w + 1).int()
    return max(worst, float((pool[slots].double() - exact).abs().max() / exact.abs().max()))


@pytest.mark.parametrize("step", [gdn.replay_decode, gdn.replay_decode_naive])
@pytest.mark.parametrize("L", [1, 4, 7])
def test_ring_cycles_equal_the_recurrence(step: Any, L: int) -> None:
    assert decode_cycles(step, L, F64, 3 * L + 2) < 1e-12
    assert decode_cycles(step, L, F64, 3 * L + 2, force=frozenset({2, 3, 2 * L})) < 1e-12
    assert decode_cycles(step, L, F32, 3 * L + 2) < 1e-5


def run_chain(chain: Chain, steps: int, naive: bool = False) -> Chain:
    reference_reset(chain)
    for _ in range(steps):
        chain.step(functools.partial(reference_verify, naive=naive), reference_commit,
                   acceptance(chain.gen, chain.shape.requests, chain.shape.tokens))
    return chain


@pytest.mark.parametrize(("tokens", "buffer_len", "naive"), [
    (2, 4, False), (3, 8, True), (4, 16, False), (8, 16, False), (16, 32, False)])
def test_chained_windows_equal_the_recurrence(tokens: int, buffer_len: int, naive: bool) -> None:
    """float64: outputs and folded checkpoints over random acceptance, both folds."""
    for exact in (True, False):
        shape = Shape(tokens, buffer_len, exact=exact, requests=2, k_size=12, v_size=6)
        chain = run_chain(Chain(shape, F64, state_dtype=F64), 12 + 48 // tokens, naive)
        assert chain.output_error < 1e-11 and chain.flushes >= 8


@pytest.mark.parametrize(("tokens", "buffer_len", "steps"), [(4, 16, 200), (2, 8, 100), (5, 16, 140), (1, 2, 60)])
def test_exact_fold_has_the_bits_of_the_recurrence(tokens: int, buffer_len: int, steps: int) -> None:
    """Hundreds of commits: every folded checkpoint equals the fp32 recurrence of the accepted tokens, bit for bit."""
    chain = run_chain(Chain(Shape(tokens, buffer_len, ratio=3)), steps)
    assert chain.bases == set(range(buffer_len)), "the ring must have wrapped at every base"
    assert chain.flushes > steps * tokens // (buffer_len - tokens)


def test_ring_fold_drifts_where_the_exact_one_does_not() -> None:
    """What the exact fold is for: a bf16 d in the checkpoint is a visible error, and not the recurrence's bits."""
    chain = Chain(Shape(exact=False))
    run_chain(chain, 40)
    chain.poison()
    keys = chain.live_keys
    state = gdn_spec.folded(chain.state[chain.live_slots], chain.rings, keys, chain.cursors["write_pos"][keys].long(),
                            chain.cursors["cache_base"][keys].long(), True, F32)
    error = float((state - chain.shadow).norm() / chain.shadow.norm())
    assert 1e-4 < error < 2e-2


def test_gates() -> None:
    """softplus at both ends, and beta not rounded through bf16."""
    raw = torch.tensor(EXTREME)
    g, beta = gdn.gates(raw, raw, torch.zeros(8), torch.zeros(8), F32)
    exact = torch.where(raw > 20, raw.double(), torch.log1p(raw.double().clamp(max=20).exp()))
    torch.testing.assert_close(-g.double(), exact, rtol=1e-6, atol=1e-43)
    torch.testing.assert_close(beta.double(), torch.sigmoid(raw.double()), rtol=1e-6, atol=1e-43)
    assert float(gdn.gates(torch.zeros(1), torch.tensor([0.3]).bfloat16(), torch.zeros(1), torch.zeros(1), F32)[1]) \
        == float(torch.sigmoid(torch.tensor(0.3).bfloat16().double()).float())


def test_tree_sum_does_not_depend_on_the_shape() -> None:
    t = torch.randn(5, 7, 80, generator=torch.Generator().manual_seed(1))
    whole = gdn.tree_sum(t)
    assert torch.equal(whole[3, 4], gdn.tree_sum(t[3, 4].clone()))
    assert torch.equal(whole, gdn.tree_sum(t.transpose(0, 1).contiguous()).T)
    torch.testing.assert_close(whole.double(), t.double().sum(-1), rtol=1e-5, atol=1e-5)


FAULTS = {"stale ring row": "out: .* not finite", "out in bf16": "out: error", "padded row written": "not zero",
          "appended on a flush": "d_cache: .* not its own", "d a little off": "d_cache: error",
          "raw v rounded": "rawv_cache: not the input", "beta through bf16": "beta_cache: error",
          "padding written": "q: .* not its own", "state a little off": "state: error",
          "window not causal": "out: error"}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_catches(fault: str) -> None:
    """Each kind of fault, put into an otherwise correct result, fails the check for its own reason."""
    spec = fault != "appended on a flush"
    case = make_case(spec=spec, act=F32, padded=(2,), row_padding=2,
                     cursors=[(2, 7 * spec, False), (3, 0, True), (0, 0, False)])
    before = case.clone()
    run(case)
    key, slot, first = case.keys[0], case.slots[1], (case.window_rows(0) or [0])[0]
    if fault == "stale ring row":
        case["out"][0] += 0 * before["d_cache"][key, :, first]
    elif fault == "out in bf16":
        case["out"][0] = case["out"][0].bfloat16().float()
    elif fault == "padded row written":
        case["out"][-1] = 1
    elif fault == "appended on a flush":
        case["d_cache"][case.keys[1], :, 3] = 0.1
    elif fault == "d a little off":
        case["d_cache"][key, :, first] *= 1 + 1e-5
    elif fault == "raw v rounded":
        case["rawv_cache"][key, :, first] = case["rawv_cache"][key, :, first].bfloat16().float()
    elif fault == "beta through bf16":
        case["beta_cache"][key, :, first] = case["beta_cache"][key, :, first].bfloat16().float()
    elif fault == "padding written":
        case.buffers["q"][-1] = 0
    elif fault == "state a little off":
        case["state"][slot] *= 1 + 1e-5
    else:
        case["out"][0] = case["out"][1]
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check(before, case)


def test_naive_form_leaves_everything_else_alone() -> None:
    """The oracle itself obeys the rules that it is used to check."""
    for spec in (False, True):
        case = make_case(spec=spec, batch=5, padded=(1, 4), slot_padding=8, row_padding=2)
        before = case.clone()
        if spec:
            gdn_spec.verify_naive(*case.verify_args(), scale=case.scale)
        else:
            gdn.replay_decode_naive(*case.decode_args(), scale=case.scale)
        poison(before)
        check(before, case)
