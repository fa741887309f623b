"""What is known without measuring: the models, their rows per device, and what would serve."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rich.console import Console
from rich.table import Table

from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.errors import ArgumentError
from replayssm_cute.registry import devices, models, tuned
from replayssm_cute.registry.models import DTYPES, Mamba2Entry
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from replayssm_tune.subject import Subject

BUFFER_LEN = 16  # of the coverage that is listed


def arch_named(device: str | None) -> Arch:
    """The architecture of a GPU by its name; of the device here without one.

    Raises:
        ArgumentError: the name is not known.
    """
    if device is None:
        return archs.of(archs.default_device())
    arch = devices.arch_by_name(device)
    if arch is None:
        raise ArgumentError("device", f"the name of a known GPU ({', '.join(devices.PRODUCTS)}), as in NVIDIA_H200",
                            repr(device))
    return arch


def problem(geometry: Mamba2Geometry, state_dtype: str, buffer_len: int) -> Mamba2Problem:
    """What an engine with bf16 activations poses."""
    act = torch.bfloat16
    return Mamba2Problem(geometry, buffer_len, DTYPES[state_dtype], act, act, act, torch.int8, torch.int32,
                         dt_bias_dtype=act, D_dtype=act)


def list_models(console: Console, device: str | None) -> None:
    """A table: a line a model, a column a device.

    Args:
        device: a GPU by name, listed beside those with rows; None for the one here.
    """
    shown = {arch.name: arch for arch in (*with_rows(), arch_named(device)) if arch.kind != "cpu"}
    table = Table("model", "heads", "layers", *shown, caption=f"rows at L={BUFFER_LEN}, TP 1, or what is missing",
                  box=None, header_style="bold")
    for model in models.mamba2_models():
        table.add_row(model.name, str(model.geometry), str(model.recurrent_layers),
                      *(coverage(model, arch) for arch in shown.values()))
    console.print(table, soft_wrap=True)
    if not shown:
        console.print("no device has rows, and there is no GPU here; --device NAME lists one")


def with_rows() -> list[Arch]:
    """The devices that have rows of any shape, in alphabetical order."""
    names = sorted({path.stem.split("device_name=")[1] for path in tuned.files() if "device_name=" in path.name})
    return [arch for arch in map(devices.arch_by_name, names) if arch is not None]


def coverage(model: Mamba2Entry, arch: Arch) -> str:
    """``fp32 10, fp16 10, bf16 missing``: rows of the model's very heads on the very device, by state dtype.

    ``predicted`` where none was measured and there are rows of the speed model.
    """
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    found = {name: rows_of(model.geometry, name, BUFFER_LEN, arch) for name in DTYPES}
    counts = {name: sum(row.measured for row in rows) for name, rows in found.items()}
    if not any(counts.values()):
        return "predicted" if any(row.provenance.predicted for rows in found.values() for row in rows) else "missing"
    return ", ".join(f"{short[name]} {number or 'missing'}" for name, number in counts.items())


def rows_of(g: Mamba2Geometry, state_dtype: str, buffer_len: int, arch: Arch) -> list[tuned.TunedRow]:
    """The rows of these very heads and ring length: those that the device itself has, or borrows."""
    found = tuned.rows_for(dispatch.OP, problem(g, state_dtype, buffer_len), arch)
    return [row for row in found if row.key[:3] == (g.nheads, g.ngroups, buffer_len)]


def explain(subject: Subject, state_dtypes: Iterable[str], buffer_lens: Iterable[int], batches: Iterable[int],
            device: str | None) -> None:
    """Memory, backends and their reasons, at every point."""
    arch, batches = arch_named(device), list(batches)
    for name in state_dtypes:
        for buffer_len in buffer_lens:
            state, rings = subject.memory(name, buffer_len)
            layers = f"{subject.layers} layers" if subject.layers else "one layer"
            print(f"{subject.name}, state {name}, L={buffer_len}: a request takes {state / 2**20:.1f} MiB of state "
                  f"and {rings / 2**20:.1f} of rings in {layers}")
            for batch in batches:
                print(dispatch.explain(problem(subject.geometry, name, buffer_len), batch, arch))
            if arch.kind != "cpu" and not any(r.measured for r in rows_of(subject.geometry, name, buffer_len, arch)):
                print(f"these heads were not measured on {arch.name}; there, replayssm-tune run --geometry "
                      f"{subject.geometry} --state-dtype {name} --buffer-len {buffer_len} measures them")
