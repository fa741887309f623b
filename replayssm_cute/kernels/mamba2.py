"""Compile the Mamba2 replay kernels: no tensors, no GPU, the arguments are the cache key."""

from collections.abc import Callable
from typing import Any

from replayssm_cute.errors import UnsupportedError
from replayssm_cute.kernels.building import compiled
from replayssm_cute.kernels.mamba2_config import Mamba2Config, validate
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.rounding import LARGEST_CODE
from replayssm_cute.types import Mamba2Problem


def compile_mamba2(problem: Mamba2Problem, config: Mamba2Config, target: str, sms: int,
                   options: str = "") -> Callable[..., Any]:
    """The compiled step for a problem; call it with the canonical arguments of a step.

    It runs on the current torch stream, allocates nothing, and checks dtypes, shapes, strides and
    alignment of every tensor itself (``ValueError`` or ``TypeError``; nothing is launched then).

    Args:
        problem: what the kernel is specialised on.
        config: how; must pass ``validate``.
        target: ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``.
        sms: multiprocessors of the device; sets the grid of the bulk design.
        options: further compiler options; with any, the cache is bypassed.

    Raises:
        UnsupportedError: ``config`` is not valid for the problem on this target.
    """
    support = validate(problem, config, TARGETS[target])
    if not support:
        raise UnsupportedError(f"{config.design} kernel", support.reason)
    return compiled(("mamba2_decode", problem, config, sms), lambda: _kernel(problem, config, target, sms), target,
                    options)


def _kernel(problem: Mamba2Problem, config: Mamba2Config, target: str, sms: int) -> tuple[Any, list[object]]:
    """The kernel and its fake arguments."""
    from replayssm_cute.kernels.mamba2_bulk import Mamba2BulkKernel, Mamba2CodedKernel
    from replayssm_cute.kernels.mamba2_register import Mamba2RegisterKernel
    from replayssm_cute.kernels.mamba2_tile import fake_arguments

    if config.design == "bulk":
        bulk = Mamba2CodedKernel if problem.state_dtype in LARGEST_CODE else Mamba2BulkKernel
        kernel: Any = bulk(problem, config, TARGETS[target], sms)
    else:
        kernel = Mamba2RegisterKernel(problem, config, TARGETS[target])
    return kernel, fake_arguments(problem)
