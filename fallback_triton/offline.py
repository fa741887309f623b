"""Compile a kernel for a GPU that is not here, and report what it takes of the machine.

Triton compiles for any of its targets without a driver. What ``ptxas`` or LLVM say about the result
(registers, spills, shared memory) is read back from the object itself.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fallback_triton.launch import Target

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_86": GPUTarget("cuda", 86, 32), "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32), "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64), "gfx950": GPUTarget("hip", "gfx950", 64),
}
FEATURES = {name: Target.at(target) for name, target in TARGETS.items()}
_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32",
          torch.int64: "i64", torch.int8: "i8", torch.bool: "i1"}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        registers: vector registers a thread.
        spilled: bytes of stack a thread (NVIDIA) or registers spilled (AMD); 0 where nothing spills.
        shared: bytes of shared memory a program.
        loads_128: global loads of 128 bits in the code: a coalesced kernel has one per 16 bytes of state.
        waits: whether it waits for the launch before it ahead of every access of global memory.
    """

    target: str
    registers: int
    spilled: int
    shared: int
    loads_128: int
    waits: bool


def compile_for(target: str, kernel: Any, arguments: list[Any], constants: dict[str, Any],
                options: dict[str, Any]) -> Resources:
    """Compile ``kernel`` for ``target``, one of ``TARGETS``; the other arguments as in ``launch.compile_kernel``."""
    runtime = dict(zip([n for n in kernel.arg_names if n not in constants], arguments, strict=True))
    signature, values = {}, dict(constants)
    for name in kernel.arg_names:
        dtype = runtime.get(name)
        if isinstance(dtype, torch.dtype):
            signature[name] = "*" + _NAMES[dtype]
        elif name in constants or dtype is None:
            signature[name] = "constexpr"
            values.setdefault(name, None)
        else:
            signature[name] = "i32" if kernel.fn.__annotations__.get(name) is tl.int32 else "i64"
    compiled = triton.compile(ASTSource(kernel, signature, values), target=TARGETS[target], options=options)
    count = _cuda_resources if "cubin" in compiled.asm else _hip_resources
    code = compiled.asm["ptx" if "cubin" in compiled.asm else "amdgcn"]
    wide = re.findall(r"ld\.global[.\w:]*\.v4\.b32|global_load_dwordx4|buffer_load_dwordx4", code)
    first = re.search(r"griddepcontrol\.wait|\b(?:ld|st|atom|red)\.global", code)
    return Resources(target, *count(compiled.asm), compiled.metadata.shared, len(wide),
                     first is not None and first[0] == "griddepcontrol.wait")


def _cuda_resources(asm: Any) -> tuple[int, int]:
    """(registers, bytes of stack) from the cubin."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK"))  # type: ignore[return-value,index]


def _hip_resources(asm: Any) -> tuple[int, int]:
    """(vector registers, registers spilled) from the assembly's metadata."""
    return tuple(int(re.search(rf"\.{name}:\s+(\d+)", asm["amdgcn"])[1])  # type: ignore[return-value,index]
                 for name in ("vgpr_count", "vgpr_spill_count"))
