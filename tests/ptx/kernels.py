"""The kernels that the executor's tests run, compiled to PTX without a GPU.

Run as ``python -m tests.ptx.kernels TARGET FOLDER``: the DSL fixes its architecture when it is first
imported, so every target needs a process of its own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from replayssm_cute.kernels.mamba2_config import Mamba2Config, ranked, validate
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from tests.ptx.code import load
from tests.ptx.launch import Kernel

ROOT = Path(__file__).parents[2]
f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Spec:
    """What to compile, and with what cases it is run.

    Attributes:
        shape: H, P, N, G.
        rounds: of the random generator; 0 rounds to nearest.
        tile_p, stages: of the bulk design, instead of the heuristic's.
        prefetch: as in ``Mamba2Config``.
        case: further arguments of ``tests.cases.make_case``.
    """

    shape: tuple[int, int, int, int]
    state: torch.dtype
    act: torch.dtype = bf16
    buffer_len: int = 16
    rounds: int = 0
    tile_p: int = 0
    stages: int = 0
    prefetch: bool = False
    case: dict[str, Any] = field(default_factory=dict, hash=False)

    def problem(self) -> Mamba2Problem:
        D, index = self.case.get("D", "tied"), self.case.get("index_dtype", torch.int32)
        return Mamba2Problem(
            Mamba2Geometry(*self.shape), self.buffer_len, self.state, self.act, self.act,
            self.case.get("dt") or self.act, torch.int8, index, philox_rounds=self.rounds,
            D_dtype=None if D is None else self.case.get("D_dtype") or self.act, D_tied=D != "full",
            dt_bias_dtype=self.act if self.case.get("dt_bias", True) else None,
            has_z=self.case.get("z", False), index_ndim=2 if self.case.get("index_columns") else 1,
            dt_align=math.gcd(16, 4 * self.buffer_len))


NANO, SUPER, WIDE = (4, 64, 128, 2), (2, 80, 128, 1), (2, 64, 256, 1)
FULL = {"z": True, "D": "full", "index_dtype": torch.int64, "index_columns": 2}
BARE = {"D": None, "dt_bias": False}
#: For the bulk design.
BULK = {
    "f32": Spec(NANO, f32), "f16": Spec(NANO, f16), "bf16": Spec(NANO, bf16),
    "f16-sr": Spec(NANO, f16, rounds=5), "bf16-sr": Spec(NANO, bf16, rounds=10),
    "p80-f32": Spec(SUPER, f32), "p80-f16-sr": Spec(SUPER, f16, rounds=5), "p80-bf16": Spec(SUPER, bf16, case=FULL),
    "n256-f32": Spec(WIDE, f32, case=BARE), "n256-f16": Spec(WIDE, f16, case=FULL),
    "f16-tile16": Spec(NANO, f16, tile_p=16, stages=1),
    "bf16-sr-tile32": Spec(NANO, bf16, rounds=10, tile_p=32, stages=4),
    "f16-prefetch": Spec(NANO, f16, prefetch=True),
    "l36-f16": Spec(NANO, f16, buffer_len=36), "l4-bf16": Spec(NANO, bf16, buffer_len=4, case=BARE)}
#: For the register design.
REGISTER = {
    "act-f32": Spec(NANO, f32, act=f32, case=FULL), "act-f16-sr": Spec(NANO, f16, act=f16, rounds=5),
    "act-f16-p80": Spec(SUPER, bf16, act=f16), "act-f32-l5": Spec(SUPER, f32, act=f32, buffer_len=5, case=BARE)}
#: For the bulk design with an 8-bit checkpoint, codes beside a scale a row.
CODED = {
    "i8": Spec(NANO, torch.int8), "e4m3": Spec(NANO, torch.float8_e4m3fn), "i8-sr": Spec(NANO, torch.int8, rounds=5),
    "e4m3-sr": Spec(NANO, torch.float8_e4m3fn, rounds=10), "p80-e4m3-sr": Spec(SUPER, torch.float8_e4m3fn, rounds=5)}
CODED_NAMES = [f"bulk-{name}" for name in CODED]
NAMES = [f"bulk-{name}" for name in BULK] + [f"register-{name}" for name in REGISTER]


def spec_of(name: str) -> Spec:
    return {**BULK, **CODED, **REGISTER}[name.partition("-")[2]]


def config_of(name: str, target: str) -> Mamba2Config:
    """The heuristic's first valid choice of the design that the name begins with, as the spec changes it."""
    spec, device = spec_of(name), TARGETS[target]
    config = next(c for c in ranked(spec.problem(), 512, device)
                  if c.design == name.partition("-")[0] and validate(spec.problem(), c, device))
    if spec.tile_p:
        config = replace(config, tile_p=spec.tile_p, threads=2 * spec.tile_p, stages=spec.stages, min_ctas=1)
    return replace(config, prefetch=True) if spec.prefetch else config


