"""Compile CuTe kernels for a target without a GPU and report what is in the machine code.

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

import torch

from replayssm_cute.kernels.mamba2 import compile_mamba2
from replayssm_cute.kernels.mamba2_config import Mamba2Config, ranked, validate
from replayssm_cute.kernels.targets import TARGETS, Target
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from replayssm_tune.resources import cuobjdump, resource_usage

STATES = (torch.float32, torch.float16, torch.bfloat16)


def make_problem(shape: tuple[int, int, int, int], state: torch.dtype, buffer_len: int = 16,
                 act: torch.dtype = torch.bfloat16, **changes: object) -> Mamba2Problem:
    options = {"dt_bias_dtype": torch.bfloat16, "D_dtype": torch.bfloat16, **changes}
    return Mamba2Problem(Mamba2Geometry(*shape), buffer_len, state, act, act, act, torch.int8, torch.int32,
                         **options)


def problems() -> list[Mamba2Problem]:
    """Every served head shape and dtype, and the odd corners."""
    f32, f16, bf16 = STATES
    shapes = [(64, 64, 128, 8), (96, 80, 128, 8), (48, 64, 256, 1), (32, 128, 256, 2), (80, 64, 64, 1)]
    main = (64, 64, 128, 8)
    found = [make_problem(shape, state) for shape in shapes for state in STATES]
    found += [make_problem(main, f32, 5), make_problem(main, f16, 36), make_problem((48, 64, 256, 1), f16, 64),
              make_problem((48, 64, 256, 1), f32, 64), make_problem((14, 64, 128, 1), f16, 1),
              make_problem(main, f16, has_z=True, D_tied=False, index_ndim=2),
              make_problem(main, f16, state_align=16, D_dtype=None, dt_bias_dtype=None)]
    found += [make_problem(main, f16, philox_rounds=5), make_problem(main, f16, philox_rounds=10),
              make_problem(main, bf16, philox_rounds=5), make_problem((96, 80, 128, 8), f16, philox_rounds=10),
              make_problem(main, f16, act=f16, philox_rounds=5)]
    found += [make_problem(shape, code, philox_rounds=r) for shape, r in ((main, 0), (main, 5), (shapes[2], 10))
              for code in (torch.int8, torch.float8_e4m3fn)]
    # What the bulk design does not take: other inputs, shapes and rings.
    found += [make_problem(shape, state, act=act) for shape in shapes[:3]
              for state, act in ((f32, f32), (f16, f16), (bf16, f16))]
    found += [make_problem((24, 32, 64, 1), f32, 5, act=f16), make_problem((7, 24, 128, 1), f16),
              make_problem(main, f32, act=f32, D_tied=False, has_z=True)]
    return found


def choices(problem: Mamba2Problem, target: Target) -> list[Mamba2Config]:
    """The first choice of each design that serves the problem."""
    valid = [c for c in ranked(problem, 1, target) if validate(problem, c, target)]
    return list({c.design: c for c in reversed(valid)}.values())


def opcodes(cubin: Path) -> list[str]:
    """The instructions of a cubin, with their modifiers."""
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", cuobjdump(cubin, "--dump-sass"), re.M)


def report(problem: Mamba2Problem, config: Mamba2Config, target: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        compile_mamba2(problem, config, target, TARGETS[target].sms, f"--keep-cubin --dump-dir {folder}")
        cubin = next(Path(folder).glob("*.cubin"))
        usage, instructions = resource_usage(cubin), opcodes(cubin)
    return {"geometry": str(problem.geometry), "state": str(problem.state_dtype), "L": problem.buffer_len,
            "philox_rounds": problem.philox_rounds,
            "config": asdict(config), **usage, "opcodes": dict(Counter(instructions))}


if __name__ == "__main__":
    target = TARGETS[sys.argv[1]]
    for problem in problems():
        configs = choices(problem, target)
        assert configs, problem
        for config in configs:
            print(json.dumps(report(problem, config, target.name)), flush=True)
