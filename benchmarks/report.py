"""Turn benchmark results into the tables and the plot of the docs.

    python -m benchmarks.report benchmarks/results/h200/*.json

Replaces what stands between ``<!-- table -->`` and ``<!-- end -->`` in docs/performance.md, behind
``<!-- eight -->`` and ``<!-- cost -->`` in docs/rounding.md and behind ``<!-- speed -->`` in the README, and
writes docs/mamba2_decode.png.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from replayssm_cute.layout import mamba2_step_bytes
from replayssm_tune.cli import parse_geometry

DOCS = Path(__file__).parents[1] / "docs"
END = "<!-- end -->"
CODES = ("int8", "float8_e4m3fn")
COLOURS = {"cute": "tab:green", "triton": "tab:blue", "per-step": "tab:grey"}


def load(paths: list[str]) -> dict[str, Any]:
    """Runs on one device as one report, the fullest first; each row keeps the copy bandwidth of its run."""
    runs = sorted((json.loads(Path(path).read_text()) for path in paths), key=lambda run: -len(run["rows"]))
    copies = [run["provenance"]["copy_gbps"] for run in runs]
    rows = [{"copy_gbps": copy, **row, "run": i} for i, (run, copy) in enumerate(zip(runs, copies, strict=True))
            for row in run["rows"]]
    assert len({run["provenance"]["device"] for run in runs}) == 1, "one device a report"
    return {"provenance": {**runs[0]["provenance"], "copies": copies}, "rows": rows}


def heading(provenance: dict[str, Any]) -> str:
    p = provenance
    copies = [f"{edge(p['copies']) / 1000:.2f}" for edge in (min, max)]
    return (f"{p['device']} ({p['sms']} multiprocessors), torch {p['torch']}, Triton {p['triton']}, CuTe DSL "
            f"{p['cutlass_dsl']}, {p['date'][:10]}; large copy in the same runs: {' to '.join(copies)} TB/s.")


def nearest(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of runs without stochastic rounding, those of 8-bit checkpoints left out."""
    rounding = {row["run"] for row in report["rows"] if row["philox_rounds"]}
    return [row for row in report["rows"] if row["run"] not in rounding and row["state_dtype"] not in CODES]


