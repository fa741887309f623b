"""The public Gated DeltaNet operations on the CPU: what they compute, what they refuse, what memory they take."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_cute import demo, dispatch, gdn_dispatch
from replayssm_cute.backends import triton
from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.gdn import (
    fused_recurrent_linear_replayssm_decode,
    gdn_replayssm_decode,
    gdn_replayssm_spec_decode,
)
from replayssm_cute.gdn_cursors import GdnCursors, commit_gdn_replayssm_spec, reset_gdn_replayssm_spec
from replayssm_cute.gdn_fold import fold_gdn_replayssm, retire_gdn_replayssm, snapshot_gdn_replayssm
from replayssm_cute.gdn_layout import allocate_gdn_pool, gdn_memory, gdn_ring_bytes, gdn_snapshot_bytes, gdn_state_bytes
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.gdn_validate import check_serving
from replayssm_cute.rounding import seed_state
from tests.cases import bits
from tests.gdn_cases import RINGS, Case, check, check_step, make_case
from tests.gdn_chain import NULL, Chain, Shape, acceptance

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def decode_options(case: Case) -> dict[str, Any]:
    names = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "d_cache", "k_cache", "g_cache", "out", "ssm_state_indices",
             "write_pos", "force_flush", "null_block_id")
    return {**{n: case.get(n) for n in names}, "initial_state": case["state"],
            "use_qk_l2norm_in_kernel": case.l2norm}


def verify_options(case: Case) -> dict[str, Any]:
    names = ("q", "k", "v", "a", "b", "A_log", "dt_bias", *RINGS, "out", "query_start_loc", "ssm_state_indices",
             "replay_indices", "write_pos", "cache_base", "is_flush", "null_block_id")
    return {**{n: case.get(n) for n in names}, "checkpoint_state": case["state"], "max_cache_len": case.buffer_len,
            "max_spec_len": max(case.lengths), "use_qk_l2norm_in_kernel": case.l2norm}


def run(case: Case) -> None:
    if case.spec:
        gdn_replayssm_spec_decode(**verify_options(case))
    else:
        gdn_replayssm_decode(**decode_options(case))


@pytest.mark.parametrize("spec", [False, True], ids=["decode", "verify"])
def test_serves_split_inputs(spec: bool) -> None:
    op = "gdn_verify" if spec else "gdn_decode"
    before = dispatch.served[op, "torch"]
    for options in ({}, {"l2norm": False}, {"exact": False, "state": BF16}, {"force": False, "padded": (0,)}):
        check_step(make_case(spec=spec, **options), run)
        check_step(make_case(spec=spec, **options, seed=1), run)  # by the prepared launch
    assert dispatch.served[op, "torch"] == before + 8


def test_packed_inputs_have_the_signature_of_sglang() -> None:
    case = make_case(packed=True, row_padding=3, padded=(1,))
    before, mixed = case.clone(), case["mixed_qkv"]
    out, state = fused_recurrent_linear_replayssm_decode(
        mixed, case["a"], case["b"], case["A_log"], case["dt_bias"], case.scale, case["state"], case["d_cache"],
        case["k_cache"], case["g_cache"], case["out"][:, None], case["ssm_state_indices"], case["write_pos"],
        case["force_flush"], True, block_v=64)
    assert out.shape == (3, 1, *case["v"].shape[1:]) and state is not None
    check(before, case)
    with pytest.raises(UnsupportedError, match="is_kda"):
        fused_recurrent_linear_replayssm_decode(
            mixed, case["a"], case["b"], case["A_log"], case["dt_bias"], None, case["state"], case["d_cache"],
            case["k_cache"], case["g_cache"], case["out"], case["ssm_state_indices"], case["write_pos"], is_kda=True)
    with pytest.raises(ArgumentError, match=r"^mixed_qkv: expected shape"):
        fused_recurrent_linear_replayssm_decode(
            mixed[:, :-1], case["a"], case["b"], case["A_log"], case["dt_bias"], None, case["state"], case["d_cache"],
            case["k_cache"], case["g_cache"], case["out"], case["ssm_state_indices"], case["write_pos"])



WRONG = {
    "initial_state": lambda t: t[0], "q": lambda t: t.double(), "k": lambda t: t[:, :, :-1], "v": lambda t: t[:, :1],
    "a": lambda t: t[:, :1], "b": lambda t: t.long(), "A_log": lambda t: t[:-1], "dt_bias": lambda t: None,
    "d_cache": lambda t: t[:, :, :, :-1], "k_cache": lambda t: t.half(), "g_cache": lambda t: t.bfloat16(),
    "out": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "ssm_state_indices": lambda t: t.float(),
    "write_pos": lambda t: t[:1], "force_flush": lambda t: t.float(), "null_block_id": lambda t: 1.0}
WRONG_SPEC = {
    "checkpoint_state": lambda t: t.double(), "rawv_cache": lambda t: None, "rawk_cache": lambda t: t.float(),
    "beta_cache": lambda t: t.half(), "query_start_loc": lambda t: t.long(), "replay_indices": lambda t: t.float(),
    "cache_base": lambda t: t[:-1], "is_flush": lambda t: t.int(), "max_cache_len": lambda t: 12,
    "max_spec_len": lambda t: 17, "launch_mode": lambda t: "all", "d_cache": lambda t: t[:, :1]}


@pytest.mark.parametrize(("spec", "name"), [*((False, n) for n in WRONG), *((True, n) for n in WRONG_SPEC)])
def test_errors_name_the_argument_and_change_nothing(spec: bool, name: str) -> None:
    case = make_case(spec=spec)
    before = case.clone()
    options = verify_options(case) if spec else decode_options(case)
    options[name] = (WRONG_SPEC if spec else WRONG)[name](options.get(name))
    with pytest.raises(ArgumentError) as caught:
        (gdn_replayssm_spec_decode if spec else gdn_replayssm_decode)(**options)
    assert caught.value.name == name, caught.value
    assert all(torch.equal(bits(t), bits(before.buffers[n])) for n, t in case.buffers.items())


def test_stochastic_rounding_of_the_checkpoint() -> None:
    """Unbiased over seeds, counted on the device, and refused for fp32."""
    case = make_case(state=BF16, batch=2, cursors=[(1, 0, True), (2, 0, True)], K=24)
    options = decode_options(case)
    seed, total = seed_state(7, "cpu"), torch.zeros(case["state"].shape, dtype=torch.float64)
    wide = make_case(state=F32, batch=2, cursors=[(1, 0, True), (2, 0, True)], K=24)
    wide["state"].copy_(case["state"])
    gdn_replayssm_decode(**decode_options(wide))
    for _ in range(200):
        pool = case["state"].clone()
        gdn_replayssm_decode(**{**options, "initial_state": pool}, enable_stochastic_rounding=True,
                             cache_philox_rounds=5, rand_seed=seed)
        total += pool.double()
    assert seed[1] == 200
    error = (total / 200 - wide["state"].double())[case.slots] / wide["state"].double()[case.slots].abs()
    assert abs(float(error.mean())) < 2e-4, "the mean over seeds is the fp32 value"
    with pytest.raises(UnsupportedError, match="drops no bits"):
        gdn_replayssm_decode(**decode_options(wide), enable_stochastic_rounding=True)


def test_ring_lengths_of_verify() -> None:
    case = make_case(spec=True, tokens=5, buffer_len=8, lengths=[1, 1, 1], cursors=[(0, 0, False)] * 3)
    options = {**verify_options(case), "max_spec_len": 5}
    with pytest.raises(ArgumentError, match="at least two windows, 2 T = 10, got 8"):
        gdn_replayssm_spec_decode(**options)
    with pytest.raises(ArgumentError, match="a power of two"):
        gdn_replayssm_spec_decode(**{**options, "max_cache_len": 24})


def test_named_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(K=9)
    with pytest.raises(ArgumentError, match="backend"):
        gdn_replayssm_decode(**decode_options(case), backend="cute-dsl")
    monkeypatch.setattr(triton, "_interpreting", lambda: False)
    with pytest.raises(UnsupportedError, match="no GPU"):
        gdn_replayssm_decode(**decode_options(case), backend="triton")
    gdn_replayssm_decode(**decode_options(case), backend="torch")


def test_a_failing_backend_falls_through_with_a_warning(monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def supports(self, problem: Any, arch: Any) -> Any:
            return gdn_dispatch.Support(True)

        def prepare(self, problem: Any, arch: Any, tuned: Any) -> Any:
            raise RuntimeError("cannot compile")

    module = gdn_dispatch.backend_module
    monkeypatch.setattr(gdn_dispatch, "preference", lambda problem, arch: [("triton", ""), ("torch", "")])
    monkeypatch.setattr(gdn_dispatch, "backend_module", lambda n: Broken() if n == "triton" else module(n))
    monkeypatch.setattr(gdn_dispatch, "_launches", {})
    check_step(make_case(K=11), run)
    assert "cannot compile" in caplog.text and "falling through" in caplog.text


def test_a_narrow_checkpoint_warns_with_the_measured_drift(caplog: pytest.LogCaptureFixture) -> None:
    dispatch.warn_once.cache_clear()
    check_step(make_case(spec=True, state=BF16, K=13), run)
    assert "1.8e-03" in caplog.text
    dispatch.warn_once.cache_clear()
    caplog.clear()
    check_step(make_case(spec=True, state=F32, K=13), run)
    assert not caplog.text


@pytest.mark.parametrize(("options", "message"), [
    ({"topk": 4}, "topk=4: a window must be a linear chain"), ({"linear_chain": False}, "no linear chain"),
    ({"standard_ring": True}, "ring of standard decode"), ({"disaggregated": True}, "disaggregated"),
    ({"prefix_cache_mode": "all"}, "'all'"), ({"buffer_len": 12}, "a power of two"),
    ({"buffer_len": 4}, "two windows"), ({"tokens": 17}, "tokens: expected")], ids=str)
def test_what_an_engine_may_not_configure(options: dict[str, Any], message: str) -> None:
    check_serving(speculative=True, buffer_len=16, tokens=4)
    with pytest.raises((UnsupportedError, ArgumentError), match=message):
        check_serving(**{"speculative": True, "buffer_len": 16, "tokens": 4, **options})


def test_standard_decode_takes_any_ring_length() -> None:
    check_serving(speculative=False, buffer_len=12)
    with pytest.raises(ArgumentError, match="buffer_len"):
        check_serving(speculative=False, buffer_len=0)


def verify(chain: Chain, inputs: dict[str, Tensor]) -> None:
    gdn_replayssm_spec_decode(
        **inputs, A_log=chain.A_log, dt_bias=chain.dt_bias, checkpoint_state=chain.state, **chain.rings,  # type: ignore[arg-type]
        **chain.cursors, **chain.indices, max_cache_len=chain.shape.buffer_len, max_spec_len=chain.shape.tokens)


def commit(chain: Chain, accepted: Tensor) -> None:
    commit_gdn_replayssm_spec(**chain.cursors, num_accepted=accepted, replay_indices=chain.indices["replay_indices"],  # type: ignore[arg-type]
                              max_cache_len=chain.shape.buffer_len, max_spec_len=chain.shape.tokens, null_block_id=NULL)


def layered(chain: Chain) -> tuple[Tensor, dict[str, Tensor], GdnCursors]:
    """The chain's pools as a model of one layer."""
    return chain.state[None], {n: r[None] for n, r in chain.rings.items() if r is not None}, GdnCursors(**chain.cursors)


