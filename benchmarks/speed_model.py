"""A model of the time of a Mamba2 replay step, on an H200 and on what nobody here has.

    python -m benchmarks.speed_model benchmarks/results/h200/*.json

writes the tables between ``<!-- model -->`` or ``<!-- model of options -->`` and ``<!-- end -->`` in
docs/performance.md.

A step takes ``start + tail * share of steps with a flush + body``. The body is the p-norm of four times, each of
which would be the body's if the others were nothing:

* memory: the bytes that the method must move (``mamba2_step_bytes``) at the bandwidth of a large copy;
* issue: the instructions of all items (``benchmarks/issue_counts.py``), one a cycle and scheduler;
* shared memory: their wavefronts, bank conflicts included, one a cycle and multiprocessor;
* latency: Little's law. The grid holds CTAs times stages items in flight, and every item is in flight for
  ``LATENCY_US`` at least. In the register design a CTA is an item.

``start``, ``tail`` and p are calibrated by least squares of the relative error on one geometry, 64x64x128 in 8
groups, in the bulk design with checkpoints of 2 and 4 bytes, rounded to nearest, at all batches; everything else
validates them. They are taken as they are to other devices, to stochastic rounding, to 8-bit checkpoints and to the
register design. The latency is not calibrated: at full bandwidth items are in flight for 3 us and more, so that no
row depends on it. It is what a step of batch 1, 2.5 us, leaves beside the 0.98 us before its first copy and the
0.62 us behind its last arrival, which a trace showed (docs/performance.md).

Figures of the devices, with their sources:

* H200: 4.8 TB/s (NVIDIA's data sheet), 132 SMs and 1.98 GHz as reported by the driver in the benchmark.
* B200: 8 TB/s (NVIDIA: 64 TB/s of a DGX B200 with eight), 148 SMs, a clock "similar to the high power SXM5 H100"
  (chipsandcheese.com, "Nvidia's B200: Keeping the CUDA Juggernaut Rolling"), here the H200's.
* B300: 8 TB/s (glennklockwood.com/garden/processors/B300). NVIDIA's 160 SMs are those of the whole chip; here as
  many as a B200 has, and the same clock.
* A large copy reaches the same share of the HBM's bandwidth on all: what was measured on the H200.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import DOCS, fill, load, nearest
from replayssm_cute.kernels.mamba2_config import Mamba2Config, default_config
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.layout import mamba2_step_bytes
from replayssm_cute.rounding import LARGEST_CODE
from replayssm_cute.types import Mamba2Geometry
from replayssm_tune.cli import parse_geometry
from tests.compiled_kernels import make_problem

COUNTS = Path(__file__).parent / "results" / "issue_counts.json"
CALIBRATION = "64x64x128/8"
SCHEDULERS = 4                  # of a multiprocessor, an instruction a cycle each
LATENCY_US = 0.8
SHARPNESS = np.arange(1.5, 6.01, 0.25).tolist()    # what is tried for p
SHOWN = (1, 8, 64, 256, 512)    # batches of the table
SHOWN_OF_OPTIONS = (1, 64, 256, 512)
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
#: (checkpoint, rounds, inputs): stochastic rounding, 8-bit checkpoints, and what takes the register design.
OPTIONS = (*((state, rounds, bf16) for state in (f16, bf16) for rounds in (5, 10)),
           *((code, rounds, bf16) for code in LARGEST_CODE for rounds in (0, 5)),
           *((state, 0, f16) for state in (f32, f16, bf16)))


@dataclass(frozen=True)
class Device:
    """What the model knows of a device.

    Attributes:
        target: of the compiler; names the multiprocessors and the issue counts.
        clock_ghz: of the multiprocessors.
        hbm_tbs: bandwidth of the memory on paper, in TB/s.
    """

    target: str
    clock_ghz: float
    hbm_tbs: float

    @property
    def sms(self) -> int:
        return TARGETS[self.target].sms


DEVICES = {"H200": Device("sm_90a", 1.98, 4.8), "B200": Device("sm_100a", 1.98, 8.0),
           "B300": Device("sm_103a", 1.98, 8.0)}


@dataclass(frozen=True)
class Step:
    """What is launched: a layer, a batch, and how."""

    geometry: Mamba2Geometry
    buffer_len: int
    state_dtype: torch.dtype
    batch: int
    config: Mamba2Config
    philox_rounds: int = 0
    act_dtype: torch.dtype = torch.bfloat16

    @property
    def nbytes(self) -> float:
        return self.batch * mamba2_step_bytes(self.geometry, self.buffer_len, self.state_dtype, self.act_dtype)

    @property
    def items(self) -> int:
        return self.batch * self.geometry.nheads


@dataclass(frozen=True)
class Parameters:
    """What is calibrated.

    Attributes:
        start: microseconds of launch, first copy and last item.
        tail: microseconds more of a step in which a row flushes.
        sharpness: p of the norm; the larger, the less the three limits disturb each other.
        copy_share: share of the HBM's bandwidth that a large copy reaches.
    """

    start: float
    tail: float
    sharpness: float
    copy_share: float


@functools.cache
def issue_counts() -> dict[str, dict[str, dict[str, int]]]:
    return json.loads(COUNTS.read_text())


def count_name(g: Mamba2Geometry, state: torch.dtype, rounds: int = 0, act: torch.dtype = torch.bfloat16) -> str:
    """What decides an item's instructions, in words; inputs that are not bf16 take the register design."""
    inputs = "" if act is torch.bfloat16 else f", {name_of(act)} inputs"
    return f"{g.headdim}x{g.dstate} {name_of(state)}" + (f" SR{rounds}" if rounds else "") + inputs


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def limits_us(step: Step, device: Device, copy_share: float) -> tuple[float, float, float, float]:
    """Microseconds of the body by memory, by issue, by shared memory and by latency alone.

    Raises:
        KeyError: nothing was counted for this head shape and dtype.
    """
    counts = issue_counts()[device.target][count_name(step.geometry, step.state_dtype, step.philox_rounds,
                                                      step.act_dtype)]
    memory = step.nbytes / (device.hbm_tbs * copy_share * 1e6)
    cycle_us = step.items / (device.sms * device.clock_ghz * 1e3)      # of an item a cycle and multiprocessor
    in_flight = min(step.items, device.sms * step.config.min_ctas * max(step.config.stages, 1))
    return (memory, counts["issued"] / SCHEDULERS * cycle_us, counts["wavefronts"] * cycle_us,
            LATENCY_US * step.items / in_flight)


