"""Which backend serves a Gated DeltaNet call: decided once per distinct signature of its arguments.

CuTe DSL on compute capability 9.0, 10.0 and 10.3 (on 9.0 it is measured as faster at every batch, see docs/gdn.md),
Triton on every other GPU, PyTorch without one. A backend chosen this way that fails falls through to the next one with
one warning; a backend asked for by name raises.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from replayssm_cute import arch as archs
from replayssm_cute.arch import Arch
from replayssm_cute.dispatch import Launch, first_call, served, warn_once
from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.gdn_types import GdnFoldProblem, GdnProblem
from replayssm_cute.types import Support

BACKENDS = ("cute", "triton", "torch")
CUTE_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
Problem = GdnProblem | GdnFoldProblem

_launches: dict[tuple[Any, ...], Launch] = {}


class Backend(Protocol):
    """What ``replayssm_cute.backends.gdn_*`` offer."""

    def supports(self, problem: Problem, arch: Arch) -> Support: ...

    def prepare(self, problem: Problem, arch: Arch) -> Callable[..., object]: ...


def backend_module(name: str) -> Backend:
    """The adapter of a backend; importing it touches no compiler and no driver."""
    if name not in BACKENDS:
        raise ArgumentError("backend", " or ".join(map(repr, BACKENDS)), repr(name))
    return importlib.import_module(f"replayssm_cute.backends.gdn_{name}")


def preference(arch: Arch) -> tuple[str, ...]:
    """Backends in the order in which they are tried."""
    if arch.kind == "cpu":
        return BACKENDS[::-1]
    if arch.kind == "cuda" and arch.capability in CUTE_CAPABILITIES:
        return BACKENDS
    return ("triton", "cute", "torch")


def prepare(problem: Problem, device: torch.device | str, backend: str | None = None,
            after: str | None = None) -> Launch:
    """The launch that serves ``problem``: that of the named backend, or of the first that can, behind ``after``.

    Raises:
        UnsupportedError: the named backend cannot serve, or none can.
    """
    arch, reasons = archs.of(device), []
    names = (backend,) if backend is not None else preference(arch)
    if after is not None:
        names = names[names.index(after) + 1:]
    for name in names:
        module = backend_module(name)
        support = module.supports(problem, arch)
        if support:
            try:
                return Launch(name, module.prepare(problem, arch), self_checking=False)
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
