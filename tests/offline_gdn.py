"""Compile the Gated DeltaNet Triton kernels for GPUs that are not here; one JSON object a line.

Run as ``python tests/offline_gdn.py [TARGET ...]``, a process of its own as ``tests/offline_triton.py`` is.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from fallback_triton import gdn_decode, gdn_fold, gdn_step, gdn_verify
from fallback_triton.gdn_config import default_config
from fallback_triton.launch import compile_options
from fallback_triton.offline import FEATURES, TARGETS, Resources, compile_for
from replayssm_cute.gdn_types import GdnFoldProblem, GdnGeometry, GdnProblem

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def make_problem(heads: tuple[int, int], state: torch.dtype, K: int = 128, V: int = 128, L: int = 16,
                 act: torch.dtype = BF16, **changes: Any) -> GdnProblem:
    fields = {"ring_dtype": act, "gate_dtypes": (act, act, F32, F32), "flag_dtype": torch.int32, **changes}
    return GdnProblem(GdnGeometry(*heads, K, V), L, state, act, **fields)


def make_verify(heads: tuple[int, int], state: torch.dtype, tokens: int, **changes: Any) -> GdnProblem:
    return make_problem(heads, state, **{"tokens": tokens, "flag_dtype": torch.int8, "exact_fold": True, **changes})


def make_fold(heads: tuple[int, int], state: torch.dtype, raw: torch.dtype | None) -> GdnFoldProblem:
    return GdnFoldProblem(GdnGeometry(*heads), 16, state, BF16, raw, (torch.int32, torch.int64, torch.int64),
                          torch.int8, False, True)


def problems(target: str) -> list[tuple[str, GdnProblem | GdnFoldProblem]]:
    """(label, problem): the served head shapes and dtypes on sm_90, a few of them elsewhere."""
    odd = {"flag_dtype": None, "row_align": 4, "state_align": 8}
    some: list[tuple[str, GdnProblem | GdnFoldProblem]] = [
        ("decode bfloat16", make_problem((16, 32), BF16)),
        ("decode 64x80 L5", make_problem((2, 6), F32, 80, 64, 5, **odd)),
        ("verify T2 float32", make_verify((16, 32), F32, 2)), ("fold float32", make_fold((16, 32), F32, BF16))]
    if target != "sm_90":
        return some
    return [*some, ("decode float32", make_problem((16, 32), F32)),
            ("decode float16, stochastic", make_problem((16, 32), F16, philox_rounds=5)),
            ("decode float32 rings", make_problem((16, 48), F32, ring_dtype=F32)),
            ("decode L64", make_problem((16, 64), F32, L=64)), ("decode K256", make_problem((4, 4), F32, 256, 256)),
            ("verify T4 float32", make_verify((16, 48), F32, 4)),
            ("verify T3 float16 L8, ring fold, verify rows",
             make_verify((16, 16), F16, 3, L=8, ring_dtype=F32, act=F16, exact_fold=False, launch_mode="verify")),
            ("verify T16 float32 L32", make_verify((16, 32), F32, 16, L=32)),
            ("fold bfloat16, ring fold", make_fold((16, 16), BF16, None))]


def compile_problem(target: str, problem: GdnProblem | GdnFoldProblem) -> dict[str, Resources]:
    """Resources of the problem's kernel, and of the per-step baseline where it decodes on sm_90."""
    config = default_config(problem, TARGETS[target].warp_size)
    options = compile_options(config.num_warps, config.max_registers)

    def resources(kernel: Any, arguments: list[Any], constants: dict[str, Any]) -> Resources:
        return compile_for(target, kernel, arguments, constants, options)

    if isinstance(problem, GdnFoldProblem):
        return {"fold": resources(gdn_fold.fold_kernel, gdn_fold.fold_arguments(problem),
                                  gdn_fold.fold_constants(problem, config))}
    if problem.tokens:
        return {"verify": resources(gdn_verify.verify_kernel, gdn_verify.verify_arguments(problem),
                                    gdn_verify.verify_constants(problem, config))}
    found = {"decode": resources(gdn_decode.decode_kernel, gdn_decode.decode_arguments(problem),
                                 gdn_decode.decode_constants(problem, config, FEATURES[target]))}
    if target == "sm_90":
        found["step"] = resources(gdn_step.step_kernel, gdn_step.step_arguments(problem),
                                  gdn_step.step_constants(problem, config, FEATURES[target]))
    return found


def main() -> None:
    for target in sys.argv[1:] or TARGETS:
        for label, problem in problems(target):
            config = default_config(problem, TARGETS[target].warp_size)
            for kernel, resources in compile_problem(target, problem).items():
                row = {"label": label, "kernel": kernel, "threads": config.num_warps * TARGETS[target].warp_size,
                       "state_bytes": config.block_v * problem.geometry.head_k_dim * problem.state_dtype.itemsize,
                       **asdict(resources)}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
