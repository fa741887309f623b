"""The tuner on the GPU here: a short run keeps its budget and its rows are no worse than the heuristic."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import pytest

from replayssm_cute import arch as archs
from replayssm_cute.registry import tuned
from replayssm_tune import cli, plan
from replayssm_tune.rows import path_of
from replayssm_tune.subject import find, steps_of

MAMBA2 = plan.Point(find("64x64x128/8").geometry, "float16", 16, 1)
DECODE, VERIFY = (plan.Point(find("32/16x128x128").geometry, "float32", 16, 1, **steps_of(
    find("32/16x128x128").geometry, op)[0]) for op in ("gdn_decode", "gdn_verify"))


@pytest.mark.parametrize("layer", [MAMBA2, DECODE, VERIFY], ids=lambda point: point.op)
def test_a_short_run_keeps_its_budget_and_beats_or_equals_the_heuristic(tmp_path: Path, layer: plan.Point,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    assert cli.main(["run", "--geometry", str(layer.geometry), "--op", layer.op, "--state-dtype", layer.state_dtype,
                     "--batch", "8,64", "--jobs", "8", "--budget", "90s", "--out", str(tmp_path)]) == 0
    assert time.monotonic() - begun < 90
    said, arch = capsys.readouterr().out, archs.of("cuda")
    assert "were not begun" not in said
    rows = tuned.load_file(path_of(tmp_path, layer.geometry, layer.state_dtype, arch.name, layer.op)).rows
    assert [row.batch for row in rows] == [8, 64]
    records = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    for row in rows:
        assert bool(row.per_step_us) == (layer.op != "gdn_verify"), "a window has no baseline"
        assert row.copy_percent and 1 < row.copy_percent < 105
        for backend, entry in row.backends.items():
            point = plan.Point.from_dict({**layer.to_dict(), "batch": row.batch})
            default = plan.unit(point, backend, arch).configs[0]
            samples = [r["result"]["us"] for r in records if r["key"]["do"] == "sample"
                       and (r["key"]["backend"], r["key"]["point"]["batch"]) == (backend, row.batch)
                       and r["key"]["config"] == default]
            assert len(samples) >= 3 and entry.us <= statistics.median(samples) + 1e-3
