"""The CuTe DSL kernels as a backend: compute capability 9.0, 10.0 and 10.3."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from replayssm_cute.arch import Arch
from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.kernels.mamba2_config import Mamba2Config, default_config, ranked, validate
from replayssm_cute.kernels.targets import for_capability
from replayssm_cute.types import SUPPORTED, Mamba2Problem, Support

SELF_CHECKING = True


@functools.cache
def installed() -> Support:
    """Whether the DSL and its calling convention are installed; imports neither."""
    for module, package in (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(module) is None:
            return Support(False, f"{package} is not installed")
    return SUPPORTED


def supports(problem: Mamba2Problem, arch: Arch) -> Support:
    target = for_capability(arch.capability) if arch.kind == "cuda" else None
    if target is None:
        return Support(False, f"the kernels are built for 9.0, 10.0 and 10.3, not for {arch}")
    if not installed():
        return installed()
    if default_config(problem, 1, target) is None:
        return validate(problem, ranked(problem, 1, target)[-1], target)  # the least demanding one has the reason
    return SUPPORTED


def rounds_in_hardware(problem: Mamba2Problem | GdnProblem, arch: Arch) -> bool:
    """``cvt.rs`` on 10.0 and 10.3; the other targets have its twin in software, and int8 has no instruction."""
    target = for_capability(arch.capability) if arch.kind == "cuda" else None
    return target is not None and target.stochastic_cvt and problem.state_dtype is not torch.int8


def prepare(problem: Mamba2Problem, arch: Arch, batch: int,
            config: dict[str, Any] | None) -> Callable[..., object]:
    from replayssm_cute.kernels.mamba2 import compile_mamba2

    target = for_capability(arch.capability)
    assert target is not None, "supports() was asked first"
    return compile_mamba2(problem, choose(problem, arch, batch, config), target.name, arch.sms)


def choose(problem: Mamba2Problem, arch: Arch, batch: int, config: dict[str, Any] | None) -> Mamba2Config:
    """The tuned choice where it is valid for this very problem, else the heuristic.

    Raises:
        ArgumentError: ``config`` is none of this kernel's.
    """
    target = for_capability(arch.capability)
    assert target is not None, "supports() was asked first"
    if config is not None:
        tuned = Mamba2Config.from_dict(config)
        if validate(problem, tuned, target):
            return tuned
    default = default_config(problem, batch, target)
    assert default is not None, "supports() was asked first"
    return default
