"""The process that owns the GPU on Gated DeltaNet steps, on the CPU: what it checks is real, but the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm_cute.backends import gdn_torch
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_tune import lab, measure, timing
from replayssm_tune.operations import OPERATIONS
from replayssm_tune.plan import Point
from tests.test_tune_lab import Capture, calls

DECODE = Point(GdnGeometry(1, 2, 32, 16), "float32", 8, 3, "gdn_decode")
VERIFY = replace(DECODE, op="gdn_verify", tokens=2, fold="exact", state_dtype="bfloat16")
POINTS = [DECODE, replace(DECODE, ring_dtype="float32", state_dtype="float16"), VERIFY, replace(VERIFY, fold="ring"),
          replace(VERIFY, tokens=4, state_dtype="float32")]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> lab.Lab:
    monkeypatch.setattr(timing, "Capture", Capture)
    monkeypatch.setattr(measure, "Capture", Capture)
    return lab.Lab("cpu", cold_bytes=1e5)


def request(do: str, point: Point, **config: Any) -> dict[str, Any]:
    return {"do": do, "point": point.to_dict(), "backend": "torch", "config": config}


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_right_candidate_passes_and_is_asked_the_same_again(here: lab.Lab, point: Point) -> None:
    errors = [here.answer(request("check", point, n=n))["error"] for n in range(2)]
    assert errors[0] == errors[1] < measure.OUTPUT_ERROR, "bf16 rounding is 1.7e-3"


@pytest.mark.parametrize("spoil", ["out", "checkpoint", "another checkpoint", "record", "nothing written", "nan"])
@pytest.mark.parametrize("point", [DECODE, VERIFY], ids=str)
def test_a_wrong_candidate_does_not(here: lab.Lab, monkeypatch: pytest.MonkeyPatch, spoil: str, point: Point) -> None:
    """Also one that is wrong only in the checkpoint or in a record, which later steps read."""
    real, out = gdn_torch.prepare(point.problem, lab.archs.CPU), 14 if point.tokens else 15

    def wrong(*args: Any) -> None:
        if spoil == "nothing written":
            return
        before = args[8].clone()
        real(*args)
        if spoil == "checkpoint":
            args[0][1:] *= 1.02
        elif spoil == "another checkpoint":
            args[0][0] += 0.02
        elif spoil == "record":
            args[8].copy_(torch.where(args[8] == before, before, args[8] * 1.05))
        elif spoil == "out":
            args[out].mul_(1.05)
        else:
            args[out][0, 0, 0] = float("nan")

    monkeypatch.setattr(gdn_torch, "prepare", lambda *args: wrong)
    assert not here.answer(request("check", point))["error"] < measure.OUTPUT_ERROR


@pytest.mark.parametrize("point", [DECODE, VERIFY], ids=str)
def test_a_sample_is_a_whole_cycle_over_all_pools(here: lab.Lab, point: Point) -> None:
    calls.clear()
    assert here.answer(request("sample", point)) == {"us": 1.0}
    w = here._workload_of(point)
    cycle = {DECODE: 8, VERIFY: 3}[point]  # of T = 2, two kept: 2, 4 and 6 records
    assert calls == [cycle * len(w.pools)] and len(w.phases) == cycle and len(w.pools) >= 2


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_point_survives_its_journey_and_poses_the_problem_of_the_workload(here: lab.Lab, point: Point) -> None:
    """What is compiled ahead is then what the process with the GPU asks for."""
    assert Point.from_dict(point.to_dict()) == point
    assert here._workload_of(point).problem() == point.problem
    assert point.problem.op == point.op


def test_windows_have_no_per_step_baseline() -> None:
    assert OPERATIONS["gdn_verify"].per_step_us(OPERATIONS["gdn_verify"].make(VERIFY, 2, "cpu", 0)) is None
