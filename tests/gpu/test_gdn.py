"""Gated DeltaNet on the GPU: the public operations, by the CuTe and the Triton kernels, against the float64 oracle.

Every test runs once for each backend; what the CuTe kernels do not take is skipped with
their reason. The cases are those of ``tests.gdn_cases``, made on the CPU, run on the GPU and checked on the CPU; the
chains those of ``tests.gdn_chain``.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_cute import dispatch
from replayssm_cute.errors import UnsupportedError
from replayssm_cute.gdn import gdn_replayssm_decode, gdn_replayssm_spec_decode
from replayssm_cute.gdn_cursors import GdnCursors, commit_gdn_replayssm_spec, reset_gdn_replayssm_spec
from replayssm_cute.gdn_fold import fold_gdn_replayssm, retire_gdn_replayssm, snapshot_gdn_replayssm
from tests.cases import bits
from tests.gdn_cases import Case, check, make_case
from tests.gdn_chain import NULL, Chain, Shape, acceptance
from tests.test_gdn_op import decode_options, verify_options

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EXTREME = (-100.0, 19.9, 20.0, 20.1, 88.0, 89.0, 1e4, -8.0)


BACKEND = "triton"      # of the test that runs: see ``serving``


@pytest.fixture(params=("cute", "triton"), autouse=True)
def serving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BACKEND", request.param)


def call(operation: Any, **options: Any) -> None:
    """The operation by the backend under test; skips where that cannot serve."""
    try:
        operation(**options, backend=BACKEND)
    except UnsupportedError as error:
        pytest.skip(str(error))


def run(case: Case) -> None:
    """The step on a case whose buffers are on the GPU; it must be the backend under test that serves."""
    op = "gdn_verify" if case.spec else "gdn_decode"
    before = dispatch.served[op, BACKEND]
    if case.spec:
        call(gdn_replayssm_spec_decode, **verify_options(case))
    else:
        call(gdn_replayssm_decode, **decode_options(case))
    assert dispatch.served[op, BACKEND] == before + 1


def check_kernel(**options: Any) -> float:
    before = make_case(**options)
    case = before.to("cuda")
    if options.get("packed"):
        for name in ("q", "k", "v"):
            case.buffers[name] = case.buffers["mixed_qkv"]
    run(case)
    torch.cuda.synchronize()
    return check(before, case.to("cpu"))


@pytest.mark.parametrize("spec", [False, True], ids=["decode", "verify"])
@pytest.mark.parametrize(("state", "act", "ring", "exact"), [
    (F32, BF16, BF16, True), (F16, F16, F16, True), (BF16, BF16, BF16, True), (F32, F32, F32, True),
    (F32, BF16, F32, False), (F16, BF16, F16, False), (BF16, BF16, BF16, False)])
def test_dtypes(spec: bool, state: torch.dtype, act: torch.dtype, ring: torch.dtype, exact: bool) -> None:
    check_kernel(spec=spec, state=state, act=act, ring=ring, exact=exact, K=128, V=128, buffer_len=16, tokens=2,
                 batch=4, padded=(2,))


@pytest.mark.parametrize("k_heads", [1, 16], ids=["register", "staged"])
@pytest.mark.parametrize(("state", "ring"), [(F32, F32), (F16, F16), (F32, F16), (F16, F32), (BF16, F16), (BF16, F32)])
def test_decode_with_wide_rings(state: torch.dtype, ring: torch.dtype, k_heads: int) -> None:
    for L in (16, 32):
        full = (L - 1, 0, True)
        check_kernel(state=state, ring=ring, k_heads=k_heads, K=128, V=128, buffer_len=L, batch=7, padded=(4,),
                     cursors=[full, (L - 2, 0, False), (8, 0, True), (9, 0, False), full, (0, 0, True), (1, 0, False)])


@pytest.mark.parametrize("k_heads", [1, 16], ids=["register", "staged"])
@pytest.mark.parametrize("exact", [False, True], ids=["ring", "exact"])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_verify_with_wide_rings(dtype: torch.dtype, exact: bool, k_heads: int) -> None:
    """Checkpoint and ring of one dtype; bases at which records wrap, and the raw ones behind them."""
    check_kernel(spec=True, state=dtype, ring=dtype, exact=exact, k_heads=k_heads, K=128, V=128, buffer_len=16,
                 tokens=4, batch=6, padded=(3,), cursors=[(12, 9, True), (12, 9, False), (5, 13, True), (0, 3, False),
                                                          (1, 15, True), (7, 0, False)])


@pytest.mark.parametrize("spec", [False, True], ids=["decode", "verify"])
@pytest.mark.parametrize("options", [
    {"K": 64, "V": 80}, {"K": 80, "V": 64}, {"K": 5, "V": 7}, {"K": 256, "V": 256}, {"K": 128, "V": 96, "ratio": 3},
    {"K": 128, "V": 128, "ratio": 4, "k_heads": 2}, {"K": 128, "V": 128, "ratio": 1, "k_heads": 16},
    {"l2norm": False}, {"raw_gates": EXTREME, "batch": 4, "gate_dtype": F32}, {"slot_padding": 3, "row_padding": 5},
    {"packed": True, "row_padding": 8, "index_dtype": torch.int64},
    {"null_block_id": 0, "padded": (0, 2, 3), "batch": 4}, {"padded": (0, 1), "batch": 2}], ids=str)
def test_options(spec: bool, options: dict[str, Any]) -> None:
    check_kernel(spec=spec, tokens=2, **options)


@pytest.mark.parametrize("L", [1, 5, 16, 33, 64])
def test_decode_flushes_at_every_cursor(L: int) -> None:
    check_kernel(batch=L, ratio=1, buffer_len=L, K=128, V=64, cursors=[(w, 0, True) for w in range(L)])
    check_kernel(batch=L, ratio=1, buffer_len=L, K=128, V=64, cursors=[(w, 0, w == L - 1) for w in range(L)],
                 force=False)


@pytest.mark.parametrize(("tokens", "L", "exact"), [
    (1, 2, True), (2, 4, False), (3, 8, True), (4, 16, True), (4, 16, False), (6, 16, True), (8, 16, False),
    (8, 32, True), (16, 32, True), (16, 64, False)])
def test_verify_wraps_at_every_base(tokens: int, L: int, exact: bool) -> None:
    for m in (L // 4, L - tokens):
        check_kernel(spec=True, exact=exact, batch=L, ratio=1, buffer_len=L, tokens=tokens, K=128, V=128,
                     cursors=[(m, base, base % 2 == 0) for base in range(L)],
                     lengths=[tokens - base % 2 for base in range(L)])


def test_windows_without_tokens_only_fold() -> None:
    check_kernel(spec=True, batch=5, tokens=4, lengths=[4, 1, 0, 0, 3], buffer_len=8, K=128, V=128,
                 cursors=[(2, 7, False), (3, 1, True), (4, 5, True), (1, 0, False), (4, 6, False)])


def test_launch_modes_split_the_rows() -> None:
    whole = make_case(spec=True, batch=6, K=128, V=128, state=F16).to("cuda")
    parts = whole.clone()
    run(whole)
    for mode in ("verify", "flush"):
        call(gdn_replayssm_spec_decode, **verify_options(parts), launch_mode=mode)
    for name, buffer in whole.buffers.items():
        same = bits(buffer) == bits(parts.buffers[name])
        assert bool(same.all()), f"{name}: {int((~same).sum())} elements differ"


def recurrence(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor,
               dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """One token of every request by the per-step Triton kernel."""
    from fallback_triton.gdn_step import recurrent_step
    pool, out = state.clone(), torch.empty_like(v)
    slots = torch.arange(len(state), dtype=torch.int32, device=state.device)
    recurrent_step(pool, *(t.contiguous() for t in (q, k, v, a, b)), A_log, dt_bias, slots, NULL, out,
                   scale=k.shape[-1] ** -0.5)
    return out, pool


def verify(chain: Chain, inputs: dict[str, Tensor]) -> None:
    call(
        gdn_replayssm_spec_decode, **inputs, A_log=chain.A_log, dt_bias=chain.dt_bias,
        checkpoint_state=chain.state, **chain.rings,
        **chain.cursors, **chain.indices, max_cache_len=chain.shape.buffer_len, max_spec_len=chain.shape.tokens)


def commit(chain: Chain, accepted: Tensor) -> None:
    commit_gdn_replayssm_spec(**chain.cursors, num_accepted=accepted, replay_indices=chain.indices["replay_indices"],  # type: ignore[arg-type]
                              max_cache_len=chain.shape.buffer_len, max_spec_len=chain.shape.tokens, null_block_id=NULL)


def started(shape: Shape, **options: Any) -> Chain:
    chain = Chain(shape, device="cuda", recurrence=recurrence, **options)
    reset_gdn_replayssm_spec(**chain.cursors, replay_indices=chain.indices["replay_indices"],  # type: ignore[arg-type]
                             max_cache_len=shape.buffer_len, max_spec_len=shape.tokens, null_block_id=NULL)
    return chain


def layered(chain: Chain) -> tuple[Tensor, dict[str, Tensor], GdnCursors]:
    return chain.state[None], {n: r[None] for n, r in chain.rings.items() if r is not None}, GdnCursors(**chain.cursors)


@pytest.mark.parametrize(("tokens", "L", "act", "requests"), [
    (4, 16, BF16, 5), (3, 8, F16, 5), (8, 32, BF16, 5), (4, 16, F32, 5), (4, 16, BF16, 51)])
def test_exact_fold_has_the_bits_of_the_per_step_kernel(tokens: int, L: int, act: torch.dtype, requests: int) -> None:
    """300 chained commits with random acceptance: every folded checkpoint equals the accepted tokens one at a time.

    The per-step kernel is Triton's: the CuTe fold repeats its bits. 51 requests take the staged design.
    """
    chain = started(Shape(tokens, L, 1, 3, 128, 128, requests=requests), act=act, ring=act)
    for _ in range(300 if requests < 50 else 60):
        chain.step(verify, commit, acceptance(chain.gen, requests, tokens))
    assert chain.bases == set(range(L)) and chain.flushes > 250
    assert chain.output_error < (1e-2 if act != F32 else 1e-4)


def test_folds_outside_of_the_step_leave_the_same_bits() -> None:
    chain = started(Shape(4, 16, 2, 2, 128, 128))
    sources, keys = chain.indices["ssm_state_indices"], chain.indices["replay_indices"]
    for _ in range(40):
        chain.step(verify, commit, acceptance(chain.gen, 3, 4))
        state, rings, cursors = layered(chain)
        due = cursors.is_flush[chain.live_keys].bool()
        fold_gdn_replayssm(state, rings, sources, keys, cursors, 4, null_block_id=NULL)  # type: ignore[arg-type]
        assert torch.equal(chain.state[chain.live_slots[due]], chain.shadow[due])
    assert chain.flushes == 0
    state, rings, cursors = layered(chain)
    targets = sources.clone()  # type: ignore[union-attr]
    targets[0] = next(s for s in range(state.shape[1]) if s not in chain.slots.tolist())
    snapshot_gdn_replayssm(state, rings, sources, targets, keys, cursors, null_block_id=NULL)  # type: ignore[arg-type]
    assert torch.equal(state[0, targets[:1].long()], chain.shadow[:1])
    retire_gdn_replayssm(state, rings, sources, sources, keys, cursors, 4, null_block_id=NULL)  # type: ignore[arg-type]
    assert torch.equal(state[0, chain.live_slots[:1]], chain.shadow[:1])
    assert cursors.write_pos[chain.live_keys].tolist() == [0, 0, 0]


def test_the_same_bits_in_every_launch_and_any_batch() -> None:
    for spec in (False, True):
        first = make_case(spec=spec, batch=33, K=128, V=128, buffer_len=16, tokens=4, k_heads=4).to("cuda")
        results = []
        for _ in range(20):
            case = first.clone()
            run(case)
            results.append(case)
        for case in results[1:]:
            for name, buffer in case.buffers.items():
                assert torch.equal(bits(buffer), bits(results[0].buffers[name])), name


def test_a_verify_step_in_a_graph() -> None:
    """Captured once, replayed with other cursors, flags and inputs in the same tensors."""
    first = make_case(spec=True, batch=4, K=128, V=128, buffer_len=16, tokens=4)
    static = first.to("cuda")
    run(static.clone())  # compile
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side):
        call(gdn_replayssm_spec_decode, **verify_options(static))
    for seed in (0, 1, 2):
        before = make_case(spec=True, batch=4, K=128, V=128, buffer_len=16, tokens=4, seed=seed, padded=(seed,))
        for name, buffer in static.buffers.items():
            buffer.copy_(before.buffers[name])
        graph.replay()
        torch.cuda.synchronize()
        after = before.clone()
        for name, buffer in static.buffers.items():
            after.buffers[name].copy_(buffer)
        check(before, after)


@pytest.mark.parametrize("spec", [False, True], ids=["decode", "verify"])
def test_pools_past_2_31_elements(spec: bool) -> None:
    """The last slot of a strided pool view lies past 2^31 elements; it gives the bits of an ordinary pool."""
    case = make_case(spec=spec, batch=1, K=128, V=128, buffer_len=8, cursors=[(3, 0, True)]).to("cuda")
    near, slot = case.clone(), case.slots[0]
    run(near)
    options = verify_options(case) if spec else decode_options(case)
    name = "checkpoint_state" if spec else "initial_state"
    per_slot, stride = case["state"][0].numel(), 2 ** 29 + 64
    wide = torch.zeros(4 * stride + per_slot + 8, dtype=F32, device="cuda").as_strided(
        (5, *case["state"].shape[1:]), (stride, *case["state"].stride()[1:]))
    wide[4] = case["state"][slot]
    options[name] = wide
    options["ssm_state_indices"] = torch.tensor([4], dtype=torch.int32, device="cuda")
    if not spec:  # one index names checkpoint and ring: put the ring at slot 4 as well
        for ring in ("d_cache", "k_cache", "g_cache"):
            moved = torch.zeros(5, *case[ring].shape[1:], dtype=case[ring].dtype, device="cuda")
            moved[4] = case[ring][slot]
            options[ring] = moved
    call(gdn_replayssm_spec_decode if spec else gdn_replayssm_decode, **options)
    assert torch.equal(bits(wide[4]), bits(near["state"][slot]))
    assert torch.equal(bits(case["out"]), bits(near["out"]))
    assert bool((wide[3] == 0).all())
