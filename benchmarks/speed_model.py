"""The speed model beside what was measured: its calibration, and tables of what it predicts.

    python -m benchmarks.speed_model benchmarks/results/h200/*.json

calibrates the model of ``replayssm_tune/speed_model.py``, writes its parameters and its error to
``replayssm_tune/speed_model.json``, and the tables between ``<!-- model -->`` or ``<!-- model of options -->`` and
``<!-- end -->`` in docs/performance.md.

``start``, ``tail`` and p are calibrated by least squares of the relative error on one geometry, 64x64x128 in 8
groups, in the bulk design with checkpoints of 2 and 4 bytes, rounded to nearest, at all batches; ``coded`` after
them on 8-bit checkpoints from batch 64 on. Everything else validates them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from benchmarks.report import DOCS, fill, load, nearest
from replayssm_cute.kernels.mamba2_config import Mamba2Config, default_config
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.rounding import LARGEST_CODE
from replayssm_tune.cli import parse_geometry
from replayssm_tune.speed_model import (
    CALIBRATED,
    DEVICES,
    LARGE_BATCH,
    Device,
    Parameters,
    Step,
    flushing,
    limits_us,
    name_of,
    norm,
    step_us,
)
from tests.compiled_kernels import make_problem

CALIBRATION = "64x64x128/8"
SHARPNESS = np.arange(1.5, 6.01, 0.25).tolist()    # what is tried for p
CODED = np.arange(1.0, 3.0, 0.01).tolist()         # and for coded
SHOWN = (1, 8, 64, 256, 512)    # batches of the table
SHOWN_OF_OPTIONS = (1, 64, 256, 512)
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
#: (checkpoint, rounds, inputs): stochastic rounding, 8-bit checkpoints, and what takes the register design.
OPTIONS = (*((state, rounds, bf16) for state in (f16, bf16) for rounds in (5, 10)),
           *((code, rounds, bf16) for code in LARGEST_CODE for rounds in (0, 5)),
           *((state, 0, f16) for state in (f32, f16, bf16)))


def measured(rows: list[dict[str, Any]]) -> list[tuple[Step, float]]:
    """The steps of benchmark rows with their microseconds."""
    found = []
    for row in rows:
        cute = row["backends"].get("cute")
        if cute is None:
            continue
        step = Step(parse_geometry(row["geometry"]), row["buffer_len"], getattr(torch, row["state_dtype"]),
                    row["batch"], Mamba2Config.from_dict(cute["config"]), row["philox_rounds"])
        found.append((step, cute["us"]))
    return found


def calibrate(rows: list[dict[str, Any]]) -> Parameters:
    """The parameters that predict the rows of ``CALIBRATION`` best, in four decimals.

    ``start`` and ``tail`` are linear and solved for, ``sharpness`` is searched.
    """
    chosen = [row for row in rows if row["geometry"] == CALIBRATION]
    points, device = measured(chosen), DEVICES["H200"]
    copy_share = float(np.median([row["copy_gbps"] for row in chosen])) / (1000 * device.hbm_tbs)
    us = np.array([time for _, time in points])
    linear = np.array([(1, flushing(step)) for step, _ in points]) / us[:, None]

    def fit(sharpness: float) -> tuple[float, Parameters]:
        body = np.array([norm(limits_us(step, device, copy_share), sharpness) for step, _ in points])
        (start, tail), *_ = np.linalg.lstsq(linear, 1 - body / us, rcond=None)
        error = linear @ (start, tail) + body / us - 1
        return float(error @ error), Parameters(float(start), float(tail), sharpness, copy_share)

    best = min(map(fit, SHARPNESS), key=lambda found: found[0])[1]
    return Parameters(**{name: round(value, 4) for name, value in asdict(best).items()})


def with_coded(rows: list[dict[str, Any]], p: Parameters) -> Parameters:
    """The parameters with the ``coded`` that predicts large batches of 8-bit checkpoints best; as they are without."""
    points = [(step, us) for step, us in measured(rows) if step.batch >= LARGE_BATCH]

    def error(coded: float) -> float:
        return sum((step_us(step, DEVICES["H200"], replace(p, coded=coded)) / us - 1) ** 2 for step, us in points)

    return replace(p, coded=round(min(CODED, key=error), 2)) if points else p


def errors(rows: list[dict[str, Any]], p: Parameters) -> dict[str, float]:
    """Largest relative error of the rows' times, in three decimals: of ``small`` and of ``large`` batches."""
    found = [(step.batch, abs(step_us(step, DEVICES["H200"], p) / us - 1)) for step, us in measured(rows)]
    return {"small": round(max(error for batch, error in found if batch < LARGE_BATCH), 3),
            "large": round(max(error for batch, error in found if batch >= LARGE_BATCH), 3)}


