"""The command ``replayssm-tune``. In the order of the work: list, explain, run, show, report, check, export."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from replayssm_cute.errors import ArgumentError, ReplayError
from replayssm_cute.registry import tuned
from replayssm_tune import survey
from replayssm_tune.rows import merge_row
from replayssm_tune.subject import Subject, find, parse_any, parse_geometry, steps_of

__all__ = ["main", "merge_row", "parse_geometry"]

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STATE_DTYPES = ("float32", "float16", "bfloat16")
OPS = ("mamba2_decode", "gdn_decode", "gdn_verify")


def command_list(args: argparse.Namespace) -> None:
    """Models, the devices with rows for their heads, and what is missing."""
    survey.list_models(console(), args.device, args.op)


def command_explain(args: argparse.Namespace) -> None:
    """What would serve a model here, and why."""
    survey.explain(subject_of(args), args.state_dtype, args.buffer_len, args.batch, args.device)


def command_run(args: argparse.Namespace) -> None:
    """Measure on the GPU here and write registry rows."""
    from replayssm_tune.run import Order, tune
    order = Order(subject_of(args), tuple(args.state_dtype), tuple(args.buffer_len), tuple(args.batch),
                  tuple(args.backend), args.budget, Path(args.out), args.force, args.fresh, args.timeout, args.jobs,
                  args.prune)
    if args.dry_run:
        from replayssm_tune.dry_run import rehearse
        rehearse(order, survey.arch_named(args.device), args.compile, console())
    else:
        tune(order, console())


def command_show(args: argparse.Namespace) -> None:
    """Rows as tables: times, percent of the copy bandwidth, the runner-up, ring lengths against memory."""
    from replayssm_tune import figures, show
    found = figures.read(args.paths, op=args.op)
    for table in (show.table(found), show.ring_lengths(found)):
        if table is not None:
            console().print(table)


def command_report(args: argparse.Namespace) -> None:
    """Rows as one HTML page with its plots, and the plots as PNG files; predicted rows only where a path names them."""
    from replayssm_tune import figures, report
    print(report.write(figures.read(args.paths, bool(args.paths), args.op), Path(args.out)))


def command_export(args: argparse.Namespace) -> None:
    """Pack a folder of your files into one archive to contribute."""
    from replayssm_tune.export import export
    for sentence in export(Path(args.folder), Path(args.to), args.force, args.op):
        print(sentence)
    print(args.to)


def command_check(args: argparse.Namespace) -> None:
    """Read files strictly and name the first fault."""
    for path in args.files:
        print(f"{path}: {len(tuned.load_file(path).rows)} rows")


def console() -> Console:
    """Where output goes; a pipe has no width, so lines are not folded there."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def subject_of(args: argparse.Namespace) -> Subject:
    """What the positional argument, --model or --geometry name."""
    named = [text for text in (args.subject, args.model) if text]
    if len(named) + bool(args.geometry) != 1:
        raise ArgumentError("model", "exactly one of MODEL, --model and --geometry", ", ".join(named) or "none")
    subject = Subject(str(args.geometry), args.geometry, None) if args.geometry else find(named[0], args.tp)
    steps = steps_of(subject.geometry, args.op, args.spec_tokens, args.fold, args.ring_dtype)
    return dataclasses.replace(subject, steps=steps)


def listed(kind: Any) -> Any:
    """The type of an argument that is a list with commas."""
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]
    parse.__name__ = f"list of {kind.__name__}"
    return parse


