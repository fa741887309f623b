"""Instructions that the bulk kernels issue for an item, counted in an execution of their PTX.

    python -m benchmarks.issue_counts

compiles the kernels of the speed model for every target, executes whole ring cycles of two batch
sizes with the executor of ``tests/ptx`` and writes ``benchmarks/results/issue_counts.json``: by
target and kernel the machine instructions of all warps for one item (head of a row), the mean of a
cycle. Waits for barriers are not counted; one PTX instruction counts as so many machine instructions
as the whole kernel has for one.
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
from numpy.typing import NDArray

from benchmarks.speed_model import COUNTS
from replayssm_cute.kernels.mamba2 import compile_mamba2
from replayssm_cute.kernels.mamba2_config import Mamba2Config, default_config
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.types import Mamba2Problem
from tests.cases import make_case
from tests.compiled_kernels import STATES, make_problem
from tests.offline_cute import opcodes
from tests.ptx.code import Block, load
from tests.ptx.kernels import shared_memory
from tests.ptx.launch import Kernel, Options, launch
from tests.ptx.machine import Machine

ROOT = Path(__file__).parents[1]
SHAPES = ((64, 128), (80, 128))      # headdim, dstate
HEADS, L = 4, 16


class CountingMachine(Machine):
    """A machine that counts the PTX instructions of its warps."""

    issued = 0

    def _execute(self, block: Block, index: NDArray[np.int64]) -> None:
        if block.needs != "wait":
            self.issued += size(block) * np.unique(index // 32).size
        super()._execute(block, index)


def size(block: Block) -> int:
    return len(block.steps) + (block.branch is not None)


def executed(kernel: Kernel, problem: Mamba2Problem, cycles: int) -> int:
    """PTX instructions of a launch whose rows stand at every cursor of a ring ``cycles`` times."""
    g = problem.geometry
    case = make_case(batch=L * cycles, nheads=g.nheads, headdim=g.headdim, dstate=g.dstate, ngroups=g.ngroups,
                     buffer_len=L, state=problem.state_dtype, cursors=[(w, w == L - 1) for w in range(L)] * cycles)
    with patch("tests.ptx.launch.Machine", CountingMachine):
        machine = launch(kernel, case, Options(ctas=2, races=False))
    assert isinstance(machine, CountingMachine)
    return machine.issued


def issued(problem: Mamba2Problem, config: Mamba2Config, target: str) -> float:
    """Machine instructions of an item: what a cycle more of the same CTAs adds."""
    with tempfile.TemporaryDirectory() as folder:
        compiled: Any = compile_mamba2(problem, config, target, TARGETS[target].sms,
                                       f"--keep-ptx --keep-cubin --dump-dir {folder}")
        text = next(Path(folder).glob("*.ptx")).read_text(encoding="latin1").rstrip("\0")
        machine = sum(name != "NOP" for name in opcodes(next(Path(folder).glob("*.cubin"))))
    code = load(text)
    kernel = Kernel(code, config, shared_memory(str(compiled.ir_module)))
    added = (executed(kernel, problem, 2) - executed(kernel, problem, 1)) / (L * HEADS)
    return added * machine / sum(map(size, code.blocks))


def problems() -> dict[str, Mamba2Problem]:
    """What is counted, by head shape and state dtype."""
    return {f"{P}x{N} {str(state).removeprefix('torch.')}": make_problem((HEADS, P, N, 1), state, L)
            for P, N in SHAPES for state in STATES}


def count(target: str, names: list[str]) -> dict[str, int]:
    """The counts of some kernels of a target, from a process of its own: the DSL fixes its architecture."""
    run = subprocess.run([sys.executable, "-m", "benchmarks.issue_counts", target, *names], cwd=ROOT, check=True,
                         text=True, stdout=subprocess.PIPE, env={**os.environ, "CUTE_DSL_ARCH": target,
                                                                 "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tuning'}"})
    return json.loads(run.stdout.splitlines()[-1])


def count_here(target: str, names: list[str]) -> dict[str, int]:
    """The same in this process."""
    counts = {}
    for name in names:
        problem = problems()[name]
        config = default_config(problem, 512, TARGETS[target])
        assert config is not None and config.design == "bulk"
        counts[name] = round(issued(problem, config, target))
    return counts


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(count_here(sys.argv[1], sys.argv[2:])))
    else:
        COUNTS.write_text(json.dumps({target: count(target, list(problems())) for target in TARGETS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