def test_fold_behind_every_commit() -> None:
    """Folding outside of the verify step gives the same bits as folding in it."""
    chain = Chain(Shape())
    reset_gdn_replayssm_spec(**chain.cursors, replay_indices=chain.indices["replay_indices"], max_cache_len=16,  # type: ignore[arg-type]
                             max_spec_len=4, null_block_id=NULL)
    folds, sources, keys = 0, chain.indices["ssm_state_indices"], chain.indices["replay_indices"]
    for _ in range(25):
        chain.step(verify, commit, acceptance(chain.gen, 3, 4))
        state, rings, cursors = layered(chain)
        due = cursors.is_flush[chain.live_keys].bool()
        fold_gdn_replayssm(state, rings, sources, keys, cursors, 4, null_block_id=NULL)  # type: ignore[arg-type]
        folds += int(due.sum())
        assert torch.equal(chain.state[chain.live_slots[due]], chain.shadow[due])
        assert not bool(cursors.is_flush[chain.live_keys].any())
        assert bool((cursors.write_pos[chain.live_keys[due]] == 0).all())
    assert folds > 10 and chain.flushes == 0


def test_snapshot_and_retirement() -> None:
    """A copy at any accepted step has the recurrence's bits and disturbs nothing; a retired ring is empty."""
    chain = Chain(Shape(requests=3))
    reset_gdn_replayssm_spec(**chain.cursors, replay_indices=chain.indices["replay_indices"], max_cache_len=16,  # type: ignore[arg-type]
                             max_spec_len=4, null_block_id=NULL)
    for n in (2, 3, 1):
        chain.step(verify, commit, torch.tensor([n, 4, n]))
    sources, keys = chain.indices["ssm_state_indices"], chain.indices["replay_indices"]
    state, rings, cursors = layered(chain)
    wide = torch.cat([state, torch.full_like(state, math.nan)], 1)
    pool = state.shape[1]
    before, held = wide.clone(), chain.cursors["write_pos"][chain.live_keys].int()
    targets = torch.tensor([pool, -4, pool + 2, pool + 1]).int()
    args = (wide, rings, sources, targets, keys, cursors)
    snapshot_gdn_replayssm(*args, num_records=torch.tensor([0, 1, 2, 1]).int(), null_block_id=NULL)  # type: ignore[arg-type]
    assert torch.equal(wide[0, pool], before[0, chain.slots[0]]), "no record: the checkpoint itself"
    assert bool(wide[0, pool + 1].isnan().all()), "a padded row made a copy"
    assert torch.equal(bits(wide[0, :pool]), bits(before[0, :pool]))
    snapshot_gdn_replayssm(*args, null_block_id=NULL)  # type: ignore[arg-type]
    for row in (0, 2):
        assert torch.equal(wide[0, int(targets[row])], chain.shadow[row])
    assert torch.equal(cursors.write_pos[chain.live_keys], held)
    retire_gdn_replayssm(wide, rings, sources, sources, keys, cursors, 4, null_block_id=NULL)  # type: ignore[arg-type]
    assert torch.equal(wide[0, chain.live_slots], chain.shadow)
    assert cursors.write_pos[chain.live_keys].tolist() == [0, 0, 0]


