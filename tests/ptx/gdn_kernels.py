"""The Gated DeltaNet kernels that the executor's tests run, compiled to PTX without a GPU.

Run as ``python -m tests.ptx.gdn_kernels TARGET FOLDER``, as ``tests.ptx.kernels``.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from replayssm_cute.gdn_types import GdnGeometry, GdnProblem
from replayssm_cute.kernels.gdn_config import GdnConfig
from replayssm_cute.kernels.targets import TARGETS
from tests.ptx.code import load
from tests.ptx.gdn_launch import Kernel
from tests.ptx.kernels import build_all, compiled_folder, shared_memory

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Spec:
    """What to compile, and with what cases it is run.

    Attributes:
        state: dtype of the checkpoint.
        tokens: T; 0 for standard decode.
        exact: the exact fold.
        ring: dtype of the rings of d and k.
        heads: (Hk, ratio).
        config: ``GdnConfig`` arguments.
        problem: further fields of ``GdnProblem``.
        case: further arguments of ``tests.gdn_cases.make_case``.
    """

    state: torch.dtype
    tokens: int = 0
    exact: bool = False
    ring: torch.dtype = bf16
    heads: tuple[int, int] = (1, 1)
    buffer_len: int = 16
    config: dict[str, Any] = field(default_factory=dict)
    problem: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] = field(default_factory=dict)

    def posed(self) -> GdnProblem:
        Hk, ratio = self.heads
        gate = self.case.get("gate_dtype") or bf16
        return GdnProblem(
            GdnGeometry(Hk, Hk * ratio), self.buffer_len, self.state, bf16, self.ring, (gate, gate, f32, f32),
            index_dtype=self.case.get("index_dtype", torch.int32), key_dtype=torch.int64,
            flag_dtype=torch.int8 if self.tokens else torch.int32 if self.case.get("force", True) else None,
            tokens=self.tokens, exact_fold=self.exact, l2norm=self.case.get("l2norm", True), **self.problem)


def staged(rows: int, tile_v: int, stages: int = 2, **more: Any) -> dict[str, Any]:
    return {"design": "staged", "rows": rows, "tile_v": tile_v, "stages": stages, "pdl": True, **more}


def register(rows: int, tile_v: int) -> dict[str, Any]:
    return {"design": "register", "rows": rows, "tile_v": tile_v, "pdl": True}


WIDE, NARROW, HEAD = staged(2, 64), staged(2, 64), staged(4, 128)
SR = {"philox_rounds": 5}
SPECS = {
    "decode-f32": Spec(f32, config=WIDE), "decode-bf16": Spec(bf16, config=NARROW),
    "decode-f16": Spec(f16, config=HEAD),
    "decode-f32-reg": Spec(f32, config=register(2, 32)), "decode-bf16-reg": Spec(bf16, config=register(2, 32)),
    "decode-bf16-sr": Spec(bf16, config=NARROW, problem=SR, case={"l2norm": False}),
    "decode-f16-sr-reg": Spec(f16, config=register(2, 32), problem=SR, case={"l2norm": False}),
    "decode-ratio3": Spec(bf16, heads=(2, 3), config=HEAD, case={"index_dtype": torch.int64, "force": False}),
    "decode-l32": Spec(f32, heads=(1, 4), buffer_len=32, config=staged(4, 64, evict_first=True),
                       case={"l2norm": False, "gate_dtype": f32}),
    "decode-f32-f32": Spec(f32, ring=f32, config=WIDE),
    "decode-f32-f32-reg": Spec(f32, ring=f32, config=register(2, 32)),
    "decode-f16-f16": Spec(f16, ring=f16, config=NARROW),
    "decode-f16-f16-sr": Spec(f16, ring=f16, config=NARROW, problem=SR, case={"l2norm": False}),
    "decode-bf16-f32": Spec(bf16, ring=f32, config=NARROW),
    "decode-f32-f16": Spec(f32, ring=f16, heads=(1, 2), buffer_len=32, config=staged(4, 64)),
    "ring-f32-f32": Spec(f32, 4, ring=f32, config=WIDE), "exact-f32-f32": Spec(f32, 4, True, ring=f32, config=WIDE),
    "ring-f32": Spec(f32, 4, config=staged(4, 64)), "ring-bf16": Spec(bf16, 4, config=NARROW),
    "ring-bf16-reg": Spec(bf16, 4, config=register(2, 32)),
    "ring-t16": Spec(f32, 16, buffer_len=32, heads=(1, 2), config=staged(2, 64)),
    "exact-f32": Spec(f32, 4, True, config=WIDE), "exact-f32-reg": Spec(f32, 4, True, config=register(2, 64)),
    "exact-bf16": Spec(bf16, 4, True, config=HEAD),
    "exact-f16": Spec(f16, 4, True, heads=(1, 3), config=HEAD, case={"index_dtype": torch.int64}),
    "exact-t6": Spec(f32, 6, True, config=staged(4, 64), case={"l2norm": False}),
    "exact-bf16-verify": Spec(bf16, 4, True, config=HEAD, problem={"launch_mode": "verify"}),
    "exact-bf16-flush": Spec(bf16, 4, True, config=HEAD, problem={"launch_mode": "flush"})}
#: What is compiled for a target; the kernels have one source, and the targets differ in a few instructions.
NAMES = {"sm_100a": tuple(SPECS), "sm_103a": ("decode-bf16-sr",),
         "sm_90a": ("decode-bf16", "decode-f32-reg", "decode-f16-sr-reg", "decode-f32-f32", "decode-f16-f16",
                    "ring-f32", "exact-f32", "exact-bf16")}


@functools.cache
def kernel(name: str, target: str) -> Kernel:
    """A kernel ready to be launched; everything for its target is compiled at the first call.

    Raises:
        RuntimeError: the kernel does not compile.
    """
    found = json.loads((compiled_folder("tests.ptx.gdn_kernels", target) / f"{name}.json").read_text())
    if "error" in found:
        raise RuntimeError(f"{name} does not compile for {target}: {found['error']}")
    return Kernel(load(found["ptx"]), GdnConfig(**SPECS[name].config), found["shared_bytes"])


def build(name: str, target: str) -> dict[str, object]:
    from replayssm_cute.kernels.gdn import compile_gdn
    spec = SPECS[name]
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_gdn(spec.posed(), GdnConfig(**spec.config), target, TARGETS[target].sms,
                               f"--keep-ptx --dump-dir {folder}")
        text = next(Path(folder).glob("*.ptx")).read_text(encoding="latin1")
    return {"ptx": text.rstrip("\0"), "shared_bytes": shared_memory(str(compiled.ir_module))}


if __name__ == "__main__":
    build_all(NAMES[sys.argv[1]], build, sys.argv[1], Path(sys.argv[2]))
