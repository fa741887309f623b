"""Compile the Gated DeltaNet kernels: no tensors, no GPU, the arguments are the cache key."""

from collections.abc import Callable
from typing import Any

from replayssm_cute.errors import UnsupportedError
from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.kernels.building import compiled
from replayssm_cute.kernels.gdn_config import GdnConfig, validate
from replayssm_cute.kernels.targets import TARGETS


def compile_gdn(problem: GdnProblem, config: GdnConfig, target: str, sms: int, options: str = "") -> Callable[..., Any]:
    """The compiled step for a problem; its arguments are those of the kernels' ``__call__``, see ``in_order``.

    It runs on the current torch stream, allocates nothing, and checks dtypes, shapes, strides and alignment of every
    tensor itself (``ValueError`` or ``TypeError``; nothing is launched then).

    Args:
        problem: what the kernel is specialised on.
        config: how; must pass ``validate``.
        target: ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``.
        sms: multiprocessors of the device; sets the grid of the staged design.
        options: further compiler options; with any, the cache is bypassed.

    Raises:
        UnsupportedError: ``config`` is not valid for the problem on this target.
    """
    support = validate(problem, config, TARGETS[target])
    if not support:
        raise UnsupportedError(f"{config.design} kernel", support.reason)
    return compiled((problem.op, problem, config, sms), lambda: _kernel(problem, config, target, sms), target, options)


def _kernel(problem: GdnProblem, config: GdnConfig, target: str, sms: int) -> tuple[Any, list[object]]:
    """The kernel and its fake arguments."""
    from replayssm_cute.kernels.gdn_register import GdnRegisterKernel
    from replayssm_cute.kernels.gdn_staged import GdnStagedKernel
    from replayssm_cute.kernels.gdn_tile import fake_arguments

    kernel: Any = GdnStagedKernel(problem, config, TARGETS[target], sms) if config.design == "staged" else \
        GdnRegisterKernel(problem, config, TARGETS[target])
    return kernel, fake_arguments(problem)


def in_order(spec: bool, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a verify or a decode step in the order of the kernels' ``__call__``; None for what it lacks."""
    if spec:
        return (*args, None)
    pos, forced, slots, null, out, *seed = args[11:]
    return (*args[:11], None, None, None, out, None, slots, None, pos, None, forced, null, seed[0] if seed else None)
