"""The kernels under test, each by itself: the two CuTe designs and Triton."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.kernels import mamba2_config
from replayssm_cute.kernels.targets import for_capability
from replayssm_cute.types import Mamba2Problem

KINDS = ("bulk", "register", "triton")


def act_dtype(kind: str, other: torch.dtype = torch.float16) -> torch.dtype:
    """Inputs that a kernel serves: ``other`` for the register design, since the bulk design takes bf16."""
    return other if kind == "register" else torch.bfloat16


def prepare(kind: str, problem: Mamba2Problem, batch: int) -> Callable[..., object]:
    """The compiled step of one kernel; skips where that kernel says why it cannot serve."""
    arch = archs.of("cuda")
    module = dispatch.backend_module("triton" if kind == "triton" else "cute")
    if kind == "triton":
        return module.prepare(problem, arch, batch, None)
    if not module.supports(problem, arch):
        pytest.skip(module.supports(problem, arch).reason)
    target = for_capability(arch.capability)
    assert target is not None, "supports() knows the target"
    valid = [c for c in mamba2_config.ranked(problem, batch, target) if mamba2_config.validate(problem, c, target)]
    config = next((c for c in valid if c.design == kind), None)
    if config is None:
        pytest.skip(f"the {kind} design does not serve it")
    return module.prepare(problem, arch, batch, config.to_dict())
