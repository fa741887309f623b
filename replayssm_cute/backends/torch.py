"""The PyTorch reference as a backend: any device, any shape the contract allows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from replayssm_cute.arch import Arch
from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.reference.mamba2 import replay_step
from replayssm_cute.types import SUPPORTED, Mamba2Problem, Support

SELF_CHECKING = False


def supports(problem: Mamba2Problem, arch: Arch) -> Support:
    return SUPPORTED


def rounds_in_hardware(problem: Mamba2Problem | GdnProblem, arch: Arch) -> bool:
    return False


def prepare(problem: Mamba2Problem, arch: Arch, batch: int,
            config: dict[str, Any] | None) -> Callable[..., object]:
    return functools.partial(replay_step, dt_softplus=problem.dt_softplus, philox_rounds=problem.philox_rounds)
