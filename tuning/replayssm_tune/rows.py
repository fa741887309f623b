"""Writing rows into registry files: locked, atomic, never over a better row unless that is asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

import replayssm_cute
from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.errors import RegistryError
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.registry import tuned
from replayssm_cute.registry.tuned_sizes import SIZES
from replayssm_cute.types import Mamba2Geometry
from replayssm_tune.journal import LOCK_NAME

log = logging.getLogger("replayssm_cute")

METHOD = "CUDA graph of whole staggered ring cycles, cold L2, median of 3 or more samples"
#: Rows of one file share these; a row that was measured under others cannot stand in it.
VERSIONS = ("capability", "sms", "torch", "triton", "cutlass_dsl", "package", "predicted")

TIMES = {"backends", "per_step_us", "copy_percent"}

Row = dict[str, Any]


def merge_row(folder: Path, geometry: Mamba2Geometry, state_dtype: str, info: dict[str, Any], row: Row) -> None:
    """Write a row of the device here into the file of a folder that holds its kind, over any that is there.

    Args:
        state_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        info: ``timing.provenance``.
    """
    store(path_of(folder, geometry, state_dtype, archs.of("cuda").name), record(archs.of("cuda").name, info), [row],
          force=True)


def path_of(folder: Path, geometry: Mamba2Geometry | GdnGeometry, state_dtype: str, device: str,
            op: str = dispatch.OP) -> Path:
    """The file of a folder that holds the rows of an operation, head shape, dtype and device."""
    first, second = (getattr(geometry, name) for name in SIZES[op].DIMS)
    return folder / tuned.file_name(op, first, second, state_dtype, device)


def record(device: str, info: dict[str, Any]) -> dict[str, Any]:
    """The provenance that a file holds, from ``timing.provenance``."""
    return {"device": device, "capability": info["capability"], "sms": info["sms"], "torch": info["torch"],
            "triton": info["triton"], "cutlass_dsl": info["cutlass_dsl"], "package": replayssm_cute.__version__,
            "date": info["date"][:10], "method": METHOD, "predicted": False}


def store(path: Path, provenance: dict[str, Any], rows: Iterable[Row], force: bool = False) -> list[str]:
    """Merge rows into a file by their keys; two processes may do so at once.

    Args:
        provenance: as ``tuned.write_rows`` takes it.
        force: also replace better rows, and begin a file anew that was written under other versions.

    Returns:
        one sentence for every row that was left as it is, because it is better than the new one.

    Raises:
        RegistryError: the file is malformed, or was written under other versions and ``force`` is not set.
        OSError: the disk is full or the folder cannot be written; the file is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(LOCK_NAME)):
        held = _held(path, provenance, force)
        kept = []
        for row in rows:
            old = held.get(key(row))
            reason = better(old, row) if old and not force else None
            if reason:
                kept.append(f"{describe_key(row)}: {reason}; --force replaces it")
            else:
                held[key(row)] = row
        try:
            tuned.write_rows(path, provenance, held.values())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    return kept


def check(path: Path, provenance: dict[str, Any], force: bool = False) -> None:
    """Raise now what ``store`` would raise about the file that is there."""
    if not force:
        _held(path, provenance, force)
    elif path.exists():
        tuned.load_file(path)


def _held(path: Path, provenance: dict[str, Any], force: bool) -> dict[tuple[Any, ...], Row]:
    """The rows of a file that may stand beside rows of this provenance; predicted ones give way to measured ones."""
    if not path.exists():
        return {}
    if tuned.load_file(path).provenance.predicted and not provenance["predicted"]:
        return {}
    content = json.loads(path.read_text())
    changed = [name for name in VERSIONS if content["provenance"][name] != provenance[name]]
    differences = ", ".join(f"{name} {content['provenance'][name]}" for name in changed)
    if changed and force:
        log.warning("%s: begun anew; its %d rows were measured with %s", path, len(content["rows"]), differences)
        return {}
    if changed:
        raise RegistryError(f"{path}: its rows were measured with {differences}, and one file has one provenance; "
                            "write to another folder (--out), or begin the file anew with --force")
    return {key(row): row for row in content["rows"]}


def better(old: Row, new: Row) -> str | None:
    """Why the row that is there should stay, None where the new one may replace it."""
    missing = sorted(old["backends"].keys() - new["backends"].keys())
    if missing:
        return f"the row in the file also holds {', '.join(missing)}"
    was, now = (min(entry["us"] for entry in row["backends"].values()) for row in (old, new))
    return f"the row in the file is faster, {was:.2f} us against {now:.2f} us" if was < now else None


def key(row: Row) -> tuple[Any, ...]:
    """What tells a row from the others of its file."""
    return tuple(row[name] for name in _sizes(row))


def describe_key(row: Row) -> str:
    if "nheads" in row:
        return f"{row['nheads']} heads in {row['ngroups']} groups, L={row['buffer_len']}, batch {row['batch']}"
    return ", ".join(f"{name} {row[name]}" for name in _sizes(row))


def _sizes(row: Row) -> list[str]:
    """The fields that say what a row was measured for."""
    return next(list(size.CHECKS) for size in SIZES.values() if size.CHECKS.keys() == row.keys() - TIMES)
