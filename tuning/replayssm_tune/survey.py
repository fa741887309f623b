"""What is known without measuring: the models, their rows per device, and what would serve."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from rich.console import Console
from rich.table import Table

from replayssm_cute import arch as archs
from replayssm_cute.arch import Arch
from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_layout import check_buffer_len
from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.registry import devices, models, tuned
from replayssm_cute.registry.models import DTYPES
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from replayssm_tune.operations import OPERATIONS, Problem
from replayssm_tune.point import Point
from replayssm_tune.subject import Geometry, Step, Subject, steps_of

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


def problem(point: Point) -> Problem:
    """What an engine with bf16 activations poses."""
    act, state = torch.bfloat16, DTYPES[point.state_dtype]
    if isinstance(point.geometry, Mamba2Geometry):
        return Mamba2Problem(point.geometry, point.buffer_len, state, act, act, act, torch.int8, torch.int32,
                             dt_bias_dtype=act, D_dtype=act)
    check_buffer_len(point.buffer_len, point.tokens, "buffer_len")
    return GdnProblem(point.geometry, point.buffer_len, state, act, DTYPES[point.ring_dtype],
                      (act, act, torch.float32, torch.float32), flag_dtype=torch.int8 if point.tokens else None,
                      scale=point.geometry.head_k_dim ** -0.5, tokens=point.tokens, exact_fold=point.exact)


def list_models(console: Console, device: str | None, op: str | None = None) -> None:
    """A table: a line a model, a column a device.

    Args:
        device: a GPU by name, listed beside those with rows; None for the one here.
        op: only the models with this operation; None lists all, with the usual one of each.
    """
    shown = {arch.name: arch for arch in (*with_rows(), arch_named(device)) if arch.kind != "cpu"}
    listed = models.gdn_models() if op and op != Point.op else models.mamba2_models() if op else models.all_models()
    steps = {model.name: steps_of(model.geometry, op)[0] for model in listed}
    kinds = ", ".join(dict.fromkeys(step_name(model.geometry, steps[model.name]) for model in listed))
    table = Table("model", "heads", "layers", *shown, box=None, header_style="bold",
                  caption=f"rows of {kinds} at L={BUFFER_LEN}, TP 1, or what is missing")
    for model in listed:
        table.add_row(model.name, str(model.geometry), str(model.recurrent_layers),
                      *(coverage(model.geometry, steps[model.name], arch) for arch in shown.values()))
    console.print(table, soft_wrap=True)
    if not shown:
        console.print("no device has rows, and there is no GPU here; --device NAME lists one")


def with_rows() -> list[Arch]:
    """The devices that have rows of any shape, in alphabetical order."""
    names = sorted({path.stem.split("device_name=")[1] for path in tuned.files() if "device_name=" in path.name})
    return [arch for arch in map(devices.arch_by_name, names) if arch is not None]


def step_name(geometry: Geometry, step: Step) -> str:
    """``Mamba2 decode``, ``Gated DeltaNet verify T=4 exact fold``."""
    words = Point(geometry, "float32", BUFFER_LEN, 1, **step).step
    return f"Gated DeltaNet {words.strip(' ,')}" if words else "Mamba2 decode"


def coverage(geometry: Geometry, step: Step, arch: Arch) -> str:
    """``fp32 10, fp16 10, bf16 missing``: rows of the very heads on the very device, by state dtype.

    ``predicted`` where none was measured and there are rows of the speed model. Decode with rings in the state's dtype,
    as SGLang allocates them, counts as well.
    """
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    found = {name: [row for variant in variants(step, name)
                    for row in rows_of(Point(geometry, name, BUFFER_LEN, 1, **variant), arch)] for name in DTYPES}
    counts = {name: sum(row.measured for row in rows) for name, rows in found.items()}
    if not any(counts.values()):
        return "predicted" if any(row.provenance.predicted for rows in found.values() for row in rows) else "missing"
    return ", ".join(f"{short[name]} {number or 'missing'}" for name, number in counts.items())


def variants(step: Step, state_dtype: str) -> list[Step]:
    """The step, and what of Gated DeltaNet decode has rings in the state's dtype."""
    if step.get("op") != "gdn_decode" or step["ring_dtype"] == state_dtype:
        return [step]
    return [step, {**step, "ring_dtype": state_dtype}]


def rows_of(point: Point, arch: Arch) -> tuple[tuned.TunedRow, ...]:
    """The rows of these very heads, ring and window at any batch: those that the device itself has, or borrows."""
    return tuned.of_layer(point.op, problem(point), arch)


def explain(subject: Subject, state_dtypes: Iterable[str], buffer_lens: Iterable[int], batches: Iterable[int],
            device: str | None) -> None:
    """Memory, backends and their reasons, at every point."""
    arch, batches = arch_named(device), list(batches)
    for step, name, buffer_len in itertools.product(subject.steps, state_dtypes, buffer_lens):
        point = Point(subject.geometry, name, buffer_len, 1, **step)
        state, rings = subject.memory(name, buffer_len, step)
        layers = f"{subject.layers} layers" if subject.layers else "one layer"
        words = f"{point.step.strip(' ,')}, " if point.step else ""
        print(f"{subject.name}, {words}state {name}, L={buffer_len}: a request takes {state / 2**20:.1f} MiB of "
              f"state and {rings / 2**20:.1f} of rings in {layers}")
        for batch in batches:
            print(OPERATIONS[point.op].explain(problem(point), batch, arch))
        if arch.kind != "cpu" and not any(row.measured for row in rows_of(point, arch)):
            print(f"these heads were not measured on {arch.name}; there, replayssm-tune run --geometry "
                  f"{subject.geometry} {options(point)}--state-dtype {name} --buffer-len {buffer_len} measures them")


def options(point: Point) -> str:
    """What ``replayssm-tune`` is told beside heads, state dtype and ring length; nothing for Mamba2."""
    if point.op == Point.op:
        return ""
    window = f"--spec-tokens {point.tokens} --fold {point.fold} " if point.tokens else ""
    return f"--op {point.op} {window}--ring-dtype {point.ring_dtype} "
