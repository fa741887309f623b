"""One file of tuned rows: what it holds, and how it is read and written. See docs/registry.md."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayssm_cute.errors import RegistryError
from replayssm_cute.registry import devices
from replayssm_cute.registry.schema import (
    AMOUNT,
    BOOL,
    COUNT,
    OBJECT,
    OBJECTS,
    TEXT,
    Check,
    read_json,
    record,
)
from replayssm_cute.registry.tuned_sizes import SIZES, Size

BACKENDS = ("cute", "triton", "torch")

_NAME = re.compile(r"op=([a-z0-9_]+),([a-z_]+)=([1-9]\d*),([a-z_]+)=([1-9]\d*),"
                   r"state_dtype=(float32|float16|bfloat16),device_name=([A-Za-z0-9_.+-]+)\.json")


@dataclass(frozen=True)
class Provenance:
    """Where the numbers of a file come from.

    Attributes:
        device: name as ``Arch.name`` spells it.
        capability: compute capability such as ``"9.0"``, or the AMD target such as ``"gfx942"``.
        sms: multiprocessors.
        torch, triton, cutlass_dsl, package: versions; None for a library that was not installed.
        date: ISO date of the measurement.
        method: how the time was taken, in a few words.
        predicted: the rows come from a model of the device, not from a measurement on it.
    """

    device: str
    capability: str
    sms: int
    torch: str
    triton: str | None
    cutlass_dsl: str | None
    package: str
    date: str
    method: str
    predicted: bool

    def drift(self) -> str:
        """The compilers whose installed minor version is not the recorded one; empty where none."""
        recorded = {"triton": self.triton, "nvidia-cutlass-dsl": self.cutlass_dsl}
        return ", ".join(f"{name} {then} then and {now} now" for name, then in recorded.items()
                         if then and (now := _installed(name)) and _minor(then) != _minor(now))


@dataclass(frozen=True)
class TunedEntry:
    """The best choice of one backend.

    Attributes:
        config: what the backend's ``prepare`` takes; only the backend knows its keys.
        us: microseconds of one step.
        runner_up: ``{"config": ..., "us": ...}`` of the second best choice, None where only
            one was valid.
    """

    config: dict[str, Any]
    us: float
    runner_up: dict[str, Any] | None = None


@dataclass(frozen=True)
class TunedRow:
    """What was measured for one problem size.

    Attributes:
        size: heads of one rank, L, rows of the step and whatever else tells it from the other rows of its file.
        backends: best choice by backend name; at least one.
        provenance: that of the file.
        per_step_us: microseconds of the per-step baseline in the same run, None where not taken.
        copy_percent: percent of the copy bandwidth of the same run that the fastest backend
            reaches on ideal bytes, None where not taken.
        borrowed: the row was measured on another device than the one it was looked up for.
    """

    size: Size
    backends: dict[str, TunedEntry]
    provenance: Provenance
    per_step_us: float | None = None
    copy_percent: float | None = None
    borrowed: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells a row from the other rows of its file; the batch is the last."""
        return self.size.key

    @property
    def buffer_len(self) -> int:
        return self.size.buffer_len

    @property
    def batch(self) -> int:
        return self.size.batch

    @property
    def measured(self) -> bool:
        """The times were taken on the very device. Only then may they rank the backends: a
        borrowed or predicted row is a good first choice of launch, not a race between two."""
        return not (self.borrowed or self.provenance.predicted)

    def describe(self) -> str:
        """One line: device, batch, date, microseconds per backend, and what qualifies them."""
        times = ", ".join(f"{name} {entry.us:.1f} us" for name, entry in sorted(self.backends.items()))
        notes = ["borrowed"] * self.borrowed + ["predicted"] * self.provenance.predicted
        notes += filter(None, [self.provenance.drift()])
        return f"{self.provenance.device}, batch {self.batch}, {self.provenance.date}: {times}" \
            + (f" ({'; '.join(notes)})" if notes else "")


@dataclass(frozen=True)
class TunedFile:
    """The content of one file.

    Attributes:
        shape: (op, the two sizes of a head, state dtype) as in the file's name.
        provenance: of all its rows.
        rows: ordered by ``TunedRow.key``.
    """

    shape: tuple[str, int, int, str]
    provenance: Provenance
    rows: tuple[TunedRow, ...]


def file_name(op: str, first: int, second: int, state_dtype: str, device_name: str) -> str:
    """The name of the file that holds these rows.

    Args:
        first, second: sizes of a head: headdim and dstate of Mamba2, head_k_dim and head_v_dim of Gated DeltaNet.

    Raises:
        RegistryError: a part cannot be spelled in a file name, or no operation has this name.
    """
    names = SIZES[op].DIMS if op in SIZES else ("headdim", "dstate")
    name = f"op={op},{names[0]}={first},{names[1]}={second},state_dtype={state_dtype},device_name={device_name}.json"
    shape_and_device(Path(name))
    return name


def load_file(path: str | os.PathLike[str]) -> TunedFile:
    """Read and check one file.

    Raises:
        RegistryError: naming the file, the field, what was expected and what came.
    """
    return _parse(Path(path), read_json(Path(path)))


