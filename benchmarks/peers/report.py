"""Table and plot of a comparison with the kernels of other packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLUMNS = ("operation", "layer", "state", "batch", "kernel", "us", "times ours", "copy", "error", "served by")
#: What the plot shows: key of a row, label, whether the axis is logarithmic.
QUANTITIES = (("us", "us a step", True), ("times_ours", "times ours", False), ("copy_percent", "% of copy", False))
COLOURS = {"ours": "tab:green", "vllm": "tab:blue", "flashinfer": "tab:orange", "sglang": "tab:purple"}


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    head = f"{row['op']} {row['layer']} {state(row)} b{row['batch']:<4d} {row['kernel']:28s} "
    if "reason" in row:
        return head + row["reason"]
    return (f"{head}{row['us']:9.2f} us {ratio(row):>7s} {row['copy_percent']:5.1f}% copy  error {row['error']:.1e}  "
            f"{row['served']}")


def state(row: dict[str, Any]) -> str:
    rounds = row["philox_rounds"]
    return row["state_dtype"] + (f", {rounds} Philox rounds" if rounds else "")


def ratio(row: dict[str, Any]) -> str:
    return "-" if row["times_ours"] is None else f"{row['times_ours']:.2f}x"


def table(results: dict[str, Any]) -> str:
    """Markdown: where and with what it was measured, and a line for every row, refusals with their reason."""
    p = results["provenance"]
    there = [f"{name} {number}" for name, number in results["packages"].items() if number is not None]
    gone = [name for name, number in results["packages"].items() if number is None]
    lines = [f"{p['device']} ({p['sms']} multiprocessors), torch {p['torch']}, Triton {p['triton']}, CuTe DSL "
             f"{p['cutlass_dsl']}, {p['date'][:10]}; large copy in the same run: {p['copy_gbps'] / 1000:.2f} TB/s. "
             f"Compared: {', '.join(there)}." + (f" Not installed: {', '.join(gone)}." if gone else ""), "",
             f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in results["rows"]:
        cells = [row["op"], row["layer"], state(row), row["batch"], row["kernel"]]
        if "reason" in row:
            cells += ["-"] * 4 + [row["reason"].replace("|", "\\|")]
        else:
            cells += [f"{row['us']:.2f}", ratio(row), f"{row['copy_percent']:.0f}%", f"{row['error']:.1e}",
                      row["served"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """Against the batch: a column for each operation, layer and dtype, a row for each quantity, a line a kernel."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in results["rows"] if row.get("times_ours") is not None]
    columns = list(dict.fromkeys((row["op"], row["layer"], state(row)) for row in timed))
    figure, axes = plt.subplots(len(QUANTITIES), max(1, len(columns)), squeeze=False, sharex=True, sharey="row",
                                figsize=(3.4 * max(1, len(columns)), 2.6 * len(QUANTITIES)))
    for j, column in enumerate(columns):
        held = [row for row in timed if (row["op"], row["layer"], state(row)) == column]
        for i, (key, _, log) in enumerate(QUANTITIES):
            for kernel in dict.fromkeys(row["kernel"] for row in held):
                _line(axes[i][j], [row for row in held if row["kernel"] == kernel], key)
            axes[i][j].set_xscale("log", base=2)
            axes[i][j].set_yscale("log" if log else "linear")
            axes[i][j].grid(alpha=0.3)
        axes[0][j].set_title("\n".join(column), fontsize=8)
        axes[0][j].legend(fontsize=6)
        axes[-1][j].set_xlabel("batch")
    for i, (_, label, _) in enumerate(QUANTITIES):
        axes[i][0].set_ylabel(label)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _line(axis: Any, rows: list[dict[str, Any]], key: str) -> None:
    name = rows[0]["kernel"]
    axis.plot([row["batch"] for row in rows], [row[key] for row in rows], marker="o", ms=3, label=name,
              color=COLOURS[name.replace(",", " ").split()[0]], ls="-" if rows[0]["replay"] else ":",
              alpha=0.5 if "," in name else 1.0)
