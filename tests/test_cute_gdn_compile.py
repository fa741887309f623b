"""The Gated DeltaNet CuTe kernels compile for every target: no spills, resident as asked, on the tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("cutlass")

from replayssm_cute.kernels.targets import TARGETS
from tests.kernel_resources import ROOT, count, resident_ctas


def reports(target: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "CUTE_DSL_ARCH": target, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tuning'}"}
    run = subprocess.run([sys.executable, "-m", "tests.offline_cute_gdn", target], cwd=ROOT, env=environment,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("target", TARGETS)
def test_resources(target: str) -> None:
    found = reports(target)
    assert len(found) == 6
    for r in found:
        staged = r["config"]["design"] == "staged"
        assert r["STACK"] == r["LOCAL"] == count(r, "LDL") == count(r, "STL") == 0, (r["label"], "spills")
        warps = r["warps"] + (1 + r["exact"] if staged else 0)
        assert resident_ctas(r["REG"], r["shared"], 32 * warps, TARGETS[target]) >= r["config"]["min_ctas"], r["label"]
        assert count(r, "HMMA") >= 30, r["label"]
        assert (count(r, "UBLKCP") > 0) == staged, r["label"]
        if r["exact"]:  # the fold's multiply-adds, two at a time where the target can
            assert count(r, "FFMA2" if target != "sm_90a" else "FFMA") >= 90, r["label"]
