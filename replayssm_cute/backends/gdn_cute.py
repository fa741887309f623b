"""The Gated DeltaNet CuTe DSL kernels as a backend: compute capability 9.0, 10.0 and 10.3."""

from __future__ import annotations

import functools
from collections.abc import Callable

from replayssm_cute.arch import Arch
from replayssm_cute.backends import gdn_batches
from replayssm_cute.backends.cute import installed
from replayssm_cute.gdn_dispatch import Problem, TunedPlan
from replayssm_cute.gdn_types import GdnFoldProblem, GdnProblem
from replayssm_cute.kernels.gdn_config import GdnConfig, heuristic, ranked, validate
from replayssm_cute.kernels.targets import Target, for_capability
from replayssm_cute.types import SUPPORTED, Support


def supports(problem: Problem, arch: Arch) -> Support:
    target = for_capability(arch.capability) if arch.kind == "cuda" else None
    if target is None:
        return Support(False, f"the kernels are built for 9.0, 10.0 and 10.3, not for {arch}")
    if isinstance(problem, GdnFoldProblem):
        return Support(False, "there is no kernel for folds outside of a step")
    if not installed():
        return installed()
    if heuristic(problem, 1, target) is None:
        return validate(problem, ranked(problem, 1, target)[-1], target)  # the least demanding one has the reason
    return SUPPORTED


def plan(problem: GdnProblem, target: Target, tuned: TunedPlan = ()) -> list[tuple[int, GdnConfig]]:
    """The tuned choices where they are valid for this very problem, else the heuristic's; see ``gdn_batches.plan``."""
    def choose(batch: int, config: GdnConfig | None) -> GdnConfig:
        if config is not None and validate(problem, config, target):
            return config
        default = heuristic(problem, batch, target)
        assert default is not None, "supports() was asked first"
        return default

    return gdn_batches.plan(GdnConfig, tuned, (1 << n for n in range(17)), choose)


def prepare(problem: Problem, arch: Arch, tuned: TunedPlan = ()) -> Callable[..., object]:
    """The step for any batch."""
    from replayssm_cute.kernels.gdn import compile_gdn, in_order

    target = for_capability(arch.capability)
    assert target is not None and isinstance(problem, GdnProblem), "supports() was asked first"
    launches = [(batch, compile_gdn(problem, config, target.name, arch.sms))
                for batch, config in plan(problem, target, tuned)]
    return gdn_batches.by_batch(problem, launches, functools.partial(in_order, problem.tokens > 0))
