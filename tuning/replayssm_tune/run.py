"""``replayssm-tune run``: measure every point of an order and write its row as soon as it stands."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from replayssm_cute.arch import Arch
from replayssm_cute.errors import UnsupportedError
from replayssm_cute.registry import tuned
from replayssm_tune import figures, plan, prune, rows, show
from replayssm_tune.compiler import Compilers
from replayssm_tune.journal import Journal
from replayssm_tune.measure import times_of
from replayssm_tune.operations import nbytes, sizes
from replayssm_tune.plan import Point, Unit
from replayssm_tune.process import Child
from replayssm_tune.prune import Pruned
from replayssm_tune.search import Bench, Trial, per_step, search
from replayssm_tune.subject import Subject

LAB = [sys.executable, "-m", "replayssm_tune.lab"]
COMPILER = [sys.executable, "-m", "replayssm_tune.compiler"]
SEARCHING = 0.9         # of the budget; the rest is for what the last point still has to do
SETUP_SECONDS = 300.0   # to import the compilers, and for the yardstick
gpu_is_here = torch.cuda.is_available


@dataclass(frozen=True)
class Order:
    """What the user asked for.

    Attributes:
        state_dtypes, buffer_lens, batches, backends: a row a combination of the first three, an entry a backend.
        budget: seconds, about.
        out: folder of the files and of the journal.
        force: replace better rows too, and files of other versions.
        fresh: measure anew what the journal holds.
        timeout: seconds a candidate may take over its check or a sample.
        jobs: processes that compile ahead.
        prune: leave out what the speed model says is slower.
    """

    subject: Subject
    state_dtypes: tuple[str, ...]
    buffer_lens: tuple[int, ...]
    batches: tuple[int, ...]
    backends: tuple[str, ...]
    budget: float
    out: Path
    force: bool
    fresh: bool
    timeout: float
    jobs: int
    prune: bool

    @property
    def points(self) -> list[Point]:
        return self.subject.points(self.state_dtypes, self.buffer_lens, self.batches)

    def path(self, state_dtype: str, device: str) -> Path:
        """The file of the rows of a state dtype."""
        return rows.path_of(self.out, self.subject.geometry, state_dtype, device, self.subject.op)

    def units(self, point: Point, arch: Arch) -> tuple[list[Unit], list[Pruned]]:
        """The candidates of a point that are to be measured, and those that are not."""
        units = [plan.unit(point, backend, arch) for backend in self.backends]
        return prune.split(units, arch) if self.prune else (units, [])


def tune(order: Order, console: Console) -> None:
    """Measure on the GPU here.

    Raises:
        UnsupportedError: there is none.
        RegistryError: a file that would be written is malformed or of other versions.
        OSError: the folder cannot be written, or the disk is full.
    """
    if not gpu_is_here():
        raise UnsupportedError("run", "there is no GPU to measure on; --dry-run needs none")
    begun = time.monotonic()
    order.out.mkdir(parents=True, exist_ok=True)
    journal, lab = Journal(order.out, order.fresh), Child(LAB)
    try:
        about = lab.ask({"do": "device"}, SETUP_SECONDS)
        arch = Arch(**{**about["arch"], "capability": tuple(about["arch"]["capability"])})
        bench = Bench(lab, journal, {"device": arch.name, "build": about["build"]}, order.timeout)
        seconds = SEARCHING * order.budget - (time.monotonic() - begun)
        with alone_on(about["id"], console):
            measure(order, bench, arch, seconds, console)
    finally:
        lab.close()


@contextlib.contextmanager
def alone_on(device: str, console: Console) -> Iterator[None]:
    """Wait until no other tuner of this user measures on the device; two would disturb each other's times."""
    user = Path.home().name
    lock = FileLock(Path(tempfile.gettempdir(), f"replayssm-tune-{user}-{device}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print("another replayssm-tune measures on this GPU; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def measure(order: Order, bench: Bench, arch: Arch, seconds: float, console: Console) -> None:
    """All points, each with its share of the seconds that are left."""
    deadline = time.monotonic() + seconds
    yardstick = bench.lab.ask({"do": "yardstick"}, SETUP_SECONDS)
    provenance = rows.record(arch.name, yardstick["provenance"])
    for name in order.state_dtypes:
        rows.check(order.path(name, arch.name), provenance, order.force)
    units = {point: order.units(point, arch) for point in order.points}
    everything = [u for at_point, _ in units.values() for u in at_point]
    for reason in dict.fromkeys(f"{u.backend}: {u.support.reason}" for u in everything if not u.support):
        console.print(reason)
    if spared := sum(len(pruned) for _, pruned in units.values()):
        console.print(f"{spared} candidates pruned by the speed model; --no-prune measures them, too")
    compilers = Compilers(COMPILER, order.jobs, arch)
    compilers.submit(plan.distinct(everything))
    try:
        with bar(console) as progress:
            task = progress.add_task("", total=sum(len(u.configs) for u in everything))
            tell = _teller(progress, task, console)
            for number, (point, (at_point, pruned)) in enumerate(units.items()):
                if time.monotonic() > deadline:
                    console.print(f"the budget is spent; {len(units) - number} of {len(units)} points were not begun; "
                                  "the same command goes on")
                    return
                progress.update(task, description=str(point))
                prune.note(bench, pruned)
                share = (deadline - time.monotonic()) / (len(units) - number)
                row = measure_point(bench, at_point, share, compilers, tell)
                keep(order, point, row, yardstick["bandwidth"], provenance, console)
        compare_ring_lengths(order, arch, console)
    finally:
        compilers.close()


def compare_ring_lengths(order: Order, arch: Arch, console: Console) -> None:
    """Where several were measured: what each costs in time and memory."""
    paths = [order.path(name, arch.name) for name in order.state_dtypes]
    layers = {replace(point, batch=1) for point in order.points}
    measured = [f for path in paths if path.exists() for f in figures.of_file(tuned.load_file(path))
                if replace(f.point, batch=1) in layers]
    table = show.ring_lengths(measured, order.subject.layers or 1)
    if table is not None:
        console.print(table)


def measure_point(bench: Bench, at_point: list[Unit], seconds: float, compilers: Compilers,
                  tell: Any) -> dict[str, Any]:
    """``entries`` by backend, ``heuristic`` microseconds by backend, and ``per_step`` microseconds or None."""
    point, deadline = at_point[0].point, time.monotonic()
    entries, heuristic = {}, {}
    for unit in at_point:
        deadline += seconds / len(at_point)
        found = search(bench, unit, deadline, lambda config, unit=unit: compilers.result(unit, config),  # type: ignore[misc]
                       lambda trial, unit=unit: tell(unit, trial))  # type: ignore[misc]
        if found:
            entries[unit.backend] = found
            first = Trial(bench, unit, unit.configs[0])
            heuristic[unit.backend] = first.us if first.samples and not first.fault else None
    return {"entries": entries, "heuristic": heuristic, "per_step": per_step(bench, point) if entries else None}


def keep(order: Order, point: Point, found: dict[str, Any], bandwidth: float, provenance: dict[str, Any],
         console: Console) -> None:
    """Write the row of a point and say what it holds."""
    if not found["entries"]:
        console.print(f"{point}: no backend has a right candidate; no row")
        return
    row = {**sizes(point), **times_of(nbytes(point), found["entries"], found["per_step"], bandwidth)}
    path = order.path(point.state_dtype, provenance["device"])
    console.print(sentence(point, row, found["heuristic"]), highlight=False, soft_wrap=True)
    for reason in rows.store(path, provenance, [row], order.force):
        console.print(f"kept {reason}", highlight=False, soft_wrap=True)


def sentence(point: Point, row: dict[str, Any], heuristic: dict[str, float | None]) -> str:
    """One line about a row: times, what the heuristic takes, and the distance of the runner-up."""
    parts = []
    for backend, entry in row["backends"].items():
        notes = [f"heuristic {heuristic[backend]:.2f}"] if heuristic[backend] else []
        if entry["runner_up"]:
            notes.append(f"runner-up {100 * (entry['runner_up']['us'] / entry['us'] - 1):+.1f}%")
        parts.append(f"{backend} {entry['us']:.2f} us" + (f" ({', '.join(notes)})" if notes else ""))
    baseline = "" if row["per_step_us"] is None else f"per step {row['per_step_us']:.2f} us, "
    return f"{point}: {baseline}{', '.join(parts)}; {row['copy_percent']:.0f}% of copy"


def bar(console: Console) -> Progress:
    """Candidates done of all candidates, with the time that is left."""
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                    TextColumn("left"), TimeRemainingColumn(), console=console)


def _teller(progress: Progress, task: Any, console: Console) -> Any:
    """Moves the bar for every candidate and says once which are left out."""
    told = set()

    def tell(unit: Unit, trial: Trial) -> None:
        progress.advance(task)
        text = f"{unit.point.step}{unit.point.state_dtype} L={unit.point.buffer_len}: {unit.backend} {trial.config}"
        if trial.fault and text not in told:
            told.add(text)
            console.print(f"{text} left out: {trial.fault}", highlight=False, markup=False, soft_wrap=True)
    return tell
