"""The choice between candidates, with a pretended laboratory: right before fast, in turns, resumed where it stopped."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replayssm_cute.types import SUPPORTED, Mamba2Geometry
from replayssm_tune.journal import Journal
from replayssm_tune.plan import Point, Unit
from replayssm_tune.process import Lost
from replayssm_tune.search import FEWEST_ROUNDS, ROUNDS, Bench, Trial, per_step, search

POINT = Point(Mamba2Geometry(64, 64, 128, 8), "float16", 16, 64)


class Lab:
    """Answers like the process with the GPU; ``times``: samples of a candidate in turn, the last one for ever."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.errors: dict[str, float] = {}
        self.asked: list[tuple[str, str]] = []

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        do, name = request["do"], request["config"].get("name", "per step")
        self.asked.append((do, name))
        if name == "crash" or (name == "late" and len(self.asked) > 4):
            raise Lost("its process was killed by signal 11")
        if do == "check":
            return {"error": self.errors.get(name, 1e-3)}
        done = sum(asked == (do, name) for asked in self.asked) - 1
        return {"us": self.times[name][min(done, len(self.times[name]) - 1)]}


@pytest.fixture
def lab() -> Iterator[Lab]:
    yield Lab()


def bench(lab: Lab, folder: Path, **device: Any) -> Bench:
    return Bench(lab, Journal(folder), {"device": "NVIDIA_H200", "build": "b", **device}, 60.0)  # type: ignore[arg-type]


def run(bench: Bench, *names: str, seconds: float = 60.0, ready: Any = lambda config: None) -> Any:
    unit = Unit(POINT, "cute", SUPPORTED, tuple({"name": name} for name in names))
    told: list[Trial] = []
    found = search(bench, unit, time.monotonic() + seconds, ready, told.append)
    return found, {trial.config["name"]: trial.fault for trial in told}


def test_the_fastest_right_candidate_wins(lab: Lab, tmp_path: Path) -> None:
    lab.times = {"default": [10.0], "wrong": [1.0], "good": [9.5], "slow": [20.0], "nan": [1.0]}
    lab.errors = {"wrong": 1.0, "nan": float("nan")}
    found, faults = run(bench(lab, tmp_path), "default", "crash", "wrong", "nan", "good", "slow")
    assert found == {"config": {"name": "good"}, "us": 9.5, "runner_up": {"config": {"name": "default"}, "us": 10.0}}
    assert faults == {"default": None, "crash": "its process was killed by signal 11", "wrong": "wrong by 1.0e+00",
                      "nan": "wrong by nan", "good": None, "slow": None}
    assert not {("sample", "wrong"), ("sample", "nan")} & set(lab.asked), "what is wrong is not timed"
    assert lab.asked.count(("sample", "slow")) == 1, "what is far behind is not timed again"


def test_finalists_are_sampled_in_turns_and_the_median_counts(lab: Lab, tmp_path: Path) -> None:
    lab.times = {"default": [10.0], "lucky": [9.2, 12.0, 12.0, 12.0, 12.0], "good": [9.6, 9.6, 30.0, 9.5, 9.7]}
    found, _ = run(bench(lab, tmp_path), "default", "lucky", "good")
    assert found["config"] == {"name": "good"} and found["us"] == 9.6
    rounds = [name for do, name in lab.asked if do == "sample"]
    assert rounds == ["default", "lucky", "good"] * ROUNDS


def noisy(times: dict[str, float], seed: int, spread: float) -> dict[str, list[float]]:
    """Samples of every candidate, each off by up to ``spread``."""
    dice = random.Random(seed)
    return {name: [us * (1 + dice.uniform(-spread, spread)) for _ in range(ROUNDS)] for name, us in times.items()}


