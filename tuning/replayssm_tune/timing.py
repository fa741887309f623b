"""Device timing: CUDA graphs, medians, and the two yardsticks measured in the same run."""

from __future__ import annotations

import datetime
import platform
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


class Capture:
    """A captured sequence of launches; each sample replays it and times it with events.

    Args:
        step: issues ``calls`` launches on the current stream.
    """

    def __init__(self, step: Callable[[], None], calls: int, min_ms: float = 4.0) -> None:
        self._calls, self._stream, self._graph = calls, torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()  # first calls compile and initialise
            self._stream.synchronize()
            with torch.cuda.graph(self._graph, stream=self._stream):
                step()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._replay(1)
        self._times = max(1, min(50, round(min_ms / max(self._replay(1), 1e-3))))

    def sample(self) -> float:
        """Microseconds per call of enough replays to last ``min_ms``, behind one that wakes the clocks."""
        self._replay(1)
        return self._replay(self._times) * 1e3 / self._times / self._calls

    def _replay(self, times: int) -> float:
        """Milliseconds of that many replays."""
        start, end = self._events
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            for _ in range(times):
                self._graph.replay()
            end.record(self._stream)
            end.synchronize()
        return start.elapsed_time(end)


def time_graph(step: Callable[[], None], calls: int, samples: int = 7, min_ms: float = 4.0) -> dict[str, float]:
    """Microseconds per call of a captured sequence: median, min and max over the samples.

    ``step`` issues ``calls`` launches on the current stream. They are captured once; a sample
    replays the graph often enough to last ``min_ms`` and is timed with events.
    """
    capture = Capture(step, calls, min_ms)
    us = [capture.sample() for _ in range(samples)]
    return {"us": statistics.median(us), "us_min": min(us), "us_max": max(us)}


def copy_bandwidth(gib: float = 2.0) -> float:
    """Bytes per second, read plus written, of a large device-to-device copy."""
    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    seconds = []
    for _ in range(12):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.numel() / statistics.median(seconds[3:])


@triton.jit
def _add_one(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n) + 1.0, mask=at < n)


def same_size_us(nbytes: float, cold_bytes: float = 250e6) -> float:
    """Microseconds of an elementwise kernel that moves ``nbytes``, half read and half written.

    The yardstick for a launch of this size: it pays launch, ramp and tail as a step does. The
    buffers rotate so that they are cold in L2.
    """
    n = max(1024, int(nbytes / 8) // 1024 * 1024)
    pools = max(2, int(-(-cold_bytes // (8 * n))))
    buffers = torch.zeros((pools, 2, n), device="cuda")
    calls = max(1, 64 // pools) * pools

    def step() -> None:
        for i in range(calls):
            source, target = buffers[i % pools]
            _add_one[(triton.cdiv(n, 1024),)](source, target, n, BLOCK=1024, num_warps=4)

    return time_graph(step, calls)["us"]


def provenance(bandwidth: float) -> dict[str, Any]:
    """Device, versions and date: what makes a figure comparable later."""
    properties = torch.cuda.get_device_properties(0)
    info: dict[str, Any] = {
        "device": properties.name, "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count, "torch": torch.__version__,
        "triton": triton.__version__, "python": platform.python_version(),
        "cuda": torch.version.cuda, "copy_gbps": round(bandwidth / 1e9, 1),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
    try:
        import cutlass
        info["cutlass_dsl"] = cutlass.__version__
    except ImportError:
        info["cutlass_dsl"] = None
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit",
             "--format=csv,noheader"]
    try:
        info["smi"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        info["smi"] = None
    return info
