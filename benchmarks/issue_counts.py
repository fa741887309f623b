"""What a kernel issues for an item, and asks of shared memory, counted in an execution of its PTX.

    python -m benchmarks.issue_counts

compiles the kernels of the speed model for every target, executes whole ring cycles of two batch
sizes with the executor of ``tests/ptx`` and writes ``benchmarks/results/issue_counts.json``: by
target and kernel, for one item (head of a row) and the mean of a cycle, ``issued`` machine instructions
of all warps, and ``wavefronts`` of shared memory (``tests/ptx/wavefronts.py``). Waits for barriers are not counted;
one PTX instruction counts as so many machine instructions as the whole kernel has for one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.speed_model import COUNTS, count_name
from replayssm_cute.kernels.mamba2 import compile_mamba2
from replayssm_cute.kernels.mamba2_config import Mamba2Config, default_config
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.rounding import LARGEST_CODE, seed_state
from replayssm_cute.types import Mamba2Problem
from tests.cases import make_case
from tests.compiled_kernels import STATES, make_problem
from tests.offline_cute import opcodes
from tests.ptx.code import Block, load
from tests.ptx.kernels import shared_memory
from tests.ptx.launch import Kernel, Options, launch
from tests.ptx.vectors_cases import drawer, with_codes
from tests.ptx.wavefronts import CountingMachine

ROOT = Path(__file__).parents[1]
SHAPES = ((64, 128), (80, 128))      # headdim, dstate
HEADS, L = 4, 16


class IssueMachine(CountingMachine):
    """A machine that counts the PTX instructions of its warps, too."""

    issued = 0

    def _execute(self, block: Block, index: NDArray[np.int64]) -> None:
        if block.needs != "wait":
            self.issued += size(block) * np.unique(index // 32).size
        super()._execute(block, index)


def size(block: Block) -> int:
    return len(block.steps) + (block.branch is not None)


def executed(kernel: Kernel, problem: Mamba2Problem, cycles: int) -> NDArray[np.float64]:
    """(PTX instructions, wavefronts) of a launch whose rows stand at every cursor of a ring ``cycles`` times."""
    g, coded = problem.geometry, problem.state_dtype in LARGEST_CODE
    case = make_case(batch=L * cycles, nheads=g.nheads, headdim=g.headdim, dstate=g.dstate, ngroups=g.ngroups,
                     buffer_len=L, state=torch.float32 if coded else problem.state_dtype, act=problem.act_dtype,
                     cursors=[(w, w == L - 1) for w in range(L)] * cycles)
    case = with_codes(case, problem.state_dtype, drawer(1)) if coded else case
    dice = seed_state(1, "cpu") if problem.philox_rounds else None
    with patch("tests.ptx.launch.Machine", IssueMachine):
        machine = launch(kernel, case, Options(ctas=2, races=False, dice=dice))
    assert isinstance(machine, IssueMachine)
    return np.array([machine.issued, machine.taken.total()], np.float64)


def per_item(problem: Mamba2Problem, config: Mamba2Config, target: str) -> dict[str, int]:
    """Machine instructions and wavefronts of an item: what a cycle more of the same CTAs adds."""
    with tempfile.TemporaryDirectory() as folder:
        compiled: Any = compile_mamba2(problem, config, target, TARGETS[target].sms,
                                       f"--keep-ptx --keep-cubin --dump-dir {folder}")
        text = next(Path(folder).glob("*.ptx")).read_text(encoding="latin1").rstrip("\0")
        machine = sum(name != "NOP" for name in opcodes(next(Path(folder).glob("*.cubin"))))
    code = load(text)
    kernel = Kernel(code, config, shared_memory(str(compiled.ir_module)))
    issued, wavefronts = (executed(kernel, problem, 2) - executed(kernel, problem, 1)) / (L * HEADS)
    return {"issued": round(issued * machine / sum(map(size, code.blocks))), "wavefronts": round(wavefronts)}


def problems() -> dict[str, Mamba2Problem]:
    """What is counted, by ``speed_model.count_name``."""
    f16 = torch.float16
    found = [make_problem((HEADS, P, N, 1), state, L) for P, N in SHAPES for state in STATES]
    found += [make_problem((HEADS, *SHAPES[0], 1), state, L, philox_rounds=rounds)
              for states, several in ((STATES[1:], (5, 10)), (LARGEST_CODE, (0, 5)))
              for state in states for rounds in several]
    found += [make_problem((HEADS, *SHAPES[0], 1), state, L, act=f16) for state in STATES]
    return {count_name(p.geometry, p.state_dtype, p.philox_rounds, p.act_dtype): p for p in found}


def count(target: str, names: list[str]) -> dict[str, dict[str, int]]:
    """The counts of some kernels of a target, from a process of its own: the DSL fixes its architecture."""
    run = subprocess.run([sys.executable, "-m", "benchmarks.issue_counts", target, *names], cwd=ROOT, check=True,
                         text=True, stdout=subprocess.PIPE, env={**os.environ, "CUTE_DSL_ARCH": target,
                                                                 "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tuning'}"})
    return json.loads(run.stdout.splitlines()[-1])


def count_here(target: str, names: list[str]) -> dict[str, dict[str, int]]:
    """The same in this process."""
    counts = {}
    for name in names:
        problem = problems()[name]
        config = default_config(problem, 512, TARGETS[target])
        assert config is not None
        counts[name] = per_item(problem, config, target)
    return counts


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(count_here(sys.argv[1], sys.argv[2:])))
    else:
        COUNTS.write_text("{\n" + ",\n".join(
            f' "{target}": {{\n' + ",\n".join(f'  "{name}": {json.dumps(found)}' for name, found in counts.items())
            + "\n }" for target in TARGETS for counts in [count(target, list(problems()))]) + "\n}\n")


if __name__ == "__main__":
    main()