def test_noise_does_not_decide(tmp_path: Path) -> None:
    """Fifty tunings whose samples spread by 0.4% in all, as on an H200: one choice, whichever has the least median."""
    true, least, chosen = {"default": 10.0, "a": 9.99, "b": 9.98, "c": 10.01, "slow": 10.4}, set(), set()
    for seed in range(50):
        lab = Lab()
        lab.times = noisy(true, seed, 0.002)
        least.add(min(true, key=lambda name: statistics.median(lab.times[name])))
        (tmp_path / str(seed)).mkdir()
        chosen.add(run(bench(lab, tmp_path / str(seed)), *true)[0]["config"]["name"])
    assert chosen == {"default"} and len(least) > 1


def test_two_tunings_choose_within_2_percent(tmp_path: Path) -> None:
    """Also where the samples spread by 1% and candidates lie everywhere around the edge of a tie."""
    true = {"default": 10.0, **{f"c{i}": 9.98 - 0.02 * i for i in range(20)}}
    chosen = set()
    for seed in range(50):
        lab = Lab()
        lab.times = noisy(true, seed, 0.005)
        (tmp_path / str(seed)).mkdir()
        chosen.add(run(bench(lab, tmp_path / str(seed)), *true)[0]["config"]["name"])
    times = [true[name] for name in chosen]
    assert len(times) > 1 and max(times) / min(times) <= 1.02


def test_a_tie_goes_to_the_first_in_the_heuristics_order_and_is_written_down(lab: Lab, tmp_path: Path) -> None:
    lab.times = {"default": [10.2], "early": [10.05], "fast": [10.0], "last": [10.02]}
    found, _ = run(bench(lab, tmp_path), "default", "early", "fast", "last")
    assert found == {"config": {"name": "early"}, "us": 10.05, "runner_up": {"config": {"name": "fast"}, "us": 10.0}}
    for _ in range(2):
        run(bench(lab, tmp_path), "default", "early", "fast", "last")
    assert bench(lab, tmp_path).recorded("choose", POINT, "cute", {}) == [
        {"chosen": {"name": "early"}, "tied": [{"config": {"name": "early"}, "us": 10.05},
                                               {"config": {"name": "fast"}, "us": 10.0},
                                               {"config": {"name": "last"}, "us": 10.02}]}]
    lab.times["default"] = [10.11]
    (tmp_path / "clear").mkdir()
    found, _ = run(bench(lab, tmp_path / "clear"), "default", "early", "fast")
    assert found["config"] == {"name": "early"}, "1.1% are a difference"
    lab.times["fast"] = [9.0]
    (tmp_path / "alone").mkdir()
    assert run(bench(lab, tmp_path / "alone"), "default", "fast")[0]["config"] == {"name": "fast"}
    assert not bench(lab, tmp_path / "alone").recorded("choose", POINT, "cute", {}), "no tie"


def test_one_lucky_sample_ties_with_nobody(lab: Lab, tmp_path: Path) -> None:
    """A candidate that is no finalist, for one far too fast first sample of another, is not the choice."""
    lab.times = {"default": [10.0], "single": [10.0], "glitch": [8.0, 10.0]}
    found, _ = run(bench(lab, tmp_path), "default", "single", "glitch")
    assert found["config"] == {"name": "default"} and lab.asked.count(("sample", "single")) == 1
    found, _ = run(bench(lab, tmp_path), "default", "single", "glitch")
    assert found["runner_up"] == {"config": {"name": "glitch"}, "us": 10.0}


def test_the_heuristic_is_a_finalist_however_slow(lab: Lab, tmp_path: Path) -> None:
    lab.times = {"default": [20.0], "good": [9.0]}
    run(bench(lab, tmp_path), "default", "good")
    assert lab.asked.count(("sample", "default")) == ROUNDS, "the row must be comparable with it"


def test_a_crash_in_a_later_round_takes_the_candidate_out(lab: Lab, tmp_path: Path) -> None:
    lab.times = {"default": [10.0], "late": [9.0]}
    found, _ = run(bench(lab, tmp_path), "default", "late")
    assert found == {"config": {"name": "default"}, "us": 10.0, "runner_up": None}
    assert lab.asked.count(("sample", "late")) == 2, "it is not asked again"


