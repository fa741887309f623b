"""The speed model against the times measured on an H200, and what it says where nothing was measured."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.report import load, nearest
from benchmarks.speed_model import (
    CALIBRATION,
    OPTIONS,
    SHARPNESS,
    SHOWN_OF_OPTIONS,
    calibrate,
    calibration,
    chosen_on,
    measured,
    of,
    option_table,
)
from replayssm_cute.kernels.mamba2_config import Mamba2Config
from replayssm_cute.types import Mamba2Geometry
from replayssm_tune import speed_model
from replayssm_tune.speed_model import DEVICES, LATENCY_US, Parameters, Step, issue_counts, limits_us, step_us

UNSET = Mamba2Config("", 0, 0)
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "h200"


@functools.cache
def report() -> dict[str, Any]:
    return load([str(path) for path in sorted(RESULTS.glob("*.json"))])


def rows() -> list[dict[str, Any]]:
    """Rounded to nearest, of checkpoints that are no codes."""
    return nearest(report())


@functools.cache
def parameters() -> Parameters:
    return of(report())


def errors(geometry: str | None = None, least: int = 64) -> list[float]:
    """Relative errors of the prediction from a batch on, of one geometry or of those that were not calibrated on."""
    chosen = [row for row in rows() if row["batch"] >= least and
              (row["geometry"] == geometry if geometry else row["geometry"] != CALIBRATION)]
    return [step_us(step, DEVICES["H200"], parameters()) / us - 1 for step, us in measured(chosen)]


@pytest.mark.parametrize("geometry", [CALIBRATION, None])
def test_large_batches_are_predicted_within_15_percent(geometry: str | None) -> None:
    found = errors(geometry)
    assert len(found) >= 12
    assert max(map(abs, found)) < 0.15


@pytest.mark.parametrize("rounds", [5, 10])
def test_stochastic_rounding_is_predicted_within_5_percent(rounds: int) -> None:
    steps = measured([row for row in report()["rows"] if row["philox_rounds"] == rounds
                      and row["state_dtype"] in ("float16", "bfloat16")])
    assert len(steps) >= 2 and {step.philox_rounds for step, _ in steps} == {rounds}
    assert max(abs(step_us(step, DEVICES["H200"], parameters()) / us - 1) for step, us in steps) < 0.05


@pytest.mark.parametrize("state", ["int8", "float8_e4m3fn"])
def test_eight_bit_checkpoints_are_predicted_within_15_percent(state: str) -> None:
    """With one parameter of their own; without it they take 16 to 41% longer than predicted."""
    steps = measured([row for row in report()["rows"] if row["state_dtype"] == state and row["batch"] >= 64])
    assert len(steps) >= 4
    p = parameters()
    assert max(abs(step_us(step, DEVICES["H200"], p) / us - 1) for step, us in steps) < 0.15
    assert min(us / step_us(step, DEVICES["H200"], replace(p, coded=1.0)) for step, us in steps) > 1.05


@pytest.mark.parametrize(("state", "batch", "us"), [
    (torch.bfloat16, 1, 2.80), (torch.bfloat16, 4, 4.1), (torch.bfloat16, 8, 5.6), (torch.float32, 1, 3.11)])
def test_the_register_design_is_predicted_within_15_percent(state: torch.dtype, batch: int, us: float) -> None:
    """What docs/performance.md says was measured of it, with bf16 inputs: as many bytes as with fp16."""
    step = Step(Mamba2Geometry(64, 64, 128, 8), 16, state, batch, UNSET, act_dtype=torch.float16)
    step = chosen_on(step, DEVICES["H200"])
    assert step.config.design == "register"
    assert step_us(step, DEVICES["H200"], parameters()) == pytest.approx(us, rel=0.15)


def test_calibration_reads_one_geometry_only() -> None:
    others = [{**row, "backends": {"cute": {**row["backends"]["cute"], "us": 1.0}}} if row["geometry"] != CALIBRATION
              else row for row in rows()]
    assert replace(calibrate(others), coded=parameters().coded) == parameters()


def test_a_wrong_bandwidth_does_not_pass() -> None:
    wrong = replace(parameters(), copy_share=0.7 * parameters().copy_share)
    steps = measured([row for row in rows() if row["batch"] >= 64])
    assert all(step_us(step, DEVICES["H200"], wrong) / us > 1.15 for step, us in steps)


def test_the_committed_calibration_is_that_of_the_measurements() -> None:
    assert speed_model.calibrated() == calibration(report()) and speed_model.parameters() == parameters()


def test_the_margin_follows_from_the_error() -> None:
    """Two predictions that are each off by as much as was measured cannot change places across it."""
    for batch in (1, 32, 64, 512):
        error = speed_model.calibrated()["error"]["large" if batch >= 64 else "small"]
        fast, slow = 1.0, (1 + speed_model.margin(batch)) * 1.0001
        assert slow / (1 + error) > fast / (1 - error) and 0.02 < error < 0.2
    assert speed_model.margin(64) < speed_model.margin(32)


def test_parameters_are_physical() -> None:
    p = parameters()
    assert 0 < p.start < 4 and 0 < p.tail < 4 and 0.8 < p.copy_share < 1 and 1 < p.coded < 2.5
    assert min(SHARPNESS) < p.sharpness < max(SHARPNESS), "not at the edge of what was tried"


def test_the_limits_follow_from_the_step() -> None:
    config = Mamba2Config("bulk", 64, 128, min_ctas=3, stages=2)
    step = Step(Mamba2Geometry(64, 64, 128, 8), 16, torch.float16, 256, config)
    memory, issue, shared, latency = limits_us(step, DEVICES["H200"], 0.5)
    assert memory == pytest.approx(313_159_680 / 2.4e6)          # bytes of the benchmark, at 2.4 TB/s
    assert latency == pytest.approx(LATENCY_US * 256 * 64 / (132 * 6))        # rounds of items in flight
    counts = issue_counts()["sm_90a"]["64x128 float16 tile=64"]
    assert shared / issue == pytest.approx(4 * counts["wavefronts"] / counts["issued"])
    twice = limits_us(replace(step, batch=512), DEVICES["H200"], 0.5)
    assert twice == pytest.approx((2 * memory, 2 * issue, 2 * shared, 2 * latency))
    small = limits_us(replace(step, batch=1), DEVICES["H200"], 0.5)
    assert small[3] == LATENCY_US
    halves = limits_us(replace(step, config=replace(config, tile_p=32, threads=64)), DEVICES["H200"], 0.5)
    assert halves[0] == memory and halves[3] == pytest.approx(2 * latency), "as many items hold half the bytes"
    assert halves[1] > issue and halves[2] > shared, "each half takes the weights of the window"


def test_every_option_has_its_prediction() -> None:
    lines = option_table(report()).splitlines()[2:]
    assert len(lines) == len(OPTIONS) * len(SHOWN_OF_OPTIONS)
    # Stochastic rounding to two types, by 5 and 10 rounds, at batch 64, 256 and 512; four kinds of codes at two.
    assert sum("not measured" not in line for line in lines) == 2 * 2 * 3 + 4 * 2


@pytest.mark.parametrize("device", ["B200", "B300"])
def test_a_blackwell_is_faster_but_not_beyond_its_bandwidth(device: str) -> None:
    for step, _ in measured([row for row in rows() if row["batch"] >= 64]):
        here, there = (step_us(step, DEVICES[name], parameters()) for name in ("H200", device))
        assert step.nbytes / (DEVICES[device].hbm_tbs * 1e6) < there < here
