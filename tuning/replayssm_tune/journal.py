"""What was measured, one line a measurement, as soon as it stands: a run that is killed loses nothing.

A line is ``{"schema": 1, "key": {...}, "result": {...}}``. Lines are only ever appended, under a lock,
and reach the disk before the next measurement begins. A line that a crash tore is skipped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from replayssm_cute.errors import RegistryError

FILE_NAME = "journal.jsonl"
LOCK_NAME = ".tuned.lock"  # of everything in a folder
SCHEMA = 1

Key = dict[str, Any]
Result = dict[str, Any]


class Journal:
    """The measurements of a folder: those that were there, and those that are added.

    Args:
        folder: exists.
        fresh: forget the measurements that are there.

    Raises:
        RegistryError: the file was written by another version of this program.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, fresh: bool = False) -> None:
        self.path = folder / FILE_NAME
        self._lock = FileLock(folder / LOCK_NAME)
        self._results: dict[str, list[Result]] = {}
        with self._lock:
            if fresh:
                self.path.unlink(missing_ok=True)
            self.path.touch()
            for number, line in enumerate(self.path.read_bytes().splitlines(), 1):
                self._read(number, line)

    def of(self, key: Key) -> list[Result]:
        """The results under a key, in the order in which they were measured."""
        return list(self._results.get(_text(key), ()))

    def add(self, key: Key, result: Result) -> None:
        """Append a result; it is on the disk when this returns.

        Raises:
            OSError: the disk is full or the file cannot be written; what was there stays readable.
        """
        line = _text({"schema": SCHEMA, "key": key, "result": result}).encode() + b"\n"
        try:
            with self._lock, self.path.open("ab+") as file:
                file.write(line if _at_line_start(file) else b"\n" + line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; the measurements before are kept", str(self.path)) from None
        self._results.setdefault(_text(key), []).append(result)

    def _read(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return  # torn by a crash, or empty behind a torn one
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            got = record.get("schema") if isinstance(record, dict) else record
            raise RegistryError(f"{self.path}: line {number}: expected schema {SCHEMA}, got {got!r}; use another "
                                "folder, or --fresh, which measures anew")
        self._results.setdefault(_text(record["key"]), []).append(record["result"])


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _at_line_start(file: IO[bytes]) -> bool:
    """Whether the file is empty or its last line is whole; a crash may have torn it."""
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
