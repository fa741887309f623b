"""Measured launch choices per device, and the rule by which a problem finds its row.

A file holds the rows of one operation, head shape, state dtype and device; its name says which:
``op=mamba2_decode,headdim=64,dstate=128,state_dtype=float16,device_name=NVIDIA_H200.json``. What a row
was measured for depends on the operation (``tuned_sizes``).
Shipped files lie in ``replayssm_cute/tuned``. ``REPLAYSSM_TUNED_DIR`` names a folder of the
user's own files; the folders are listed once, at the first lookup, and a file is read at the first
lookup of its shape. The format is described in docs/registry.md.

The lookup rule. Nothing in it depends on time, order of files or on who asks, so two ranks that
see the same files always read the same row:

1. The operation, the sizes of a head and the state dtype are exactly those of the problem. A user's row
   replaces the shipped row of the same device and key, whole. A Gated DeltaNet row serves only
   its own dtype of the rings, and in verify steps its own fold and windows of as many tiles of tokens.
2. The device is the one ``replayssm_cute.registry.devices.nearest`` names: itself; else another
   name of the same product; else a donor of its family. A row of another device is *borrowed*.
   Devices are never mixed. Predicted rows count only where no measured row of this shape would serve
   the device, borrowed ones included.
3. Among the rows of that device, in this order: heads per group (value heads per key head) as near as
   possible (the same, where a row has it), tokens of a window as near as possible, buffer_len as near as
   possible, batch * heads as near as possible. All but buffer_len compare by ratio, that is by
   distance in log2, in exact arithmetic.
4. Ties: the larger window, the larger buffer_len (its launch holds the smaller ring too), then the smaller
   batch * heads, then fewer heads, then fewer groups or key heads.

A file that is malformed, or whose name does not match its content, is skipped with one warning.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from replayssm_cute.arch import Arch
from replayssm_cute.errors import RegistryError
from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.registry import devices
from replayssm_cute.registry.tuned_file import (
    Provenance,
    TunedEntry,
    TunedFile,
    TunedRow,
    file_name,
    load_file,
    shape_and_device,
    write_rows,
)
from replayssm_cute.registry.tuned_sizes import SIZES, Distance, ratio
from replayssm_cute.types import Mamba2Problem

__all__ = ["Provenance", "TunedEntry", "TunedFile", "TunedRow", "by_batch", "clear_cache", "fastest", "file_name",
           "files", "load_file", "lookup", "of_layer", "rows_for", "write_rows"]

log = logging.getLogger("replayssm_cute")

USER_FOLDER_VARIABLE = "REPLAYSSM_TUNED_DIR"
SHIPPED_FOLDER = Path(__file__).parents[1] / "tuned"
Problem = Mamba2Problem | GdnProblem
Table = dict[str, dict[tuple[Any, ...], TunedRow]]     # by device and row key


def lookup(op: str, problem: Problem, batch: int, arch: Arch) -> TunedRow | None:
    """The row that serves a problem by the rule of this module; None where the registry has none.

    Rows were measured with bf16 inputs and are used for every input type; a backend whose launch
    does not fit falls back to its own choice.

    Args:
        op: operation, for example ``"mamba2_decode"``.
        problem: geometry of the rank, buffer_len and state dtype count.
        batch: rows of the step.
        arch: the device.
    """
    return min(rows_for(op, problem, arch), key=functools.partial(_distance, problem, batch),
               default=None)


def by_batch(op: str, problem: Problem, arch: Arch) -> tuple[tuple[int, TunedRow], ...]:
    """What ``lookup`` answers: (largest batch, row), ascending; the last row serves whatever is larger, too."""
    rows = rows_for(op, problem, arch)
    if not rows:
        return ()
    nearest = min(_misfit(problem, row) for row in rows)
    works = sorted({row.batch * row.size.heads[0] for row in rows if _misfit(problem, row) == nearest})
    heads = _heads(problem)
    limits = sorted({math.isqrt(a * b) // heads for a, b in itertools.pairwise(works)} | {0})
    found = [(batch, lookup(op, problem, batch, arch)) for batch in (*limits[1:], limits[-1] + 1)]
    return tuple((batch, row) for batch, row in found if row is not None)


def rows_for(op: str, problem: Problem, arch: Arch) -> tuple[TunedRow, ...]:
    """All rows that rules 1 and 2 leave to choose from; none of an operation without rows."""
    if op not in SIZES:
        return ()
    shape = (op, *(getattr(problem.geometry, name) for name in SIZES[op].DIMS),
             str(problem.state_dtype).removeprefix("torch."))
    for predicted in (False, True):
        tables = _tables(*shape)[predicted]
        by_device = {name: serving for name, table in tables.items()
                     if (serving := [row for row in table.values() if row.size.misfit(problem) is not None])}
        device = devices.nearest(arch.name, by_device)
        if device is not None:
            return tuple(replace(row, borrowed=device != arch.name) for row in by_device[device])
    return ()


def of_layer(op: str, problem: Problem, arch: Arch) -> tuple[TunedRow, ...]:
    """Those of ``rows_for`` whose heads, ring and window are the very ones of the problem."""
    return tuple(row for row in rows_for(op, problem, arch) if row.key[:-1] == SIZES[op].layer(problem))


def fastest(op: str, problem: Problem, arch: Arch) -> tuple[str, str] | None:
    """(backend, evidence): the backend with the least time for a layer, over all its batch sizes.

    One for all batch sizes, since a row of a batch must not change its bits with the batch. It is the
    one with the least geometric mean over the rows of the layer that are nearest by rules 3 and 4; the
    first in alphabetical order on a tie. None where the device itself was not measured.
    """
    rows = [row for row in rows_for(op, problem, arch) if row.measured]
    if not rows:
        return None
    nearest = min(rows, key=functools.partial(_distance, problem, 1))
    layer = sorted((row for row in rows if row.key[:-1] == nearest.key[:-1]), key=lambda row: row.batch)
    names = sorted(set.intersection(*(set(row.backends) for row in layer)))
    if not names:
        return None
    means = {name: math.exp(math.fsum(math.log(row.backends[name].us) for row in layer) / len(layer)) for name in names}
    times = ", ".join(f"{name} {us:.1f} us" for name, us in means.items())
    batches = f"batch {layer[0].batch} to {layer[-1].batch}" if len(layer) > 1 else f"batch {layer[0].batch}"
    return min(names, key=lambda name: means[name]), \
        f"{nearest.provenance.device}, {batches}, {nearest.provenance.date}: {times} in geometric mean"


def _distance(problem: Problem, batch: int, row: TunedRow) -> Distance:
    """Rules 3 and 4 as a sort key; no two rows of a device share it."""
    work = row.batch * row.size.heads[0]
    return (*_misfit(problem, row), ratio(work, batch * _heads(problem)), work, *row.size.heads)


def _misfit(problem: Problem, row: TunedRow) -> Distance:
    misfit = row.size.misfit(problem)
    assert misfit is not None, "rows_for() left it"
    return misfit


def _heads(problem: Problem) -> int:
    return problem.geometry.nheads if isinstance(problem, Mamba2Problem) else problem.geometry.num_v_heads


@functools.cache
def _tables(*shape: Any) -> tuple[Table, Table]:
    """The measured and the predicted rows of a shape; the user's folder is laid over the shipped one."""
    tables: tuple[Table, Table] = {}, {}
    for path in _paths().get(shape, ()):
        try:
            file = load_file(path)
        except RegistryError as error:
            log.warning("tuned file skipped: %s", error)
            continue
        rows = tables[file.provenance.predicted].setdefault(file.provenance.device, {})
        rows.update((row.key, row) for row in file.rows)
    return tables


@functools.cache
def _paths() -> dict[tuple[Any, ...], list[Path]]:
    """The files by the shape that their names say: a process reads those of the shapes that it serves."""
    found: dict[tuple[Any, ...], list[Path]] = {}
    for path in files():
        try:
            found.setdefault(shape_and_device(path)[0], []).append(path)
        except RegistryError as error:
            log.warning("tuned file skipped: %s", error)
    return found


def files() -> list[Path]:
    """Shipped files, then the user's, each in the order of their names."""
    found = sorted(SHIPPED_FOLDER.glob("*.json"))
    user = os.environ.get(USER_FOLDER_VARIABLE)
    if user:
        if not Path(user).is_dir():
            log.warning("%s=%s is not a folder; only shipped rows are used", USER_FOLDER_VARIABLE, user)
        found += sorted(Path(user).glob("*.json"))
    return found


def clear_cache() -> None:
    """Forget what was read, so that the next lookup reads the folders again (for tests and tuners)."""
    _paths.cache_clear()
    _tables.cache_clear()
