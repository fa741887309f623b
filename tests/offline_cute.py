"""Compile the CuTe kernels for a target without a GPU and report what is in the machine code.

Run as ``python tests/offline_cute.py TARGET``: the DSL fixes its architecture when it is first
imported, so every target needs a process of its own. Prints one JSON object a line.
"""

import json
import re
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from replayssm_cute.kernels.mamba2 import compile_mamba2
from replayssm_cute.kernels.mamba2_config import Mamba2Config
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.types import Mamba2Problem
from replayssm_tune.resources import cuobjdump, resource_usage
from tests.compiled_kernels import kernels
from tests.ptx.kernels import shared_memory


def opcodes(cubin: Path) -> list[str]:
    """The instructions of a cubin, with their modifiers."""
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", cuobjdump(cubin, "--dump-sass"), re.M)


def report(label: str, problem: Mamba2Problem, config: Mamba2Config, target: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        compiled: Any = compile_mamba2(problem, config, target, TARGETS[target].sms,
                                       f"--keep-cubin --dump-dir {folder}")
        cubin = next(Path(folder).glob("*.cubin"))
        usage, instructions = resource_usage(cubin), opcodes(cubin)
    return {"label": label, "geometry": str(problem.geometry), "state": str(problem.state_dtype),
            "L": problem.buffer_len, "philox_rounds": problem.philox_rounds, "config": asdict(config), **usage,
            "shared": shared_memory(str(compiled.ir_module)), "opcodes": dict(Counter(instructions))}


if __name__ == "__main__":
    target = TARGETS[sys.argv[1]]
    for label, (problem, config) in kernels(target).items():
        print(json.dumps(report(label, problem, config, target.name)), flush=True)
