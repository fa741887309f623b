"""The process that owns the GPU: checks and times one candidate a request. Run as ``-m replayssm_tune.lab``.

Requests and answers are those of ``Lab.answer``. What a request leaves behind, a workload and captured
graphs, only saves time: after a crash a new process answers the next request as well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from replayssm_cute import arch as archs
from replayssm_tune import measure, timing
from replayssm_tune.operations import OPERATIONS, Problem
from replayssm_tune.plan import Point
from replayssm_tune.process import serve
from replayssm_tune.workload import COLD_BYTES


class Lab:
    """Answers requests about the current device.

    Args:
        cold_bytes: state bytes that a sample's pools hold together.
    """

    def __init__(self, device: str = "cuda", cold_bytes: float = COLD_BYTES) -> None:
        self._device, self._cold_bytes = device, cold_bytes
        self._point: Point | None = None
        self._workload: Any = None
        self._small: tuple[Problem, Any] | None = None
        self._captures: dict[str, timing.Capture] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One of

        * ``{"do": "device"}``: ``arch`` (the fields of ``Arch``), ``id`` and ``build`` of device and code;
        * ``{"do": "yardstick"}``: ``bandwidth`` in bytes a second and ``provenance``;
        * ``{"do": "check", "point", "backend", "config"}``: ``error``, relative;
        * ``{"do": "sample", "point", "backend", "config"}``: ``us``, one sample;
        * ``{"do": "per_step", "point"}``: ``us`` of the per-step baseline, null where the operation has none.
        """
        return {"device": self._describe, "yardstick": self._yardstick, "check": self._check, "sample": self._sample,
                "per_step": self._per_step}[request["do"]](request)

    def _describe(self, request: dict[str, Any]) -> dict[str, Any]:
        arch = archs.of(self._device)
        unique = str(getattr(torch.cuda.get_device_properties(0), "uuid", 0)) if arch.kind != "cpu" else "cpu"
        return {"arch": dataclasses.asdict(arch), "id": unique, "build": build()}

    def _yardstick(self, request: dict[str, Any]) -> dict[str, Any]:
        bandwidth = timing.copy_bandwidth()
        return {"bandwidth": bandwidth, "provenance": timing.provenance(bandwidth)}

    def _check(self, request: dict[str, Any]) -> dict[str, Any]:
        point = Point.from_dict(request["point"])
        if self._small is None or self._small[0] != point.problem:
            rows = max(measure.CHECK_ROWS, point.buffer_len)
            self._small = point.problem, OPERATIONS[point.op].make(point, rows, self._device, 1.0)
        return {"error": OPERATIONS[point.op].error(self._small[1], self._launch(request, point))}

    def _sample(self, request: dict[str, Any]) -> dict[str, Any]:
        point = Point.from_dict(request["point"])
        w, name = self._workload_of(point), json.dumps([request["backend"], request["config"]], sort_keys=True)
        if name not in self._captures:
            self._captures[name] = measure.capture_replay(w, self._launch(request, point))
        w.restore()
        return {"us": self._captures[name].sample()}

    def _per_step(self, request: dict[str, Any]) -> dict[str, Any]:
        point = Point.from_dict(request["point"])
        return {"us": OPERATIONS[point.op].per_step_us(self._workload_of(point))}

    def _launch(self, request: dict[str, Any], point: Point) -> Callable[..., object]:
        return OPERATIONS[point.op].launch(request["backend"], point.problem, archs.of(self._device), point.batch,
                                           request["config"])

    def _workload_of(self, point: Point) -> Any:
        """The workload of a point; that of the point before makes room for it."""
        if self._workload is None or self._point != point:
            self._captures.clear()
            self._workload, self._point = None, point
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._workload = OPERATIONS[point.op].make(point, point.batch, self._device, self._cold_bytes)
        return self._workload


def build() -> str:
    """What a measured time depends on besides the device: the kernels' sources and their compilers."""
    digest = hashlib.sha256(torch.__version__.encode())
    for package in ("replayssm_cute.kernels", "fallback_triton"):
        folder = Path(str(importlib.import_module(package).__file__)).parent
        for source in sorted(folder.glob("*.py")):
            digest.update(source.name.encode() + source.read_bytes())
    for compiler in ("triton", "cutlass"):
        try:
            digest.update(importlib.import_module(compiler).__version__.encode())
        except ImportError:
            digest.update(b"none")
    return digest.hexdigest()[:16]


def healthy() -> bool:
    """Whether the device still answers; after an illegal access it does not, and only a new process helps."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


if __name__ == "__main__":
    serve(Lab().answer, healthy)
