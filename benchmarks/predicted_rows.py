"""Registry rows of GPUs that nobody here has, predicted by the speed model.

    python -m benchmarks.predicted_rows

writes files of ``replayssm_cute/tuned`` for every device of ``DEVICE_NAMES``: CuTe's Mamba2 decode of the heads of
every registry model on one rank, L = 16, bf16 inputs, checkpoints rounded to nearest. A file with measured rows is left
as it is. The model does not choose between configs (``replayssm_tune/speed_model.py``): a row holds the heuristic's
choice, the time that the model predicts for it, and the percent of the predicted copy bandwidth. What the prediction
rests on stands in ``provenance.method``; versions and date are those of the measurement that calibrated the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import replayssm_cute
from replayssm_cute import dispatch
from replayssm_cute.kernels.mamba2_config import default_config
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.registry import tuned
from replayssm_cute.registry.models import DTYPES, mamba2_models
from replayssm_cute.types import Mamba2Geometry
from replayssm_tune.measure import row_of
from replayssm_tune.speed_model import (
    COUNTED_BUFFER_LEN,
    DEVICES,
    LATENCY_US,
    VERSION,
    Device,
    Step,
    calibrated,
    parameters,
    step_us,
)
from tests.compiled_kernels import make_problem

#: By product, as torch names the device (spaces as underscores).
DEVICE_NAMES = {"B200": "NVIDIA_B200", "GB200": "NVIDIA_GB200", "B300": "NVIDIA_B300_SXM6_AC"}
BATCHES = (1, 8, 64, 256, 512)
L = COUNTED_BUFFER_LEN


def files() -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """(name, provenance, rows) of every file, as ``tuned.write_rows`` takes them."""
    geometries = sorted({m.geometry for m in mamba2_models()}, key=str)
    shapes = sorted({(g.headdim, g.dstate) for g in geometries})
    for product, (headdim, dstate), state in itertools.product(DEVICE_NAMES, shapes, DTYPES):
        rows = [row(g, state, batch, DEVICES[product]) for g in geometries for batch in BATCHES
                if (g.headdim, g.dstate) == (headdim, dstate)]
        yield (tuned.file_name(dispatch.OP, headdim, dstate, state, DEVICE_NAMES[product]), provenance(product), rows)


def row(g: Mamba2Geometry, state: str, batch: int, device: Device) -> dict[str, Any]:
    """The heuristic's choice with its predicted time."""
    problem = make_problem((g.nheads, g.headdim, g.dstate, g.ngroups), DTYPES[state], L)
    config = default_config(problem, batch, TARGETS[device.target])
    assert config is not None, "every registry model is served"
    us = step_us(Step(g, L, DTYPES[state], batch, config), device, parameters())
    entry = {"config": config.to_dict(), "us": round(us, 3), "runner_up": None}
    return row_of(g, DTYPES[state], L, batch, {"cute": entry}, None, 1e12 * device.hbm_tbs * parameters().copy_share)


def provenance(product: str) -> dict[str, Any]:
    """Where the rows of a device come from."""
    device, p, origin = DEVICES[product], parameters(), calibrated()["provenance"]
    method = (f"predicted by speed model {VERSION}, not measured: {device.hbm_tbs} TB/s of which a copy reaches "
              f"{100 * p.copy_share:.1f}%, {device.sms} SMs at {device.clock_ghz} GHz, counts of {device.target}, "
              f"start {p.start} us, tail {p.tail} us, p {p.sharpness}, latency {LATENCY_US} us; calibrated on an "
              f"{origin['device']}; the heuristic's configs")
    return {"device": DEVICE_NAMES[product], "capability": "{}.{}".format(*TARGETS[device.target].capability),
            "sms": device.sms, "torch": origin["torch"], "triton": None, "cutlass_dsl": origin["cutlass_dsl"],
            "package": replayssm_cute.__version__, "date": origin["date"], "method": method, "predicted": True}


def write(folder: Path) -> list[Path]:
    """Write all files but those that would replace measured rows; returns what was written."""
    written = []
    for name, origin, rows in files():
        path = folder / name
        if path.exists() and not tuned.load_file(path).provenance.predicted:
            continue
        tuned.write_rows(path, origin, rows)
        written.append(path)
    return written


def main() -> None:
    for path in write(tuned.SHIPPED_FOLDER):
        print(path.name)


if __name__ == "__main__":
    main()
