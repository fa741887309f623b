"""The Gated DeltaNet Triton kernels in Triton's interpreter, on the CPU, against the float64 oracle.

Every case (see ``tests.gdn_cases``) holds NaN wherever the kernel may not read and compares every byte that it may not
write. What the interpreter cannot show: speed, races, and rounding of a GPU's own instructions; tests/gpu has the same
cases for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fallback_triton.gdn_config import GdnTritonConfig, default_config, state_per_thread, validate
from replayssm_cute.arch import CPU, Arch
from replayssm_cute.backends import gdn_triton as backend
from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_types import GdnGeometry, GdnProblem
from replayssm_cute.reference import gdn, gdn_spec
from replayssm_cute.rounding import seed_state
from tests.cases import bits
from tests.gdn_cases import Case, check_step, make_case, make_exact, problem_of
from tests.gdn_chain import NULL, Chain, Shape, acceptance, reference_reset
from tests.interpreter import interpreted_import

interpreted_import("fallback_triton.mamba2")  # by which the backend sees that kernels are interpreted
gdn_decode, gdn_verify, gdn_fold, gdn_step, gdn_cursors = (
    interpreted_import(f"fallback_triton.gdn_{name}") for name in ("decode", "verify", "fold", "step", "cursors"))

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EXTREME = (-100.0, 19.9, 20.0, 20.1, 88.0, 89.0, 1e4, -8.0)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter asks for the variable again while it runs."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield


def run(case: Case, config: GdnTritonConfig | None = None, launch_mode: str = "both") -> None:
    problem = problem_of(case, launch_mode)
    prepare = gdn_verify.compile_verify if case.spec else gdn_decode.compile_decode
    prepare(problem, config or default_config(problem))(*case.op_args())


def check_kernel(case: Case, config: GdnTritonConfig | None = None) -> float:
    return check_step(case, lambda c: run(c, config), truncating=True)


@pytest.mark.parametrize("spec", [False, True], ids=["decode", "verify"])
@pytest.mark.parametrize(("state", "act", "ring"), [
    (F32, BF16, BF16), (F16, F16, F16), (BF16, F32, F32), (F32, BF16, F32), (BF16, BF16, F16)])
def test_dtypes(spec: bool, state: torch.dtype, act: torch.dtype, ring: torch.dtype) -> None:
    check_kernel(make_case(spec=spec, state=state, act=act, ring=ring, ratio=1, batch=3))


def exact_case(state: torch.dtype, **options: Any) -> Case:
    """Decode whose fp32 arithmetic is exact in any order, so that folded states are the same in every bit.

    No decay (a so low that every exponential is 1), beta = 1, inputs of four bits; the sums need more bits than a
    narrow state has, and fewer than fp32's.
    """
    case = make_case(state=state, act=F32, ratio=1, l2norm=False, raw_gates=(-120.0,), **options)
    make_exact(case)
    return case


@pytest.mark.parametrize("state", [F16, BF16])
@pytest.mark.parametrize("options", [{}, {"K": 24, "V": 20, "padded": (1,)}, {"padded": (0, 1, 2)}], ids=str)
def test_stochastic_rounding_is_that_of_the_specification(state: torch.dtype, options: dict[str, Any]) -> None:
    case = exact_case(state, cursors=[(3, 0, True), (1, 0, False), (2, 0, True)], **options)
    seed = seed_state(0x123456789ABCDEF, "cpu", step=9, first_head=1, total_heads=5)
    ours, theirs, nearest, other = case.clone(), case.clone(), case.clone(), seed.clone()
    problem = replace(problem_of(case), philox_rounds=5)
    gdn_decode.compile_decode(problem, default_config(problem))(*ours.op_args(), seed)
    gdn.replay_decode(*theirs.op_args(), other, scale=case.scale, l2norm=False, philox_rounds=5)
    run(nearest)
    assert torch.equal(seed, other) and seed.tolist()[1:3] == [10, 0], "the step has been counted once"
    assert torch.equal(bits(ours.buffers["state"]), bits(theirs.buffers["state"]))
    assert torch.equal(bits(ours["out"]), bits(nearest["out"])), "the output is not rounded"
    if case.live:
        assert not torch.equal(bits(ours.buffers["state"]), bits(nearest.buffers["state"]))


@pytest.mark.parametrize("spec", [False, True], ids=["decode", "verify"])
@pytest.mark.parametrize("options", [
    {"K": 128, "V": 128, "buffer_len": 16}, {"K": 64, "V": 80}, {"K": 80, "V": 64}, {"K": 5, "V": 7}], ids=str)
def test_shapes(spec: bool, options: dict[str, int]) -> None:
    check_kernel(make_case(spec=spec, batch=2, ratio=1, **options))


@pytest.mark.parametrize("spec", [False, True], ids=["decode", "verify"])
@pytest.mark.parametrize("options", [
    {"ratio": 3, "k_heads": 2, "batch": 2}, {"ratio": 4, "batch": 2}, {"l2norm": False, "ratio": 1},
    {"raw_gates": EXTREME, "batch": 4, "gate_dtype": F32}, {"slot_padding": 3, "row_padding": 5, "ratio": 1},
    {"packed": True, "row_padding": 8, "index_dtype": torch.int64, "ratio": 1},
    {"null_block_id": 0, "padded": (0, 2, 3), "batch": 4, "ratio": 1}, {"padded": (0, 1), "batch": 2}], ids=str)
def test_options(spec: bool, options: dict[str, Any]) -> None:
    check_kernel(make_case(spec=spec, **options))


def test_decode_flushes_at_every_cursor() -> None:
    check_kernel(make_case(batch=6, ratio=1, buffer_len=6, cursors=[(w, 0, True) for w in range(6)]))
    check_kernel(make_case(batch=6, ratio=1, buffer_len=6, cursors=[(w, 0, w == 5) for w in range(6)], force=False))
    check_kernel(make_case(batch=2, ratio=1, buffer_len=1, cursors=[(0, 0, True)] * 2, force=False))


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "ring"])
def test_verify_wraps_at_every_base(exact: bool) -> None:
    L, T = 8, 3
    for m in (2, L - T):
        cursors = [(m, base, base % 2 == 0) for base in range(L)]
        check_kernel(make_case(spec=True, exact=exact, batch=L, ratio=1, buffer_len=L, tokens=T, cursors=cursors))


@pytest.mark.parametrize(("tokens", "buffer_len"), [(1, 2), (2, 4), (5, 16), (16, 32)])
def test_window_lengths(tokens: int, buffer_len: int) -> None:
    """Windows that are unrolled and windows that are looped over, full and short."""
    m = buffer_len - tokens
    check_kernel(make_case(spec=True, batch=2, ratio=1, tokens=tokens, buffer_len=buffer_len,
                           cursors=[(m, buffer_len - 1, False), (m // 2, 1, True)],
                           lengths=[tokens, (tokens + 1) // 2]))


def test_windows_of_unequal_length() -> None:
    """A row may bring fewer tokens than T, and none: then it only folds, if it is to."""
    check_kernel(make_case(spec=True, batch=5, ratio=1, tokens=4, lengths=[4, 1, 0, 0, 3], buffer_len=8,
                           cursors=[(2, 7, False), (3, 1, True), (4, 5, True), (1, 0, False), (4, 6, False)]))


def test_launch_modes_split_the_rows() -> None:
    whole = make_case(spec=True, batch=4, ratio=1, state=F16)
    parts = whole.clone()
    run(whole)
    for mode in ("verify", "flush"):
        run(parts, launch_mode=mode)
    for name, buffer in whole.buffers.items():
        assert torch.equal(bits(buffer), bits(parts.buffers[name])), name


@pytest.mark.parametrize("config", [GdnTritonConfig(8, 1, 16, 8), GdnTritonConfig(16, 4, 32, 32)], ids=str)
def test_tilings(config: GdnTritonConfig) -> None:
    """Any split of a head gives the right answer: tiles, masked rows and columns."""
    for spec in (False, True):
        case = make_case(spec=spec, batch=2, ratio=1, K=40, V=24)
        assert validate(problem_of(case), config)
        check_kernel(case, config)


def recurrence(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor,
               dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """One token of every request by the per-step kernel."""
    pool, out = state.clone(), torch.empty_like(v)
    slots = torch.arange(len(state), dtype=torch.int32, device=state.device)
    gdn_step.recurrent_step(pool, q.contiguous(), k.contiguous(), v.contiguous(), a.contiguous(), b.contiguous(), A_log,
                            dt_bias, slots, NULL, out, scale=k.shape[-1] ** -0.5)
    return out, pool


def chain_verify(chain: Chain, inputs: dict[str, Tensor]) -> None:
    problem = GdnProblem(
        GdnGeometry(chain.shape.k_heads, chain.shape.k_heads * chain.shape.ratio, chain.shape.k_size,
                    chain.shape.v_size), chain.shape.buffer_len, chain.state.dtype, chain.act, chain.ring,
        (chain.act, chain.act, F32, F32), flag_dtype=torch.int8, scale=chain.shape.k_size ** -0.5,
        tokens=chain.shape.tokens, exact_fold=chain.shape.exact)
    first = (inputs[n] for n in ("q", "k", "v", "a", "b"))
    gdn_verify.compile_verify(problem, default_config(problem))(
        chain.state, *first, chain.A_log, chain.dt_bias, *chain.rings.values(), inputs["out"],
        inputs["query_start_loc"], chain.indices["ssm_state_indices"], chain.indices["replay_indices"],
        *chain.cursors.values(), NULL)


def chain_commit(chain: Chain, accepted: Tensor) -> None:
    gdn_cursors.commit(**chain.cursors, num_accepted=accepted, replay_indices=chain.indices["replay_indices"],
                       null_block_id=NULL, ring_len=chain.shape.buffer_len, max_cache_len=chain.shape.buffer_len,
                       max_spec_len=chain.shape.tokens, fold_every_commit=False)


def test_exact_fold_has_the_bits_of_the_per_step_kernel() -> None:
    """Chained windows with random acceptance: folded checkpoints equal the accepted tokens run one at a time."""
    shape = Shape(3, 8, ratio=1, requests=2, v_size=4)
    chain = Chain(shape, act=F16, ring=F16, recurrence=recurrence)
    reference_reset(chain)
    for _ in range(18):
        chain.step(chain_verify, chain_commit, acceptance(chain.gen, 2, 3))
    assert chain.flushes > 8 and len(chain.bases) > 4 and chain.output_error < 4e-3


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "ring"])
def test_fold_of_layers_into_any_slot(exact: bool) -> None:
    """Against the reference: two layers, records by cursor or by count, flags, padding; sources stay as they are."""
    case = make_case(spec=True, batch=4, exact=exact, ratio=2, buffer_len=8, padded=(2,), act=F32, ring=F32)
    state = torch.cat([torch.stack([case["state"], case["state"] * 2]), torch.zeros(2, 2, *case["state"].shape[1:])], 1)
    rings = {n: None if r is None else torch.stack([r, r]) for n, r in case.rings.items()}
    targets = torch.tensor([state.shape[1] - 1, state.shape[1] - 2, 0, -1], dtype=torch.int32)
    some = torch.tensor([1, 2, 9, 9], dtype=torch.int32)
    for flags, counts in ((case["is_flush"], None), (None, some), (None, None)):
        got, want = state.clone(), state.clone()
        args = (*rings.values(), case["ssm_state_indices"], targets, case["replay_indices"], case["write_pos"],
                case["cache_base"], flags, counts, case.null_block_id)
        problem = _fold_problem(state, rings, case, targets, flags, counts)
        gdn_fold.compile_fold(problem, default_config(problem))(got, *args)
        for layer in range(2):
            rows = [b for b in (0, 1) if flags is None or case.cursors[b][2]]
            many = [case.cursors[b][0] if counts is None else int(counts[b]) for b in rows]
            index = [torch.tensor([values[b] for b in rows]) for values in (case.slots, targets.tolist(), case.keys)]
            gdn_spec.fold(want[layer], {n: None if r is None else r[layer] for n, r in rings.items()}, *index,
                          torch.tensor(many), torch.tensor([case.cursors[b][1] for b in rows]))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
        untouched = [s for s in range(state.shape[1]) if s not in targets.tolist()]
        assert torch.equal(bits(got[:, untouched]), bits(state[:, untouched]))


def _fold_problem(state: Tensor, rings: dict[str, Tensor | None], case: Case, targets: Tensor, flags: Tensor | None,
                  counts: Tensor | None) -> Any:
    from replayssm_cute.gdn_validate import fold_problem
    return fold_problem(state, rings, case["ssm_state_indices"], targets, case["replay_indices"], case["write_pos"],
                        case["cache_base"], flags, counts, case.null_block_id, l2norm=True)


@pytest.mark.parametrize("null", [-1, 0])
@pytest.mark.parametrize("flag_dtype", [torch.int8, torch.bool])
def test_cursor_kernels(null: int, flag_dtype: torch.dtype) -> None:
    """The same cursors as the reference leaves, over more rows than one program takes."""
    gen, rows, pool = torch.Generator().manual_seed(3), 200, 260
    keys = torch.randperm(pool, generator=gen)[:rows].int()
    keys[[5, 150]] = torch.tensor([null, -9], dtype=torch.int32)
    start = [torch.randint(0, 12, (pool,), generator=gen).int(), torch.randint(0, 16, (pool,), generator=gen).int(),
             torch.randint(0, 2, (pool,), generator=gen).to(flag_dtype)]
    accepted = torch.randint(-1, 5, (rows,), generator=gen)
    for options in ({"fold_every_commit": False}, {"fold_every_commit": True}):
        for n in (accepted, None):
            one, other = ([t.clone() for t in start] for _ in range(2))
            for commit, cursors in ((gdn_cursors.commit, one), (gdn_spec.commit, other)):
                commit(*cursors, n, keys, null, ring_len=16, max_cache_len=16, max_spec_len=4, **options)
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    one, other = ([t.clone() for t in start] for _ in range(2))
    gdn_cursors.reset(*one, keys, null)
    gdn_spec.reset(*other, keys, null)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kernel", [gdn_decode.decode_kernel, gdn_verify.verify_kernel, gdn_fold.fold_kernel,
                                    gdn_step.step_kernel], ids=["decode", "verify", "fold", "step"])
def test_strides_are_64_bit(kernel: Any) -> None:
    """Pools past 2^31 elements need a GPU; that every stride is declared 64 bits wide can be seen here."""
    notes = kernel.fn.__annotations__
    strides = [n for n in kernel.arg_names if n.endswith(("_slot", "_row", "_layer"))]
    assert len(strides) >= 7 and all(str(notes[n]) == "int64" for n in [*strides, "null_block_id"])


@pytest.mark.parametrize("warp_size", [32, 64])
def test_configs_are_valid_and_cover_every_shape(warp_size: int) -> None:
    for K in (1, 16, 64, 80, 128, 256):
        for V in (1, 20, 64, 80, 96, 128, 256):
            for state in (F32, BF16):
                problem = GdnProblem(GdnGeometry(2, 4, K, V), 16, state, BF16, BF16, (BF16, BF16, F32, F32))
                config = default_config(problem, warp_size)
                assert validate(problem, config, warp_size), (K, V, config)
                assert config.block_v * config.tiles(V) >= V > config.block_v * (config.tiles(V) - 1)
                assert state_per_thread(problem.geometry, config, warp_size) <= 160


@pytest.mark.parametrize(("change", "reason"), [
    ({"block_v": 48}, "block_v=48 is not a power of two"), ({"block_v": 256}, "does not fit"),
    ({"num_warps": 32}, "exceed 512"), ({"state_k": 256}, "wider than K"), ({"num_warps": 1}, "more than 160"),
    ({"max_registers": 300}, "max_registers=300")])
def test_invalid_configs_say_why(change: dict[str, int], reason: str) -> None:
    problem = GdnProblem(GdnGeometry(2, 4), 16, F32, BF16, BF16, (BF16, BF16, F32, F32))
    values = {**default_config(problem).to_dict(), **change}
    assert reason in validate(problem, GdnTritonConfig.from_dict(values)).reason
    for bad in ({"block_v": "64"}, {"block_q": 64}, {"block_v": True}):
        with pytest.raises(ArgumentError, match="config"):
            GdnTritonConfig.from_dict({"block_v": 64, **bad})


def test_backend() -> None:
    case = make_case(ratio=1, batch=2)
    problem = problem_of(case)
    assert backend.supports(problem, CPU)
    check_step(case, lambda c: backend.prepare(problem, CPU)(*c.op_args()), truncating=True)
    assert "compute capability 8.0" in backend.supports(problem, Arch("cuda", (7, 5), "T4")).reason
    for arch in (Arch("cuda", (8, 0), "A100"), Arch("cuda", (12, 0), "RTX"), Arch("hip", name="MI300X")):
        assert backend.supports(problem, arch)
