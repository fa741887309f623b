"""Compile the Gated DeltaNet Triton kernels for GPUs that are not here; one JSON object a line.

Run as ``python tests/offline_gdn.py [TARGET ...]``, a process of its own as ``tests/offline_triton.py`` is.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from fallback_triton import gdn_decode
from fallback_triton.gdn_config import default_config
from fallback_triton.launch import compile_options
from fallback_triton.offline import TARGETS, Resources, compile_for
from replayssm_cute.gdn_types import GdnGeometry, GdnProblem

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def make_problem(heads: tuple[int, int], state: torch.dtype, K: int = 128, V: int = 128, L: int = 16,
                 act: torch.dtype = BF16, **changes: Any) -> GdnProblem:
    fields = {"ring_dtype": act, "gate_dtypes": (act, act, F32, F32), "flag_dtype": torch.int32, **changes}
    return GdnProblem(GdnGeometry(*heads, K, V), L, state, act, **fields)


def problems(target: str) -> list[tuple[str, GdnProblem]]:
    """(label, problem): the served head shapes and dtypes on sm_90, a few of them elsewhere."""
    main = [(f"decode {str(state)[6:]}", make_problem((16, 32), state)) for state in (F32, F16, BF16)]
    odd = ("decode 64x80 L5", make_problem((2, 6), BF16, 80, 64, 5, flag_dtype=None, row_align=4, state_align=8))
    if target != "sm_90":
        return [*main[:2], odd]
    return [*main, odd, ("decode float32 rings", make_problem((16, 48), F32, ring_dtype=F32)),
            ("decode L64", make_problem((16, 64), F32, L=64)), ("decode K256", make_problem((4, 4), F32, 256, 256))]


def compile_problem(target: str, problem: GdnProblem) -> Resources:
    config = default_config(problem, TARGETS[target].warp_size)
    return compile_for(target, gdn_decode.decode_kernel, gdn_decode.decode_arguments(problem),
                       gdn_decode.decode_constants(problem, config),
                       compile_options(config.num_warps, config.max_registers))


def main() -> None:
    for target in sys.argv[1:] or TARGETS:
        for label, problem in problems(target):
            config = default_config(problem, TARGETS[target].warp_size)
            row = {"label": label, "config": config.to_dict(), "threads": config.num_warps * TARGETS[target].warp_size,
                   "state_bytes": config.block_v * problem.geometry.head_k_dim * problem.state_dtype.itemsize,
                   **asdict(compile_problem(target, problem))}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
