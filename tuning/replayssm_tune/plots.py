"""The plots of a report, each a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from replayssm_cute.layout import MAX_BUFFER_LEN
from replayssm_cute.registry.models import DTYPES
from replayssm_tune.figures import Figure
from replayssm_tune.operations import OPERATIONS
from replayssm_tune.point import Point

COLOURS = {"cute": "tab:green", "triton": "tab:blue", "torch": "tab:orange", "per-step": "tab:grey"}
Series = tuple[list[int], list[float]]


def against_batch(figures: Sequence[Figure], label: str, value: Callable[[Figure, str], float | None],
                  baseline: Callable[[Figure], float | None] | None = None, log: bool = False) -> Any:
    """A panel a state dtype, a line a backend, against the batch.

    Args:
        value: of a row and a backend, None to leave the point out.
        baseline: of a row, drawn as the per-step line.
        log: the vertical axis is logarithmic.
    """
    dtypes = list(dict.fromkeys(f.state_dtype for f in figures))
    figure, axes = _subplots(len(dtypes))
    for axis, dtype in zip(axes, dtypes, strict=True):
        rows = [f for f in figures if f.state_dtype == dtype]
        for backend in sorted({name for f in rows for name in f.backends}):
            _line(axis, backend, [(f.batch, value(f, backend)) for f in rows if backend in f.backends])
        if baseline is not None:
            _line(axis, "per-step", [(f.batch, baseline(f)) for f in rows])
        axis.set_xscale("log", base=2)
        axis.set_title(f"state {dtype}", fontsize=9)
        axis.set_xlabel("batch")
        if log:
            axis.set_yscale("log")
    axes[0].set_ylabel(label)
    drawn = [axis for axis in axes if axis.lines]
    if drawn:
        drawn[0].legend(fontsize=7)
    return figure


def time(figures: Sequence[Figure]) -> Any:
    return against_batch(figures, "us a step", lambda f, backend: f.backends[backend].us, lambda f: f.per_step_us, True)


def percent(figures: Sequence[Figure]) -> Any:
    return against_batch(figures, "% of copy bandwidth", lambda f, backend: f.percent(f.backends[backend].us))


def speedup(figures: Sequence[Figure]) -> Any:
    """Over the per-step baseline, whose own line is at 1."""
    return against_batch(figures, "times per-step", lambda f, backend: f.speedup(backend),
                         lambda f: 1.0 if f.per_step_us else None)


def roofline(figures: Sequence[Figure]) -> Any:
    """Time against the bytes that must move; no point can lie below the floor, which is the copy."""
    figure, (axis,) = _subplots(1)
    for backend in sorted({name for f in figures for name in f.backends}):
        held = [(f.nbytes / 1e6, f.backends[backend].us) for f in figures if backend in f.backends]
        axis.plot(*zip(*held, strict=True), "o", ms=4, color=COLOURS[backend], label=backend)
    floor = sorted((f.nbytes / 1e6, f.floor_us) for f in figures if f.floor_us is not None)
    if floor:
        axis.plot(*zip(*floor, strict=True), "k-", lw=1, label="floor: copy of the same bytes")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("MB a step")
    axis.set_ylabel("us a step")
    axis.legend(fontsize=7)
    return figure


def memory(point: Point, layers: int) -> Any:
    """MiB of one request against the ring length: the checkpoint alone, and with the rings."""
    figure, (axis,) = _subplots(1)
    lengths = [n for n in (1, 2, 4, 8, 16, 24, 32, 48, 64) if n <= MAX_BUFFER_LEN]
    if point.tokens:  # a ring of windows is a power of two and holds two
        lengths = [n for n in lengths if n >= 2 * point.tokens and n & (n - 1) == 0]
    for name, colour in zip(DTYPES, ("tab:red", "tab:purple", "tab:olive"), strict=True):
        account = [OPERATIONS[point.op].memory(replace(point, state_dtype=name, buffer_len=n)) for n in lengths]
        state = layers * account[0][0] / 2**20
        style = "--" if name == "bfloat16" else "-"  # as large as float16
        axis.plot(lengths, [layers * sum(both) / 2**20 for both in account], style, color=colour,
                  label=f"{name}, with rings")
        axis.axhline(state, ls=":", color=colour, lw=1)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("ring length L (dotted: the checkpoint alone)")
    axis.set_ylabel(f"MiB a request, {layers} layer{'s' * (layers > 1)}")
    axis.legend(fontsize=7)
    return figure


def _subplots(columns: int) -> tuple[Any, Any]:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, columns, figsize=(1 + 3.6 * columns, 3.2), sharey=True, squeeze=False,
                                layout="constrained")
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    return figure, axes[0]


def _line(axis: Any, name: str, values: Sequence[tuple[int, float | None]]) -> None:
    held = [(x, y) for x, y in values if y is not None]
    if held:
        axis.plot(*zip(*held, strict=True), "o-", ms=3, color=COLOURS[name], label=name)
