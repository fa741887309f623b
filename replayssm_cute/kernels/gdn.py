"""Compile the Gated DeltaNet kernels: no tensors, no GPU, the arguments are the cache key."""

import os
from collections.abc import Callable
from typing import Any

import torch

from replayssm_cute import compile_cache
from replayssm_cute.errors import UnsupportedError
from replayssm_cute.gdn_types import GdnProblem
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
    if options:
        return _build(problem, config, target, sms, options)
    return compile_cache.get(target, (problem.op, problem, config, sms),
                             lambda: _build(problem, config, target, sms, ""))


def _build(problem: GdnProblem, config: GdnConfig, target: str, sms: int, options: str) -> Any:
    if not torch.cuda.is_available():
        # Without a GPU the DSL takes its architecture from the environment, at its first import.
        os.environ.setdefault("CUTE_DSL_ARCH", target)
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    from replayssm_cute.kernels.gdn_register import GdnRegisterKernel
    from replayssm_cute.kernels.gdn_staged import GdnStagedKernel
    from replayssm_cute.kernels.gdn_tile import fake_arguments

    kernel: Any = GdnStagedKernel(problem, config, TARGETS[target], sms) if config.design == "staged" else \
        GdnRegisterKernel(problem, config, TARGETS[target])
    return cute.compile(kernel, *fake_arguments(problem), make_fake_stream(use_tvm_ffi_env_stream=True),
                        options=f"--enable-tvm-ffi --gpu-arch={target} {options}".strip())


def in_order(spec: bool, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a verify or a decode step in the order of the kernels' ``__call__``; None for what it lacks."""
    if spec:
        return (*args, None)
    pos, forced, slots, null, out, *seed = args[11:]
    return (*args[:11], None, None, None, out, None, slots, None, pos, None, forced, null, seed[0] if seed else None)