@pytest.mark.parametrize("reset", [True, False])
def test_a_reused_slot(reset: bool) -> None:
    """A new request in an old slot: with its ring reset it sees nothing of the one before; without, it does."""
    chain = Chain(Shape())
    reset_gdn_replayssm_spec(**chain.cursors, replay_indices=chain.indices["replay_indices"], max_cache_len=16,  # type: ignore[arg-type]
                             max_spec_len=4, null_block_id=NULL)
    chain.step(verify, commit, torch.tensor([3, 4, 2]))
    chain.state[chain.slots[0]] = 0
    chain.shadow[0] = 0
    if reset:
        reset_gdn_replayssm_spec(**chain.cursors, replay_indices=chain.keys[:1], max_cache_len=16, max_spec_len=4,
                                 null_block_id=NULL)
    chain.output_error = 0.0
    chain.step(verify, commit, torch.tensor([4, 1, 2]))
    assert (chain.output_error < 1e-2) is reset


def test_fold_errors() -> None:
    state, cursors, keys = torch.zeros(2, 3, 2, 4, 4), GdnCursors.allocate(3), torch.tensor([0, 1]).int()
    pool = allocate_gdn_pool(3, GdnGeometry(1, 2, 4, 4), 8, layers=2, exact_fold=True)
    fold = functools.partial(fold_gdn_replayssm, state, ssm_state_indices=keys, replay_indices=keys, cursors=cursors,
                             max_spec_len=2)
    fold(rings=pool.rings)
    for name, change in {"g_cache": pool.rings["g_cache"][:1], "beta_cache": None,
                         "rawv_cache": pool.rings["rawv_cache"][..., :1]}.items():
        with pytest.raises(ArgumentError, match=f"^{name}"):
            fold(rings={**pool.rings, name: change})
    with pytest.raises(ArgumentError, match=r"^checkpoint_state"):
        fold_gdn_replayssm(state[0], pool.rings, keys, keys, cursors, 2)


