"""The choice between a backend's candidates at one point: right before fast, in interleaved rounds.

Every measurement is looked up in the journal first and written to it at once, so a search that was
interrupted goes on where it stopped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replayssm_tune.journal import Journal
from replayssm_tune.measure import OUTPUT_ERROR
from replayssm_tune.plan import Point, Unit
from replayssm_tune.process import Child, Lost

ROUNDS = 5        # samples of every finalist
FEWEST_ROUNDS = 3  # even where the time is up
TIED = 1.01       # medians over the least one that are no difference: 9 in 10 points of an H200 had all samples so near
WITHIN = 1.1      # a finalist's first sample over the least first sample; the noise of a sample is about 0.03


@dataclass(frozen=True)
class Bench:
    """Where measurements are made and kept.

    Attributes:
        lab: the process with the GPU.
        journal: of the output folder.
        device: what tells its measurements from those of another device or code, in the journal's keys.
        timeout: seconds a candidate may take over one request.
    """

    lab: Child
    journal: Journal
    device: dict[str, Any]
    timeout: float

    def recorded(self, do: str, point: Point, backend: str, config: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers to a request that the journal holds."""
        return self.journal.of(self._key(do, point, backend, config))

    def ask(self, do: str, point: Point, backend: str, config: dict[str, Any]) -> dict[str, Any]:
        """Ask the lab and write down the answer; a failure is an answer too: ``{"failed": reason}``."""
        request = {"do": do, "point": point.to_dict(), "backend": backend, "config": config}
        try:
            result = self.lab.ask(request, self.timeout)
        except Lost as loss:
            result = {"failed": str(loss)}
        return self.note(result, do, point, backend, config)

    def note(self, result: dict[str, Any], do: str, point: Point, backend: str,
             config: dict[str, Any]) -> dict[str, Any]:
        self.journal.add(self._key(do, point, backend, config), result)
        return result

    def _key(self, do: str, point: Point, backend: str, config: dict[str, Any]) -> dict[str, Any]:
        """A check holds for all batches: no kernel is specialised on one."""
        where = point.to_dict()
        if do == "check":
            del where["batch"]
        return {**self.device, "do": do, "point": where, "backend": backend, "config": config}


class Trial:
    """One candidate at one point, with what is known about it."""

    def __init__(self, bench: Bench, unit: Unit, config: dict[str, Any]) -> None:
        self._bench, self._where = bench, (unit.point, unit.backend, config)
        self.config = config
        self.results = bench.recorded("check", *self._where) + bench.recorded("sample", *self._where)

    @property
    def samples(self) -> list[float]:
        return [result["us"] for result in self.results if "us" in result]

    @property
    def us(self) -> float:
        """Median over its samples, of which there is at least one."""
        return statistics.median(self.samples)

    @property
    def fault(self) -> str | None:
        """Why it cannot be chosen, None where it can or was not asked yet."""
        for result in self.results:
            if "failed" in result:
                return str(result["failed"])
            if not result.get("error", 0.0) < OUTPUT_ERROR:
                return f"wrong by {result['error']:.1e}"
        return None

    def begin(self, ready: Callable[[], object]) -> None:
        """Compile, check and take the first sample, as far as that has not been done.

        Args:
            ready: waits for the compiled kernel; raises ``Lost`` where there will be none.
        """
        if self.fault or self.samples:
            return
        try:
            ready()
        except Lost as loss:
            self.results.append(self._bench.note({"failed": str(loss)}, "check", *self._where))
            return
        if not self.results:
            self.ask("check")
        if not self.fault:
            self.ask("sample")

    def ask(self, do: str) -> None:
        self.results.append(self._bench.ask(do, *self._where))


def search(bench: Bench, unit: Unit, deadline: float, ready: Callable[[dict[str, Any]], object],
           tell: Callable[[Trial], None]) -> dict[str, Any] | None:
    """The fastest right candidate as the registry holds it, with the runner-up; None where none is right.

    Args:
        deadline: of ``time.monotonic``, after which no further candidate is begun; the heuristic's choice
            always is.
        ready: waits for the compiled kernel of a config; raises ``Lost`` where there will be none.
        tell: hears about every candidate once it has begun.
    """
    standing: list[Trial] = []
    for config in unit.configs:
        if standing and time.monotonic() > deadline:
            break
        trial = Trial(bench, unit, config)
        trial.begin(lambda config=config: ready(config))  # type: ignore[misc]
        tell(trial)
        if not trial.fault:
            standing.append(trial)
    race(standing, unit.configs[:1], deadline)
    chosen, tied = choose([trial for trial in standing if not trial.fault])
    if tied:
        result = {"chosen": tied[0].config, "tied": [{"config": t.config, "us": round(t.us, 3)} for t in tied]}
        if bench.recorded("choose", unit.point, unit.backend, {})[-1:] != [result]:
            bench.note(result, "choose", unit.point, unit.backend, {})
    return chosen


def race(standing: list[Trial], always: tuple[dict[str, Any], ...], deadline: float) -> None:
    """Sample the finalists in turns, so that a drift of the clocks meets all of them alike.

    Args:
        always: configs that are finalists however their first sample fell.
    """
    if not standing:
        return
    least = min(trial.samples[0] for trial in standing)
    finalists = [t for t in standing if t.samples[0] <= WITHIN * least or t.config in always]
    for sampled in range(1, ROUNDS):
        if sampled >= FEWEST_ROUNDS and time.monotonic() > deadline:
            return
        for trial in finalists:
            if not trial.fault and len(trial.samples) <= sampled:
                trial.ask("sample")


def choose(trials: list[Trial]) -> tuple[dict[str, Any] | None, list[Trial]]:
    """The choice as the registry holds it, and the trials that the measurement does not tell apart from it.

    Of the finalists whose medians lie within ``TIED`` of the least it is the first in the order of the heuristic, so
    that noise does not decide: tuning again finds the same, or one about as fast. The runner-up is the fastest of the
    others and may be faster by as much. A finalist goes before a candidate with one sample.

    Args:
        trials: right ones, in the order of the heuristic.

    Returns:
        (None, []) where there are none; the second is empty where the choice is alone.
    """
    ranked = sorted(trials, key=lambda t: (len(t.samples) < FEWEST_ROUNDS, t.us))
    if not ranked:
        return None, []
    tied = [t for t in trials if t.us <= TIED * ranked[0].us and
            (len(t.samples) >= FEWEST_ROUNDS or len(ranked[0].samples) < FEWEST_ROUNDS)]
    first, *others = [tied[0], *(t for t in ranked if t is not tied[0])]
    entries = [{"config": t.config, "us": round(t.us, 3)} for t in (first, *others[:1])]
    return {**entries[0], "runner_up": entries[1] if others else None}, tied if len(tied) > 1 else []


def per_step(bench: Bench, point: Point) -> float | None:
    """Microseconds of the per-step baseline, None where it fails."""
    results = bench.recorded("per_step", point, "triton", {}) or [bench.ask("per_step", point, "triton", {})]
    return results[-1].get("us")
