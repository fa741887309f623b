"""The Triton kernels in Triton's interpreter, on the CPU, against the float64 oracle.

Every case (see ``tests.cases``) holds NaN wherever the kernel may not read and compares every byte that it
may not write. What the interpreter cannot show: speed, races, and rounding of a GPU's own instructions;
the same cases run on a GPU in tests/gpu.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fallback_triton.mamba2_config import (
    Mamba2TritonConfig,
    default_config,
    default_step_config,
    state_per_thread,
    validate,
)
from replayssm_cute.arch import CPU, Arch
from replayssm_cute.backends import triton as backend
from replayssm_cute.errors import ArgumentError
from replayssm_cute.reference import mamba2 as reference
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from replayssm_cute.validate import mamba2_problem
from tests import cases
from tests.cases import Case, bits, make_case
from tests.interpreter import interpreted_import

mamba2 = interpreted_import("fallback_triton.mamba2")
mamba2_step = interpreted_import("fallback_triton.mamba2_step")
device = interpreted_import("fallback_triton.device")
triton, tl = interpreted_import("triton"), interpreted_import("triton.language")

check, check_step = (functools.partial(f, truncating=True) for f in (cases.check, cases.check_step))
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EXTREME_DT = (-100.0, 19.9, 20.0, 20.1, 88.0, 89.0, 1e4, -8.0)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter asks for the variable again while it runs; flushing rows go ahead of any batch."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("fallback_triton.order.AT_ONCE", 0)
    yield


def run(case: Case, *args: Any, config: Mamba2TritonConfig | None = None) -> None:
    mamba2.replay_step(*args, dt_softplus=case.dt_softplus, config=config)


def check_kernel(case: Case, config: Mamba2TritonConfig | None = None) -> float:
    return check_step(case, functools.partial(run, case, config=config))


@pytest.mark.parametrize("state", [F32, F16, BF16])
@pytest.mark.parametrize(("act", "ring"), [(BF16, BF16), (F16, F16), (F32, F32), (BF16, F16), (F16, F32), (F32, BF16)])
def test_dtypes(state: torch.dtype, act: torch.dtype, ring: torch.dtype) -> None:
    check_kernel(make_case(state=state, act=act, ring=ring, z=True))


@pytest.mark.parametrize(("headdim", "dstate", "buffer_len"), [
    (64, 128, 16), (80, 128, 16), (96, 80, 5), (112, 96, 3), (20, 24, 5), (64, 256, 4), (32, 64, 33), (16, 112, 64),
    (128, 128, 2), (1, 1, 3), (7, 20, 1), (256, 16, 4)])
def test_shapes(headdim: int, dstate: int, buffer_len: int) -> None:
    cursors = [(buffer_len - 1, True), (buffer_len // 2, False)]
    check_kernel(make_case(batch=2, nheads=1, headdim=headdim, dstate=dstate, buffer_len=buffer_len, cursors=cursors))


@pytest.mark.parametrize(("nheads", "ngroups"), [(1, 1), (3, 1), (7, 1), (2, 2), (6, 2), (9, 3)])
def test_head_ratios(nheads: int, ngroups: int) -> None:
    check_kernel(make_case(nheads=nheads, ngroups=ngroups, headdim=8, dstate=16))


@pytest.mark.parametrize("options", [
    {"D": None}, {"D": "full"}, {"D": "full", "D_dtype": F32, "headdim": 20}, {"dt_bias": False}, {"dt": F32},
    {"dt_softplus": False, "dt_values": (0.1, 0.02, 1.5)}, {"index_columns": 2}, {"index_dtype": torch.int64},
    {"index_dtype": torch.int64, "index_columns": 3}, {"flush_dtype": torch.bool}, {"z": True, "D": None},
    {"dt_values": EXTREME_DT, "batch": 4}, {"dt_values": EXTREME_DT, "batch": 4, "dt": F32, "state": F16}], ids=str)
def test_options(options: dict[str, Any]) -> None:
    check_kernel(make_case(**options))


@pytest.mark.parametrize(("slot_padding", "row_padding"), [(8, 8), (4, 4), (1, 1), (0, 3)])
def test_padded_strides(slot_padding: int, row_padding: int) -> None:
    """Paged pools and padded rows, down to strides that leave rows aligned to two bytes only."""
    for act in (BF16, F32):
        check_kernel(make_case(act=act, state=F16, slot_padding=slot_padding, row_padding=row_padding, z=True))


@pytest.mark.parametrize("null_block_id", [0, -1, 4])
def test_padded_rows(null_block_id: int) -> None:
    """Padded rows change nothing, not even beside live neighbours; slot 0 is live where it is not the null block."""
    slots = {0: [3, 1, 5, 2, 4, 6], -1: [3, 0, 5, 1, 2, 4], 4: [0, 3, 5, 1, 2, 6]}[null_block_id]
    case = make_case(batch=6, null_block_id=null_block_id, slots=slots, padded=(0, 3, 4), headdim=8)
    assert null_block_id == 0 or null_block_id == 4 or 0 in [case.slots[b] for b in case.live]
    check_kernel(case)
    check_kernel(make_case(batch=3, null_block_id=null_block_id, padded=(0, 1, 2), headdim=8))


@pytest.mark.parametrize("state", [F32, BF16])
def test_ring_cycles(state: torch.dtype) -> None:
    """Two cycles with the state carried: every row at its own cursor, and flushes forced at any of them.

    What lies past the cursor is poisoned anew before every step, so a flush leaves no valid row behind.
    """
    L, pos, flushes = 5, [0, 2, 4], 0
    case = make_case(nheads=2, headdim=8, dstate=16, buffer_len=L, state=state, cursors=[(w, False) for w in pos])
    gen = torch.Generator().manual_seed(1)
    for token in range(2 * L + 2):
        flush = [w == L - 1 or (token, b) in {(1, 0), (7, 1), (8, 2)} for b, w in enumerate(pos)]
        case.set_cursors(list(zip(pos, flush, strict=True)))
        for name in ("x", "B", "C"):
            case[name].copy_(torch.randn(case[name].shape, generator=gen))
        check_kernel(case)
        flushes += sum(flush)
        pos = [0 if f else w + 1 for w, f in zip(pos, flush, strict=True)]
    assert flushes == 8


def test_one_large_dt_does_not_spoil_the_weights_behind_it() -> None:
    """Weights behind a row of dt' = 200 depend on the later dt' alone; total minus prefix would cancel to noise."""
    check_kernel(make_case(act=F32, D=None, buffer_len=6, dt_ring=(200.0, 0.01, 0.3, 0.002, 0.05, 0.1),
                           dt_values=(-3.0, -5.0, -4.0), cursors=[(5, False), (4, False), (5, True)]))


@pytest.mark.parametrize("buffer_len", [1, 6])
def test_flushing_at_every_cursor(buffer_len: int) -> None:
    cursors = [(w, True) for w in range(buffer_len)]
    check_kernel(make_case(batch=buffer_len, headdim=8, buffer_len=buffer_len, cursors=cursors))


@pytest.mark.parametrize("config", [
    Mamba2TritonConfig(16, 0, 1, 16, 16, 16), Mamba2TritonConfig(32, 16, 4, 32, 32, 64),
    Mamba2TritonConfig(64, 0, 4, 64, 64, 32), Mamba2TritonConfig(8, 0, 2, 8, 64, 8)], ids=str)
def test_tilings(config: Mamba2TritonConfig) -> None:
    """Any split of a head gives the same answer: tiles, a tail, and masked rows and columns."""
    case = make_case(batch=2, nheads=2, headdim=40, dstate=40, buffer_len=6, cursors=[(5, True), (4, False)])
    problem = mamba2_problem(*case.args(), dt_softplus=True, max_cache_len=6)
    assert validate(problem, config)
    check_kernel(case, config)


def test_a_row_gives_the_same_bits_anywhere_in_a_batch() -> None:
    alone = make_case(batch=1, cursors=[(2, False)], slots=[5], pool_slots=7)
    batch = make_case(batch=4, cursors=[(1, False), (3, True), (2, False), (0, False)], slots=[2, 6, 5, 1],
                      pool_slots=7)
    for name in ("state", "x_cache", "dt_cache", "B_cache"):
        batch[name][5] = alone[name][5]
    for name in ("x", "B", "C", "dt"):
        batch.views[name].of(batch.buffers[name])[2, ..., :1 if name == "dt" else None] = \
            alone[name][0, ..., :1 if name == "dt" else None]
    for name in ("A", "dt_bias", "D"):
        batch.buffers[name].copy_(alone.buffers[name])
    for case in (alone, batch):
        run(case, *case.args())
    assert torch.equal(bits(alone["out"][0]), bits(batch["out"][2]))


@pytest.mark.parametrize("kernel", [mamba2.replay_kernel, mamba2_step.step_kernel], ids=["replay", "step"])
def test_strides_are_64_bit(kernel: Any) -> None:
    """Pools past 2^31 elements need a GPU; that every stride is declared 64 bits wide can be seen here."""
    notes = kernel.fn.__annotations__
    strides = [n for n in kernel.arg_names if n.endswith(("_slot", "_row", "_head"))]
    assert len(strides) >= 12 and all(str(notes[n]) == "int64" for n in [*strides, "null_block_id"])


def test_per_step_baseline() -> None:
    """The yardstick equals the replay step that flushes at every token, its state and output alike."""
    for options in ({}, {"z": True, "D": "full", "state": BF16, "headdim": 20, "dstate": 24}, {"D": None, "act": F32},
                    {"padded": (1,), "dt_values": EXTREME_DT}, {"headdim": 80, "dstate": 96, "nheads": 1}):
        case = make_case(buffer_len=1, cursors=[(0, True)] * 3, **options)
        before, replayed = case.clone(), case.clone()
        a = dict(zip(("state", "x", "dt", "A", "B", "C", "D", "dt_bias", "z"), case.args(), strict=False))
        mamba2_step.recurrent_step(*a.values(), case["state_batch_indices"], case.null_block_id, case["out"],
                                   dt_softplus=True)
        check(before, case)
        check_kernel(replayed)
        for name in ("state", "out"):  # both are one rounding from the oracle: at most two from each other
            torch.testing.assert_close(case[name], replayed[name], rtol=2 ** -7 if case[name].dtype == BF16 else 1e-5,
                                       atol=1e-5, equal_nan=True)


def test_softplus() -> None:
    """Relative accuracy for very negative arguments, no overflow for large ones."""
    @triton.jit
    def softplus_kernel(source, target):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 16)
        tl.store(target + at, device.softplus(tl.load(source + at)))

    raw = torch.tensor([-100.0, -60.0, -30.0, -16.0, -8.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 8.0, 19.9, 20.1, 88.0, 89.0,
                        1e4])
    got = torch.empty_like(raw)
    softplus_kernel[(1,)](raw, got)
    exact = reference.discretize(raw, None, True, torch.float64)
    error = ((got.double() - exact) / exact).abs()
    assert float(error[raw >= -8].max()) < 1e-6
    assert float(error[1:].max()) < 1e-5 and 0 <= float(got[0]) < 1e-37
    for value in (float("nan"), float("inf"), -float("inf")):
        softplus_kernel[(1,)](torch.full_like(raw, value), got)
        torch.testing.assert_close(got[0], torch.nn.functional.softplus(torch.tensor(value)), equal_nan=True)


def problem_of(headdim: int, dstate: int, state: torch.dtype, act: torch.dtype = BF16, L: int = 16,
               nheads: int = 64) -> Mamba2Problem:
    return Mamba2Problem(Mamba2Geometry(nheads, headdim, dstate, 8), L, state, act, act, act, torch.int8, torch.int32,
                         act, act)


@pytest.mark.parametrize("warp_size", [32, 64])
def test_configs_are_valid_and_cover_every_shape(warp_size: int) -> None:
    for P, N, state in itertools.product((1, 20, 32, 64, 80, 96, 112, 128, 256), (1, 16, 24, 64, 80, 128, 256),
                                         (F32, BF16)):
        problem = problem_of(P, N, state)
        config = default_config(problem, warp_size)
        assert validate(problem, config, warp_size), (P, N, config)
        assert config.rows * config.tiles(P) >= P and config.rows * (config.tiles(P) - 1) < P
        assert state_per_thread(problem.geometry, config, warp_size) <= 160
        step = default_step_config(problem.geometry, state.itemsize, warp_size)
        assert validate(problem, step, warp_size)


@pytest.mark.parametrize(("change", "reason"), [
    ({"block_p": 48}, "block_p=48 is not a power of two"), ({"tail_p": 3}, "tail_p=3"),
    ({"block_p": 256}, "do not fit"), ({"tail_p": 16, "block_p": 32}, "do not fit"),
    ({"num_warps": 32}, "exceed 512"), ({"state_n": 256}, "wider than N"), ({"num_warps": 1}, "more than 160"),
    ({"max_registers": 300}, "max_registers=300"), ({"fold_n": 4}, "splits a call of the random generator")])
def test_invalid_configs_say_why(change: dict[str, int], reason: str) -> None:
    problem = replace(problem_of(80, 128, F16), philox_rounds=10)
    assert reason in validate(problem, replace(default_config(problem), **change)).reason


def test_config_from_a_registry_row() -> None:
    config = default_config(problem_of(64, 128, F32))
    assert Mamba2TritonConfig.from_dict(config.to_dict()) == config
    for bad in ({"block_p": "64"}, {"block_q": 64}, {"block_p": True}):
        with pytest.raises(ArgumentError, match="config"):
            Mamba2TritonConfig.from_dict({"block_p": 64, **bad})


def test_backend_serves_in_the_interpreter() -> None:
    case = make_case(batch=4, padded=(2,), z=True)
    problem = mamba2_problem(*case.args(), dt_softplus=True, max_cache_len=case.buffer_len)
    assert backend.supports(problem, CPU)
    for config in (None, Mamba2TritonConfig(16, state_n=32, ring_n=32).to_dict(), {"block_p": 512}):
        step: Callable[..., object] = backend.prepare(problem, CPU, 4, config)
        check_step(case.clone(), step)


def test_a_row_takes_the_register_limit_that_stochastic_rounding_needs() -> None:
    """A row is measured without it; other programs than the heuristic's are left as they are."""
    nearest, hopper = problem_of(64, 128, F16), Arch("cuda", (9, 0), "H200")
    stochastic = replace(nearest, philox_rounds=10)
    row = replace(default_config(nearest), max_registers=0)
    assert backend.choose(nearest, hopper, 64, row.to_dict()) == row
    assert backend.choose(stochastic, hopper, 64, row.to_dict()) == replace(row, max_registers=168)
    other = replace(row, num_warps=4)
    assert backend.choose(stochastic, hopper, 64, other.to_dict()) == other


def test_backend_says_what_it_cannot_serve() -> None:
    problem = problem_of(64, 128, F32)
    assert "compute capability 8.0" in backend.supports(problem, Arch("cuda", (7, 5), "T4")).reason
    for arch in (Arch("cuda", (8, 0), "A100"), Arch("cuda", (12, 0), "RTX"), Arch("hip", name="MI300X")):
        assert backend.supports(problem, arch)


def test_arguments_are_checked() -> None:
    case = make_case()
    args = list(case.args())
    args[12] = args[12].long()
    before = case.clone()
    with pytest.raises(ArgumentError, match="write_pos"):
        run(case, *args)
    assert all(torch.equal(bits(v), bits(before.buffers[k])) for k, v in case.buffers.items())