def test_without_time_the_heuristic_alone_is_measured(lab: Lab, tmp_path: Path) -> None:
    lab.times = {"default": [10.0], "good": [8.0]}
    found, _ = run(bench(lab, tmp_path), "default", "good", seconds=-1.0)
    assert found == {"config": {"name": "default"}, "us": 10.0, "runner_up": None}
    assert len(lab.asked) == 1 + FEWEST_ROUNDS
    again = bench(lab, tmp_path)
    assert run(again, "default", "good")[0]["config"] == {"name": "good"}, "more time goes on with the others"


def test_what_does_not_compile_never_reaches_the_gpu(lab: Lab, tmp_path: Path) -> None:
    def ready(config: dict[str, Any]) -> None:
        if config["name"] == "broken":
            raise Lost("does not compile")

    lab.times = {"default": [10.0]}
    found, faults = run(bench(lab, tmp_path), "broken", "default", ready=ready)
    assert faults["broken"] == "does not compile" and found["config"] == {"name": "default"}
    assert {name for _, name in lab.asked} == {"default"}


@pytest.mark.parametrize("stop", range(14))
def test_a_search_that_was_killed_anywhere_goes_on_there(lab: Lab, tmp_path: Path, stop: int) -> None:
    """Nothing that was measured is measured again, and the choice is that of a search that was not killed."""
    class Killed(Exception):
        pass

    class Mortal(Lab):
        def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
            if len(self.asked) == stop:
                raise Killed
            return super().ask(request, timeout)

    names, mortal = ("default", "crash", "good"), Mortal()
    mortal.times = lab.times = {"default": [10.0], "good": [9.5]}
    (tmp_path / "whole").mkdir()
    whole = run(bench(lab, tmp_path / "whole"), *names)
    total = len(lab.asked)
    assert total == 1 + 2 * (1 + ROUNDS) and stop <= total
    if stop < total:
        with pytest.raises(Killed):
            run(bench(mortal, tmp_path), *names)
    else:
        run(bench(mortal, tmp_path), *names)
    lab.asked.clear()
    assert run(bench(lab, tmp_path), *names) == whole
    assert len(lab.asked) == total - stop


def test_a_kernel_is_checked_once_for_all_batches(lab: Lab, tmp_path: Path) -> None:
    lab.times, lab.errors = {"default": [10.0], "wrong": [1.0]}, {"wrong": 1.0}
    for batch in (1, 8):
        unit = Unit(replace(POINT, batch=batch), "cute", SUPPORTED, ({"name": "default"}, {"name": "wrong"}))
        found = search(bench(lab, tmp_path), unit, time.monotonic() + 60, lambda config: None, lambda trial: None)
        assert found and found["config"] == {"name": "default"}
    assert lab.asked.count(("check", "default")) == lab.asked.count(("check", "wrong")) == 1
    assert lab.asked.count(("sample", "default")) == 2 * ROUNDS


def test_measurements_of_other_code_do_not_count(lab: Lab, tmp_path: Path) -> None:
    lab.times = {"default": [10.0], "per step": [40.0]}
    for device in ({}, {"build": "c"}, {"device": "NVIDIA_B200"}):
        lab.asked.clear()
        run(bench(lab, tmp_path, **device), "default")
        assert per_step(bench(lab, tmp_path, **device), POINT) == 40.0
        assert len(lab.asked) == 1 + ROUNDS + 1
    lab.asked.clear()
    assert per_step(bench(lab, tmp_path), POINT) == 40.0 and not lab.asked


def test_a_baseline_that_fails_is_absent(tmp_path: Path) -> None:
    class Broken(Lab):
        def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
            raise Lost("out of memory")
    assert per_step(bench(Broken(), tmp_path), POINT) is None
