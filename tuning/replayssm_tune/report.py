"""``replayssm-tune report``: one HTML page that holds its plots, and the plots as PNG files beside it."""

from __future__ import annotations

import base64
import html
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replayssm_cute.registry import models
from replayssm_tune import plots
from replayssm_tune.figures import Figure, break_even

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>replayssm-tune</title>
<style>body{{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}}img{{max-width:100%}}
table{{border-collapse:collapse}}td,th{{padding:.1em .8em;text-align:right;border-bottom:1px solid #ddd}}</style></head>
<body><h1>Decode by replay</h1>
<p>Times are microseconds of one step of one layer, medians over whole staggered ring cycles with cold L2. The floor is
the time in which a large copy of the same run moves the bytes that the method must move. Where a device is marked as
predicted, its times and its copy come from the speed model.</p>
{sections}
</body></html>
"""
PLOTS = {"time": (plots.time, "Time against batch"), "percent": (plots.percent, "Percent of copy bandwidth"),
         "speedup": (plots.speedup, "Speedup over the per-step baseline"), "roofline": (plots.roofline, "Roofline")}


def write(figures: Sequence[Figure], folder: Path) -> Path:
    """Write ``report.html`` and the plots; what was there under these names is replaced.

    Args:
        figures: ordered as ``figures.read`` gives them.

    Returns:
        the path of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(figures, key=_subject)
    sections = [section(list(members), folder) for _, members in itertools.groupby(ordered, key=_subject)]
    page = folder / "report.html"
    page.write_text(PAGE.format(sections="\n".join(sections)), encoding="utf-8")
    return page


def _subject(f: Figure) -> tuple[str, str, int]:
    return f.device, f.layer, f.buffer_len


def section(figures: list[Figure], folder: Path) -> str:
    """Everything about one layer and ring length on one device."""
    first = figures[0]
    heads = first.point.geometry
    named = [m for m in models.all_models() if any(m.geometry.shard(tp) == heads for tp in m.tp_sizes)]
    whole = next((m for m in named if m.geometry == heads), None)
    stem = f"{first.device}-{first.layer}-L{first.buffer_len}".replace("/", "-").replace(" ", "_")
    images = [image(draw(figures), folder / f"{stem}-{kind}.png", title) for kind, (draw, title) in PLOTS.items()]
    layers = whole.recurrent_layers if whole else 1
    images.append(image(plots.memory(first.point, layers), folder / f"{stem}-memory.png",
                        f"Memory of one request{f' of {whole.name}' if whole else ', one layer'}"))
    users = ", ".join(m.name for m in named) or "no model of the registry"
    return (f"<h2>{html.escape(f'{first.device}, {first.layer}, L={first.buffer_len}')}</h2>"
            f"<p>Heads of one rank of: {html.escape(users)}.</p>{break_even_table(figures)}{times_table(figures)}"
            + "".join(images))


def image(figure: Any, path: Path, title: str) -> str:
    """Save a plot and embed it."""
    import matplotlib.pyplot as plt
    figure.savefig(path, dpi=110)
    plt.close(figure)
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<h3>{html.escape(title)}</h3><img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


def break_even_table(figures: Sequence[Figure]) -> str:
    """From which batch on replay pays, by state dtype and backend."""
    names = sorted({name for f in figures for name in f.backends})
    rows = []
    for dtype in dict.fromkeys(f.state_dtype for f in figures):
        members = [f for f in figures if f.state_dtype == dtype]
        rows.append([dtype, *(str(break_even(members, name) or "none measured") for name in names)])
    return "<h3>Break-even batch</h3>" + _table(["state", *names], rows)


def times_table(figures: Sequence[Figure]) -> str:
    names = sorted({name for f in figures for name in f.backends})
    rows = [[f.state_dtype, str(f.batch), _number(f.floor_us), _number(f.per_step_us),
             *(_number(f.backends[n].us if n in f.backends else None) for n in names),
             _number(f.percent(f.backends[f.fastest].us), 0), _number(f.speedup(f.fastest))] for f in figures]
    head = ["state", "batch", "floor", "per step", *names, "% of copy", "over per step"]
    return "<h3>Microseconds</h3>" + _table(head, rows)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
