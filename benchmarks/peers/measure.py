"""Checks every kernel of an operation once, and times it at every batch."""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.peers.kernel import OURS, Bound, Kernel
from benchmarks.peers.operations import Operation
from replayssm_cute import dispatch
from replayssm_tune.timing import time_graph
from replayssm_tune.workload import COLD_BYTES

CHECK_ROWS = 19       # more than a ring of 16: rows flush in every phase
LONGEST_REASON = 300  # characters; compilers write pages
#: Largest relative error of the outputs of a kernel that is timed. The plain recurrence with bf16 inputs has 2e-3, and
#: 4e-3 where it rounds its state to bf16 at every token; cursors that stand still for a step give 0.7.
LIMIT = 2e-2


class DeviceLostError(Exception):
    """A kernel left the device unusable: no later figure would mean anything."""


def rows(op: Operation, layer: str, dtype: torch.dtype, philox_rounds: int, batches: Sequence[int], bandwidth: float,
         deadline: float = math.inf, device: str = "cuda", cold_bytes: float = COLD_BYTES) -> Iterator[dict[str, Any]]:
    """A row for every batch and kernel, with its time or with the reason why it has none.

    Args:
        bandwidth: bytes a second of a large copy in the same run.
        deadline: of ``time.monotonic``, after which nothing is begun.

    Raises:
        DeviceLostError: behind the row of the kernel that did it.
    """
    point = {"op": op.name, "layer": layer, "state_dtype": str(dtype).removeprefix("torch."),
             "philox_rounds": philox_rounds}
    make = functools.partial(op.make, layer, dtype=dtype, philox_rounds=philox_rounds, device=device)

    def workload(batch: int, cold_bytes: float) -> dict[str, Any]:
        return attempt(lambda: {"workload": make(batch=batch, cold_bytes=cold_bytes)}, deadline, device)

    def on(made: dict[str, Any], work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        return made if "reason" in made else attempt(lambda: work(made["workload"], op, *args), deadline, device)

    made, checked = workload(CHECK_ROWS, 0), {}
    for kernel in op.kernels:
        checked[kernel] = on(made, check, kernel)
        if "lost" in checked[kernel]:
            checked = {kernel: checked[kernel]}
            break
    for batch in batches:
        made, ours = workload(batch, cold_bytes), None
        for kernel, found in checked.items():
            if "reason" not in found:
                found = found | on(made, measure, kernel, bandwidth)
            if "us" in found:
                ours = found["us"] if kernel is op.kernels[0] else ours
                found |= {"times_ours": found["us"] / ours if ours else None}
            yield {**point, "batch": batch, "kernel": kernel.name, "replay": kernel.replay, **found}
            if "lost" in found:
                raise DeviceLostError(f"{op.name}: {kernel.name}: {found['reason']}")
        del made
        release(device)


def attempt(work: Callable[[], dict[str, Any]], deadline: float, device: str) -> dict[str, Any]:
    """What ``work`` found, or {"reason": why it failed}, with "lost" where the device is lost with it."""
    if time.monotonic() > deadline:
        return {"reason": "not begun: the time is spent"}
    try:
        return work()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        found: dict[str, Any] = {"reason": text[:LONGEST_REASON]}
    try:
        release(device)
    except RuntimeError:
        found["lost"] = True
    return found


def release(device: str) -> None:
    """Wait for the device and give its unused memory back. Raises RuntimeError where it is lost."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def check(w: Any, op: Operation, kernel: Kernel) -> dict[str, Any]:
    """The kernel's error on a small batch.

    Raises:
        ValueError: it is larger than rounding explains, or not a number.
    """
    functions = kernel.load()
    error = op.error(w, lambda: kernel.bind(w, *functions))
    if not error <= LIMIT:
        raise ValueError(f"relative error {error:.1e} against the recurrence in float64, more than {LIMIT:.0e}")
    return {"error": error}


def measure(w: Any, op: Operation, kernel: Kernel, bandwidth: float) -> dict[str, Any]:
    """Time of one step of one layer, and who served."""
    w.restore()
    bound = kernel.bind(w, *kernel.load())
    before = dispatch.served.copy()
    times = time_graph(bound.play, bound.steps)
    nbytes = op.step_bytes(w, kernel.replay)
    return {**times, "bytes": round(nbytes), "copy_percent": 100 * nbytes / (times["us"] * 1e-6) / bandwidth,
            "served": served(op, kernel, bound, dispatch.served - before)}


def served(op: Operation, kernel: Kernel, bound: Bound, calls: dict[tuple[str, str], int]) -> str:
    """The backend that the counters say served every call of ours; of others the function that was called.

    Args:
        calls: what our dispatch counted while the cycle was played twice, once eagerly and once for the capture.

    Raises:
        RuntimeError: several backends served, or ours served a call of another's.
    """
    if kernel.package != OURS:
        if calls:
            raise RuntimeError(f"{kernel.entries[0]} was served by {calls}")
        return kernel.entries[0]
    backends = [backend for name, backend in calls if name == op.name]
    if len(backends) != 1 or calls != {(op.name, backends[0]): 2 * bound.steps}:
        raise RuntimeError(f"{2 * bound.steps} calls of {op.name}, served: {calls}")
    return backends[0]
