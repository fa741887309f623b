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
    DEVICES,
    LATENCY_US,
    SHARPNESS,
    Parameters,
    Step,
    calibrate,
    limits_us,
    measured,
    step_us,
)
from replayssm_cute.kernels.mamba2_config import Mamba2Config
from replayssm_cute.types import Mamba2Geometry

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "h200"


@functools.cache
def rows() -> list[dict[str, Any]]:
    return nearest(load([str(RESULTS / f"{name}.json") for name in ("nano", "others")]))


@functools.cache
def parameters() -> Parameters:
    return calibrate(rows())


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


def test_calibration_reads_one_geometry_only() -> None:
    others = [{**row, "backends": {"cute": {**row["backends"]["cute"], "us": 1.0}}} if row["geometry"] != CALIBRATION
              else row for row in rows()]
    assert calibrate(others) == parameters()


def test_a_wrong_bandwidth_does_not_pass() -> None:
    wrong = replace(parameters(), copy_share=0.7 * parameters().copy_share)
    steps = measured([row for row in rows() if row["batch"] >= 64])
    assert all(step_us(step, DEVICES["H200"], wrong) / us > 1.15 for step, us in steps)


def test_parameters_are_physical() -> None:
    p = parameters()
    assert 0 < p.start < 4 and 0 < p.tail < 4 and 0.8 < p.copy_share < 1
    assert min(SHARPNESS) < p.sharpness < max(SHARPNESS), "not at the edge of what was tried"


def test_the_limits_follow_from_the_step() -> None:
    config = Mamba2Config("bulk", 64, 128, min_ctas=3, stages=2)
    step = Step(Mamba2Geometry(64, 64, 128, 8), 16, torch.float16, 256, config)
    memory, issue, latency = limits_us(step, DEVICES["H200"], 0.5)
    assert memory == pytest.approx(313_159_680 / 2.4e6)          # bytes of the benchmark, at 2.4 TB/s
    assert latency == pytest.approx(LATENCY_US * 256 * 64 / (132 * 6))        # rounds of items in flight
    twice = limits_us(replace(step, batch=512), DEVICES["H200"], 0.5)
    assert twice == pytest.approx((2 * memory, 2 * issue, 2 * latency))
    small = limits_us(replace(step, batch=1), DEVICES["H200"], 0.5)
    assert small[2] == LATENCY_US


@pytest.mark.parametrize("device", ["B200", "B300"])
def test_a_blackwell_is_faster_but_not_beyond_its_bandwidth(device: str) -> None:
    for step, _ in measured([row for row in rows() if row["batch"] >= 64]):
        here, there = (step_us(step, DEVICES[name], parameters()) for name in ("H200", device))
        assert step.nbytes / (DEVICES[device].hbm_tbs * 1e6) < there < here
