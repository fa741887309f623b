"""Rows of registry files as figures that tables and plots can share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from replayssm_cute.errors import RegistryError
from replayssm_cute.registry import tuned
from replayssm_cute.registry.models import DTYPES
from replayssm_cute.registry.tuned_file import TunedEntry, TunedFile, TunedRow
from replayssm_tune.operations import nbytes, point_of
from replayssm_tune.point import Point


@dataclass(frozen=True)
class Figure:
    """One row.

    Attributes:
        device: its name, with `` (predicted)`` where the times come from the speed model.
        point: what was measured.
        backends: best choice by backend.
        per_step_us: microseconds of the per-step baseline, None where not taken.
        nbytes: that the method must move in one step.
        bandwidth: bytes a second of a large copy in the run of the file, None where not taken.
    """

    device: str
    point: Point
    backends: dict[str, TunedEntry]
    per_step_us: float | None
    nbytes: float
    bandwidth: float | None

    @property
    def layer(self) -> str:
        """The step, but Mamba2's, and the heads of one rank."""
        return f"{self.point.step}{self.point.geometry}"

    @property
    def state_dtype(self) -> str:
        return self.point.state_dtype

    @property
    def buffer_len(self) -> int:
        return self.point.buffer_len

    @property
    def batch(self) -> int:
        return self.point.batch

    @property
    def fastest(self) -> str:
        """Name of the backend with the least time."""
        return min(self.backends, key=lambda name: self.backends[name].us)

    def percent(self, us: float) -> float | None:
        """Percent of the copy bandwidth that the method's bytes reach in a time."""
        return None if self.bandwidth is None else 100 * self.nbytes / (us * 1e-6) / self.bandwidth

    def speedup(self, backend: str) -> float | None:
        """Over the per-step baseline."""
        return None if self.per_step_us is None else self.per_step_us / self.backends[backend].us

    @property
    def floor_us(self) -> float | None:
        """Microseconds in which a large copy moves the bytes."""
        return None if self.bandwidth is None else self.nbytes / self.bandwidth * 1e6


def read(paths: Sequence[str], predicted: bool = True, op: str | None = None) -> list[Figure]:
    """The rows of files and folders; without any, of the shipped folder and the user's.

    Args:
        op: only rows of this operation; None takes all.
        predicted: take files of predicted rows, too.

    Raises:
        RegistryError: a file is malformed, or nothing was found.
    """
    found = [p for path in map(Path, paths) for p in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    files = map(tuned.load_file, found if paths else tuned.files())
    figures = [figure for file in files if predicted or not file.provenance.predicted for figure in of_file(file)
               if op in (None, figure.point.op)]
    if not figures:
        where = ", ".join(paths) or f"{tuned.SHIPPED_FOLDER}, ${tuned.USER_FOLDER_VARIABLE}" \
            f"={os.environ.get(tuned.USER_FOLDER_VARIABLE, '')}"
        raise RegistryError(f"{where}: no rows there")
    return sorted(figures, key=lambda f: (f.device, f.layer, list(DTYPES).index(f.state_dtype), f.buffer_len,
                                          f.batch))


def of_file(file: TunedFile) -> list[Figure]:
    """Every row of a file."""
    bandwidth = _bandwidth(file)
    device = file.provenance.device + " (predicted)" * file.provenance.predicted
    return [Figure(device, point_of(file.shape, row.size), row.backends, row.per_step_us, _nbytes(file, row), bandwidth)
            for row in file.rows]


def _nbytes(file: TunedFile, row: TunedRow) -> float:
    return nbytes(point_of(file.shape, row.size))


def _bandwidth(file: TunedFile) -> float | None:
    """From the row with the largest percentage, which rounding has hurt least."""
    rows = [row for row in file.rows if row.copy_percent is not None]
    if not rows:
        return None
    row = max(rows, key=lambda row: row.copy_percent or 0.0)
    fastest = min(entry.us for entry in row.backends.values())
    return _nbytes(file, row) / (fastest * 1e-6) / ((row.copy_percent or 0.0) / 100)


def break_even(figures: Iterable[Figure], backend: str) -> int | None:
    """The least batch from which on replay is no slower than the per-step baseline; None where there is none."""
    found = None
    for figure in sorted(figures, key=lambda f: f.batch):
        speedup = figure.speedup(backend) if backend in figure.backends else None
        if speedup is None or speedup < 1:
            found = None
        elif found is None:
            found = figure.batch
    return found