def write_rows(path: str | os.PathLike[str], provenance: dict[str, Any],
               rows: Iterable[dict[str, Any]]) -> None:
    """Write a file in its canonical form: sorted keys, sorted rows, one row a line. Atomic.

    Args:
        path: ends in ``file_name(...)``; an existing file is replaced.
        provenance: the fields of ``Provenance``.
        rows: objects as the file holds them.

    Raises:
        RegistryError: what would be written could not be read again; nothing is written.
    """
    path, listed = Path(path), list(rows)
    _parse(path, {"schema": 1, "provenance": provenance, "rows": listed})
    names = SIZES[shape_and_device(path)[0][0]].CHECKS
    listed.sort(key=lambda row: [row[name] for name in names])
    lines = ",\n".join("  " + json.dumps(row, sort_keys=True) for row in listed)
    header = json.dumps(provenance, sort_keys=True)
    text = f'{{\n "provenance": {header},\n "rows": [\n{lines}\n ],\n "schema": 1\n}}\n'
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuned-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a shipped file is for everyone
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


_FILE = {"schema": Check("1", lambda value: type(value) is int and value == 1),
         "provenance": OBJECT, "rows": OBJECTS}
_PROVENANCE = {
    "device": TEXT, "capability": TEXT, "sms": COUNT, "torch": TEXT, "triton": TEXT.or_null(),
    "cutlass_dsl": TEXT.or_null(), "package": TEXT, "method": TEXT, "predicted": BOOL,
    "date": Check("a date as 2026-11-30", lambda value: isinstance(value, str) and _is_date(value)),
}
_TIMES = {"backends": OBJECT, "per_step_us": AMOUNT.or_null(), "copy_percent": AMOUNT.or_null()}
_CONFIG = Check("an object of finite numbers, strings and booleans", lambda value: isinstance(value, dict)
                and all(isinstance(v, str) or (isinstance(v, (bool, int, float)) and math.isfinite(v))
                        for v in value.values()))
_RUNNER_UP = {"config": _CONFIG, "us": AMOUNT}
_ENTRY = {**_RUNNER_UP, "runner_up": OBJECT.or_null()}


def _parse(path: Path, content: object) -> TunedFile:
    shape, device = shape_and_device(path)
    file = record(str(path), content, _FILE)
    provenance = Provenance(**record(f"{path}: provenance", file["provenance"], _PROVENANCE))
    if provenance.device != device:
        raise RegistryError(f"{path}: provenance.device: expected {device} as in the file's name, "
                            f"got {provenance.device}")
    product = devices.PRODUCTS.get(devices.product_of(device) or "")
    if product and product.kind == "cuda" and provenance.capability != "{}.{}".format(*product.capability):
        raise RegistryError(f"{path}: provenance.capability: expected that of {device}, "
                            f"got {provenance.capability}")
    size = SIZES[shape[0]]
    rows = [_row(f"{path}: rows[{i}]", row, size, provenance) for i, row in enumerate(file["rows"])]
    if len({row.key for row in rows}) != len(rows):
        raise RegistryError(f"{path}: rows: two rows share {', '.join(size.CHECKS)}")
    return TunedFile(shape, provenance, tuple(sorted(rows, key=lambda row: row.key)))


def shape_and_device(path: Path) -> tuple[tuple[str, int, int, str], str]:
    """What a file's name says: (op, the two sizes of a head, state dtype), and the device.

    Raises:
        RegistryError: it is no such name.
    """
    match = _NAME.fullmatch(path.name)
    op, first, one, second, two, state_dtype, device = match.groups() if match else ("",) * 7
    if op not in SIZES or (first, second) != SIZES[op].DIMS:
        names = " or ".join(f"op={op},{size.DIMS[0]}=...,{size.DIMS[1]}=..." for op, size in SIZES.items())
        raise RegistryError(f"{path}: expected a file name {names},state_dtype=...,device_name=....json")
    return (op, int(one), int(two), state_dtype), device


def _row(where: str, value: object, kind: type[Any], provenance: Provenance) -> TunedRow:
    row = record(where, value, {**kind.CHECKS, **_TIMES})
    size: Size = kind(**{name: row[name] for name in kind.CHECKS})
    fault = size.fault()
    if fault:
        raise RegistryError(f"{where}.{fault}")
    if not row["backends"] or not row["backends"].keys() <= set(BACKENDS):
        raise RegistryError(f"{where}.backends: expected some of {', '.join(BACKENDS)}, "
                            f"got {', '.join(row['backends']) or 'none'}")
    entries = {}
    for name, entry in row["backends"].items():
        record(f"{where}.backends.{name}", entry, _ENTRY)
        if entry["runner_up"] is not None:
            record(f"{where}.backends.{name}.runner_up", entry["runner_up"], _RUNNER_UP)
        entries[name] = TunedEntry(**entry)
    return TunedRow(size, entries, provenance, row["per_step_us"], row["copy_percent"])


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@functools.cache
def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