@functools.cache
def kernel(name: str, target: str) -> Kernel:
    """A kernel ready to be launched; everything for its target is compiled at the first call.

    Raises:
        RuntimeError: the kernel does not compile.
    """
    text, shared_bytes = ptx(name, target)
    return Kernel(load(text), config_of(name, target), shared_bytes)


def ptx(name: str, target: str) -> tuple[str, int]:
    """(PTX, bytes of dynamic shared memory)."""
    found = json.loads((compiled_folder("tests.ptx.kernels", target) / f"{name}.json").read_text())
    if "error" in found:
        raise RuntimeError(f"{name} does not compile for {target}: {found['error']}")
    return found["ptx"], found["shared_bytes"]


@functools.cache
def compiled_folder(module: str, target: str) -> Path:
    """A folder with every kernel of a module such as this one, shared by the test processes of a machine."""
    from filelock import FileLock

    from replayssm_cute import compile_cache
    own = Path(ROOT, *module.split(".")).with_suffix(".py")
    sources = b"".join(p.read_bytes() for p in (own, Path(__file__).with_name("launch.py")))
    key = f"{compile_cache.cache_dir().name}-{hashlib.sha256(sources).hexdigest()[:8]}"
    folder = Path(tempfile.gettempdir()) / f"replayssm-ptx-{os.getuid()}" / key / target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder) + ".lock"):
        if not (folder / "done").exists():
            subprocess.run([sys.executable, "-m", module, target, str(folder)], cwd=ROOT, check=True,
                           env={**os.environ, "CUTE_DSL_ARCH": target, "PYTHONPATH": str(ROOT)})
            (folder / "done").touch()
    return folder


# ---- in the process of one target -------------------------------------------------------------------

def shared_memory(module: str) -> int:
    """Dynamic shared memory that the host code of a compiled function asks for.

    It is the 64-bit member of the launch configuration (grid, block, shared bytes, ...).
    """
    config = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    member = re.search(rf"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] : [^\n]*{config}", module)
    assert member is not None, "the launch configuration has changed its form"
    stored = re.search(rf"llvm\.store (%\d+), {member[1]} : i64", module[member.end():])
    assert stored is not None
    return int(re.findall(rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", module[:member.start()])[-1])


def build(name: str, target: str) -> dict[str, object]:
    from replayssm_cute.kernels.mamba2 import compile_mamba2
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_mamba2(spec_of(name).problem(), config_of(name, target), target, TARGETS[target].sms,
                                  f"--keep-ptx --dump-dir {folder}")
        text = next(Path(folder).glob("*.ptx")).read_text(encoding="latin1")
    return {"ptx": text.rstrip("\0"), "shared_bytes": shared_memory(str(compiled.ir_module))}


def build_all(names: Iterable[str], build: Callable[[str, str], dict[str, object]], target: str, folder: Path) -> None:
    """Write what ``build`` makes of each name, or its error, where ``ptx`` and its like read it."""
    for name in names:
        try:
            result = build(name, target)
        except Exception as error:
            result = {"error": str(error)}
        (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    build_all(NAMES + CODED_NAMES, build, sys.argv[1], Path(sys.argv[2]))
