"""Rows merged into files: by two processes at once, and in the order of what is better."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replayssm_cute.errors import RegistryError
from replayssm_cute.registry import tuned
from replayssm_cute.types import Mamba2Geometry
from replayssm_tune import rows

NANO = Mamba2Geometry(64, 64, 128, 8)
INFO = {"capability": "9.0", "sms": 132, "torch": "2.13.0", "triton": "3.6.0", "cutlass_dsl": None,
        "date": "2026-11-30T10:00:00Z"}
H200 = rows.record("NVIDIA_H200", INFO)

WRITER = """
import sys
from pathlib import Path
from tests.test_tune_rows import H200, row
from replayssm_tune import rows
for batch in range(int(sys.argv[2]), 60, 2):
    assert rows.store(Path(sys.argv[1]), H200, [row(batch, cute=5.0)]) == []
"""


def row(batch: int = 8, **us: float) -> dict[str, Any]:
    entries = {name: {"config": {"a": 1}, "us": t, "runner_up": None} for name, t in us.items()}
    return {"nheads": 64, "ngroups": 8, "buffer_len": 16, "batch": batch, "backends": entries, "per_step_us": None,
            "copy_percent": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return rows.path_of(tmp_path / "new", NANO, "float16", "NVIDIA_H200")


def times(path: Path) -> dict[int, dict[str, float]]:
    return {r.batch: {name: e.us for name, e in r.backends.items()} for r in tuned.load_file(path).rows}


def test_two_writers_lose_no_row_of_each_other(path: Path) -> None:
    modules = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": modules}
    both = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), first], env=environment) for first in "12"]
    assert [process.wait(60) for process in both] == [0, 0]
    assert times(path) == {batch: {"cute": 5.0} for batch in range(1, 60)}


@pytest.mark.parametrize(("new", "kept"), [
    ({"cute": 9.0, "triton": 12.0}, False), ({"cute": 10.0, "triton": 8.0}, False),
    ({"cute": 9.5, "triton": 11.0}, False), ({"cute": 9.6, "triton": 11.0}, True),
    ({"cute": 1.0}, True), ({"triton": 1.0}, True), ({"cute": 9.0, "triton": 12.0, "torch": 90.0}, False)])
def test_only_a_row_that_is_no_worse_replaces_one(path: Path, new: dict[str, float], kept: bool) -> None:
    old = {"cute": 9.5, "triton": 12.0}
    rows.store(path, H200, [row(**old), row(16, cute=20.0)])
    said = rows.store(path, H200, [row(**new)])
    assert bool(said) == kept and times(path) == {8: old if kept else new, 16: {"cute": 20.0}}
    assert rows.store(path, H200, [row(**new)], force=True) == [] and times(path)[8] == new


@pytest.mark.parametrize("name", sorted({*rows.VERSIONS} - {"capability", "predicted"}))
def test_every_version_counts(path: Path, name: str) -> None:
    before = {**H200, name: 114 if name == "sms" else "0.1"}
    path.parent.mkdir()
    tuned.write_rows(path, before, [row(cute=9.0)])
    content = path.read_bytes()
    with pytest.raises(RegistryError, match=f"were measured with {name} "):
        rows.check(path, H200)
    with pytest.raises(RegistryError, match=f"were measured with {name} "):
        rows.store(path, H200, [row(cute=8.0)])
    assert path.read_bytes() == content
    rows.store(path, H200, [row(16, cute=8.0)], force=True)
    assert times(path) == {16: {"cute": 8.0}}


def test_a_full_disk_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows.store(path, H200, [row(cute=9.0)])
    content = path.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as caught:
        patch.setattr(os, "replace", full)
        rows.store(path, H200, [row(cute=8.0)])
    assert caught.value.filename == str(path)
    assert path.read_bytes() == content and {p.name for p in path.parent.iterdir()} == {path.name, ".tuned.lock"}
    assert rows.store(path, H200, [row(cute=8.0)]) == [], "the lock was given back"


def test_what_could_not_be_read_again_is_not_written(path: Path) -> None:
    rows.store(path, H200, [row(cute=9.0)])
    with pytest.raises(RegistryError, match="us: expected a positive finite number"):
        rows.store(path, H200, [row(16, cute=float("inf"))])
    assert times(path) == {8: {"cute": 9.0}}
