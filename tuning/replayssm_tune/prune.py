"""What the speed model spares the GPU: candidates that it says are slower by more than it can be wrong.

The margin follows from the model's measured error (``speed_model.margin``). Kept whatever the model says are the
heuristic's choice, the best prediction, and what the model does not know: Triton, other operations, devices without
figures, tiles and ring lengths whose instructions were not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from replayssm_cute.arch import Arch
from replayssm_cute.kernels.mamba2_config import Mamba2Config
from replayssm_cute.registry import devices
from replayssm_cute.types import Mamba2Problem
from replayssm_tune.plan import Unit
from replayssm_tune.search import Bench
from replayssm_tune.speed_model import COUNTED_BUFFER_LEN, DEVICES, Step, margin, parameters, step_us


@dataclass(frozen=True)
class Pruned:
    """A candidate that is not measured.

    Attributes:
        unit: with the candidates that are kept.
        config: the candidate.
        slower: predicted time over the best prediction at this point, less 1.
    """

    unit: Unit
    config: dict[str, Any]
    slower: float

    @property
    def reason(self) -> str:
        return f"predicted {100 * self.slower:.0f}% slower than the best, more than the " \
            f"{100 * margin(self.unit.point.batch):.0f}% that the speed model may be wrong"


def split(units: Iterable[Unit], arch: Arch) -> tuple[list[Unit], list[Pruned]]:
    """The units with the candidates that are worth timing, and the others."""
    kept: list[Unit] = []
    pruned: list[Pruned] = []
    for unit in units:
        times = [predicted_us(unit, config, arch) for config in unit.configs]
        best = min((us for us in times if us is not None), default=0.0)
        limit = best * (1 + margin(unit.point.batch))
        stay = [i == 0 or us is None or us <= limit for i, us in enumerate(times)]
        kept.append(replace(unit, configs=tuple(c for c, stays in zip(unit.configs, stay, strict=True) if stays)))
        pruned += [Pruned(kept[-1], config, us / best - 1)
                   for config, us, stays in zip(unit.configs, times, stay, strict=True) if us is not None and not stays]
    return kept, pruned


def predicted_us(unit: Unit, config: dict[str, Any], arch: Arch) -> float | None:
    """Microseconds of a step with this candidate; None where the model does not know."""
    problem, device = unit.point.problem, DEVICES.get(devices.product_of(arch.name) or "")
    if unit.backend != "cute" or not isinstance(problem, Mamba2Problem) or device is None:
        return None
    if problem.buffer_len != COUNTED_BUFFER_LEN:
        return None
    step = Step(problem.geometry, problem.buffer_len, problem.state_dtype, unit.point.batch,
                Mamba2Config.from_dict(config), problem.philox_rounds, problem.act_dtype)
    try:
        return step_us(step, replace(device, sms=arch.sms or device.sms), parameters())
    except KeyError:
        return None


def note(bench: Bench, pruned: Iterable[Pruned]) -> None:
    """Write the pruned candidates of a point down in the journal, each once."""
    for p in pruned:
        where, result = ("prune", p.unit.point, p.unit.backend, p.config), {"pruned": p.reason}
        if bench.recorded(*where)[-1:] != [result]:
            bench.note(result, *where)
