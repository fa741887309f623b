"""The cache of compiled kernels: one compilation for many processes, and never the wrong kernel."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys, torch
from tests.compiled_kernels import make_problem
from replayssm_cute.kernels import mamba2
from replayssm_cute.kernels.mamba2_config import default_config
from replayssm_cute.kernels.targets import TARGETS

kernel, built = mamba2._kernel, []
def counted(*args):
    built.append(args)
    return kernel(*args)
mamba2._kernel = counted
for state in map(lambda n: getattr(torch, n), sys.argv[1].split(",")):
    problem = make_problem((14, 64, 128, 1), state)
    step = mamba2.compile_mamba2(problem, default_config(problem, 1, TARGETS["sm_90a"]), "sm_90a", 132)
    assert mamba2.compile_mamba2(problem, default_config(problem, 1, TARGETS["sm_90a"]), "sm_90a", 132) is step
    try:
        step(*[None] * 18)
    except TypeError as error:  # it names the tensors it was compiled for
        print(str(error).split("mState: ")[1].split(",")[4].strip(" )"))
print("built", len(built))
"""


def start(cache: Path, states: str = "float32") -> subprocess.Popen[str]:
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "REPLAYSSM_CACHE_DIR": str(cache),
                   "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tuning'}"}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, states], cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return out.split("\n")[:-1], err


def test_two_processes_compile_once(tmp_path: Path) -> None:
    outputs = [finish(p)[0] for p in [start(tmp_path), start(tmp_path)]]
    assert sorted(o[-1] for o in outputs) == ["built 0", "built 1"]
    assert finish(start(tmp_path))[0][-1] == "built 0"
    assert not list(tmp_path.rglob("*.tmp*"))


def test_dtypes_do_not_share_a_kernel(tmp_path: Path) -> None:
    out, _ = finish(start(tmp_path, "bfloat16,float16,float32"))
    assert out == ["bfloat16", "float16", "float32", "built 3"]


def test_damaged_entry_is_compiled_anew(tmp_path: Path) -> None:
    finish(start(tmp_path))
    entry, = tmp_path.rglob("*.o")
    entry.write_bytes(entry.read_bytes()[:1000])
    out, err = finish(start(tmp_path))
    assert out[-1] == "built 1" and "is damaged" in err
    assert finish(start(tmp_path))[0][-1] == "built 0"


def test_unusable_folder_still_compiles(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    out, err = finish(start(blocked))
    assert out[-1] == "built 1" and "cannot be used" in err


def test_key_holds_target_sources_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              caplog: pytest.LogCaptureFixture) -> None:
    import cutlass

    from replayssm_cute import compile_cache
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    compile_cache._fingerprint.cache_clear()
    here = compile_cache.cache_dir()
    monkeypatch.setattr(cutlass, "__version__", "0.0.0")
    compile_cache._fingerprint.cache_clear()
    assert compile_cache.cache_dir() != here
    compile_cache._fingerprint.cache_clear()
    stored: list[Path] = []
    monkeypatch.setattr(compile_cache, "_store", lambda path, compiled: stored.append(path))
    monkeypatch.setattr(compile_cache, "_memory", {})
    with caplog.at_level(logging.ERROR):
        for target, key in (("sm_90a", (1,)), ("sm_100a", (1,)), ("sm_100a", (2,))):
            monkeypatch.setattr(compile_cache, "_load", lambda path: path)
            compile_cache.get(target, key, lambda: None)
    assert len(set(stored)) == 3
