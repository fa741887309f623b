"""Which backend serves a problem: decided once per problem and batch, never per step.

Order of preference: CuTe DSL on compute capability 10.0 and 10.3; on 9.0 whichever of CuTe and
Triton the registry has measured as faster for the layer, else Triton; Triton on every other GPU;
PyTorch without a GPU. The batch has no part in it: backends sum in different orders, and a row's bits
must not change with the batch. A backend chosen this way that fails falls through to the next one with one
warning; a backend asked for by name raises.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from replayssm_cute import arch as archs
from replayssm_cute.arch import Arch
from replayssm_cute.errors import ArgumentError, ReplayError, UnsupportedError
from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.launch_config import LaunchConfig
from replayssm_cute.registry import tuned
from replayssm_cute.types import Mamba2Problem, Support

log = logging.getLogger("replayssm_cute")

BACKENDS = ("cute", "triton", "torch")
OP = "mamba2_decode"

#: Calls served, keyed by (op, backend). Replays of a captured graph do not count: no host code runs.
served: Counter[tuple[str, str]] = Counter()


class Backend(Protocol):
    """What a module of ``replayssm_cute.backends`` offers."""

    #: The prepared launch checks dtypes, shapes, strides and alignment itself, on every call.
    SELF_CHECKING: bool

    def supports(self, problem: Mamba2Problem, arch: Arch) -> Support: ...

    #: What it would launch: a row's config where that is valid for this very problem, else its own choice. PyTorch,
    #: which no row names, lacks it.
    def choose(self, problem: Mamba2Problem, arch: Arch, batch: int, config: dict[str, Any] | None) -> LaunchConfig: ...

    #: Whether its stochastic rounding, where the problem asks for it, is an instruction of the device.
    def rounds_in_hardware(self, problem: Mamba2Problem | GdnProblem, arch: Arch) -> bool: ...

    def prepare(self, problem: Mamba2Problem, arch: Arch, batch: int,
                config: dict[str, Any] | None) -> Callable[..., object]: ...


def backend_module(name: str) -> Backend:
    """The adapter of a backend; importing it touches no compiler and no driver."""
    if name not in BACKENDS:
        raise ArgumentError("backend", " or ".join(map(repr, BACKENDS)), repr(name))
    return importlib.import_module(f"replayssm_cute.backends.{name}")


@dataclass(frozen=True)
class Candidate:
    """A backend in order of preference: whether it can serve, with which tuned config out of which row, and why."""

    backend: str
    support: Support
    config: dict[str, Any] | None
    why: str
    row: str = ""


@functools.lru_cache(maxsize=4096)
def candidates(problem: Mamba2Problem, batch: int, arch: Arch) -> tuple[Candidate, ...]:
    """Every backend in the order in which it would be tried on this device."""
    row = tuned.lookup(OP, problem, batch, arch)
    found = []
    for backend, why in preference(tuned.fastest(OP, problem, arch), arch):
        module = backend_module(backend)
        support, entry = module.supports(problem, arch), row.backends.get(backend) if row else None
        if row and entry and support and _takes(module, problem, arch, batch, entry.config):
            found.append(Candidate(backend, support, entry.config, why, row.describe()))
        else:
            found.append(Candidate(backend, support, None, why))
    return tuple(found)


def _takes(module: Backend, problem: Mamba2Problem, arch: Arch, batch: int, config: dict[str, Any]) -> bool:
    """Whether a backend would launch a row's config for this very problem, of which a row knows less."""
    try:
        return config.items() <= module.choose(problem, arch, batch, config).to_dict().items()
    except ArgumentError as error:
        warn_once(f"a tuned row is not for these kernels, their own choice serves: {error}")
        return False


def preference(measured: tuple[str, str] | None, arch: Arch,
               unmeasured: tuple[str, str] = ("triton", "no measurement on this device")) -> list[tuple[str, str]]:
    """(backend, why) in the order in which backends are tried.

    Args:
        measured: the backend that is faster on this device, with the evidence; None where there is none.
        unmeasured: the first choice on 9.0 without, and why.
    """
    if arch.kind == "cpu":
        return [("torch", "no GPU"), ("triton", "interpreter only"), ("cute", "no GPU")]
    last = ("torch", "slow: materialises the states")
    if arch.kind == "cuda" and arch.capability in ((10, 0), (10, 3)):
        return [("cute", "the kernels are specialised for this architecture"),
                ("triton", "fallback"), last]
    if arch.kind == "cuda" and arch.capability == (9, 0):
        name, why = (measured[0], f"measured as faster: {measured[1]}") if measured else unmeasured
        if name == "cute":
            return [("cute", why), ("triton", "fallback"), last]
        return [("triton", why), ("cute", "second choice"), last]
    return [("triton", "the CuTe kernels are built for 9.0, 10.0 and 10.3"),
            ("cute", "other architecture"), last]


