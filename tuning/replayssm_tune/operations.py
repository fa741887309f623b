"""The operations that are tuned, and what the tuner asks of each. Imports no compiler."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from replayssm_cute import dispatch, gdn_dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.gdn_layout import check_buffer_len, gdn_ring_bytes, gdn_state_bytes, gdn_step_bytes
from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.layout import mamba2_ring_bytes, mamba2_state_bytes, mamba2_step_bytes
from replayssm_cute.registry.models import DTYPES
from replayssm_cute.registry.tuned_sizes import SIZES
from replayssm_cute.types import Mamba2Problem
from replayssm_tune.gdn_workload import accepted_of, make_gdn_workload
from replayssm_tune.point import Point
from replayssm_tune.workload import make_workload

Problem = Mamba2Problem | GdnProblem


@dataclass(frozen=True)
class Operation:
    """What is tuned.

    Attributes:
        module: of this package, with ``replay_error`` and ``time_per_step`` of a workload; it imports Triton.
        make: (point, batch, device, cold_bytes) -> workload.
        backend: name -> adapter, which says what it supports.
        launch: (backend, problem, arch, batch, config) -> the prepared step with this very config.
        step_bytes: point -> bytes that a row of the batch must move in a step.
        memory: point -> bytes of a request's checkpoint and of its rings, in one layer.
        explain: (problem, batch, arch) -> the dispatcher's decision in words.
    """

    module: str
    make: Callable[[Point, int, str, float], Any]
    backend: Callable[[str], Any]
    launch: Callable[[str, Any, Arch, int, dict[str, Any]], Callable[..., object]]
    step_bytes: Callable[[Point], float]
    memory: Callable[[Point], tuple[int, int]]
    explain: Callable[[Any, int, Arch], str]

    def problem(self, point: Point) -> Problem:
        """Read off a workload of two rows on the CPU, so that what is compiled ahead is what the GPU will ask for."""
        return _problem(self, replace(point, batch=2))

    def error(self, workload: Any, launch: Callable[..., object]) -> float:
        """Worst relative error of a launch."""
        return float(self._measuring.replay_error(workload, launch))

    def per_step_us(self, workload: Any) -> float | None:
        """Microseconds of the per-step baseline, None where there is none."""
        us: float | None = self._measuring.time_per_step(workload)
        return us

    @property
    def _measuring(self) -> Any:
        return importlib.import_module(f"replayssm_tune.{self.module}")


@functools.cache
def _problem(operation: Operation, point: Point) -> Problem:
    posed: Problem = operation.make(point, point.batch, "cpu", 1.0).problem()
    return posed


def _mamba2_workload(point: Point, batch: int, device: str, cold_bytes: float) -> Any:
    return make_workload(point.mamba2, batch, DTYPES[point.state_dtype], point.buffer_len, device=device,
                         cold_bytes=cold_bytes)


def _mamba2_launch(backend: str, problem: Mamba2Problem, arch: Arch, batch: int,
                   config: dict[str, Any]) -> Callable[..., object]:
    return dispatch.backend_module(backend).prepare(problem, arch, batch, config)


def _mamba2_bytes(point: Point) -> float:
    return mamba2_step_bytes(point.mamba2, point.buffer_len, DTYPES[point.state_dtype])


def _mamba2_memory(point: Point) -> tuple[int, int]:
    return (mamba2_state_bytes(point.mamba2, DTYPES[point.state_dtype]),
            mamba2_ring_bytes(point.mamba2, point.buffer_len))


def _gdn_workload(point: Point, batch: int, device: str, cold_bytes: float) -> Any:
    check_buffer_len(point.buffer_len, point.tokens, "buffer_len")
    return make_gdn_workload(point.gdn, batch, DTYPES[point.state_dtype], point.buffer_len,
                             ring_dtype=DTYPES[point.ring_dtype], tokens=point.tokens, exact=point.exact,
                             device=device, cold_bytes=cold_bytes)


def _gdn_launch(backend: str, problem: GdnProblem, arch: Arch, batch: int,
                config: dict[str, Any]) -> Callable[..., object]:
    return gdn_dispatch.backend_module(backend).prepare(problem, arch, ((batch, config),))


def _gdn_bytes(point: Point) -> float:
    return gdn_step_bytes(point.gdn, point.buffer_len, DTYPES[point.state_dtype], ring_dtype=DTYPES[point.ring_dtype],
                          tokens=point.tokens, accepted=accepted_of(point.tokens), exact_fold=point.exact)


def _gdn_memory(point: Point) -> tuple[int, int]:
    return (gdn_state_bytes(point.gdn, DTYPES[point.state_dtype]),
            gdn_ring_bytes(point.gdn, point.buffer_len, exact_fold=point.exact, ring_dtype=DTYPES[point.ring_dtype]))


_MAMBA2 = Operation("measure", _mamba2_workload, dispatch.backend_module, _mamba2_launch, _mamba2_bytes,
                    _mamba2_memory, dispatch.explain)
_GDN = Operation("gdn_measure", _gdn_workload, gdn_dispatch.backend_module, _gdn_launch, _gdn_bytes, _gdn_memory,
                 gdn_dispatch.explain)

#: By name, as the dispatcher counts them.
OPERATIONS = {"mamba2_decode": _MAMBA2, "gdn_decode": _GDN, "gdn_verify": _GDN}


def sizes(point: Point) -> dict[str, Any]:
    """The fields of a registry row that say what it was measured for."""
    g = point.geometry
    return {name: getattr(g if hasattr(g, name) else point, name) for name in SIZES[point.op].CHECKS}


def point_of(shape: tuple[str, int, int, str], size: Any) -> Point:
    """The point of a registry row; ``shape`` is that of its file."""
    op, *dims, state_dtype = shape
    fields = {name: getattr(size, name) for name in ("ring_dtype", "tokens", "fold") if hasattr(size, name)}
    return Point(size.geometry(tuple(dims)), state_dtype, size.buffer_len, size.batch, op, **fields)


def nbytes(point: Point) -> float:
    """Bytes that a step must move."""
    return OPERATIONS[point.op].step_bytes(point) * point.batch
