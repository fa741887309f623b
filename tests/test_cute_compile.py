"""The CuTe kernels compile for every target, without spills and with the instructions they are for."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

ROOT = Path(__file__).parents[1]
TARGETS = ("sm_90a", "sm_100a", "sm_103a")


@functools.cache
def reports(target: str) -> list[dict]:
    environment = {**os.environ, "CUTE_DSL_ARCH": target, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tuning'}"}
    run = subprocess.run([sys.executable, "tests/offline_cute.py", target], cwd=ROOT, env=environment,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def count(report: dict, *parts: str) -> int:
    """Instructions whose dotted name starts with parts[0] and has the other parts among its modifiers."""
    return sum(n for name, n in report["opcodes"].items()
               if name.split(".")[0] == parts[0] and set(parts[1:]) <= set(name.split(".")))


def of_design(target: str, design: str) -> list[dict]:
    found = [r for r in reports(target) if r["config"]["design"] == design]
    assert len(found) >= 10, f"the {design} design must be covered"
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_no_spills(target: str) -> None:
    for r in reports(target):
        spills = count(r, "LDL") + count(r, "STL")
        assert r["STACK"] == 0 and r["LOCAL"] == 0 and spills == 0, r


@pytest.mark.parametrize("target", TARGETS)
def test_register_design_accesses(target: str) -> None:
    for r in of_design(target, "register"):
        if r["config"]["vec_bits"] == 256:
            assert count(r, "LDG", "NA", "ENL2", "256") > 0 and count(r, "STG", "ENL2", "256") > 0, r
        else:
            assert count(r, "LDG", "NA", "128") > 0 and count(r, "STG", "128") > 0, r
    wide = [r["config"]["vec_bits"] for r in of_design(target, "register") if r["geometry"] == "64x64x128/8"]
    assert (256 in wide) == (target != "sm_90a")


@pytest.mark.parametrize("target", TARGETS)
def test_bulk_design_copies(target: str) -> None:
    for r in of_design(target, "bulk"):
        coded = r["state"] in ("torch.int8", "torch.float8_e4m3fn")
        assert r["opcodes"]["UBLKCP.S.G"] == 7 + coded, r    # state, three rings, current x and B, C; scales
        assert r["opcodes"]["UBLKCP.G.S"] == 2, r            # the append of x and B
        assert count(r, "LDSM") > 0, r


@pytest.mark.parametrize("target", TARGETS)
def test_products_on_the_tensor_cores(target: str) -> None:
    for r in reports(target):
        assert (count(r, "HMMA") > 0) == (r["config"]["design"] != "register"), r


@pytest.mark.parametrize("target", TARGETS)
def test_packed_fma(target: str) -> None:
    for r in reports(target):
        assert (count(r, "FFMA2") > 0) == (target != "sm_90a"), r


@pytest.mark.parametrize("target", TARGETS)
def test_stochastic_rounding_is_done_by_the_hardware_where_there_is_one(target: str) -> None:
    stochastic = [r for r in reports(target) if r["philox_rounds"]]
    assert {r["config"]["design"] for r in stochastic} == {"bulk", "register"}
    for r in reports(target):
        name = {"torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float8_e4m3fn": "E4M3"}.get(r["state"], "")
        instructions = count(r, "F2FP", name, "RS") if name else 0
        # int8 has no such instruction.
        assert (instructions >= 4) == (r["philox_rounds"] > 0 and target != "sm_90a" and r["state"] != "torch.int8"), r
