"""Importing costs no more than torch, and all ways of installing resolve the same names."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("triton", "cutlass", "tvm_ffi", "cuda", "matplotlib", "rich", "vllm", "numpy.testing")


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                         env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tuning'}", "PATH": "/usr/bin:/bin"})
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_touches_no_compiler_and_no_driver() -> None:
    loaded = python("import sys, torch; before = set(sys.modules); import replayssm_cute; "
                    "replayssm_cute.supports_replayssm; replayssm_cute.explain; "
                    "replayssm_cute.selective_state_update_replayssm_output_only; "
                    "print(*sorted(set(sys.modules) - before)); assert not torch.cuda.is_initialized()")
    new = loaded.split()
    assert "replayssm_cute.mamba2" in new
    assert not [m for m in new if m.split(".")[0] in HEAVY], new


def test_import_is_as_cheap_as_torch() -> None:
    seconds = float(python("import torch, time; t = time.perf_counter(); import replayssm_cute; "
                           "print(time.perf_counter() - t)"))
    assert seconds < 0.05


def test_every_export_exists() -> None:
    import replayssm_cute
    for name in replayssm_cute.__all__:
        assert getattr(replayssm_cute, name) is not None
    with pytest.raises(AttributeError):
        _ = replayssm_cute.nothing


def test_wheel_holds_three_packages_and_the_data(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)],
                   check=True, capture_output=True, text=True)
    wheel, = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {n.split("/")[0] for n in names if ".dist-info" not in n}
    assert top == {"replayssm_cute", "fallback_triton", "replayssm_tune"}
    assert "replayssm_cute/py.typed" in names
    for folder in ("models", "tuned"):
        committed = {f"replayssm_cute/{folder}/{p.name}" for p in (ROOT / "replayssm_cute" / folder).glob("*.json")}
        assert committed <= set(names)
    points = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    for name in ("vllm.general_plugins", "replayssm-tune", "replayssm-demo"):
        assert name in points


def test_installed_clone_and_tree_resolve_the_same_files(tmp_path: Path) -> None:
    code = ("import importlib.util as u; print(*(u.find_spec(n).origin for n in "
            "('replayssm_cute', 'fallback_triton', 'replayssm_tune')))")
    tree = python(code).split()
    assert tree == [str(ROOT / p / "__init__.py") for p in ("replayssm_cute", "fallback_triton",
                                                            "tuning/replayssm_tune")]
    installed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    if installed.returncode == 0:  # in the test environment the package is installed, editable
        assert installed.stdout.split() == tree
