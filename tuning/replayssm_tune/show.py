"""``replayssm-tune show``: rows as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from replayssm_tune.figures import Figure
from replayssm_tune.operations import OPERATIONS


def table(figures: Sequence[Figure]) -> Table:
    """A line a row of the registry; the fastest backend's time is bold."""
    names = sorted({name for f in figures for name in f.backends})
    found = Table("device", "layer", "state", "L", "batch", "per step us", *(f"{name} us" for name in names),
                  "% of copy", "over per step", "runner-up", box=None, header_style="bold")
    for f in figures:
        times = [f"{f.backends[name].us:.2f}" if name in f.backends else "" for name in names]
        times = [f"[bold]{text}[/]" if name == f.fastest else text for name, text in zip(names, times, strict=True)]
        best = f.backends[f.fastest]
        percent, speedup = f.percent(best.us), f.speedup(f.fastest)
        found.add_row(f.device, f.layer, f.state_dtype, str(f.buffer_len), str(f.batch),
                      "" if f.per_step_us is None else f"{f.per_step_us:.2f}", *times,
                      "" if percent is None else f"{percent:.0f}", "" if speedup is None else f"{speedup:.2f}x",
                      f"{100 * (best.runner_up['us'] / best.us - 1):+.1f}%" if best.runner_up else "")
    return found


def ring_lengths(figures: Sequence[Figure], layers: int = 1) -> Table | None:
    """Time against memory of the ring lengths that were measured; None where there is one only.

    Args:
        layers: that a request has state in; memory is that of a request over all of them.
    """
    groups: dict[tuple[str, str, str, int], list[Figure]] = {}
    for f in figures:
        groups.setdefault((f.device, f.layer, f.state_dtype, f.batch), []).append(f)
    found = Table("device", "layer", "state", "batch", "L", "us", "backend", "state MiB", "rings MiB", "", box=None,
                  header_style="bold", caption=f"memory of one request in {layers} layer{'s' * (layers > 1)}")
    for (*names, batch), members in groups.items():
        best = min(f.backends[f.fastest].us for f in members)
        for f in members if len(members) > 1 else []:
            us = f.backends[f.fastest].us
            state, rings = (layers * n for n in OPERATIONS[f.point.op].memory(f.point))
            found.add_row(*names, str(batch), str(f.buffer_len), f"{us:.2f}", f.fastest, f"{state / 2**20:.1f}",
                          f"{rings / 2**20:.1f}", "fastest" if us == best else f"{100 * (us / best - 1):+.1f}%")
    return found if found.row_count else None