def table(report: dict[str, Any]) -> str:
    """A Markdown table: one line a point."""
    columns = ("layer", "state", "batch", "per-step", "Triton", "CuTe", "CuTe: copy", "CuTe: same-size kernel",
               "over per-step")
    lines = [heading(report["provenance"]), "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in nearest(report):
        cute, triton = row["backends"]["cute"], row["backends"]["triton"]
        lines.append(f"| {row['geometry']} | {row['state_dtype']} | {row['batch']} | {row['per_step_us']:.2f} | "
                     f"{triton['us']:.2f} | **{cute['us']:.2f}** | {cute['copy_percent']:.0f}% | "
                     f"{cute['same_size_percent']:.0f}% | {row['per_step_us'] / cute['us']:.2f}x |")
    return "\n".join(lines)


def short_table(report: dict[str, Any]) -> str:
    """The first layer's CuTe times: a Markdown table, one line a state dtype."""
    rows = [row for row in nearest(report) if row["geometry"] == report["rows"][0]["geometry"]]
    batches = [b for b in (1, 16, 64, 256, 512) if any(row["batch"] == b for row in rows)]
    lines = [heading(report["provenance"]), "", f"| state | {' | '.join(f'batch {b}' for b in batches)} |",
             "|---" * (1 + len(batches)) + "|"]
    for dtype in dict.fromkeys(row["state_dtype"] for row in rows):
        held = {row["batch"]: row for row in rows if row["state_dtype"] == dtype}
        cells = [f"{cute['us']:.1f} ({cute['copy_percent']:.0f}%, {held[b]['per_step_us'] / cute['us']:.2f}x)"
                 for b in batches for cute in [held[b]["backends"]["cute"]]]
        lines.append(f"| {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_table(report: dict[str, Any]) -> str:
    """What stochastic rounding adds to a step of the same run: a Markdown table, one line a layer, dtype and batch."""
    def point(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["geometry"], row["state_dtype"], row["batch"]

    wide = [row for row in report["rows"] if row["state_dtype"] not in CODES]
    with_rounding = {row["run"] for row in wide if row["philox_rounds"]}
    base = {point(row): row for row in wide if not row["philox_rounds"] and row["run"] in with_rounding}
    rounds = sorted({row["philox_rounds"] for row in wide} - {0})
    held = {(*point(row), row["philox_rounds"]): row for row in wide}
    heads = [f"{name}, {r} rounds" for name in ("CuTe", "Triton") for r in rounds]
    lines = [heading(report["provenance"]), "", f"| layer | state | batch | {' | '.join(heads)} |",
             "|---" * (3 + len(heads)) + "|"]
    for key in sorted({point(row) for row in wide if row["philox_rounds"]}):
        times = [(held[(*key, r)]["backends"].get(name), base[key]["backends"].get(name))
                 for name in ("cute", "triton") for r in rounds]
        added = [f"{100 * (b['us'] / a['us'] - 1):+.1f}%" if a and b else "not timed" for b, a in times]
        lines.append(f"| {' | '.join(map(str, key))} | {' | '.join(added)} |")
    return "\n".join(lines)


def eight_table(report: dict[str, Any]) -> str:
    """CuTe times of 8-bit checkpoints beside fp16's: a Markdown table, one line a batch."""
    coded = [row for row in report["rows"] if row["state_dtype"] in CODES]
    fp16 = {row["batch"]: row["backends"]["cute"]["us"] for row in nearest(report)
            if row["state_dtype"] == "float16" and row["geometry"] == coded[0]["geometry"]}
    kinds = list(dict.fromkeys((row["state_dtype"], row["philox_rounds"]) for row in coded))
    held = {(row["state_dtype"], row["philox_rounds"], row["batch"]): row["backends"]["cute"] for row in coded}
    heads = [f"{dtype}, {f'{rounds} rounds' if rounds else 'nearest'}" for dtype, rounds in kinds]
    lines = [heading(report["provenance"]), "", f"| batch | float16, nearest | {' | '.join(heads)} |",
             "|---" * (2 + len(heads)) + "|"]
    for batch in sorted({row["batch"] for row in coded} & fp16.keys()):
        cells = [f"{cute['us']:.1f} ({fp16[batch] / cute['us']:.2f}x, {cute['copy_percent']:.0f}%)"
                 for kind in kinds for cute in [held[(*kind, batch)]]]
        lines.append(f"| {batch} | {fp16[batch]:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(axis: Any, rows: list[dict[str, Any]]) -> None:
    """One panel: the rows of a layer and dtype against the batch."""
    first, copy = rows[0], rows[0]["copy_gbps"] * 1e9
    step_bytes = mamba2_step_bytes(parse_geometry(first["geometry"]), first["buffer_len"],
                                   getattr(torch, first["state_dtype"]), replay=False)
    batches = [r["batch"] for r in rows]
    axis.plot(batches, [100 * r["bytes"] / (r["same_size_us"] * 1e-6) / copy for r in rows], "k--", lw=1,
              label="elementwise kernel of the same size")
    series = {name: [r["backends"][name]["copy_percent"] for r in rows] for name in ("cute", "triton")}
    series["per-step"] = [100 * step_bytes * r["batch"] / (r["per_step_us"] * 1e-6) / copy for r in rows]
    for name, values in series.items():
        axis.plot(batches, values, "o-", ms=3, color=COLOURS[name], label=name)
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)


def plot(report: dict[str, Any], path: Path) -> None:
    """Percent of the copy bandwidth on ideal bytes against the batch, a panel for each layer and dtype."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = nearest(report)
    geometries = list(dict.fromkeys(r["geometry"] for r in points))
    dtypes = list(dict.fromkeys(r["state_dtype"] for r in points))
    figure, axes = plt.subplots(len(geometries), len(dtypes), figsize=(4 * len(dtypes), 2.8 * len(geometries)),
                                sharex=True, sharey=True, squeeze=False)
    for i, geometry in enumerate(geometries):
        for j, dtype in enumerate(dtypes):
            rows = [r for r in points if (r["geometry"], r["state_dtype"]) == (geometry, dtype)]
            draw(axes[i][j], rows)
            axes[i][j].set_title(f"{geometry}, state {dtype}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("batch")
    for row in axes:
        row[0].set_ylabel("% of copy bandwidth")
    axes[0][0].set_ylim(0, 108)
    axes[0][0].legend(fontsize=7)
    figure.suptitle("Mamba2 decode step, bytes that the method must move over the copy bandwidth\n"
                    + heading(report["provenance"]), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def fill(page: Path, begin: str, content: str) -> None:
    """Replace what stands between ``begin`` and the next END of a page."""
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{content}\n{END}{rest.split(END, 1)[1]}")


def main() -> None:
    report = load(sys.argv[1:])
    fill(DOCS / "performance.md", "<!-- table -->", table(report))
    fill(DOCS / "rounding.md", "<!-- eight -->", eight_table(report))
    fill(DOCS / "rounding.md", "<!-- cost -->", cost_table(report))
    fill(DOCS.parent / "README.md", "<!-- speed -->", short_table(report))
    plot(report, DOCS / "mamba2_decode.png")


if __name__ == "__main__":
    main()