def of(report: dict[str, Any]) -> Parameters:
    """The parameters that a report's rows give."""
    return with_coded([row for row in report["rows"] if getattr(torch, row["state_dtype"]) in LARGEST_CODE],
                      calibrate(nearest(report)))


def calibration(report: dict[str, Any]) -> dict[str, Any]:
    """What ``speed_model.json`` holds; see ``speed_model.calibrated``."""
    rows = nearest(report)
    p = of(report)
    named = ("device", "date", "torch", "cutlass_dsl")
    provenance = {name: report["provenance"][name] for name in named}
    return {"parameters": asdict(p), "error": errors(rows, p),
            "provenance": {**provenance, "date": provenance["date"][:10]}}


def chosen_on(step: Step, device: Device) -> Step:
    """The step with the heuristic's choice on a device."""
    g = step.geometry
    problem = make_problem((g.nheads, g.headdim, g.dstate, g.ngroups), step.state_dtype, step.buffer_len,
                           step.act_dtype, philox_rounds=step.philox_rounds)
    config = default_config(problem, step.batch, TARGETS[device.target])
    assert config is not None
    return replace(step, config=config)


def predicted(step: Step, device: Device, p: Parameters) -> str:
    """Microseconds, and what limits the body."""
    limits = limits_us(step, device, p.copy_share, p.coded)
    return f"{step_us(step, device, p):.1f} ({', '.join(f'{limit:.1f}' for limit in limits)})"


def cells(step: Step, us: float | None, p: Parameters) -> list[str]:
    """Measured and predicted on the H200, the error, and predictions elsewhere."""
    model = step_us(step, DEVICES["H200"], p)
    here = ["not measured", predicted(step, DEVICES["H200"], p), ""] if us is None else \
        [f"{us:.2f}", f"{model:.2f}", f"{100 * (model / us - 1):+.1f}%"]
    return here + [predicted(chosen_on(step, DEVICES[name]), DEVICES[name], p) for name in ("B200", "B300")]


def markdown(columns: tuple[str, ...], lines: list[list[str]]) -> str:
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|",
                      *(f"| {' | '.join(line)} |" for line in lines)])


RESULTS = ("H200 measured", "H200 model", "error", "B200 predicted", "B300 predicted")


def table(report: dict[str, Any]) -> str:
    """A Markdown table: measured and predicted on the H200, predicted elsewhere."""
    p = of(report)
    head = (f"Microseconds; in brackets what memory, issue, shared memory and latency alone would take. Calibrated on "
            f"{CALIBRATION}: start {p.start:.2f} us, tail {p.tail:.2f} us, p = {p.sharpness:.2f}; a copy reaches "
            f"{100 * p.copy_share:.1f}% of the HBM's bandwidth.")
    lines = [[str(step.geometry), name_of(step.state_dtype), str(step.batch), *cells(step, us, p)]
             for step, us in measured(nearest(report)) if step.batch in SHOWN]
    return f"{head}\n\n{markdown(('layer', 'state', 'batch', *RESULTS), lines)}"


def option_table(report: dict[str, Any]) -> str:
    """The same of ``OPTIONS`` on the calibration's layer, where they were measured or not."""
    p, lines = of(report), []
    of_layer = [found for found in measured(report["rows"]) if str(found[0].geometry) == CALIBRATION]
    for state, rounds, act in OPTIONS:
        for batch in SHOWN_OF_OPTIONS:
            bare = Step(parse_geometry(CALIBRATION), 16, state, batch, Mamba2Config("", 0, 0), rounds, act)
            step = chosen_on(bare, DEVICES["H200"])
            key = (state, rounds, act, batch)
            held = [(s, us) for s, us in of_layer if (s.state_dtype, s.philox_rounds, s.act_dtype, s.batch) == key]
            step, us = held[0] if held else (step, None)
            lines.append([name_of(state), str(rounds or "no"), name_of(act), str(batch), *cells(step, us, p)])
    return markdown(("state", "SR rounds", "inputs", "batch", *RESULTS), lines)


def main() -> None:
    report = load(sys.argv[1:])
    CALIBRATED.write_text(json.dumps(calibration(report), indent=1) + "\n")
    fill(DOCS / "performance.md", "<!-- model -->", table(report))
    fill(DOCS / "performance.md", "<!-- model of options -->", option_table(report))


if __name__ == "__main__":
    main()
