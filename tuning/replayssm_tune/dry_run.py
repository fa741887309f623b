"""``replayssm-tune run --dry-run``: the search space, and what its kernels take of the machine. Needs no GPU."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from replayssm_cute.arch import Arch
from replayssm_cute.kernels.targets import REGISTERS_PER_SM, for_capability
from replayssm_tune import plan, run
from replayssm_tune.compiler import Compilers
from replayssm_tune.plan import Unit
from replayssm_tune.process import Lost
from replayssm_tune.prune import Pruned

SECONDS_A_KERNEL = 3.0  # of one core, about


def rehearse(order: run.Order, arch: Arch, compiles: bool, console: Console) -> None:
    """Print what ``run`` would measure on an architecture.

    Args:
        compiles: also compile every kernel of it, as far as the order's budget goes, and print its resources.
    """
    at_points = [order.units(point, arch) for point in order.points]
    units = [u for at_point, _ in at_points for u in at_point]
    spared = [p for _, pruned in at_points for p in pruned]
    kernels = plan.distinct(units)
    console.print(f"{order.subject.name} on {arch}: {len(order.points)} points, {sum(len(u.configs) for u in units)} "
                  f"candidates, {len(kernels)} kernels", highlight=False)
    console.print(space(units))
    if spared:
        console.print(pruned_table(spared))
    if compiles:
        console.print(f"compiling with {order.jobs} processes, about "
                      f"{len(kernels) * SECONDS_A_KERNEL / order.jobs:.0f} s", highlight=False)
        console.print(resources(order, arch, kernels, console))


def space(units: list[Unit]) -> Table:
    """Points and candidates of each backend, by dtype and ring length; or why it cannot serve."""
    table = Table("state", "L", "backend", "points", "candidates", "kernels", box=None, header_style="bold")
    groups: dict[tuple[Any, ...], list[Unit]] = {}
    for u in units:
        groups.setdefault((u.point.step + u.point.state_dtype, u.point.buffer_len, u.backend), []).append(u)
    for (dtype, buffer_len, backend), members in groups.items():
        counts = Counter(len(u.configs) for u in members)
        each = ", ".join(f"{n} at {points}" for n, points in counts.items()) if len(counts) > 1 else str(*counts)
        table.add_row(dtype, str(buffer_len), backend, str(len(members)),
                      each if members[0].support else members[0].support.reason, str(len(plan.distinct(members))))
    return table


def pruned_table(spared: list[Pruned]) -> Table:
    """A line a candidate that the speed model left out: at which batches, and by how much it is predicted slower."""
    table = Table("state", "L", "backend", "pruned", "batches", "predicted slower by", box=None, header_style="bold",
                  caption="than the best prediction, by more than the speed model may be wrong; --no-prune keeps them")
    groups: dict[tuple[str, ...], list[Pruned]] = {}
    varying = _varying([c for p in spared for c in (*p.unit.configs, p.config)])
    for p in spared:
        text = " ".join(f"{name}={p.config[name]}" for name in varying)
        groups.setdefault((p.unit.point.state_dtype, str(p.unit.point.buffer_len), p.unit.backend, text), []).append(p)
    for cells, members in groups.items():
        percent = ", ".join(f"{100 * p.slower:.0f}%" for p in members)
        table.add_row(*cells, ", ".join(str(p.unit.point.batch) for p in members), percent)
    return table


def resources(order: run.Order, arch: Arch, kernels: list[tuple[Unit, dict[str, Any]]], console: Console) -> Table:
    """A line a kernel: what it takes, and how many of its CTAs the registers let a multiprocessor hold."""
    table = Table("state", "L", "backend", "config", "registers", "spilled", "shared", "CTAs", box=None,
                  header_style="bold")
    compilers, deadline = Compilers(run.COMPILER, order.jobs, arch, resources=True), time.monotonic() + order.budget
    compilers.submit(kernels)
    shown = sorted(kernels, key=lambda k: (k[0].point.step, order.state_dtypes.index(k[0].point.state_dtype),
                                           k[0].point.buffer_len, order.backends.index(k[0].backend)))
    varying = {backend: _varying([c for u, c in kernels if u.backend == backend]) for backend in order.backends}
    try:
        with run.bar(console) as progress:
            for u, config in progress.track(shown, description="compiled"):
                if time.monotonic() > deadline:
                    table.caption = "the budget is spent; the rest was not compiled"
                    break
                text = " ".join(f"{name}={config[name]}" for name in varying[u.backend])
                cells = (u.point.step + u.point.state_dtype, str(u.point.buffer_len), u.backend, text)
                try:
                    table.add_row(*cells, *_cells(compilers.result(u, config), arch))
                except Lost as loss:
                    table.add_row(*cells, str(loss))
    finally:
        compilers.close()
    return table


def _cells(taken: dict[str, Any], arch: Arch) -> tuple[str, ...]:
    target = for_capability(arch.capability)
    resident = REGISTERS_PER_SM // (-(-taken["registers"] // 8) * 8 * taken["threads"])
    if target is not None:
        resident = min(resident, target.smem_per_sm // (taken["shared"] + 1024))
    return str(taken["registers"]), str(taken["spilled"]), str(taken["shared"]), str(resident)


def _varying(configs: list[dict[str, Any]]) -> list[str]:
    """The names whose values differ between the configs."""
    return [name for name in configs[0] if len({config[name] for config in configs}) > 1] if configs else []
