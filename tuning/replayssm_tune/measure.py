"""Correctness and time of one candidate on whole staggered ring cycles."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from replayssm_cute.layout import mamba2_step_bytes
from replayssm_cute.reference.mamba2 import replay_step
from replayssm_cute.types import Mamba2Geometry
from replayssm_tune.gdn_workload import GdnWorkload
from replayssm_tune.timing import Capture, time_graph
from replayssm_tune.workload import Workload

OUTPUT_ERROR = 4e-3     # relative, of outputs and checkpoints; rounding to bf16 gives 1.7e-3
CHECK_ROWS = 8          # at least; L of them, so that every phase flushes one
CHANGED = (0, 9, 10, 11, 16)  # of the canonical arguments: the pools and out


def capture_replay(w: Workload | GdnWorkload, launch: Callable[..., object]) -> Capture:
    """One ring cycle over all pools, captured.

    Every phase flushes its share of the rows: a cursor pinned at 0 would overstate the speed.
    """
    assert w.flushes == w.batch, "a cycle flushes every row once"
    return Capture(functools.partial(_cycle, w, launch), len(w.phases) * len(w.pools))


def time_replay(w: Workload | GdnWorkload, launch: Callable[..., object]) -> dict[str, float]:
    """Microseconds a step of one ring cycle over all pools: median, min and max."""
    assert w.flushes == w.batch, "a cycle flushes every row once"
    return time_graph(functools.partial(_cycle, w, launch), len(w.phases) * len(w.pools))


def _cycle(w: Workload | GdnWorkload, launch: Callable[..., object]) -> None:
    for phase in range(len(w.phases)):
        for pool in range(len(w.pools)):
            launch(*w.arguments(phase, pool))


def time_per_step(w: Workload) -> float:
    """Microseconds of the per-step baseline on the same inputs and pools."""
    from fallback_triton.mamba2_step import recurrent_step
    i = w.inputs

    def step() -> None:
        for p in w.pools:
            recurrent_step(p.state, i["x"], i["dt"], i["A"], i["B"], i["C"], i["D"], i["dt_bias"],
                           None, w.indices, 0, i["out"], dt_softplus=True)

    return time_graph(step, len(w.pools))["us"]


def replay_error(w: Workload, launch: Callable[..., object]) -> float:
    """Worst relative error of outputs and flushed checkpoints against the float64 reference.

    Looks at the first, a middle and the last phase of a ring cycle, each on restored pools, so that
    every candidate is asked the same. NaN or infinite where a result is, or where a checkpoint changed that
    no row flushed.
    """
    errors = []
    for phase in (0, w.buffer_len // 2, w.buffer_len - 1):
        w.restore()
        args = list(w.arguments(phase, 0))
        exact = [a.clone() if i in CHANGED else a for i, a in enumerate(args)]
        replay_step(*exact, dt_softplus=True, dtype=torch.float64)
        launch(*args)
        flushed = args[14][args[13] != 0].long()
        kept = torch.ones(len(args[0]), dtype=torch.bool, device=args[0].device).index_fill(0, flushed, False)
        errors += [_relative(args[16], exact[16]), _relative(args[0][flushed], exact[0][flushed]),
                   0.0 if torch.equal(args[0][kept], exact[0][kept]) else math.inf]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def registry_row(w: Workload, entries: dict[str, dict[str, Any]], per_step_us: float | None,
                 bandwidth: float) -> dict[str, Any]:
    """A registry row of what was measured on a workload; see ``row_of``."""
    return row_of(w.geometry, w.pools[0].state.dtype, w.buffer_len, w.batch, entries, per_step_us, bandwidth)


def row_of(geometry: Mamba2Geometry, state_dtype: torch.dtype, buffer_len: int, batch: int,
           entries: dict[str, dict[str, Any]], per_step_us: float | None, bandwidth: float) -> dict[str, Any]:
    """A registry row as the file holds it.

    Args:
        entries: best choice by backend; at least one.
        per_step_us: microseconds of the per-step baseline, None where it was not timed.
        bandwidth: bytes a second of a large copy in the same run.
    """
    sizes = {"nheads": geometry.nheads, "ngroups": geometry.ngroups, "buffer_len": buffer_len, "batch": batch}
    nbytes = mamba2_step_bytes(geometry, buffer_len, state_dtype) * batch
    return {**sizes, **times_of(nbytes, entries, per_step_us, bandwidth)}


def times_of(nbytes: float, entries: dict[str, dict[str, Any]], per_step_us: float | None,
             bandwidth: float) -> dict[str, Any]:
    """The fields of a row that hold what was measured; ``nbytes`` must move in the step, the rest as in ``row_of``."""
    fastest = min(entry["us"] for entry in entries.values())
    return {"backends": entries, "per_step_us": None if per_step_us is None else round(per_step_us, 3),
            "copy_percent": round(100 * nbytes / (fastest * 1e-6) / bandwidth, 1)}
