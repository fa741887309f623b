"""The Gated DeltaNet CuTe DSL kernels as a backend: compute capability 9.0, 10.0 and 10.3."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from replayssm_cute.arch import Arch
from replayssm_cute.backends.cute import installed
from replayssm_cute.gdn_dispatch import Problem
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


def plan(problem: GdnProblem, target: Target) -> list[tuple[int, GdnConfig]]:
    """The heuristic's choices: (largest batch, config), ascending; the last one serves whatever is larger still."""
    steps: list[tuple[int, GdnConfig]] = []
    for batch in (1 << n for n in range(17)):
        config = heuristic(problem, batch, target)
        assert config is not None, "supports() was asked first"
        if steps and steps[-1][1] == config:
            steps.pop()
        steps.append((batch, config))
    return steps


def prepare(problem: Problem, arch: Arch) -> Callable[..., object]:
    """The step for any batch: what each batch takes is compiled here, so that nothing compiles in a graph capture.

    No choice of ``plan`` shows in the results, so the batch may make it.
    """
    from replayssm_cute.kernels.gdn import compile_gdn, in_order

    target = for_capability(arch.capability)
    assert target is not None and isinstance(problem, GdnProblem), "supports() was asked first"
    launches = [(batch, compile_gdn(problem, config, target.name, arch.sms)) for batch, config in plan(problem, target)]
    last, spec = launches.pop()[1], problem.tokens > 0

    def step(*args: Tensor | int | None) -> object:
        rows: Tensor = args[15] if spec else args[2]  # type: ignore[assignment]
        batch = rows.shape[0] - spec
        launch = next((f for limit, f in launches if batch <= limit), last)
        return launch(*in_order(spec, args))
    return step
