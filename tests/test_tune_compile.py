"""Compiling ahead for a GPU that is not here: real compilers, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from replayssm_cute.arch import Arch
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.types import SUPPORTED, Mamba2Geometry
from replayssm_tune import cli, run
from replayssm_tune.compiler import Compilers
from replayssm_tune.plan import Point, Unit, distinct, unit
from replayssm_tune.process import Lost
from replayssm_tune.subject import Subject, find

ROOT = Path(__file__).parents[1]
H200 = Arch("cuda", (9, 0), "NVIDIA_H200", 132)
POINT = Point(Mamba2Geometry(8, 64, 128, 1), "float16", 16, 4)
DECODE = Point(GdnGeometry(2, 4), "float32", 16, 4, "gdn_decode")
VERIFY = Point(GdnGeometry(2, 4), "bfloat16", 16, 4, "gdn_verify", tokens=2, fold="exact")
SUBJECT = Subject("", POINT.geometry, None)
FAKE = [sys.executable, "-m", "tests.tune_fake", "--compiler"]

#: Prepares a kernel as the process with the GPU does, on the driver of tests.fake_gpu, which loads nothing.
PREPARE = """
import json, sys
import triton
from tests.fake_gpu import DRIVER
from replayssm_cute.arch import Arch
from replayssm_tune.operations import OPERATIONS
from replayssm_tune.plan import Point
point, config, name = json.loads(sys.argv[1])
point = Point.from_dict(point)
if name == "triton": triton.runtime.driver.set_active(DRIVER)
arch = Arch("cuda", (9, 0), "NVIDIA_H200", 132)
OPERATIONS[point.op].launch(name, point.problem, arch, 4, config)
"""


@pytest.mark.parametrize(("point", "backend"), [(POINT, "cute"), (POINT, "triton"), (DECODE, "cute"),
                                                (VERIFY, "triton")], ids=str)
def test_the_process_with_the_gpu_finds_what_was_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                point: Point, backend: str) -> None:
    if backend == "cute":
        pytest.importorskip("cutlass")
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    u = unit(point, backend, H200)
    compilers = Compilers(run.COMPILER, 1, H200)
    compilers.submit([(u, u.configs[0])])
    assert compilers.result(u, u.configs[0]) == {}
    compilers.close()
    compiled = {p for p in tmp_path.rglob("*") if p.suffix in (".o", ".cubin")}
    assert len(compiled) == 1
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
                   "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", PREPARE, json.dumps([point.to_dict(), u.configs[0], backend])], check=True,
                   env=environment, cwd=ROOT)
    assert {p for p in tmp_path.rglob("*") if p.suffix in (".o", ".cubin")} == compiled, "nothing was compiled again"


def test_a_kernel_is_compiled_once_for_all_batches() -> None:
    units = [unit(point, "triton", H200) for point in SUBJECT.points(["float16"], [16], [1, 8, 64])]
    assert sum(len(u.configs) for u in units) == 3 * len(distinct(units)) > 0
    more = [unit(point, "triton", H200) for point in SUBJECT.points(["float16", "float32"], [16, 32], [1, 8])]
    kinds = {(u.point.state_dtype, u.point.buffer_len) for u, _ in distinct(more)}
    assert len(kinds) == 4
    assert [c == u.configs[0] for u, c in distinct(more)] == [True] * 4 + [False] * (len(distinct(more)) - 4), \
        "what every unit needs is compiled first"


def test_without_jobs_nothing_is_compiled_ahead() -> None:
    u = Unit(POINT, "triton", SUPPORTED, ({"a": 1},))
    compilers = Compilers(["/no/such/program"], 0, H200)
    compilers.submit([(u, {"a": 1})])
    assert compilers.result(u, {"a": 1}) == {}
    compilers.close()


def test_a_kernel_that_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TUNE_FAKE", json.dumps({"no_compile": ['"a": 1']}))
    u = Unit(POINT, "triton", SUPPORTED, ({"a": 1}, {"a": 2}))
    compilers = Compilers(FAKE, 2, H200)
    compilers.submit(distinct([u]))
    with pytest.raises(Lost, match="does not compile"):
        compilers.result(u, {"a": 1})
    assert compilers.result(u, {"a": 2}) == {}
    compilers.close()


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["run", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


def test_a_dry_run_counts_the_space(capsys: pytest.CaptureFixture[str]) -> None:
    said = dry_run(capsys, "granite-4.0-h-tiny", "--device", "NVIDIA_B200", "--batch", "8,64", "--buffer-len", "8,16",
                   "--no-compile", "--no-prune", "--state-dtype", "float16")
    units = [unit(point, backend, Arch("cuda", (10, 0), "NVIDIA_B200"))
             for point in find("granite-4.0-h-tiny").points(["float16"], [8, 16], [8, 64])
             for backend in ("cute", "triton")]
    assert f"4 points, {sum(len(u.configs) for u in units)} candidates, {len(distinct(units))} kernels" in said
    assert len(re.findall(r"float16 +(8|16) +(cute|triton) +2 ", said)) == 4


def test_a_dry_run_says_which_backend_cannot_serve(capsys: pytest.CaptureFixture[str]) -> None:
    said = dry_run(capsys, "granite-4.0-h-tiny", "--device", "L40S", "--batch", "8", "--no-compile")
    assert "the kernels are built for 9.0, 10.0 and 10.3, not for NVIDIA_L40S" in said


def test_a_dry_run_compiles_and_tells_the_resources(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cutlass")
    said = dry_run(capsys, "--geometry", "14x24x128/2", "--device", "NVIDIA_H200", "--batch", "8", "--state-dtype",
                   "float16", "--jobs", "2")
    found = re.findall(r"float16 +16 +(cute|triton) +\w+=\w+ +(\d+) +(\d+) +(\d+) +(\d+)", said)
    lines = [(backend, *map(int, numbers)) for backend, *numbers in found]
    assert [line[0] for line in lines] == ["cute"] * 3 + ["triton"] * 4
    for _, registers, spilled, shared, resident in lines:
        assert 16 <= registers <= 255 and spilled >= 0 and shared > 0 and 1 <= resident <= 32
    assert lines[0][2] == lines[3][2] == 0, "the heuristic's choices do not spill"
    assert lines[6][1] == 96 and lines[6][2] > 0, "a limit of 96 registers makes this shape spill"


def test_an_unknown_device_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run", "--dry-run"], ["explain"]):
        assert cli.main([*command, "granite-4.0-h-tiny", "--device", "NVIDIA_H2000"]) == 2
        said = capsys.readouterr().err
        assert "device: expected the name of a known GPU (A100" in said and "NVIDIA_H2000" in said
