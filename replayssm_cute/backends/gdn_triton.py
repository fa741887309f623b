"""The Gated DeltaNet Triton kernels as a backend: any GPU that Triton serves, and the CPU under its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fallback_triton.gdn_config import GdnTritonConfig, default_config, validate
from replayssm_cute.arch import Arch
from replayssm_cute.backends import gdn_batches
from replayssm_cute.backends.triton import available, warp_size
from replayssm_cute.gdn_dispatch import Problem, TunedPlan
from replayssm_cute.gdn_types import GdnFoldProblem, GdnProblem
from replayssm_cute.types import Support


def supports(problem: Problem, arch: Arch) -> Support:
    return available(arch)


def plan(problem: GdnProblem, warp: int, tuned: TunedPlan = ()) -> list[tuple[int, GdnTritonConfig]]:
    """The tuned limits of registers where they are valid, else the heuristic's; see ``gdn_batches.plan``.

    A tuned choice of another split is not taken: it would sum in another order.
    """
    default = default_config(problem, warp)

    def choose(batch: int, config: GdnTritonConfig | None) -> GdnTritonConfig:
        same = config is not None and replace(config, max_registers=default.max_registers) == default
        return config if config is not None and same and validate(problem, config, warp) else default

    return gdn_batches.plan(GdnTritonConfig, tuned, (), choose)


def prepare(problem: Problem, arch: Arch, tuned: TunedPlan = ()) -> Callable[..., object]:
    if isinstance(problem, GdnFoldProblem):
        from fallback_triton.gdn_fold import compile_fold
        return compile_fold(problem, default_config(problem, warp_size(arch)))
    from fallback_triton.gdn_decode import compile_decode
    from fallback_triton.gdn_verify import compile_verify

    compile_step = compile_verify if problem.tokens else compile_decode
    launches = [(batch, compile_step(problem, config)) for batch, config in plan(problem, warp_size(arch), tuned)]
    return launches[0][1] if len(launches) == 1 else gdn_batches.by_batch(problem, launches)
