"""The process that owns the GPU, on the CPU: what it checks and times is real, but the clock and the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replayssm_cute import dispatch
from replayssm_cute.backends import torch as torch_backend
from replayssm_cute.types import Mamba2Geometry
from replayssm_tune import lab, measure, run, timing
from replayssm_tune.plan import Point
from replayssm_tune.process import Child, Lost

POINT = Point(Mamba2Geometry(2, 16, 64, 1), "float16", 8, 3)
calls: list[int] = []


class Capture:
    """Stands in for a captured graph: counts its launches and says that each takes a microsecond."""

    def __init__(self, step: Callable[[], None], calls: int, min_ms: float = 4.0) -> None:
        self.step, self.calls = step, calls

    def sample(self) -> float:
        self.step()
        calls.append(self.calls)
        return 1.0


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> lab.Lab:
    monkeypatch.setattr(timing, "Capture", Capture)
    monkeypatch.setattr(measure, "Capture", Capture)
    return lab.Lab("cpu", cold_bytes=1e5)


def request(do: str, point: Point = POINT, **config: Any) -> dict[str, Any]:
    return {"do": do, "point": point.to_dict(), "backend": "torch", "config": config}


def test_a_right_candidate_passes(here: lab.Lab) -> None:
    assert here.answer(request("check"))["error"] < measure.OUTPUT_ERROR / 4


@pytest.mark.parametrize("spoil", ["out", "checkpoint", "another checkpoint", "nothing written", "nan"])
def test_a_wrong_candidate_does_not(here: lab.Lab, monkeypatch: pytest.MonkeyPatch, spoil: str) -> None:
    """Also one that is wrong only in the checkpoint, which is written on a flush and never rebuilt."""
    real = torch_backend.prepare(POINT.problem, lab.archs.CPU, 3, None)

    def wrong(*args: Any) -> None:
        if spoil == "nothing written":
            return
        real(*args)
        flushed = args[14][args[13].bool()].long()
        if spoil == "checkpoint":
            args[0][flushed] *= 1.02
        elif spoil == "another checkpoint":
            args[0][0] *= 1.02
        elif spoil == "out":
            args[16][0] *= 1.05
        else:
            args[16][0, 0, 0] = float("nan")

    monkeypatch.setattr(torch_backend, "prepare", lambda *args: wrong)
    assert not here.answer(request("check"))["error"] < measure.OUTPUT_ERROR


def test_every_candidate_is_asked_the_same(here: lab.Lab) -> None:
    errors = {here.answer(request("check", n=n))["error"] for n in range(3)}
    assert len(errors) == 1, "the pools are restored in between"


def test_a_sample_is_a_whole_ring_cycle_over_all_pools(here: lab.Lab) -> None:
    calls.clear()
    assert here.answer(request("sample")) == {"us": 1.0}
    w = here._workload_of(POINT)
    assert calls == [8 * len(w.pools)] and len(w.pools) >= 2
    before = w.pools[0].state.clone()
    here.answer(request("sample"))
    assert here._workload_of(POINT) is w, "the point is the same"
    w.restore()
    assert not torch.equal(before, w.pools[0].state), "a cycle changes the checkpoints"
    other = dataclasses.replace(POINT, batch=5)
    here.answer(request("sample", other))
    assert here._workload_of(other).batch == 5 and len(here._captures) == 1, "the graphs of the old pools are gone"


def test_a_point_survives_its_journey_and_poses_the_problem_of_the_workload(here: lab.Lab) -> None:
    """What is compiled ahead is then what the process with the GPU asks for."""
    for geometry in (Mamba2Geometry(2, 24, 64, 1), Mamba2Geometry(3, 16, 32, 3)):
        for buffer_len in (5, 16):
            point = Point(geometry, "float32", buffer_len, 4)
            assert Point.from_dict(point.to_dict()) == point
            assert here._workload_of(point).problem() == point.problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_real_process_starts_and_says_that_it_has_no_gpu() -> None:
    child = Child(run.LAB)
    with pytest.raises(Lost, match=r"(?i)cuda|nvidia"):
        child.ask({"do": "device"}, 60)
    child.close()


def test_it_describes_device_and_code(here: lab.Lab) -> None:
    about = here.answer({"do": "device"})
    assert about["arch"] == dataclasses.asdict(lab.archs.CPU) and about["build"] == lab.build()
    assert len(about["build"]) == 16 and dispatch.OP == "mamba2_decode"
