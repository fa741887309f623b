"""What a run has to measure: points of the registry, and each backend's candidates there."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from replayssm_cute import dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.registry.models import DTYPES
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem, Support
from replayssm_tune.measure import problem_of
from replayssm_tune.space import candidates
from replayssm_tune.workload import make_workload


@dataclass(frozen=True)
class Point:
    """One row of the registry.

    Attributes:
        geometry: heads of one rank.
        state_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        buffer_len: L.
        batch: rows of the step.
    """

    geometry: Mamba2Geometry
    state_dtype: str
    buffer_len: int
    batch: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Point:
        return cls(**{**values, "geometry": Mamba2Geometry(**values["geometry"])})

    @property
    def problem(self) -> Mamba2Problem:
        """The problem that the workload of this point poses; the batch has no part in it."""
        return _problem(self.geometry, self.state_dtype, self.buffer_len)

    def __str__(self) -> str:
        return f"{self.geometry} {self.state_dtype} L={self.buffer_len} batch {self.batch}"


@functools.cache
def _problem(geometry: Mamba2Geometry, state_dtype: str, buffer_len: int) -> Mamba2Problem:
    """Read off a workload of two rows on the CPU, so that what is compiled ahead is what the GPU will ask for."""
    return problem_of(make_workload(geometry, 2, DTYPES[state_dtype], buffer_len, device="cpu", cold_bytes=1.0))


@dataclass(frozen=True)
class Unit:
    """The candidates of one backend at one point, the heuristic's choice first.

    Attributes:
        support: whether the backend serves the point at all; there are no candidates where not.
    """

    point: Point
    backend: str
    support: Support
    configs: tuple[dict[str, Any], ...]


def points(geometry: Mamba2Geometry, state_dtypes: Iterable[str], buffer_lens: Iterable[int],
           batches: Iterable[int]) -> list[Point]:
    """Every point of a run, in the order in which it is measured."""
    return [Point(geometry, *values) for values in itertools.product(state_dtypes, buffer_lens, batches)]


def unit(point: Point, backend: str, arch: Arch) -> Unit:
    """What a backend has to offer at a point on this architecture."""
    support = dispatch.backend_module(backend).supports(point.problem, arch)
    configs = candidates(backend, point.problem, point.batch, arch) if support else []
    return Unit(point, backend, support, tuple(configs))


def distinct(units: Iterable[Unit]) -> list[tuple[Unit, dict[str, Any]]]:
    """The different kernels of some units: batches share them, because no kernel is specialised on the batch.

    In the order in which they should be compiled: the heuristic's choices first, since every unit needs its own.
    """
    listed = list(units)
    kernels = [(u, c) for part in (slice(1), slice(1, None)) for u in listed for c in u.configs[part]]
    found: dict[tuple[Any, ...], tuple[Unit, dict[str, Any]]] = {}
    for u, c in kernels:
        found.setdefault((u.point.problem, u.backend, *sorted(c.items())), (u, c))
    return list(found.values())
