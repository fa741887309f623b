"""Time candidates on whole staggered ring cycles, after each has given the right answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.layout import mamba2_step_bytes
from replayssm_cute.reference.mamba2 import replay_step
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from replayssm_cute.validate import mamba2_problem
from replayssm_tune.space import candidates
from replayssm_tune.timing import time_graph
from replayssm_tune.workload import Workload, make_workload

OUTPUT_ERROR = 4e-3     # relative; rounding to bf16 gives 1.7e-3
CHECK_ROWS = 8


def problem_of(w: Workload) -> Mamba2Problem:
    return mamba2_problem(*w.arguments(0, 0), dt_softplus=True, max_cache_len=w.buffer_len,
                          philox_rounds=w.philox_rounds)


def time_replay(w: Workload, launch: Callable[..., object]) -> dict[str, float]:
    """Microseconds a step of one ring cycle over all pools: median, min and max.

    Every phase flushes its share of the rows: a cursor pinned at 0 would overstate the speed.
    """
    assert w.flushes == w.batch, "a cycle flushes every row once"

    def step() -> None:
        for phase in range(w.buffer_len):
            for pool in range(len(w.pools)):
                launch(*w.arguments(phase, pool))

    return time_graph(step, w.buffer_len * len(w.pools))


def time_per_step(w: Workload) -> float:
    """Microseconds of the per-step baseline on the same inputs and pools."""
    from fallback_triton.mamba2_step import recurrent_step
    i = w.inputs

    def step() -> None:
        for p in w.pools:
            recurrent_step(p.state, i["x"], i["dt"], i["A"], i["B"], i["C"], i["D"], i["dt_bias"],
                           None, w.indices, 0, i["out"], dt_softplus=True)

    return time_graph(step, len(w.pools))["us"]


def output_error(w: Workload, launch: Callable[..., object]) -> float:
    """Worst relative output error of the first phases against the float64 reference."""
    worst = 0.0
    for phase in (0, w.buffer_len // 2, w.buffer_len - 1):
        args = list(w.arguments(phase, 0))
        exact = [a.clone() if i in (0, 9, 10, 11, 16) else a for i, a in enumerate(args)]  # pools and out
        replay_step(*exact, dt_softplus=True, dtype=torch.float64)
        launch(*args)
        got, want = args[16].double(), exact[16].double()
        worst = max(worst, float((got - want).norm() / want.norm()))
    return worst


def best(backend: str, small: Workload, w: Workload, seconds: float,
         say: Callable[[str], None]) -> dict[str, Any] | None:
    """The fastest candidate of a backend, with the runner-up; None where none is valid and right.

    Args:
        small: a workload of few rows, for the check.
        seconds: after which no further candidate is begun; the heuristic's choice is always timed.
    """
    problem, arch = problem_of(w), archs.of("cuda")
    module = dispatch.backend_module(backend)
    if not module.supports(problem, arch):
        return None
    timed: list[tuple[float, dict[str, Any]]] = []
    deadline = time.monotonic() + seconds
    for config in candidates(backend, problem, w.batch, arch):
        if timed and time.monotonic() > deadline:
            break
        try:
            launch = module.prepare(problem, arch, w.batch, config)
            error = output_error(small, launch)
            if not error < OUTPUT_ERROR:
                say(f"{backend} {config}: wrong by {error:.1e}, left out")
                continue
            timed.append((time_replay(w, launch)["us"], config))
        except Exception as failure:  # one candidate's failure is no reason to stop
            say(f"{backend} {config}: {type(failure).__name__}: {failure}")
    if not timed:
        return None
    timed.sort(key=lambda t: t[0])
    entries = [{"config": config, "us": round(us, 3)} for us, config in timed[:2]]
    return {**entries[0], "runner_up": entries[1] if len(entries) > 1 else None}


def measure_rows(geometry: Mamba2Geometry, buffer_len: int, state_dtype: torch.dtype, batches: Iterable[int],
                 backends: Iterable[str], seconds: float, bandwidth: float, say: Callable[[str], None],
                 keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure one row a batch and hand each to ``keep`` as soon as it stands.

    Args:
        seconds: for one backend at one batch.
        bandwidth: bytes a second of a large copy in this run.
    """
    small = make_workload(geometry, CHECK_ROWS, state_dtype, buffer_len)
    for batch in batches:
        w = make_workload(geometry, batch, state_dtype, buffer_len)
        found = {b: best(b, small, w, seconds, say) for b in backends}
        entries = {name: entry for name, entry in found.items() if entry}
        if not entries:
            say(f"batch {batch}: no backend could be measured")
            continue
        row = registry_row(w, entries, time_per_step(w), bandwidth)
        say(f"{geometry} {str(state_dtype)[6:]} batch {batch}: per step {row['per_step_us']:.2f} us, "
            + ", ".join(f"{n} {e['us']:.2f} us" for n, e in entries.items()) + f", {row['copy_percent']}% of copy")
        keep(row)
        del w
        torch.cuda.empty_cache()


def registry_row(w: Workload, entries: dict[str, dict[str, Any]], per_step_us: float | None,
                 bandwidth: float) -> dict[str, Any]:
    """A registry row of what was measured on a workload; ``entries`` by backend as the file holds them."""
    g, fastest = w.geometry, min(entry["us"] for entry in entries.values())
    share = mamba2_step_bytes(g, w.buffer_len, w.pools[0].state.dtype) * w.batch / (fastest * 1e-6) / bandwidth
    per_step_us = None if per_step_us is None else round(per_step_us, 3)
    return {"nheads": g.nheads, "ngroups": g.ngroups, "buffer_len": w.buffer_len, "batch": w.batch,
            "backends": entries, "per_step_us": per_step_us, "copy_percent": round(100 * share, 1)}
