"""Rows of registry files as figures that tables and plots can share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from replayssm_cute.errors import RegistryError
from replayssm_cute.layout import mamba2_step_bytes
from replayssm_cute.registry import tuned
from replayssm_cute.registry.models import DTYPES
from replayssm_cute.registry.tuned_file import TunedEntry, TunedFile, TunedRow
from replayssm_cute.types import Mamba2Geometry


@dataclass(frozen=True)
class Figure:
    """One row.

    Attributes:
        device: its name, with `` (predicted)`` where the times come from the speed model.
        geometry: heads of one rank.
        state_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        buffer_len, batch: L, and rows of the step.
        backends: best choice by backend.
        per_step_us: microseconds of the per-step baseline, None where not taken.
        nbytes: that the method must move in one step.
        bandwidth: bytes a second of a large copy in the run of the file, None where not taken.
    """

    device: str
    geometry: Mamba2Geometry
    state_dtype: str
    buffer_len: int
    batch: int
    backends: dict[str, TunedEntry]
    per_step_us: float | None
    nbytes: float
    bandwidth: float | None

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


def read(paths: Sequence[str], predicted: bool = True) -> list[Figure]:
    """The rows of files and folders; without any, of the shipped folder and the user's.

    Args:
        predicted: take files of predicted rows, too.

    Raises:
        RegistryError: a file is malformed, or nothing was found.
    """
    found = [p for path in map(Path, paths) for p in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    files = map(tuned.load_file, found if paths else tuned.files())
    figures = [figure for file in files if predicted or not file.provenance.predicted for figure in of_file(file)]
    if not figures:
        where = ", ".join(paths) or f"{tuned.SHIPPED_FOLDER}, ${tuned.USER_FOLDER_VARIABLE}" \
            f"={os.environ.get(tuned.USER_FOLDER_VARIABLE, '')}"
        raise RegistryError(f"{where}: no rows there")
    return sorted(figures, key=lambda f: (f.device, str(f.geometry), list(DTYPES).index(f.state_dtype), f.buffer_len,
                                          f.batch))


def of_file(file: TunedFile) -> list[Figure]:
    """Every row of a file."""
    _, headdim, dstate, state_dtype = file.shape
    bandwidth = _bandwidth(file)
    device = file.provenance.device + " (predicted)" * file.provenance.predicted
    return [Figure(device, row.size.geometry((headdim, dstate)), state_dtype,
                   row.buffer_len, row.batch, row.backends, row.per_step_us, _nbytes(file, row), bandwidth)
            for row in file.rows]


def _nbytes(file: TunedFile, row: TunedRow) -> float:
    _, headdim, dstate, state_dtype = file.shape
    return mamba2_step_bytes(row.size.geometry((headdim, dstate)), row.buffer_len, DTYPES[state_dtype]) * row.batch


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
