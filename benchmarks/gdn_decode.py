"""Benchmark of the Gated DeltaNet steps on a GPU: whole staggered flush cycles, cold L2, CUDA graphs.

    python -m benchmarks.gdn_decode --out results.json [--batch 1,64] [--dtype float32,bfloat16]
                                    [--kind decode,ring,exact] [--tp 1,4] [--backend cute,triton]
                                    [--ring-dtype bfloat16,state]

Heads are those of Qwen3-Next (Hk = 16, HV = 32, K = V = 128) on one rank of ``--tp``. ``decode`` is standard decode
with L = 16, where one row in 16 flushes a step; ``ring`` and ``exact`` verify windows of T = 4 tokens of which 3 are
accepted, with either fold, where one row in three flushes a step, with 9 records. Cursors are precomputed: the commit
is not timed. The rings of d and k are bf16 unless ``--ring-dtype`` says otherwise; ``state`` is the checkpoint's dtype.
Every time stands beside the bytes that the algorithm must move, the bandwidth of a large copy and the
time of an elementwise kernel of the same size, all measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.mamba2_decode import measured
from replayssm_cute import dispatch, gdn_dispatch
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_tune.gdn_workload import GdnWorkload, make_gdn_workload
from replayssm_tune.measure import time_replay
from replayssm_tune.timing import copy_bandwidth, provenance, same_size_us

QWEN3_NEXT = GdnGeometry(16, 32, 128, 128)
KINDS = {"decode": (0, False), "ring": (4, False), "exact": (4, True)}


def time_backend(w: GdnWorkload, backend: str) -> dict[str, Any]:
    """Time what the backend serves; that it was this one that served is asserted."""
    problem = w.problem()
    support = gdn_dispatch.backend_module(backend).supports(problem, dispatch.archs.of("cuda"))
    if not support:
        return {"error": support.reason}
    before = dispatch.served[problem.op, backend]
    gdn_dispatch.serve(w.arguments(0, 0), (problem.op, w.exact), lambda: problem, torch.device("cuda"), backend)
    assert dispatch.served[problem.op, backend] == before + 1
    return time_replay(w, gdn_dispatch.prepare(problem, "cuda", backend).call)


def run(args: argparse.Namespace) -> None:
    bandwidth = copy_bandwidth()
    report: dict[str, Any] = {"provenance": provenance(bandwidth), "rows": []}
    same_size = functools.cache(same_size_us)
    deadline = time.monotonic() + args.budget
    points = itertools.product(map(int, args.tp.split(",")), args.kind.split(","), args.dtype.split(","),
                               args.ring_dtype.split(","), map(int, args.batch.split(",")))
    for tp, kind, name, ring, batch in points:
        if time.monotonic() > deadline:
            print("budget spent; the rest is not measured", file=sys.stderr)
            return
        (tokens, exact), ring = KINDS[kind], name if ring == "state" else ring
        w = make_gdn_workload(QWEN3_NEXT.shard(tp), batch, getattr(torch, name), ring_dtype=getattr(torch, ring),
                              tokens=tokens, exact=exact)
        nbytes = round(w.step_bytes())
        row: dict[str, Any] = {"kind": kind, "tp": tp, "geometry": str(w.geometry), "state_dtype": name,
                               "ring_dtype": ring, "batch": batch, "bytes": nbytes,
                               "same_size_us": same_size(nbytes), "backends": {}}
        for backend in args.backend.split(","):
            row["backends"][backend] = measured(time_backend(w, backend), nbytes, bandwidth, row["same_size_us"])
        report["rows"].append(row)
        print(line(row), flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
        del w
        gc.collect()
        torch.cuda.empty_cache()


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['kind']:6s} TP{row['tp']} {row['state_dtype']:8s} ring {row['ring_dtype']:8s} b{row['batch']:<4d} "
             f"same-size {row['same_size_us']:7.2f}"]
    cells += [f"{name} {b['us']:7.2f} us {b['copy_percent']:5.1f}% copy {b['same_size_percent']:5.1f}% size"
              if "us" in b else f"{name} {b['error']}" for name, b in row["backends"].items()]
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default=",".join(KINDS))
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--ring-dtype", default="bfloat16", help="of the d and k rings; state: the checkpoint's")
    parser.add_argument("--batch", default="1,4,16,64,256,512")
    parser.add_argument("--tp", default="1,4")
    parser.add_argument("--backend", default="cute,triton")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no row is begun")
    parser.add_argument("--out")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
