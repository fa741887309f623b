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
from replayssm_cute.layout import MAX_BUFFER_LEN
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

BACKENDS = ("cute", "triton", "torch")

_NAME = re.compile(r"op=([a-z0-9_]+),headdim=([1-9]\d*),dstate=([1-9]\d*),"
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
        nheads, ngroups: H and G of one rank.
        buffer_len: L.
        batch: rows of the step.
        backends: best choice by backend name; at least one.
        provenance: that of the file.
        per_step_us: microseconds of the per-step baseline in the same run, None where not taken.
        copy_percent: percent of the copy bandwidth of the same run that the fastest backend
            reaches on ideal bytes, None where not taken.
        borrowed: the row was measured on another device than the one it was looked up for.
    """

    nheads: int
    ngroups: int
    buffer_len: int
    batch: int
    backends: dict[str, TunedEntry]
    provenance: Provenance
    per_step_us: float | None = None
    copy_percent: float | None = None
    borrowed: bool = False

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What tells a row from the other rows of its file."""
        return self.nheads, self.ngroups, self.buffer_len, self.batch

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
        shape: (op, headdim, dstate, state dtype) as in the file's name.
        provenance: of all its rows.
        rows: ordered by ``TunedRow.key``.
    """

    shape: tuple[str, int, int, str]
    provenance: Provenance
    rows: tuple[TunedRow, ...]


def file_name(op: str, headdim: int, dstate: int, state_dtype: str, device_name: str) -> str:
    """The name of the file that holds these rows.

    Raises:
        RegistryError: a part cannot be spelled in a file name.
    """
    name = f"op={op},headdim={headdim},dstate={dstate},state_dtype={state_dtype}," \
           f"device_name={device_name}.json"
    _shape_and_device(Path(name))
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
    listed.sort(key=lambda row: [row[name] for name in ("nheads", "ngroups", "buffer_len", "batch")])
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
_ROW = {
    "nheads": COUNT, "ngroups": COUNT, "batch": COUNT, "backends": OBJECT,
    "buffer_len": Check(f"an integer in 1..{MAX_BUFFER_LEN}",
                        lambda value: type(value) is int and 1 <= value <= MAX_BUFFER_LEN),
    "per_step_us": AMOUNT.or_null(), "copy_percent": AMOUNT.or_null(),
}
_CONFIG = Check("an object of finite numbers, strings and booleans", lambda value: isinstance(value, dict)
                and all(isinstance(v, str) or (isinstance(v, (bool, int, float)) and math.isfinite(v))
                        for v in value.values()))
_RUNNER_UP = {"config": _CONFIG, "us": AMOUNT}
_ENTRY = {**_RUNNER_UP, "runner_up": OBJECT.or_null()}


def _parse(path: Path, content: object) -> TunedFile:
    shape, device = _shape_and_device(path)
    file = record(str(path), content, _FILE)
    provenance = Provenance(**record(f"{path}: provenance", file["provenance"], _PROVENANCE))
    if provenance.device != device:
        raise RegistryError(f"{path}: provenance.device: expected {device} as in the file's name, "
                            f"got {provenance.device}")
    product = devices.PRODUCTS.get(devices.product_of(device) or "")
    if product and product.kind == "cuda" and provenance.capability != "{}.{}".format(*product.capability):
        raise RegistryError(f"{path}: provenance.capability: expected that of {device}, "
                            f"got {provenance.capability}")
    rows = [_row(f"{path}: rows[{i}]", row, provenance) for i, row in enumerate(file["rows"])]
    if len({row.key for row in rows}) != len(rows):
        raise RegistryError(f"{path}: rows: two rows share nheads, ngroups, buffer_len and batch")
    return TunedFile(shape, provenance, tuple(sorted(rows, key=lambda row: row.key)))


def _shape_and_device(path: Path) -> tuple[tuple[str, int, int, str], str]:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise RegistryError(f"{path}: expected a file name op=...,headdim=...,dstate=...,"
                            "state_dtype=...,device_name=....json")
    op, headdim, dstate, state_dtype, device = match.groups()
    return (op, int(headdim), int(dstate), state_dtype), device


def _row(where: str, value: object, provenance: Provenance) -> TunedRow:
    row = record(where, value, _ROW)
    if row["nheads"] % row["ngroups"]:
        raise RegistryError(f"{where}.ngroups: expected a divisor of nheads={row['nheads']}, "
                            f"got {row['ngroups']}")
    if not row["backends"] or not row["backends"].keys() <= set(BACKENDS):
        raise RegistryError(f"{where}.backends: expected some of {', '.join(BACKENDS)}, "
                            f"got {', '.join(row['backends']) or 'none'}")
    entries = {}
    for name, entry in row["backends"].items():
        record(f"{where}.backends.{name}", entry, _ENTRY)
        if entry["runner_up"] is not None:
            record(f"{where}.backends.{name}.runner_up", entry["runner_up"], _RUNNER_UP)
        entries[name] = TunedEntry(**entry)
    return TunedRow(**{**row, "backends": entries}, provenance=provenance)


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
