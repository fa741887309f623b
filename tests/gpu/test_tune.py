"""The tuner on the GPU here: a short run keeps its budget and its rows are no worse than the heuristic."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import pytest

from replayssm_cute import arch as archs
from replayssm_cute.registry import tuned
from replayssm_tune import cli
from replayssm_tune.cli import parse_geometry
from replayssm_tune.rows import path_of

GEOMETRY = parse_geometry("64x64x128/8")


def test_a_short_run_keeps_its_budget_and_beats_or_equals_the_heuristic(tmp_path: Path,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    from replayssm_tune import plan  # it imports Triton, which other tests collected here want to interpret

    begun = time.monotonic()
    assert cli.main(["run", "--geometry", str(GEOMETRY), "--state-dtype", "float16", "--batch", "8,64", "--jobs", "4",
                     "--budget", "90s", "--out", str(tmp_path)]) == 0
    assert time.monotonic() - begun < 90
    said, arch = capsys.readouterr().out, archs.of("cuda")
    assert "were not begun" not in said
    rows = tuned.load_file(path_of(tmp_path, GEOMETRY, "float16", arch.name)).rows
    assert [row.batch for row in rows] == [8, 64]
    records = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    for row in rows:
        assert row.per_step_us and row.copy_percent and 1 < row.copy_percent < 105
        for backend, entry in row.backends.items():
            default = plan.unit(plan.Point(GEOMETRY, "float16", 16, row.batch), backend, arch).configs[0]
            samples = [r["result"]["us"] for r in records if r["key"]["do"] == "sample"
                       and (r["key"]["backend"], r["key"]["point"]["batch"]) == (backend, row.batch)
                       and r["key"]["config"] == default]
            assert len(samples) >= 3 and entry.us <= statistics.median(samples) + 1e-3
