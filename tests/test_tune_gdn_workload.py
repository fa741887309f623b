"""The inputs, pools and cursors of a Gated DeltaNet layer that tuner and benchmarks share."""

from __future__ import annotations

import pytest
import torch

from replayssm_cute.gdn_layout import committed_records, gdn_step_bytes
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.reference import gdn_spec
from replayssm_tune.gdn_workload import GdnWorkload, accepted_of, make_gdn_workload

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SMALL = GdnGeometry(2, 4, 16, 16)
QWEN3_NEXT = GdnGeometry(16, 32)


def make(batch: int = 5, state: torch.dtype = F16, buffer_len: int = 8, **options: object) -> GdnWorkload:
    return make_gdn_workload(SMALL, batch, state, buffer_len, device="cpu", cold_bytes=1e4, **options)  # type: ignore


@pytest.mark.parametrize("batch", [1, 5, 48])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4])
def test_every_row_flushes_once_a_cycle(tokens: int, batch: int) -> None:
    w = make(batch, tokens=tokens, exact=tokens == 3)
    assert w.flushes == batch
    assert sorted(w.inputs["slots"].tolist()) == list(range(1, batch + 1)), "slot 0 is nobody's"
    assert w.pool.state.nbytes >= 1e4 and w.problem().exact_fold == (tokens == 3)
    held = torch.stack([c["write_pos"] for c in w.phases])
    held = held[:, w.inputs["slots"].long()] if tokens else held
    expected = committed_records(8, tokens, w.accepted) if tokens else list(range(8))
    assert all(sorted(column.tolist()) == expected for column in held.T)
    if tokens:
        assert expected[-1] + tokens <= 8, "the last window fits"


@pytest.mark.parametrize(("tokens", "buffer_len"), [(2, 8), (4, 16), (5, 32)])
def test_cursors_move_as_commits_move_them(tokens: int, buffer_len: int) -> None:
    w = make(tokens=tokens, buffer_len=buffer_len)
    slots = w.inputs["slots"]
    moved = {name: cursor.clone() for name, cursor in w.phases[0].items()}
    for phase in w.phases[1:]:
        gdn_spec.commit(*moved.values(), torch.full_like(slots, w.accepted), slots, -1, ring_len=buffer_len,
                        max_cache_len=buffer_len, max_spec_len=tokens, fold_every_commit=False)
        for name, cursor in phase.items():
            assert torch.equal(moved[name][slots.long()], cursor[slots.long()]), name


def test_noise_is_restored_and_tokens_are_the_same_packed_and_apart() -> None:
    w = make(tokens=2, exact=True)
    before = {**w.inputs, "state": w.pool.state, **w.pool.rings}
    before = {name: t.clone() for name, t in before.items() if name != "out"}
    w.pool.state.zero_()
    for tensor in (*w.pool.rings.values(), w.inputs["v"], w.inputs["a"]):
        tensor.zero_()
    w.restore()
    after = {**w.inputs, "state": w.pool.state, **w.pool.rings}
    assert all(torch.equal(after[name], t) for name, t in before.items())
    for name, view in zip(("q", "k", "v"), w.packed(), strict=True):
        assert torch.equal(w.inputs[name], view) and w.inputs[name].is_contiguous()


def test_dtypes_are_those_asked_for() -> None:
    w = make_gdn_workload(SMALL, 2, F32, act_dtype=F16, ring_dtype=F32, tokens=2, exact=True, device="cpu",
                          cold_bytes=0)
    problem = w.problem()
    assert (problem.state_dtype, problem.act_dtype, problem.ring_dtype) == (F32, F16, F32)
    assert w.pool.rings["rawv_cache"].dtype == F16 and len(w.pools) == 2


def test_bytes_of_a_step() -> None:
    state, vectors, heads = 32 * 128 * 128 * 4, (16 + 32) * 128, 32
    io, record = 2 * 2 * (vectors + heads), 2 * vectors + 4 * heads
    assert gdn_step_bytes(QWEN3_NEXT, 16, F32) == pytest.approx(state * 17 / 16 + record * (7.5 + 15 / 16) + io)
    assert gdn_step_bytes(QWEN3_NEXT, 16, F32, ring_dtype=F32) - gdn_step_bytes(QWEN3_NEXT, 16, F32) == pytest.approx(
        2 * vectors * (7.5 + 15 / 16))
    assert gdn_step_bytes(QWEN3_NEXT, 16, F32, replay=False) == 2 * state + io
    ring = gdn_step_bytes(QWEN3_NEXT, 16, F32, tokens=4, accepted=3)
    assert ring == pytest.approx(state * 4 / 3 + record * (6 + 4) + 4 * io)
    exact = gdn_step_bytes(QWEN3_NEXT, 16, F32, tokens=4, accepted=3, exact_fold=True)
    assert exact == pytest.approx(ring + 4 * record + 9 / 3 * 4 * heads), "raw inputs written; beta read by the fold"


def test_three_of_four_are_accepted() -> None:
    assert [accepted_of(n) for n in (0, 1, 2, 3, 4, 8, 16)] == [0, 1, 2, 3, 3, 6, 12]
    assert committed_records(16, 4, 3) == [3, 6, 9] and committed_records(32, 16, 12) == [12]
