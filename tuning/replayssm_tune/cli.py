"""The command ``replayssm-tune``: list, explain, run, check."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch

import replayssm_cute
from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.errors import ReplayError, UnsupportedError
from replayssm_cute.registry import models, tuned
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
METHOD = "CUDA graph of whole staggered ring cycles, cold L2, median of 7 samples"


def parse_geometry(text: str) -> Mamba2Geometry:
    """``HxPxN/G``, the heads of one rank."""
    try:
        shape, groups = text.split("/")
        nheads, headdim, dstate = map(int, shape.split("x"))
        return Mamba2Geometry(nheads, headdim, dstate, int(groups))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not HxPxN/G: {error}") from None


def geometry_of(args: argparse.Namespace) -> Mamba2Geometry:
    """The rank's geometry that --model and --tp, or --geometry, ask for."""
    return args.geometry if args.geometry else models.get(args.model).geometry.shard(args.tp)


def command_list(args: argparse.Namespace) -> None:
    """Every model and the devices with rows for its heads."""
    for model in models.all_models():
        g = model.geometry
        shape = f"headdim={g.headdim},dstate={g.dstate},"
        files = (p for p in tuned.SHIPPED_FOLDER.glob("*.json") if shape in p.name)
        devices = sorted({p.stem.split("device_name=")[1] for p in files})
        print(f"{model.name:34s} {g!s:14s} {', '.join(devices) or 'no tuned rows'}")


def command_explain(args: argparse.Namespace) -> None:
    """What would serve here, and why."""
    act = torch.bfloat16
    for name in args.state_dtype:
        problem = Mamba2Problem(geometry_of(args), args.buffer_len, getattr(torch, name), act, act, act, torch.int8,
                                torch.int32, dt_bias_dtype=act, D_dtype=act)
        for batch in args.batch:
            print(dispatch.explain(problem, batch))


def command_run(args: argparse.Namespace) -> None:
    """Measure on the GPU here and write registry rows."""
    if not torch.cuda.is_available():
        raise UnsupportedError("replayssm-tune run", "there is no GPU to measure on")
    from replayssm_tune.measure import measure_rows
    from replayssm_tune.timing import copy_bandwidth, provenance

    geometry, folder = geometry_of(args), Path(args.out)
    bandwidth = copy_bandwidth()
    info = provenance(bandwidth)
    seconds = args.budget / (len(args.state_dtype) * len(args.batch) * len(args.backend))
    for name in args.state_dtype:
        measure_rows(geometry, args.buffer_len, getattr(torch, name), args.batch, args.backend, seconds, bandwidth,
                     functools.partial(print, flush=True), functools.partial(merge_row, folder, geometry, name, info))


def merge_row(folder: Path, geometry: Mamba2Geometry, state_dtype: str, info: dict[str, Any],
               row: dict[str, Any]) -> None:
    """Write a row into the file of a folder that holds its kind; it replaces the row of the same key.

    Args:
        state_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        info: ``timing.provenance``.
    """
    arch = archs.of("cuda")
    record = {"device": arch.name, "capability": info["capability"], "sms": info["sms"], "torch": info["torch"],
              "triton": info["triton"], "cutlass_dsl": info["cutlass_dsl"], "package": replayssm_cute.__version__,
              "date": info["date"][:10], "method": METHOD, "predicted": False}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / tuned.file_name(dispatch.OP, geometry.headdim, geometry.dstate, state_dtype, arch.name)
    held = {} if not path.exists() else {key(row): row for row in stored_rows(path)}
    tuned.write_rows(path, record, {**held, key(row): row}.values())


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a well-formed file as it holds them."""
    tuned.load_file(path)
    return list(json.loads(path.read_text())["rows"])


def key(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """What tells a row from the others of its file."""
    return row["nheads"], row["ngroups"], row["buffer_len"], row["batch"]


def command_check(args: argparse.Namespace) -> None:
    """Read files strictly and name the first fault."""
    for path in args.files:
        print(f"{path}: {len(tuned.load_file(path).rows)} rows")


def listed(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="replayssm-tune", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for name, function in (("list", command_list), ("explain", command_explain), ("run", command_run),
                           ("check", command_check)):
        sub = commands.add_parser(name, help=(function.__doc__ or "").split("\n")[0])
        sub.set_defaults(function=function)
        if name in ("explain", "run"):
            subject = sub.add_mutually_exclusive_group(required=True)
            subject.add_argument("--model", help="registry name; see `replayssm-tune list`")
            subject.add_argument("--geometry", type=parse_geometry, help="HxPxN/G of one rank")
            sub.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of --model")
            sub.add_argument("--state-dtype", type=listed(str), default=["float32", "float16", "bfloat16"])
            sub.add_argument("--buffer-len", type=int, default=16)
            sub.add_argument("--batch", type=listed(int), default=list(BATCHES))
        if name == "run":
            sub.add_argument("--backend", type=listed(str), default=["cute", "triton"])
            sub.add_argument("--budget", type=float, default=300.0, help="seconds, about")
            sub.add_argument("--out", default="tuned", help="folder of the files; REPLAYSSM_TUNED_DIR makes it used")
        if name == "check":
            sub.add_argument("files", nargs="+")
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        args.function(args)
    except (ReplayError, OSError) as error:
        print(f"replayssm-tune: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
