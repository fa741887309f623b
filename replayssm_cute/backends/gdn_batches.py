"""Gated DeltaNet launch choices that follow the batch: what the CuTe and the Triton adapter share.

A step is prepared once for every batch. All its kernels are compiled then, so that nothing compiles in a graph capture;
no choice shows in the results, so the batch may make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from replayssm_cute.dispatch import warn_once
from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_dispatch import TunedPlan
from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.launch_config import LaunchConfig

Config = TypeVar("Config", bound=LaunchConfig)
LARGEST = 1 << 16  # batch, from which on one choice serves


def plan(kind: type[Config], tuned: TunedPlan, limits: Iterable[int],
         choose: Callable[[int, Config | None], Config]) -> list[tuple[int, Config]]:
    """(largest batch, config), ascending; the last one serves whatever is larger still.

    Args:
        tuned: as ``gdn_dispatch.tuned_plan`` gives it. What is no config of this kind is skipped with one warning.
        limits: batches up to which ``choose`` may answer otherwise than behind them.
        choose: (batch, tuned config or None) -> the config to take.
    """
    ends = sorted({*limits, *(limit for limit, _ in tuned), LARGEST})
    found: list[tuple[int, Config]] = []
    for batch in ends:
        values = next((values for limit, values in tuned if batch <= limit), tuned[-1][1] if tuned else None)
        config = choose(batch, _read(kind, values))
        if found and found[-1][1] == config:
            found.pop()
        found.append((batch, config))
    return found


def _read(kind: type[Config], values: dict[str, Any] | None) -> Config | None:
    try:
        return None if values is None else kind.from_dict(values)
    except ArgumentError as error:
        warn_once(f"tuned config {values} skipped: {error}")
        return None


def by_batch(problem: GdnProblem, launches: list[tuple[int, Callable[..., Any]]],
             order: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda args: args) -> Callable[..., Any]:
    """The step that takes the launch of its batch.

    Args:
        launches: (largest batch, launch), ascending, as ``plan`` has them.
        order: the canonical arguments of a step -> those of a launch.
    """
    rows_at, more = (15, 1) if problem.tokens else (2, 0)  # query_start_loc or k
    *smaller, (_, last) = launches

    def step(*args: Any) -> Any:
        batch = args[rows_at].shape[0] - more
        launch = next((f for limit, f in smaller if batch <= limit), last)
        return launch(*order(args))
    return step
