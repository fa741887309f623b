"""Which backend serves a Gated DeltaNet call: decided once per distinct signature of its arguments.

The order of preference is that of ``replayssm_cute.dispatch``, but that on 9.0 CuTe comes first where the registry has
not measured the layer: on an H200 it was faster at every batch (docs/gdn.md). Each backend takes the launch choices of
the registry's rows, by the batch, and its own where there are none. A backend chosen this way that fails falls through
to the next one with one warning; a backend asked for by name raises.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.dispatch import BACKENDS, Candidate, Launch, first_call, served, warn_once
from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.gdn_types import GdnFoldProblem, GdnProblem
from replayssm_cute.registry import tuned
from replayssm_cute.types import Support

UNMEASURED = ("cute", "measured as faster on an H200 at every batch (docs/gdn.md)")  # first choice on 9.0
Problem = GdnProblem | GdnFoldProblem
#: (largest batch, tuned config or None), ascending; the last one serves whatever is larger; empty where nothing is.
TunedPlan = tuple[tuple[int, dict[str, Any] | None], ...]

_launches: dict[tuple[Any, ...], Launch] = {}


class Backend(Protocol):
    """What ``replayssm_cute.backends.gdn_*`` offer."""

    def supports(self, problem: Problem, arch: Arch) -> Support: ...

    def prepare(self, problem: Problem, arch: Arch, tuned: TunedPlan = ()) -> Callable[..., object]: ...


def backend_module(name: str) -> Backend:
    """The adapter of a backend; importing it touches no compiler and no driver."""
    if name not in BACKENDS:
        raise ArgumentError("backend", " or ".join(map(repr, BACKENDS)), repr(name))
    return importlib.import_module(f"replayssm_cute.backends.gdn_{name}")


def preference(problem: Problem, arch: Arch) -> list[tuple[str, str]]:
    """(backend, why) in the order in which they are tried."""
    measured = tuned.fastest(problem.op, problem, arch) if isinstance(problem, GdnProblem) else None
    return dispatch.preference(measured, arch, UNMEASURED)


@functools.lru_cache(maxsize=4096)
def candidates(problem: GdnProblem, batch: int, arch: Arch) -> tuple[Candidate, ...]:
    """Every backend in the order in which it would be tried, with what the registry has for this batch."""
    row = None if problem.philox_rounds else tuned.lookup(problem.op, problem, batch, arch)
    found = []
    for backend, why in preference(problem, arch):
        entry = row.backends.get(backend) if row else None
        found.append(Candidate(backend, backend_module(backend).supports(problem, arch),
                               entry.config if entry else None, why, row.describe() if row and entry else ""))
    return tuple(found)


def explain(problem: GdnProblem, batch: int, arch: Arch) -> str:
    """The decision for a problem, one line a backend in the order of preference."""
    return dispatch.lines(str(problem), problem, batch, arch, candidates(problem, batch, arch))


def tuned_plan(problem: Problem, arch: Arch, backend: str) -> TunedPlan:
    """The launch choices that the registry's rows hold for a backend; none for folds outside of a step.

    Rows are measured without stochastic rounding, which takes more registers: with it the heuristic stands.
    """
    if not isinstance(problem, GdnProblem) or problem.philox_rounds:
        return ()
    rows = tuned.by_batch(problem.op, problem, arch)
    return tuple((batch, row.backends[backend].config if backend in row.backends else None) for batch, row in rows)


def prepare(problem: Problem, device: torch.device | str, backend: str | None = None,
            after: str | None = None) -> Launch:
    """The launch that serves ``problem``: that of the named backend, or of the first that can, behind ``after``.

    Raises:
        UnsupportedError: the named backend cannot serve, or none can.
    """
    arch, reasons = archs.of(device), []
    names = [backend] if backend is not None else [name for name, _ in preference(problem, arch)]
    if after is not None:
        names = names[names.index(after) + 1:]
    for name in names:
        module = backend_module(name)
        support = module.supports(problem, arch)
        if support:
            try:
                return Launch(name, module.prepare(problem, arch, tuned_plan(problem, arch, name)), self_checking=False)
            except Exception as error:
                if backend is not None:
                    raise
                warn_once(f"backend {name!r} failed to prepare {problem} on {arch}, falling through: {error!r}")
        reasons.append(f"{name}: {support.reason or 'failed'}")
    raise UnsupportedError(str(problem), f"no backend can serve it ({'; '.join(reasons)})")


def serve(args: tuple[Any, ...], options: tuple[Any, ...], pose: Callable[[], Problem], device: torch.device,
          backend: str | None) -> None:
    """Call the launch for these arguments; ``pose`` validates them the first time such arguments come.

    Args:
        args: the canonical arguments of the operation: tensors, None, and plain values.
        options: whatever else ``pose`` depends on.
    """
    signature = (options, backend, *((t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16)
                                     if isinstance(t, Tensor) else type(t) for t in args))
    launch = _launches.get(signature)
    if launch is not None:
        launch.call(*args)
    else:
        problem = pose()
        launch = first_call(prepare(problem, device, backend), args, str(problem), backend is not None,
                            lambda failed: prepare(problem, device, after=failed))
        _launches[signature] = launch
    served[options[0], launch.backend] += 1
