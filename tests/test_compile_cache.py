"""The cache of compiled kernels: one compilation for many processes, and never the wrong kernel."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass")

ROOT = Path(__file__).parents[1]
PROGRAM = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO)
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
print("built", len(built), "with the DSL" if "cutlass" in sys.modules else "without the DSL")
"""
BUILT, LOADED, LINKED = "built 1 with the DSL", "built 0 with the DSL", "built 0 without the DSL"


def start(cache: Path, states: str = "float32", **environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "REPLAYSSM_CACHE_DIR": str(cache),
                   "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tuning'}", **environment}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, states], cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return out.split("\n")[:-1], err


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that two processes have filled at once with the kernel of ``start``'s default."""
    cache = tmp_path_factory.mktemp("compiled")
    outputs = [finish(p)[0] for p in [start(cache), start(cache)]]
    assert sorted(o[-1] for o in outputs) in ([LOADED, BUILT], [LINKED, BUILT])
    return cache


@pytest.fixture
def cache(compiled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(compiled, tmp_path / "cache")


def only(cache: Path, suffix: str) -> Path:
    found, = cache.rglob("*" + suffix)
    return found


def test_two_processes_compile_once(cache: Path) -> None:
    assert only(cache, ".o") and only(cache, ".so")
    assert not list(cache.rglob("*.tmp*"))


def test_an_entry_loads_without_the_dsl(cache: Path) -> None:
    out, err = finish(start(cache))
    assert out == ["float32", LINKED] and not err
    only(cache, ".o").unlink()
    assert finish(start(cache))[0][-1] == LINKED


def test_dtypes_do_not_share_a_kernel(cache: Path) -> None:
    states = "bfloat16,float16,float32"
    assert finish(start(cache, states))[0] == ["bfloat16", "float16", "float32", "built 2 with the DSL"]
    assert finish(start(cache, states))[0] == ["bfloat16", "float16", "float32", LINKED]


@pytest.mark.parametrize("environment", [{"CC": "", "PATH": ""}, {"CC": "true"}], ids=["none", "links nothing"])
def test_without_a_compiler_the_dsl_loads(cache: Path, environment: dict[str, str]) -> None:
    only(cache, ".so").unlink()
    out, err = finish(start(cache, **environment))
    assert out == ["float32", LOADED] and err.count("cannot be made") == 1 and "WARNING" not in err
    assert sorted(p.suffix for p in cache.rglob("sm_90a-*")) == [".lock", ".o"]


def test_object_without_a_library_is_linked(cache: Path) -> None:
    only(cache, ".so").unlink()
    assert [finish(start(cache)) for _ in range(2)] == [(["float32", LOADED], ""), (["float32", LINKED], "")]


def test_compiles_once_without_a_compiler(tmp_path: Path) -> None:
    states = "float32,float16"
    out, err = finish(start(tmp_path, states, CC="false"))
    assert out[-1] == "built 2 with the DSL" and err.count("cannot be made") == 1
    assert finish(start(tmp_path, states, CC="false"))[0][-1] == LOADED


@pytest.mark.parametrize("size", [0, 20, 8192, -1])
def test_truncated_library_is_not_loaded(cache: Path, size: int) -> None:
    """Where the dynamic loader would crash."""
    from replayssm_cute import shared_object
    library = only(cache, ".so")
    library.write_bytes(library.read_bytes()[:size])
    with pytest.raises(ValueError, match="checksum"):
        shared_object.load(library, "replayssm_step")


def test_damaged_library_is_linked_anew(cache: Path) -> None:
    """By one of two processes."""
    library = only(cache, ".so")
    library.write_bytes(library.read_bytes()[:8192])
    ended = [finish(p) for p in [start(cache), start(cache)]]
    assert sorted(out[-1] for out, _ in ended) in ([LOADED, LINKED], [LOADED, LOADED])
    assert sum("is damaged" in err for _, err in ended) == 1
    assert finish(start(cache)) == (["float32", LINKED], "") and not list(cache.rglob("*.tmp*"))


def test_damaged_entry_is_compiled_anew(cache: Path) -> None:
    entry = only(cache, ".o")
    entry.write_bytes(entry.read_bytes()[:1000])
    only(cache, ".so").write_bytes(b"")
    out, err = finish(start(cache))
    assert out[-1] == BUILT and err.count("is damaged") == 2
    assert finish(start(cache)) == (["float32", LINKED], "")


def test_unusable_folder_still_compiles(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    out, err = finish(start(blocked))
    assert out[-1] == BUILT and "cannot be used" in err


def test_version_is_read_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cutlass

    from replayssm_cute import compile_cache
    assert compile_cache._dsl_version() == cutlass.__version__
    source = tmp_path / "__init__.py"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(source)))
    source.write_text("from x import y\n__version__ = '1.2.3'\n")
    assert compile_cache._dsl_version() == "1.2.3"
    source.write_text("from .versions import __version__\n")
    assert compile_cache._dsl_version() == cutlass.__version__


def test_library_is_of_one_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds where the DSL's runtime lies."""
    from replayssm_cute import shared_object
    names = set()
    for origin in ("/one/cutlass/__init__.py", "/two/cutlass/__init__.py"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, origin=origin: SimpleNamespace(origin=origin))
        shared_object._installation.cache_clear()
        names.add(shared_object.beside(Path("/cache/sm_90a-1.o")))
    shared_object._installation.cache_clear()
    assert len(names) == 2


def test_key_holds_target_sources_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from replayssm_cute import compile_cache
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    compile_cache._fingerprint.cache_clear()
    here = compile_cache.cache_dir()
    monkeypatch.setattr(compile_cache, "_dsl_version", lambda: "0.0.0")
    compile_cache._fingerprint.cache_clear()
    assert compile_cache.cache_dir() != here
    compile_cache._fingerprint.cache_clear()
    stored: list[Path] = []
    monkeypatch.setattr(compile_cache, "_store", lambda path, compiled: stored.append(path))
    monkeypatch.setattr(compile_cache, "_memory", {})
    for target, key in (("sm_90a", (1,)), ("sm_100a", (1,)), ("sm_100a", (2,))):
        compile_cache.get(target, key, lambda: None)
    assert len(set(stored)) == 3
