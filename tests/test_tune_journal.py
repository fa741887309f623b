"""The journal of measurements: whole through torn lines, other writers, and disks that are full."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from replayssm_cute.errors import RegistryError
from replayssm_tune.journal import Journal

KEY = {"backend": "cute", "config": {"stages": 2, "tile_p": 64}}
SAME = {"config": {"tile_p": 64, "stages": 2}, "backend": "cute"}
OTHER = {"backend": "cute", "config": {"stages": 3, "tile_p": 64}}


def test_results_are_there_for_the_next_run_in_their_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for us in (3.0, 2.0):
        journal.add(KEY, {"us": us})
    journal.add(OTHER, {"failed": "crash"})
    for later in (journal, Journal(tmp_path)):
        assert later.of(SAME) == [{"us": 3.0}, {"us": 2.0}]
        assert later.of(OTHER) == [{"failed": "crash"}] and later.of({}) == []
    assert Journal(tmp_path, fresh=True).of(KEY) == [] == Journal(tmp_path).of(KEY)


def test_a_crash_at_any_byte_loses_only_the_line_that_it_tore(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add(KEY, {"us": 1.0})
    whole = journal.path.read_bytes()
    journal.add(OTHER, {"us": 2.0})
    full = journal.path.read_bytes()
    for length in range(len(whole), len(full)):
        journal.path.write_bytes(full[:length])
        again = Journal(tmp_path)
        assert again.of(KEY) == [{"us": 1.0}]
        again.add(OTHER, {"us": 4.0})
        read = Journal(tmp_path)
        assert read.of(KEY) == [{"us": 1.0}] and read.of(OTHER)[-1] == {"us": 4.0}


def test_two_writers_keep_each_others_lines(tmp_path: Path) -> None:
    one, two = Journal(tmp_path), Journal(tmp_path)
    one.add(KEY, {"us": 1.0})
    two.add(OTHER, {"us": 2.0})
    one.add(KEY, {"us": 3.0})
    read = Journal(tmp_path)
    assert read.of(KEY) == [{"us": 1.0}, {"us": 3.0}] and read.of(OTHER) == [{"us": 2.0}]


@pytest.mark.parametrize("line", ['{"schema": 2, "key": {}, "result": {}}', "[1]", '{"key": {}, "result": {}}'])
def test_the_file_of_another_version_is_named(tmp_path: Path, line: str) -> None:
    journal = Journal(tmp_path)
    journal.add(KEY, {"us": 1.0})
    journal.path.write_text(journal.path.read_text() + line + "\n")
    with pytest.raises(RegistryError, match=r"journal\.jsonl: line 2: expected schema 1, got"):
        Journal(tmp_path)
    assert Journal(tmp_path, fresh=True).of(KEY) == []


def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 5)  # the last block did not fit
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = Journal(tmp_path)
    journal.add(KEY, {"us": 1.0})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device; the measurements before are kept") as caught:
            journal.add(OTHER, {"us": 2.0})
    assert caught.value.filename == str(journal.path) and journal.of(OTHER) == []
    journal.add(KEY, {"us": 3.0})
    read = Journal(tmp_path)
    assert read.of(KEY) == [{"us": 1.0}, {"us": 3.0}] and read.of(OTHER) == []
    assert [json.loads(line)["result"]["us"] for line in read.path.read_text().splitlines()[::2]] == [1.0, 3.0]