def test_memory_account_of_a_model() -> None:
    """Qwen3.5-35B-A3B, 48 requests, windows of 4: to the byte what an allocation takes."""
    geometry, layers, requests, T, L = GdnGeometry(16, 32), 30, 48, 4, 16
    account = gdn_memory(geometry, layers, requests, T, L)
    assert account.snapshot == 49 * 30 * 4 * 32 * 128 * 128 * 4
    assert f"{account.snapshot / 2**30:.2f}" == "11.48"
    pool = allocate_gdn_pool(49, geometry, L, layers=layers, exact_fold=True, device="meta")
    assert pool.ring_nbytes == account.ring
    assert pool.state.nbytes == account.layers * account.slots * gdn_state_bytes(geometry)
    assert "11.48 GiB of fp32 state snapshots replaced by 0.54 GiB" in demo.speculative_memory()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("ring", [F32, BF16])
def test_ring_bytes(exact: bool, ring: torch.dtype) -> None:
    """One request and layer, against an allocation and against the formula written out."""
    geometry, L, size = GdnGeometry(2, 6, 64, 80), 8, 4 if ring is F32 else 2
    pool = allocate_gdn_pool(1, geometry, L, exact_fold=exact, ring_dtype=ring, act_dtype=F16)
    vectors = L * (6 * 80 + 2 * 64)
    want = vectors * size + L * 6 * 4 + (vectors * 2 + L * 6 * 4 if exact else 0)
    assert pool.ring_nbytes == want == gdn_ring_bytes(geometry, L, exact_fold=exact, ring_dtype=ring, act_dtype=F16)
    assert gdn_snapshot_bytes(geometry, 3, BF16) == 3 * 6 * 80 * 64 * 2


@pytest.mark.parametrize(("tp", "heads"), [(1, (16, 48)), (4, (4, 12)), (16, (1, 3))])
def test_tensor_parallel(tp: int, heads: tuple[int, int]) -> None:
    shard = GdnGeometry(16, 48).shard(tp)
    assert (shard.num_k_heads, shard.num_v_heads) == heads and shard.ratio == 3


def test_geometries_are_checked() -> None:
    for bad in ((16, 40), (0, 4), (2, 4, 0)):
        with pytest.raises(ArgumentError):
            GdnGeometry(*bad)
    for tp in (0, 3, 32):
        with pytest.raises(ArgumentError, match="tp"):
            GdnGeometry(16, 48).shard(tp)
