"""Every GPU backend against the float64 oracle, with every trap of ``tests.cases`` in the arguments."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.mamba2 import selective_state_update_replayssm_output_only, warmup_mamba2
from replayssm_cute.reference.mamba2 import recurrent_step, replay_step
from replayssm_cute.registry.models import mamba2_models
from replayssm_cute.rounding import seed_state
from replayssm_cute.types import Mamba2Problem
from replayssm_cute.validate import mamba2_problem
from replayssm_tune.space import candidates
from tests.cases import ARGUMENTS, POOLS, Case, bits, check, make_case, oracle
from tests.gpu.kinds import KINDS, act_dtype, prepare

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HEAD_SHAPES = sorted({(m.geometry.headdim, m.geometry.dstate) for m in mamba2_models()})
EXTREME_DT = (-100.0, 19.9, 20.0, 20.1, 88.0, 89.0, 1e4, -8.0)
gpu_case = functools.partial(make_case, device="cuda")


def problem_of(case: Case) -> Mamba2Problem:
    return mamba2_problem(*case.args(), dt_softplus=case.dt_softplus, max_cache_len=case.buffer_len)


def prepared(kind: str, case: Case) -> functools.partial[object]:
    """One kernel's step with the case's arguments; skips where the kernel cannot serve."""
    return functools.partial(prepare(kind, problem_of(case), case.views["x"].size[0]), *case.args(), None)


def check_kernel(kind: str, case: Case) -> float:
    before = case.clone()
    prepared(kind, case)()
    torch.cuda.synchronize()
    return check(before, case, oracle(before, replay_step))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", HEAD_SHAPES, ids=str)
def test_head_shapes_of_all_models(kind: str, state: torch.dtype, shape: tuple[int, int]) -> None:
    headdim, dstate = shape
    check_kernel(kind, gpu_case(batch=9, nheads=6, ngroups=2, headdim=headdim, dstate=dstate, buffer_len=16,
                                state=state, act=act_dtype(kind), padded=(4, 7)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nheads", "headdim", "ngroups"), [(64, 64, 8), (96, 80, 8), (128, 64, 8), (112, 64, 8)])
def test_whole_layers(kind: str, nheads: int, headdim: int, ngroups: int) -> None:
    """Real layers at a batch that takes several rounds of a persistent grid."""
    check_kernel(kind, gpu_case(batch=23, nheads=nheads, headdim=headdim, dstate=128, ngroups=ngroups, buffer_len=16,
                                state=F16, act=act_dtype(kind), padded=(3,)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffer_len", [1, 3, 4, 5, 8, 16, 20, 24, 32, 33, 48, 64])
def test_ring_lengths(kind: str, buffer_len: int) -> None:
    cursors = [(w, w == buffer_len - 1 or w % 3 == 1) for w in range(buffer_len)]
    check_kernel(kind, gpu_case(batch=buffer_len, nheads=2, headdim=64, dstate=128, buffer_len=buffer_len,
                                act=act_dtype(kind), cursors=cursors))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [
    {"z": True}, {"D": None}, {"D": "full"}, {"D": "full", "z": True, "D_dtype": F32}, {"dt_bias": False}, {"dt": F32},
    {"dt_softplus": False, "dt_values": (0.1, 0.02, 1.5)}, {"dt_values": EXTREME_DT}, {"index_columns": 3},
    {"index_dtype": torch.int64}, {"index_dtype": torch.int64, "index_columns": 2}, {"flush_dtype": torch.bool},
    {"null_block_id": -1, "padded": (1, 2), "slots": [3, 0, 5, 0, 7]}, {"null_block_id": 3, "padded": (0, 4)},
    {"slot_padding": 16, "row_padding": 16}, {"slot_padding": 8, "row_padding": 8, "state": BF16, "z": True},
    {"act": F16, "state": F16}, {"act": F32, "state": F32, "z": True}, {"act": F32, "ring": BF16},
    {"nheads": 7, "ngroups": 1}, {"nheads": 14}, {"nheads": 1, "ngroups": 1}, {"padded": (0, 1, 2, 3, 4)}], ids=str)
def test_options(kind: str, options: dict[str, Any]) -> None:
    shape = {"batch": 5, "nheads": 6, "ngroups": 2, "headdim": 64, "dstate": 128, "buffer_len": 8,
             "act": act_dtype(kind)}
    if "slots" in options:  # slot 0 is live beside padded rows of null block -1
        options = {**options, "slots": [3, 6, 5, 0, 7], "pool_slots": 9}
    if "dt_values" in options and shape["act"] == F16:
        options = {**options, "dt_values": tuple(min(v, 1e3) for v in options["dt_values"])}  # 1e4 leaves fp16's range
    check_kernel(kind, gpu_case(**{**shape, **options}))


@pytest.mark.parametrize(("headdim", "dstate", "slot_padding", "row_padding"), [
    (96, 80, 0, 0), (112, 96, 0, 0), (20, 24, 0, 0), (1, 1, 0, 0), (64, 112, 1, 1), (256, 64, 0, 3)])
def test_odd_shapes_go_to_triton(headdim: int, dstate: int, slot_padding: int, row_padding: int) -> None:
    check_kernel("triton", gpu_case(nheads=3, headdim=headdim, dstate=dstate, buffer_len=5, slot_padding=slot_padding,
                                    row_padding=row_padding))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [F32, F16], ids=str)
def test_ring_cycles(kind: str, state: torch.dtype) -> None:
    """Two cycles with the state carried: rows at their own cursors, flushes forced at any of them."""
    L, pos, flushes = 8, [0, 3, 6], 0
    case = gpu_case(nheads=4, ngroups=2, headdim=64, dstate=128, buffer_len=L, state=state,
                    act=act_dtype(kind), cursors=[(w, False) for w in pos])
    gen = torch.Generator("cuda").manual_seed(1)
    step = prepared(kind, case)
    for token in range(2 * L + 2):
        flush = [w == L - 1 or (token, b) in {(1, 0), (7, 1), (8, 2)} for b, w in enumerate(pos)]
        case.set_cursors(list(zip(pos, flush, strict=True)))
        for name in ("x", "B", "C"):
            case[name].copy_(torch.randn(case[name].shape, generator=gen, device="cuda"))
        before = case.clone()
        step()
        check(before, case, oracle(before, replay_step))
        flushes += sum(flush)
        pos = [0 if f else w + 1 for w, f in zip(pos, flush, strict=True)]
    assert flushes == 9


@pytest.mark.parametrize("kind", KINDS)
def test_slots_past_two_to_the_31_elements(kind: str) -> None:
    """The last slot of a pool of 2^31 and more elements, beside the first."""
    slots = 2 ** 31 // (16 * 64 * 128) + 3
    for cursors in ([(3, True), (5, False)], [(5, False), (3, True)]):
        small = gpu_case(batch=2, nheads=16, headdim=64, dstate=128, ngroups=2, buffer_len=8, state=F16, pool_slots=6,
                         act=act_dtype(kind), slots=[1, 5], cursors=cursors)
        args = dict(zip(ARGUMENTS, small.clone().args(), strict=True))
        big = {name: torch.empty((slots, *small.views[name].size[1:]), dtype=small[name].dtype, device="cuda")
               for name in POOLS}
        for name in POOLS:
            big[name][[1, slots - 1]] = small[name][[1, 5]]
        args |= big
        args["state_batch_indices"][1] = slots - 1
        assert big["state"][-1].storage_offset() > 2 ** 31
        problem = mamba2_problem(*args.values(), dt_softplus=True, max_cache_len=8)
        prepare(kind, problem, 2)(*args.values(), None)
        after = small.clone()
        for name in POOLS:
            after[name][[1, 5]] = big[name][[1, slots - 1]]
        after["out"].copy_(args["out"])
        check(small, after, oracle(small, replay_step))
        del big, args


@pytest.mark.parametrize("kind", [*KINDS, "cute"])
@pytest.mark.parametrize("state", [F32, F16], ids=str)
def test_same_bits_on_every_launch_and_anywhere_in_a_batch(kind: str, state: torch.dtype) -> None:
    """Launches at several batch sizes: one row's bits never change, whatever stands beside it.

    "cute" is the backend's own choice, which changes with the batch.
    """
    shape: dict[str, Any] = {"nheads": 8, "ngroups": 2, "headdim": 64, "dstate": 128, "buffer_len": 8, "state": state,
                             "act": act_dtype(kind), "pool_slots": 140}
    seen: dict[str, torch.Tensor] = {}
    for batch in (1, 2, 5, 16, 33, 130):
        for where in {0, batch // 2, batch - 1}:
            for probe_cursor in ((6, True), (5, False)):
                cursors = [((3 * b) % 8, b % 3 == 0) for b in range(batch)]
                cursors[where] = probe_cursor
                case = gpu_case(batch=batch, cursors=cursors, seed=batch, **shape)
                probe = gpu_case(batch=1, cursors=[probe_cursor], **shape)
                place(case, where, probe)
                again = case.clone()
                if kind == "cute":
                    public(again, "cute")
                else:
                    prepared(kind, again)()
                got = {"out": again["out"][where], "state": again["state"][again.slots[where]]}
                for name, value in got.items():
                    first = seen.setdefault(f"{name} {probe_cursor}", value.clone())
                    assert torch.equal(bits(value), bits(first)), f"{name} at batch {batch}, row {where}"


def place(case: Case, where: int, probe: Case) -> None:
    """Copy the only row of a probe, with its slot, into row ``where`` of a case of the same layer."""
    for name in ("x", "B", "C"):
        case[name][where] = probe[name][0]
    case["dt"][where, :, 0] = probe["dt"][0, :, 0]
    for name in ("A", "D", "dt_bias"):
        case.buffers[name].copy_(probe.buffers[name])
    for name in POOLS:
        case[name][case.slots[where]] = probe[name][probe.slots[0]]


@pytest.mark.parametrize(("state", "rounds"), [(F32, 0), (F16, 5), (BF16, 10)], ids=str)
@pytest.mark.parametrize(("headdim", "dstate", "buffer_len"), [(64, 128, 16), (96, 256, 64)])
def test_what_the_tuner_chooses_from_gives_the_same_bits(state: torch.dtype, rounds: int, headdim: int, dstate: int,
                                                         buffer_len: int) -> None:
    """Tile, CTAs and stages may change with the batch, and must not show."""
    cursors = [(w, w == buffer_len - 1 or w % 3 == 1) for w in range(buffer_len)]
    case = gpu_case(batch=buffer_len, nheads=6, ngroups=2, headdim=headdim, dstate=dstate, buffer_len=buffer_len,
                    state=state, cursors=cursors, z=True)
    seed = seed_state(5, "cuda") if rounds else None
    problem = mamba2_problem(*case.args(), seed, dt_softplus=True, max_cache_len=buffer_len, philox_rounds=rounds)
    module, arch = dispatch.backend_module("cute"), archs.of("cuda")
    configs = candidates("cute", problem, buffer_len, arch)
    if not configs:
        pytest.skip("no CuTe kernels here")
    assert configs[1]["prefetch"] != configs[0]["prefetch"]
    other_tiles = [c for c in configs if c["tile_p"] != configs[0]["tile_p"]][:1]
    assert other_tiles or dstate == 256, "only the largest stages leave one tile to choose"
    first = None
    for config in (configs[0], configs[1], *other_tiles, configs[-1]):
        got = case.clone()
        module.prepare(problem, arch, buffer_len, config)(*got.args(), None if seed is None else seed.clone())
        first = first or got
        for name in (*POOLS, "out"):
            assert torch.equal(bits(got.buffers[name]), bits(first.buffers[name])), (name, config)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_graph_follows_its_tensors(kind: str) -> None:
    """A graph captured once is replayed with other indices, cursors, flags and inputs in the same tensors."""
    case = gpu_case(batch=6, nheads=4, ngroups=2, headdim=64, dstate=128, buffer_len=8, pool_slots=12,
                    act=act_dtype(kind))
    step = prepared(kind, case)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        step()
    for seed in range(4):
        other = gpu_case(batch=6, nheads=4, ngroups=2, headdim=64, dstate=128, buffer_len=8, pool_slots=12,
                         act=act_dtype(kind), seed=seed + 10, padded=(seed % 6,))
        for name, buffer in other.buffers.items():
            case.buffers[name].copy_(buffer)
        case.cursors, case.slots = other.cursors, other.slots
        before = case.clone()
        graph.replay()
        torch.cuda.synchronize()
        check(before, case, oracle(before, replay_step))


def public(case: Case, backend: str | None, **more: Any) -> torch.Tensor:
    return selective_state_update_replayssm_output_only(
        **{n: case.get(n) for n in ARGUMENTS}, dt_softplus=case.dt_softplus, max_cache_len=case.buffer_len,
        backend=backend, **more)


@pytest.mark.parametrize("backend", ["cute", "triton"])
def test_public_op_over_ring_cycles_equals_the_recurrence(backend: str) -> None:
    """End to end: 3 L tokens of a whole layer by replay and by the float64 recurrence, then a flush."""
    L, batch = 16, 3
    case = gpu_case(batch=batch, nheads=64, ngroups=8, headdim=64, dstate=128, buffer_len=L,
                    cursors=[(0, False)] * batch)
    exact = case["state"][case.slots].double()
    gen, flushes, served = torch.Generator("cuda").manual_seed(1), 0, dispatch.served[dispatch.OP, backend]
    tokens, pos = 3 * L + 5, [0] * batch
    for token in range(tokens):
        # Forced flushes stagger the rows; the last one completes the state.
        cursors = [(w, w == L - 1 or (token, b) in {(3, 1), (10, 2), (30, 0)} or token == tokens - 1)
                   for b, w in enumerate(pos)]
        case.set_cursors(cursors)
        pos = [0 if flush else w + 1 for w, flush in cursors]
        flushes += sum(flush for _, flush in cursors)
        for name in ("x", "B", "C"):
            case[name].copy_(torch.randn(case[name].shape, generator=gen, device="cuda"))
        public(case, backend)
        y, exact = recurrent_step(exact, case["x"], case["dt"][..., 0], case["A"][:, 0, 0], case["B"], case["C"],
                                  case["D"][:, 0], case["dt_bias"][:, 0])
        error = (case["out"].double() - y).norm() / y.norm()
        assert error < 2.5e-3, (token, float(error))  # bf16 rounding of the output gives 1.7e-3
    state = case["state"][case.slots].double()
    assert (state - exact).norm() / exact.norm() < 1e-6
    assert flushes > 2 * batch and dispatch.served[dispatch.OP, backend] == served + tokens


def test_one_process_never_takes_the_wrong_kernel() -> None:
    """bf16, then fp16, then other strides, dtypes and lengths, all through the public op in turn."""
    shape = {"nheads": 4, "ngroups": 2, "headdim": 64, "dstate": 128, "buffer_len": 8}
    variants: list[dict[str, Any]] = [
        {"state": BF16}, {"state": F16}, {"state": F32}, {"state": F16, "slot_padding": 64},
        {"state": F16, "row_padding": 8}, {"state": F16, "row_padding": 4}, {"state": F16, "dt": F32},
        {"state": F16, "D": "full"}, {"state": F16, "D": "full", "D_dtype": F32},
        {"state": F16, "flush_dtype": torch.bool},
        {"state": F16, "index_columns": 2}, {"state": F16, "index_dtype": torch.int64}, {"act": F16}, {"act": F32},
        {"state": F16, "slot_padding": 8}, {"state": F16, "D_dtype": F32}, {"state": F16, "dt_softplus": False}]
    for _ in range(2):
        for options in variants:
            case = gpu_case(**{**shape, **options})
            before = case.clone()
            public(case, None)
            check(before, case, oracle(before, replay_step))


def test_nothing_compiles_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    case = gpu_case(batch=4, nheads=4, ngroups=2, headdim=64, dstate=128, buffer_len=12)
    problem = problem_of(case)
    for backend in ("cute", "triton"):
        if not dispatch.backend_module(backend).supports(problem, archs.of("cuda")):
            continue
        assert warmup_mamba2(problem, [1, 4], backend=backend) == [backend] * 2
        if backend == "cute":
            import cutlass.cute
            monkeypatch.setattr(cutlass.cute, "compile", lambda *a, **k: pytest.fail("compiled after the warm-up"))
        else:
            import triton
            monkeypatch.setattr(triton, "compile", lambda *a, **k: pytest.fail("compiled after the warm-up"))
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
            public(case, backend)
        graph.replay()
        torch.cuda.synchronize()


def test_a_slot_is_clean_after_a_reset() -> None:
    """A new request in a used slot starts at cursor 0: nothing of the previous tenant's ring is read."""
    case = gpu_case(batch=1, nheads=4, headdim=64, dstate=128, buffer_len=8, cursors=[(7, False)])
    public(case, None)
    case.set_cursors([(0, False)])  # poisons the whole ring
    case["state"][case.slots[0]].zero_()
    before = case.clone()
    public(case, None)
    check(before, case, oracle(before, replay_step))
    assert torch.isfinite(case["out"]).all()
