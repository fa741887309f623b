"""A decode kernel of some package, and what becomes of it on a workload: rounds of launches over several layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

OURS = "replayssm_cute"


@dataclass(frozen=True)
class Bound:
    """A kernel on a workload, all its arguments built.

    Attributes:
        rounds: of one cycle, in which every row flushes as often as any other.
        layers: pools that a round steps through.
        step: (round, layer) -> the output, which the next step may overwrite.
        commit: what all layers share behind the steps of a round; None where there is nothing.
    """

    rounds: int
    layers: int
    step: Callable[[int, int], Tensor]
    commit: Callable[[], object] | None = None

    @property
    def steps(self) -> int:
        return self.rounds * self.layers

    def play(self) -> None:
        """Issue the launches of one cycle."""
        for i in range(self.rounds):
            for layer in range(self.layers):
                self.step(i, layer)
            if self.commit is not None:
                self.commit()


@dataclass(frozen=True)
class Kernel:
    """What is compared.

    Attributes:
        name: of its rows.
        package: import name of the package that it belongs to.
        entries: its functions, ``module:function`` each.
        replay: it keeps a ring; else it stores the state at every token.
        bind: (workload, *functions) -> Bound. Raises where the kernel does not take the workload.
    """

    name: str
    package: str
    entries: tuple[str, ...]
    replay: bool
    bind: Callable[..., Bound]

    def load(self) -> tuple[Callable[..., Any], ...]:
        """Its functions.

        Raises:
            ImportError, AttributeError: this version of the package has them not.
        """
        found = (entry.split(":") for entry in self.entries)
        return tuple(getattr(importlib.import_module(module), name) for module, name in found)


def version(package: str) -> str | None:
    """Version of a package, "unknown" where it does not say or fails to import; None where it is not installed."""
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        return None if error.name == package else "unknown"
    except Exception:
        return "unknown"  # installed and broken: its kernels' rows say how
    return str(getattr(module, "__version__", "unknown"))