def count(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``5m`` or ``1h30m``."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text)
    if not text or match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 90s, 5m or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def one_of(*words: str) -> Any:
    """The type of an argument that is a list of some of these words."""
    def word(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}")
        return text
    return listed(word)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="replayssm-tune", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    functions = {"list": command_list, "explain": command_explain, "run": command_run, "show": command_show,
                 "report": command_report, "check": command_check, "export": command_export}
    subs = {name: commands.add_parser(name, help=(function.__doc__ or "").split("\n")[0], description=function.__doc__)
            for name, function in functions.items()}
    for name, function in functions.items():
        subs[name].set_defaults(function=function)
    for name in ("list", "explain", "run", "show", "report", "export"):
        subs[name].add_argument("--op", choices=OPS, help="operation; default: all, of a model its standard decode")
    for name in ("explain", "run"):
        add_subject(subs[name])
    for name in ("list", "explain"):
        subs[name].add_argument("--device", help="a GPU by name, such as NVIDIA_H200; default the device here")
    add_run(subs["run"])
    add_files(subs)
    return top


def add_subject(sub: argparse.ArgumentParser) -> None:
    """Which model, and at which points."""
    sub.add_argument("subject", nargs="?", metavar="MODEL", help="the same as --model")
    sub.add_argument("--model", help="registry name (see list), path of a config.json, or HxPxN/G (Mamba2) or "
                     "HV/HkxVxK (Gated DeltaNet) of a whole layer")
    sub.add_argument("--geometry", type=parse_any, help="HxPxN/G or HV/HkxVxK of one rank")
    sub.add_argument("--tp", type=count, default=1, help="tensor-parallel ranks of --model")
    sub.add_argument("--state-dtype", type=one_of(*STATE_DTYPES), default=list(STATE_DTYPES))
    sub.add_argument("--buffer-len", type=listed(count), default=[16], help="ring length L; several to compare them")
    sub.add_argument("--batch", type=listed(count), default=list(BATCHES))
    sub.add_argument("--spec-tokens", type=listed(count), help="T of a verify step, 1 + drafts (default 4)")
    sub.add_argument("--fold", type=one_of("exact", "ring"), help="of a verify step (default exact)")
    sub.add_argument("--ring-dtype", type=one_of(*STATE_DTYPES),
                     help="of the d and k rings of Gated DeltaNet (default bfloat16)")


def add_run(sub: argparse.ArgumentParser) -> None:
    """How to measure."""
    sub.add_argument("--backend", type=one_of("cute", "triton"), default=["cute", "triton"])
    sub.add_argument("--budget", type=duration, default=300.0, help="about how long: 90s, 5m, 1h30m (default 5m)")
    sub.add_argument("--out", default="tuned", help="folder of the files; REPLAYSSM_TUNED_DIR makes it used")
    sub.add_argument("--force", action="store_true", help="replace better rows, and files of other versions")
    sub.add_argument("--fresh", action="store_true", help="forget the measurements of earlier runs in --out")
    sub.add_argument("--no-prune", dest="prune", action="store_false",
                     help="measure also what the speed model says is slower")
    sub.add_argument("--timeout", type=duration, default=60.0, help="for one candidate; a hang costs this much")
    sub.add_argument("--dry-run", action="store_true", help="no GPU: the search space, and what its kernels take")
    sub.add_argument("--device", help="with --dry-run: a GPU by name, such as NVIDIA_B200; default the device here")
    sub.add_argument("--no-compile", dest="compile", action="store_false", help="with --dry-run: only the space")
    sub.add_argument("--jobs", type=count, default=min(16, max(1, (os.cpu_count() or 2) - 1)),
                     help="processes that compile ahead")


def add_files(subs: dict[str, argparse.ArgumentParser]) -> None:
    """Which files to read, and where to write what was made of them."""
    for name in ("show", "report"):
        subs[name].add_argument("paths", nargs="*", help="files and folders; default the shipped ones and yours")
    subs["report"].add_argument("--out", default="report", help="folder of report.html and the plots")
    subs["check"].add_argument("files", nargs="+")
    subs["export"].add_argument("folder", help="of the files, as --out of run")
    subs["export"].add_argument("--to", default="replayssm-rows.zip", help="the archive")
    subs["export"].add_argument("--force", action="store_true", help="also over better rows and other versions")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        args.function(args)
    except KeyboardInterrupt:
        print("replayssm-tune: interrupted; what was measured is kept, and the same command goes on", file=sys.stderr)
        return 130
    except (ReplayError, OSError) as error:
        print(f"replayssm-tune: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
