"""The Triton kernels as a backend: any GPU that Triton serves, and the CPU under Triton's interpreter."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fallback_triton.mamba2_config import Mamba2TritonConfig, default_config, validate
from replayssm_cute.arch import Arch
from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.types import SUPPORTED, Mamba2Problem, Support

SELF_CHECKING = False

OLDEST = (8, 0)  # the first capability with bf16; older ones were never tried


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreting() -> bool:
    """Whether Triton runs in its interpreter; Triton is imported only where the answer can be yes."""
    if "triton" not in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    from fallback_triton.launch import interpreted
    from fallback_triton.mamba2 import replay_kernel

    return interpreted(replay_kernel)


def warp_size(arch: Arch) -> int:
    """Lanes of a warp: 64 on AMD's data-centre GPUs."""
    return 64 if arch.kind == "hip" else 32


def available(arch: Arch) -> Support:
    """Whether Triton kernels run on a device at all, whatever they compute."""
    if not _installed():
        return Support(False, "triton is not installed")
    if arch.kind == "cpu" and not _interpreting():
        return Support(False, "no GPU, and Triton was not imported under TRITON_INTERPRET=1")
    if arch.kind == "cuda" and arch.capability < OLDEST:
        return Support(False, f"the kernels need compute capability 8.0, {arch} has less")
    return SUPPORTED


def supports(problem: Mamba2Problem, arch: Arch) -> Support:
    return available(arch)


def rounds_in_hardware(problem: Mamba2Problem | GdnProblem, arch: Arch) -> bool:
    return False


def prepare(problem: Mamba2Problem, arch: Arch, batch: int,
            config: dict[str, Any] | None) -> Callable[..., object]:
    from fallback_triton.mamba2 import compile_replay_step

    return compile_replay_step(problem, choose(problem, arch, batch, config))


def choose(problem: Mamba2Problem, arch: Arch, batch: int, config: dict[str, Any] | None) -> Mamba2TritonConfig:
    """The tuned choice where it is valid for this very problem, else the heuristic.

    Rows are measured without stochastic rounding, which takes more registers: where the heuristic limits them for the
    same program, it does so for the row, too.

    Raises:
        ArgumentError: ``config`` is none of this kernel's.
    """
    default = default_config(problem, warp_size(arch))
    if config is not None:
        tuned = Mamba2TritonConfig.from_dict(config)
        if problem.philox_rounds and tuned == replace(default, max_registers=0):
            return default
        if validate(problem, tuned, warp_size(arch)):
            return tuned
    return default
