"""What a run has to measure: points of the registry, and each backend's candidates there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from replayssm_cute.arch import Arch
from replayssm_cute.types import Support
from replayssm_tune.operations import OPERATIONS
from replayssm_tune.point import Point
from replayssm_tune.space import candidates

__all__ = ["Point", "Unit", "distinct", "unit"]


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


def unit(point: Point, backend: str, arch: Arch) -> Unit:
    """What a backend has to offer at a point on this architecture."""
    support = OPERATIONS[point.op].backend(backend).supports(point.problem, arch)
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
