"""What every compiled CuTe kernel takes of the machine, against committed limits.

    python -m tests.kernel_resources

compiles the kernels of ``tests/compiled_kernels.py`` for every target and writes
``tests/resource_limits.json`` and the tables of ``docs/resources.md`` anew. Read the difference
before committing it: a limit that rises is a regression that was accepted. Some registers are kept by
hand, those that DSL 4.7.1 takes where 4.8.0 takes fewer: of 96x80x128, and of 64x64x128 with stochastic
rounding on 9.0. Both leave the CTAs that are asked for.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replayssm_cute.kernels.targets import REGISTERS_PER_SM, TARGETS, Target

ROOT = Path(__file__).parents[1]
LIMITS = Path(__file__).with_name("resource_limits.json")
PAGE = ROOT / "docs" / "resources.md"
SLACK = 0.15                 # two supported versions of the DSL differ by less
WARPS_PER_SM, CTAS_PER_SM, RESERVED_SMEM = 64, 32, 1024
AT_MOST = ("registers", "spills", "shared", "instructions", "narrow_loads", "narrow_stores")
AT_LEAST = ("resident", "wide_loads", "wide_stores", "bulk_copies", "packed_fma", "tensor", "hardware_sr")
LOOSE = ("registers", "spills", "instructions", "narrow_loads", "narrow_stores", "packed_fma")


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes; accesses and instructions count in the machine code, not as executed.

    Attributes:
        registers: a thread.
        spills: bytes of stack and local memory a thread, and accesses to them.
        shared: bytes of dynamic shared memory a CTA.
        instructions: of the kernel, without the padding behind its end.
        narrow_loads, narrow_stores: global accesses of less than 128 bits a thread.
        resident: CTAs that a multiprocessor holds by registers, shared memory and warps.
        wide_loads, wide_stores: global accesses of 128 or 256 bits a thread.
        bulk_copies: between global and shared memory, both ways.
        packed_fma: instructions of two fp32 FMAs.
        tensor: tensor-core products.
        hardware_sr: conversions with stochastic rounding.
    """

    registers: int
    spills: int
    shared: int
    instructions: int
    narrow_loads: int
    narrow_stores: int
    resident: int
    wide_loads: int
    wide_stores: int
    bulk_copies: int
    packed_fma: int
    tensor: int
    hardware_sr: int


