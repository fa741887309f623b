"""What a kernel issues for a head, and asks of shared memory, counted in an execution of its PTX.

    python -m benchmarks.issue_counts

compiles the kernels of the speed model for every target, executes whole ring cycles of two batch
sizes with the executor of ``tests/ptx`` and writes ``tuning/replayssm_tune/issue_counts.json``: by
target and kernel, for one head of a row and the mean of a cycle, ``issued`` machine instructions
of all warps, and ``wavefronts`` of shared memory (``tests/ptx/wavefronts.py``). Waits for barriers are not counted;
one PTX instruction counts as so many machine instructions as the whole kernel has for one. The code of sm_103a is
that of sm_100a (``tests/test_ptx_registry.py``), and so are its counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from replayssm_cute.kernels.mamba2 import compile_mamba2
from replayssm_cute.kernels.mamba2_config import Mamba2Config, default_config
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.registry.models import mamba2_models
from replayssm_cute.rounding import LARGEST_CODE, seed_state
from replayssm_cute.types import Mamba2Problem
from replayssm_tune.speed_model import COUNTED_BUFFER_LEN, COUNTS, count_name
from tests.cases import make_case
from tests.compiled_kernels import STATES, make_problem
from tests.offline_cute import opcodes
from tests.ptx.code import Block, load
from tests.ptx.kernels import shared_memory
from tests.ptx.launch import Kernel, Options, launch
from tests.ptx.vectors_cases import drawer, with_codes
from tests.ptx.wavefronts import CountingMachine

ROOT = Path(__file__).parents[1]
MAIN = (64, 128)         # headdim and dstate of what is counted in every way
SHAPES = sorted({(m.geometry.headdim, m.geometry.dstate) for m in mamba2_models()})
HEADS, L = 4, COUNTED_BUFFER_LEN
COUNTED = {"sm_90a": "sm_90a", "sm_100a": "sm_100a", "sm_103a": "sm_100a"}      # by target, whose code is counted
Counted = tuple[Mamba2Problem, Mamba2Config]


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


def per_head(problem: Mamba2Problem, config: Mamba2Config, target: str) -> dict[str, int]:
    """Machine instructions and wavefronts of a head: what a cycle more of the same CTAs adds."""
    with tempfile.TemporaryDirectory() as folder:
        compiled: Any = compile_mamba2(problem, config, target, TARGETS[target].sms,
                                       f"--keep-ptx --keep-cubin --dump-dir {folder}")
        text = next(Path(folder).glob("*.ptx")).read_text(encoding="latin1").rstrip("\0")
        machine = sum(name != "NOP" for name in opcodes(next(Path(folder).glob("*.cubin"))))
    code = load(text)
    kernel = Kernel(code, config, shared_memory(str(compiled.ir_module)))
    issued, wavefronts = (executed(kernel, problem, 2) - executed(kernel, problem, 1)) / (L * HEADS)
    return {"issued": round(issued * machine / sum(map(size, code.blocks))), "wavefronts": round(wavefronts)}


def problems() -> list[Mamba2Problem]:
    """What is counted with the heuristic's tile."""
    f16 = torch.float16
    found = [make_problem((HEADS, P, N, 1), state, L) for P, N in SHAPES for state in STATES]
    found += [make_problem((HEADS, *MAIN, 1), state, L, philox_rounds=rounds)
              for states, several in ((STATES[1:], (5, 10)), (LARGEST_CODE, (0, 5)))
              for state in states for rounds in several]
    return found + [make_problem((HEADS, *MAIN, 1), state, L, act=f16) for state in STATES]


def kernels(target: str) -> dict[str, Counted]:
    """What is counted, by ``count_name``: the heuristic's choice, and half its tile as the tuner tries it."""
    found = []
    for problem in problems():
        config = default_config(problem, 512, TARGETS[target])
        assert config is not None
        found.append((problem, config))
    found += [(p, replace(c, tile_p=c.tile_p // 2, threads=c.tile_p)) for p, c in found
              if (p.geometry.headdim, p.geometry.dstate) == MAIN and c.design == "bulk" and not p.philox_rounds
              and p.state_dtype in STATES]
    return {count_name(p.geometry, p.state_dtype, c.tile_p, p.philox_rounds, p.act_dtype): (p, c) for p, c in found}


def count(target: str, names: list[str]) -> dict[str, dict[str, int]]:
    """The counts of some kernels of a target, from a process of its own: the DSL fixes its architecture."""
    run = subprocess.run([sys.executable, "-m", "benchmarks.issue_counts", target, *names], cwd=ROOT, check=True,
                         text=True, stdout=subprocess.PIPE, env={**os.environ, "CUTE_DSL_ARCH": target,
                                                                 "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tuning'}"})
    return json.loads(run.stdout.splitlines()[-1])


def count_here(target: str, names: list[str]) -> dict[str, dict[str, int]]:
    """The same in this process."""
    return {name: per_head(*kernels(target)[name], target) for name in names}


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(count_here(sys.argv[1], sys.argv[2:])))
        return
    found = {target: count(target, list(kernels(target))) for target in set(COUNTED.values())}
    COUNTS.write_text("{\n" + ",\n".join(
        f' "{target}": {{\n' + ",\n".join(f'  "{name}": {json.dumps(counts)}' for name, counts in found[code].items())
        + "\n }" for target, code in COUNTED.items()) + "\n}\n")


if __name__ == "__main__":
    main()
