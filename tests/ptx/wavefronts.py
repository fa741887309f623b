"""Bank conflicts in shared memory, counted in an execution.

    python -m tests.ptx.wavefronts

runs the kernels of ``tests/ptx/vectors_cases.py`` and writes ``tests/wavefront_limits.json`` and the table of
``docs/ptx_executor.md`` anew. Read the difference before committing it, as of ``tests/kernel_resources.py``.

Shared memory serves 32 banks of four bytes, one word each, in a *wavefront*. An access of a warp is cut into phases of
128 bytes: all lanes at up to 4 bytes a lane, half of the warp at 8, a quarter at 16 (``ldmatrix`` as well, a matrix a
phase). Lanes that read the same word share it. A phase takes as many wavefronts as the bank has words that
the most words are asked of; the ideal is one a phase. Bulk copies are not counted.

This is what PTX asks for. The hardware may serve two phases at once where lanes read the same words; how is not
documented, and not counted on.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import fill
from tests.kernel_resources import write
from tests.ptx.builder import Array
from tests.ptx.kernels import kernel
from tests.ptx.launch import Options, launch
from tests.ptx.machine import Lanes, Machine
from tests.ptx.vectors_cases import KERNELS, case_of, dice_of

ROOT = Path(__file__).parents[2]
LIMITS = ROOT / "tests" / "wavefront_limits.json"
PAGE = ROOT / "docs" / "ptx_executor.md"
TARGETS = ("sm_90a", "sm_100a")        # sm_103a has the PTX of sm_100a
SLACK = 1.02                            # of a limit; the versions of the DSL differ a little
BANKS, WORD = 32, 4


def wavefronts(warp: NDArray[np.int64], lane: NDArray[np.int64], offset: NDArray[np.int64],
               size: int) -> tuple[int, int]:
    """(wavefronts, their ideal) of an access of ``size`` bytes a lane, by the lanes of any number of warps."""
    words = max(1, size // WORD)
    phase = warp * words + lane * words // 32
    asked = np.unique(phase[:, None] << 32 | offset[:, None] // WORD + np.arange(words))    # once a phase and word
    banks, times = np.unique((asked >> 32) * BANKS + asked % BANKS, return_counts=True)
    phases, where = np.unique(banks // BANKS, return_inverse=True)
    worst = np.zeros(phases.size, np.int64)
    np.maximum.at(worst, where, times)
    return int(worst.sum()), phases.size


class CountingMachine(Machine):
    """A machine that counts wavefronts, and what they would ideally be, by kind and bits a lane."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.taken: Counter[str] = Counter()
        self.ideal: Counter[str] = Counter()

    def load_shared(self, lanes: Lanes, address: Array, width: int, count: int) -> list[Array]:
        self._count("load", lanes, address, width * count)
        return super().load_shared(lanes, address, width, count)

    def store_shared(self, lanes: Lanes, address: Array, values: list[Array]) -> None:
        self._count("store", lanes, address, values[0].dtype.itemsize * len(values))
        super().store_shared(lanes, address, values)

    def _count(self, kind: str, lanes: Lanes, address: Array, size: int) -> None:
        taken, ideal = wavefronts(lanes.index // 32, lanes.thread % 32, address.astype(np.int64), size)
        self.taken[f"{kind} {8 * size}"] += taken
        self.ideal[f"{kind} {8 * size}"] += ideal


def count(name: str, target: str) -> CountingMachine:
    """The machine that ran the kernel on a case with appends and flushes."""
    with patch("tests.ptx.launch.Machine", CountingMachine):
        machine = launch(kernel(name, target), case_of(name, "general"), Options(dice=dice_of(name), races=False))
    assert isinstance(machine, CountingMachine)
    return machine


def ratios(machine: CountingMachine) -> dict[str, float]:
    """Wavefronts over their ideal, by kind and bits a lane, and of all of them."""
    found = {kind: machine.taken[kind] / machine.ideal[kind] for kind in sorted(machine.taken)}
    return {"all": machine.taken.total() / machine.ideal.total(), **found}


def limits_of(found: dict[str, float]) -> dict[str, float]:
    return {kind: round(ratio * SLACK, 3) for kind, ratio in found.items()}


def violations(found: dict[str, float], limits: dict[str, float]) -> list[str]:
    """Which ratios are past their limits, in words; accesses of a new width may have no conflicts at all."""
    return [f"{kind}: {ratio:.3f} wavefronts for one, at most {limits.get(kind, 1.0)}"
            for kind, ratio in found.items() if ratio > limits.get(kind, 1.0)]


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """A Markdown table, one line a kernel: by target the ratio of all accesses, and those that are not 1."""
    lines = [f"| kernel | {' | '.join(TARGETS)} |", "|---" * (1 + len(TARGETS)) + "|"]
    for name in KERNELS:
        cells = [", ".join([f"**{ratios['all']:.2f}**", *(f"{kind} {r:.2f}" for kind, r in ratios.items()
                                                         if kind != "all" and r > 1)])
                 for ratios in (found[target][name] for target in TARGETS)]
        lines.append(f"| {' | '.join((name, *cells))} |")
    return "\n".join(lines)


def main() -> None:
    found = {target: {name: ratios(count(name, target)) for name in KERNELS} for target in TARGETS}
    limits = {target: {name: limits_of(ratios) for name, ratios in rows.items()} for target, rows in found.items()}
    write(limits, LIMITS)
    fill(PAGE, "<!-- wavefronts -->", table(found))


if __name__ == "__main__":
    main()