@functools.cache
def reports(target: str) -> dict[str, dict[str, Any]]:
    """What ``tests/offline_cute.py`` says of every kernel of a target, by label."""
    environment = {**os.environ, "CUTE_DSL_ARCH": target, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tuning'}"}
    run = subprocess.run([sys.executable, "tests/offline_cute.py", target], cwd=ROOT, env=environment,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {report["label"]: report for report in found}


def count(report: dict[str, Any], *parts: str) -> int:
    """Instructions whose dotted name starts with parts[0] and has the other parts among its modifiers."""
    return sum(n for name, n in report["opcodes"].items()
               if name.split(".")[0] == parts[0] and set(parts[1:]) <= set(name.split(".")))


def widths(report: dict[str, Any], opcode: str) -> dict[int, int]:
    """Accesses of an opcode (``LDG`` or ``STG``) by bits a thread."""
    found: dict[int, int] = {}
    for name, n in report["opcodes"].items():
        parts = name.split(".")
        if parts[0] == opcode:
            bits = max((int(digits) for p in parts if (digits := p.lstrip("US")) in ("8", "16", "64", "128", "256")),
                       default=32)
            found[bits] = found.get(bits, 0) + n
    return dict(sorted(found.items()))


def resident_ctas(registers: int, shared: int, threads: int, target: Target) -> int:
    """CTAs that a multiprocessor holds.

    A warp's registers are given out in units of 256 by the scheduler it belongs to, each of the four
    holding a quarter of them; every CTA takes 1 KB of shared memory beside its own.
    """
    warps = threads // 32
    per_scheduler = REGISTERS_PER_SM // 4 // (-(-registers * 32 // 256) * 256)
    return min(4 * per_scheduler // warps, target.smem_per_sm // (shared + RESERVED_SMEM),
               WARPS_PER_SM // warps, CTAS_PER_SM)


def resources(report: dict[str, Any], target: Target) -> KernelResources:
    config, loads, stores = report["config"], widths(report, "LDG"), widths(report, "STG")
    threads = config["threads"] + (64 if config["design"] == "bulk" else 0)   # a producer and a scorer warp

    def wide(accesses: dict[int, int]) -> int:
        return sum(n for bits, n in accesses.items() if bits >= 128)

    return KernelResources(
        registers=report["REG"],
        spills=report["STACK"] + report["LOCAL"] + count(report, "LDL") + count(report, "STL"),
        shared=report["shared"],
        instructions=sum(report["opcodes"].values()) - count(report, "NOP"),
        narrow_loads=sum(loads.values()) - wide(loads), narrow_stores=sum(stores.values()) - wide(stores),
        resident=resident_ctas(report["REG"], report["shared"], threads, target),
        wide_loads=wide(loads), wide_stores=wide(stores), bulk_copies=count(report, "UBLKCP"),
        packed_fma=count(report, "FFMA2"), tensor=count(report, "HMMA"), hardware_sr=count(report, "F2FP", "RS"))


def limits_of(found: KernelResources, min_ctas: int) -> dict[str, int]:
    """Limits for a kernel as it is now: some slack where compilers differ, and the residency its config asks for."""
    limits = asdict(found)
    for name in LOOSE:
        limits[name] = math.ceil(limits[name] * (1 + SLACK)) if name in AT_MOST else \
            math.floor(limits[name] * (1 - SLACK))
    return {**limits, "resident": min_ctas}


def violations(found: KernelResources, limits: dict[str, int]) -> list[str]:
    """What of a kernel is past its limits, in words."""
    values = asdict(found)
    return [f"{name} {values[name]}, at most {limits[name]}" for name in AT_MOST if values[name] > limits[name]] + \
        [f"{name} {values[name]}, at least {limits[name]}" for name in AT_LEAST if values[name] < limits[name]]


def accesses(report: dict[str, Any], opcode: str) -> str:
    return " ".join(f"{n}x{bits}" for bits, n in widths(report, opcode).items()) or "0"


def table(target: str) -> str:
    """A Markdown table of a target, one line a kernel."""
    columns = ("kernel", "registers", "spills", "shared, KB", "resident CTAs (asked)", "instructions", "loads",
               "stores", "bulk copies", "packed FMA", "tensor", "hardware SR")
    lines = [f"## {target}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for label, report in reports(target).items():
        r = resources(report, TARGETS[target])
        cells = (label, r.registers, r.spills, f"{r.shared / 1024:.1f}",
                 f"{r.resident} ({report['config']['min_ctas']})", r.instructions, accesses(report, "LDG"),
                 accesses(report, "STG"), r.bulk_copies, r.packed_fma, r.tensor, r.hardware_sr)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def write(limits: dict[str, dict[str, Any]], path: Path) -> None:
    """Limits by target and label, one label a line."""
    path.write_text("{\n" + ",\n".join(
        f' "{name}": {{\n' + ",\n".join(f"  {json.dumps(label)}: {json.dumps(held)}" for label, held in rows.items())
        + "\n }" for name, rows in limits.items()) + "\n}\n")


def main() -> None:
    limits = {name: {label: limits_of(resources(report, target), report["config"]["min_ctas"])
                     for label, report in reports(name).items()} for name, target in TARGETS.items()}
    write(limits, LIMITS)
    before = PAGE.read_text().split("<!-- tables -->")[0]
    PAGE.write_text(before + "<!-- tables -->\n" + "\n\n".join(map(table, TARGETS)) + "\n")


if __name__ == "__main__":
    main()
