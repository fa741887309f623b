"""What a Blackwell would run: the kernels that registry rows and the heuristic name, compiled to PTX.

Run as ``python -m tests.ptx.registry_kernels TARGET``, a process for every target; prints a JSON object a line.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from replayssm_cute.kernels.mamba2_config import Mamba2Config, validate
from replayssm_cute.kernels.targets import TARGETS
from tests.compiled_kernels import Kernel as Named
from tests.compiled_kernels import label, model_kernels, row_kernels, shape_key
from tests.ptx.code import load
from tests.ptx.kernels import Spec, shared_memory
from tests.ptx.launch import Kernel

ROOT = Path(__file__).parents[2]
HEADS, GROUPS = 4, 2


def registered(target: str) -> dict[str, tuple[Spec, Mamba2Config]]:
    """By label, one of those that differ in heads and groups only: rows of every device, and the heuristic's choices.

    Raises:
        AssertionError: a kernel is of another problem than ``Spec`` can say.
    """
    rows = [kernel for device in TARGETS.values() for kernel in row_kernels(device)
            if validate(*kernel, TARGETS[target])]
    found = {shape_key(*kernel): kernel for kernel in (*rows, *model_kernels(TARGETS[target]))}
    kernels = {}
    for problem, config in found.values():
        g = problem.geometry
        spec = Spec((HEADS, g.headdim, g.dstate, GROUPS), problem.state_dtype, problem.act_dtype, problem.buffer_len,
                    problem.philox_rounds)
        named: Named = (spec.problem(), config)
        assert shape_key(*named) == shape_key(problem, config), problem
        kernels[label(*named)] = spec, config
    return kernels


@functools.cache
def texts(target: str) -> dict[str, dict[str, Any]]:
    """By label: ``ptx``, and ``shared`` bytes a CTA."""
    run = subprocess.run([sys.executable, "-m", "tests.ptx.registry_kernels", target], cwd=ROOT, check=True, text=True,
                         stdout=subprocess.PIPE, env={**os.environ, "CUTE_DSL_ARCH": target, "PYTHONPATH":
                                                      f"{ROOT}{os.pathsep}{ROOT / 'tuning'}"})
    return {found["label"]: found for line in run.stdout.splitlines() if line.startswith("{")
            for found in [json.loads(line)]}


def kernel(name: str, target: str) -> Kernel:
    found = texts(target)[name]
    return Kernel(load(found["ptx"]), registered(target)[name][1], found["shared"])


def main(target: str) -> None:
    from replayssm_cute.kernels.mamba2 import compile_mamba2
    for name, (spec, config) in registered(target).items():
        with tempfile.TemporaryDirectory() as folder:
            compiled: Any = compile_mamba2(spec.problem(), config, target, TARGETS[target].sms,
                                           f"--keep-ptx --dump-dir {folder}")
            text = next(Path(folder).glob("*.ptx")).read_text(encoding="latin1").rstrip("\0")
        print(json.dumps({"label": name, "ptx": text, "shared": shared_memory(str(compiled.ir_module))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
