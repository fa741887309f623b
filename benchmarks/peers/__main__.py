"""Decode kernels of vLLM, FlashInfer and SGLang, those that are installed, beside ours.

    python -m benchmarks.peers --out out/peers.json [--op mamba2_decode,gdn_decode,gdn_verify] [--batch 1,16,64,256]
                               [--dtype float32,bfloat16] [--layer 64x64x128/8] [--backend auto,triton]

Writes the JSON file, a table beside it (.md) and a plot (.png). docs/peers.md says what is compared and how to read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import report
from benchmarks.peers.kernel import OURS, version
from benchmarks.peers.measure import DeviceLostError, rows
from benchmarks.peers.operations import OPERATIONS, Operation
from replayssm_tune.timing import copy_bandwidth, provenance


def chosen(args: argparse.Namespace, versions: dict[str, str | None]) -> list[Operation]:
    """The operations asked for, with ours by every backend asked for and the kernels of the packages that are here."""
    found = []
    for name in args.op.split(","):
        op = OPERATIONS[name].served_by(args.backend.split(","))
        present = tuple(kernel for kernel in op.kernels if versions.get(kernel.package) is not None)
        found.append(dataclasses.replace(op, kernels=present))
    return found


def run(args: argparse.Namespace) -> bool:
    """Measure and write; False where the device was lost on the way."""
    versions = {name: version(name) for name in (OURS, *args.package.split(","))}
    for name, number in versions.items():
        print(f"{name}: {'not installed, left out' if number is None else number}", flush=True)
    bandwidth = copy_bandwidth()
    results: dict[str, Any] = {"provenance": provenance(bandwidth), "packages": versions, "rows": []}
    deadline, batches = time.monotonic() + args.budget, list(map(int, args.batch.split(",")))
    try:
        for op in chosen(args, versions):
            layers = args.layer.split(",") if args.layer else op.layers
            for layer, dtype in itertools.product(layers, args.dtype.split(",")):
                for row in rows(op, layer, getattr(torch, dtype), args.philox_rounds, batches, bandwidth, deadline):
                    results["rows"].append(row)
                    args.out.write_text(json.dumps(results, indent=1) + "\n")
                    print(report.line(row), flush=True)
    except DeviceLostError as error:
        print(f"the device is lost, the rest is not measured: {error}", file=sys.stderr)
        return False
    finally:
        args.out.with_suffix(".md").write_text(report.table(results) + "\n")
        report.plot(results, args.out.with_suffix(".png"))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--op", default=",".join(OPERATIONS), help="default: %(default)s")
    parser.add_argument("--layer", help="HxPxN/G or HV/HkxVxK, for one kind of operation; default: those of each")
    parser.add_argument("--dtype", default="float32,bfloat16", help="of the state")
    parser.add_argument("--batch", default="1,16,64,256")
    parser.add_argument("--package", default="vllm,flashinfer,sglang")
    parser.add_argument("--backend", default="auto", help="of ours; auto: the dispatcher's choice")
    parser.add_argument("--philox-rounds", type=int, default=0, help="0: round to nearest; else Mamba2 only")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which nothing is begun")
    return 0 if run(parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