def norm(values: tuple[float, ...], p: float) -> float:
    return sum(v ** p for v in values) ** (1 / p)


def flushing(step: Step) -> float:
    """Share of steps in which at least one row flushes; cursors are spread evenly."""
    return min(1.0, step.batch / step.buffer_len)


def step_us(step: Step, device: Device, p: Parameters) -> float:
    """Predicted microseconds of a step."""
    body = norm(limits_us(step, device, p.copy_share), p.sharpness)
    return p.start + p.tail * flushing(step) + body


def measured(rows: list[dict[str, Any]]) -> list[tuple[Step, float]]:
    """The steps of benchmark rows with their microseconds."""
    found = []
    for row in rows:
        cute = row["backends"]["cute"]
        step = Step(parse_geometry(row["geometry"]), row["buffer_len"], getattr(torch, row["state_dtype"]),
                    row["batch"], Mamba2Config.from_dict(cute["config"]), row["philox_rounds"])
        found.append((step, cute["us"]))
    return found


def calibrate(rows: list[dict[str, Any]]) -> Parameters:
    """The parameters that predict the rows of ``CALIBRATION`` best.

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

    return min(map(fit, SHARPNESS), key=lambda found: found[0])[1]


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
    limits = limits_us(step, device, p.copy_share)
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
    p = calibrate(nearest(report))
    head = (f"Microseconds; in brackets what memory, issue, shared memory and latency alone would take. Calibrated on "
            f"{CALIBRATION}: start {p.start:.2f} us, tail {p.tail:.2f} us, p = {p.sharpness:.2f}; a copy reaches "
            f"{100 * p.copy_share:.1f}% of the HBM's bandwidth.")
    lines = [[str(step.geometry), name_of(step.state_dtype), str(step.batch), *cells(step, us, p)]
             for step, us in measured(nearest(report)) if step.batch in SHOWN]
    return f"{head}\n\n{markdown(('layer', 'state', 'batch', *RESULTS), lines)}"


def option_table(report: dict[str, Any]) -> str:
    """The same of ``OPTIONS`` on the calibration's layer, where they were measured or not."""
    p, lines = calibrate(nearest(report)), []
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
    fill(DOCS / "performance.md", "<!-- model -->", table(report))
    fill(DOCS / "performance.md", "<!-- model of options -->", option_table(report))


if __name__ == "__main__":
    main()
