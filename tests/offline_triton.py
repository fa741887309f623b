"""Compile the Triton kernels for GPUs that are not here and print what they take, one JSON object a line.

Run as ``python tests/offline_triton.py [TARGET ...]``. It is a process of its own because the kernels must
not be interpreted here, which Triton decides when it is imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from fallback_triton import mamba2, mamba2_step
from fallback_triton.launch import compile_options
from fallback_triton.mamba2_config import Mamba2TritonConfig, default_config, default_step_config
from fallback_triton.offline import FEATURES, TARGETS, Resources, compile_for
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def make_problem(shape: tuple[int, int, int, int], state: torch.dtype, buffer_len: int = 16, act: torch.dtype = BF16,
                 **changes: Any) -> Mamba2Problem:
    fields = {"act_dtype": act, "ring_dtype": act, "dt_dtype": act, "dt_bias_dtype": act, "D_dtype": act,
              "flush_dtype": torch.int8, "index_dtype": torch.int32, **changes}
    return Mamba2Problem(Mamba2Geometry(*shape), buffer_len, state, **fields)


def problems(target: str) -> list[tuple[str, Mamba2Problem]]:
    """(label, problem): the served head shapes and dtypes on sm_90, a few of them elsewhere."""
    main = [(f"64x128 L16 {str(state)[6:]}", make_problem((64, 64, 128, 8), state)) for state in (F32, F16, BF16)]
    tail = ("80x128 L5 bfloat16", make_problem((96, 80, 128, 8), BF16, 5))
    eight_bit = ("64x128 int8 stochastic", make_problem((64, 64, 128, 8), torch.int8, philox_rounds=5))
    stochastic = ("64x128 L16 float16, stochastic", make_problem((64, 64, 128, 8), F16, philox_rounds=5))
    if target != "sm_90":
        return [*main[:2], tail, eight_bit, stochastic]
    return [*main, tail, eight_bit, stochastic,
            ("64x128 L16 bfloat16, stochastic", make_problem((64, 64, 128, 8), BF16, philox_rounds=10)),
            ("64x128 e4m3", make_problem((64, 64, 128, 8), torch.float8_e4m3fn)),
            ("80x128 e4m3 stochastic", make_problem((96, 80, 128, 8), torch.float8_e4m3fn, philox_rounds=10)),
            ("64x256 int8", make_problem((48, 64, 256, 1), torch.int8)),
            ("80x128 L16 float32", make_problem((96, 80, 128, 8), F32)),
            ("64x256 L16 float32", make_problem((48, 64, 256, 1), F32)),
            ("20x24 L5 float16, all options",
             make_problem((6, 20, 24, 2), F16, 5, F16, has_z=True, D_tied=False, row_align=8, state_align=16,
                          index_dtype=torch.int64, index_ndim=2)),
            ("112x96 L33 bfloat16, float32 inputs, float16 rings",
             make_problem((7, 112, 96, 1), BF16, 33, F32, ring_dtype=F16)),
            ("64x128 L64 float32, no D, no bias",
             make_problem((64, 64, 128, 8), F32, 64, D_dtype=None, dt_bias_dtype=None, flush_dtype=torch.bool))]


def compile_replay(target: str, problem: Mamba2Problem, config: Mamba2TritonConfig) -> Resources:
    return compile_for(target, mamba2.replay_kernel, mamba2.replay_arguments(problem),
                       mamba2.replay_constants(problem, config, FEATURES[target]),
                       compile_options(config.num_warps, config.max_registers))


def compile_step(target: str, problem: Mamba2Problem, config: Mamba2TritonConfig) -> Resources:
    p = problem
    step = mamba2_step.StepProblem(p.geometry, p.state_dtype, p.act_dtype, p.dt_dtype, p.index_dtype, p.dt_bias_dtype,
                                   p.D_dtype, p.D_tied, p.has_z, p.dt_softplus, p.state_align, p.row_align)
    return compile_for(target, mamba2_step.step_kernel, mamba2_step.step_arguments(step),
                       mamba2_step.step_constants(step, config, FEATURES[target]),
                       compile_options(config.num_warps, config.max_registers))


def main() -> None:
    for target in sys.argv[1:] or TARGETS:
        warp_size = TARGETS[target].warp_size
        for label, problem in problems(target):
            config = default_config(problem, warp_size)
            row = {"label": label, "state_bytes": config.rows * problem.geometry.dstate * problem.state_dtype.itemsize,
                   "threads": config.num_warps * warp_size, "config": config.to_dict(),
                   "replay": asdict(compile_replay(target, problem, config))}
            if problem.buffer_len == 16 and problem.state_dtype.itemsize > 1:  # the baseline has no 8-bit state
                step = default_step_config(problem.geometry, problem.state_dtype.itemsize, warp_size)
                row["step"] = asdict(compile_step(target, problem, step))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