def rounding(problem: Mamba2Problem | GdnProblem, arch: Arch, backend: str) -> str:
    """How a backend rounds the stored checkpoint on this device, in words."""
    if not problem.philox_rounds:
        return "to nearest"
    hardware = backend_module(backend).rounds_in_hardware(problem, arch)
    return "stochastic, in hardware (cvt.rs)" if hardware else "stochastic, in software"


@dataclass(frozen=True)
class Launch:
    """A prepared step: call it with the normalised arguments of the step."""

    backend: str
    call: Callable[..., object]
    self_checking: bool

    @functools.cached_property
    def counter(self) -> tuple[str, str]:
        """Its key in ``served``, made once."""
        return OP, self.backend


def prepare(problem: Mamba2Problem, batch: int, device: torch.device,
            backend: str | None = None, after: str | None = None) -> Launch:
    """Compile or fetch the launch that serves ``problem`` at this batch size.

    Args:
        backend: serve with this backend or raise; None chooses.
        after: try only the candidates behind this one, which failed.

    Raises:
        UnsupportedError: the named backend cannot serve, or no backend can.
    """
    arch = archs.of(device)
    found = candidates(problem, batch, arch)
    if backend is not None:
        backend_module(backend)
        found = tuple(c for c in found if c.backend == backend)
        if not found[0].support:
            raise UnsupportedError(f"backend {backend!r}", found[0].support.reason)
    elif after is not None:
        found = found[[c.backend for c in found].index(after) + 1:]
    for c in found:
        if not c.support:
            continue
        module = backend_module(c.backend)
        try:
            return Launch(c.backend, module.prepare(problem, arch, batch, c.config), module.SELF_CHECKING)
        except Exception as error:
            if backend is not None:
                raise
            warn_once(f"backend {c.backend!r} failed to prepare {describe(problem)} on {arch}, "
                      f"falling through: {type(error).__name__}: {error}")
    reasons = "; ".join(f"{c.backend}: {c.support.reason or 'failed'}" for c in found)
    raise UnsupportedError(describe(problem), f"no backend can serve it ({reasons})")


def run(problem: Mamba2Problem, batch: int, device: torch.device, backend: str | None,
        args: tuple[Any, ...]) -> Launch:
    """Prepare and make the first call of a launch; on failure fall through, as ``prepare`` does."""
    return first_call(prepare(problem, batch, device, backend), args, describe(problem), backend is not None,
                      lambda failed: prepare(problem, batch, device, after=failed))


def first_call(launch: Launch, args: tuple[Any, ...], subject: str, named: bool,
               behind: Callable[[str], Launch]) -> Launch:
    """Call a launch for the first time; where it fails, warn and go on to the launch behind it.

    Args:
        subject: what is served, for the warning.
        named: the caller insists on this backend: its failure is raised.
        behind: backend that failed -> the launch that comes next.
    """
    while True:
        try:
            launch.call(*args)
            return launch
        except ReplayError:
            raise
        except Exception as error:
            if named:
                raise
            warn_once(f"backend {launch.backend!r} failed on {subject}, falling "
                      f"through: {type(error).__name__}: {error}")
            launch = behind(launch.backend)


def explain(problem: Mamba2Problem, batch: int, device: torch.device | str | Arch | None = None) -> str:
    """The decision for a problem, one line a backend in the order of preference."""
    arch = device if isinstance(device, Arch) else archs.of(archs.default_device() if device is None else device)
    return lines(describe(problem), problem, batch, arch, candidates(problem, batch, arch))


def lines(subject: str, problem: Mamba2Problem | GdnProblem, batch: int, arch: Arch,
          found: Iterable[Candidate]) -> str:
    """``explain`` of the candidates of any operation."""
    lines = [f"{subject}, batch {batch}, on {arch}:"]
    chosen = False
    for c in found:
        if c.support and not chosen:
            chosen, mark = True, "->"
        else:
            mark = "  "
        config = "" if c.config is None else f", tuned {c.config} ({c.row})"
        rounded = f", rounding {rounding(problem, arch, c.backend)}" if problem.philox_rounds else ""
        lines.append(f"{mark} {c.backend:6s} {c.why}{config}{rounded}" if c.support
                     else f"{mark} {c.backend:6s} cannot: {c.support.reason}")
    return "\n".join(lines)


def describe(problem: Mamba2Problem) -> str:
    state = str(problem.state_dtype).removeprefix("torch.")
    act = str(problem.act_dtype).removeprefix("torch.")
    return f"Mamba2 {problem.geometry}, state {state}, inputs {act}, L={problem.buffer_len}"


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time this message occurs in the process."""
    log.warning(message)
