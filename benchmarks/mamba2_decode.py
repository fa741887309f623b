"""Benchmark of the Mamba2 replay step on a GPU: whole staggered ring cycles, cold L2, CUDA graphs.

    python -m benchmarks.mamba2_decode --out results.json [--batch 1,64] [--dtype float32,bfloat16]
                                       [--geometry 64x64x128/8] [--backend cute,triton]

Every time stands beside the bytes that the algorithm must move, the bandwidth of a large copy and
the time of an elementwise kernel of the same size, all measured in the same run. The per-step
baseline is this project's own Triton kernel of the plain recurrence.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from replayssm_tune.timing import copy_bandwidth, provenance, same_size_us, time_graph
from replayssm_tune.workload import Workload, make_workload

from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.layout import mamba2_step_bytes
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from replayssm_cute.validate import mamba2_problem

GEOMETRIES = ("64x64x128/8", "96x80x128/8", "128x64x128/8")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def parse_geometry(text: str) -> Mamba2Geometry:
    """``HxPxN/G``."""
    shape, groups = text.split("/")
    nheads, headdim, dstate = map(int, shape.split("x"))
    return Mamba2Geometry(nheads, headdim, dstate, int(groups))


def problem_of(w: Workload) -> Mamba2Problem:
    return mamba2_problem(*w.arguments(0, 0), dt_softplus=True, max_cache_len=w.buffer_len,  # type: ignore[arg-type]
                          philox_rounds=w.philox_rounds)


def time_replay(w: Workload, backend: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Time one ring cycle over all pools with a backend; the launch that ran is named in the row."""
    problem, device = problem_of(w), torch.device("cuda", 0)
    arch = archs.of(device)
    module = dispatch.backend_module(backend)
    support = module.supports(problem, arch)
    if not support:
        return {"error": support.reason}
    launch = module.prepare(problem, arch, w.batch, config)
    calls = w.buffer_len * len(w.pools)
    flushes = w.flushes
    assert flushes * w.buffer_len == w.batch * w.buffer_len, "a cycle flushes every row once"

    def step() -> None:
        for phase in range(w.buffer_len):
            for pool in range(len(w.pools)):
                launch(*w.arguments(phase, pool))

    return {**time_graph(step, calls), "flushes_per_step": flushes / w.buffer_len}


def time_per_step(w: Workload) -> dict[str, float]:
    """Time the per-step baseline on the same inputs and pools."""
    from fallback_triton.mamba2_step import recurrent_step
    i = w.inputs

    def step() -> None:
        for p in w.pools:
            recurrent_step(p.state, i["x"], i["dt"], i["A"], i["B"], i["C"], i["D"], i["dt_bias"],
                           None, w.indices, 0, i["out"], dt_softplus=True)

    return time_graph(step, len(w.pools))


def run(args: argparse.Namespace) -> dict[str, Any]:
    bandwidth = copy_bandwidth()
    report: dict[str, Any] = {"provenance": provenance(bandwidth), "rows": []}
    sizes: dict[int, float] = {}
    deadline = time.monotonic() + args.budget
    for geometry in map(parse_geometry, args.geometry.split(",")):
        for name in args.dtype.split(","):
            for batch in map(int, args.batch.split(",")):
                if time.monotonic() > deadline:
                    print("budget spent; the rest is not measured", file=sys.stderr)
                    return report
                w = make_workload(geometry, batch, getattr(torch, name), args.buffer_len)
                nbytes = mamba2_step_bytes(geometry, args.buffer_len, getattr(torch, name)) * batch
                size = round(nbytes)
                if size not in sizes:
                    sizes[size] = same_size_us(nbytes)
                row: dict[str, Any] = {"geometry": str(geometry), "state_dtype": name, "batch": batch,
                                       "buffer_len": args.buffer_len, "bytes": size,
                                       "same_size_us": sizes[size], "backends": {}}
                if args.per_step:
                    row["per_step_us"] = time_per_step(w)["us"]
                for backend in args.backend.split(","):
                    row["backends"][backend] = measured(time_replay(w, backend), nbytes, bandwidth, sizes[size])
                report["rows"].append(row)
                print(line(row), flush=True)
                if args.out:
                    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
                del w
                gc.collect()
                torch.cuda.empty_cache()
    return report


def measured(result: dict[str, Any], nbytes: float, bandwidth: float, same_us: float) -> dict[str, Any]:
    if "us" in result:
        result["copy_percent"] = 100 * nbytes / (result["us"] * 1e-6) / bandwidth
        result["same_size_percent"] = 100 * same_us / result["us"]
    return result


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['geometry']:13s} {row['state_dtype']:8s} b{row['batch']:<4d} "
             f"same-size {row['same_size_us']:7.2f}"]
    if "per_step_us" in row:
        cells.append(f"per-step {row['per_step_us']:7.2f}")
    for name, b in row["backends"].items():
        cells.append(f"{name} {b['us']:7.2f} us {b['copy_percent']:5.1f}% copy {b['same_size_percent']:5.1f}% size"
                     if "us" in b else f"{name} {b['error']}")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default=",".join(GEOMETRIES))
    parser.add_argument("--dtype", default="float32,float16,bfloat16")
    parser.add_argument("--batch", default=",".join(map(str, BATCHES)))
    parser.add_argument("--backend", default="cute,triton")
    parser.add_argument("--buffer-len", type=int, default=16)
    parser.add_argument("--no-per-step", dest="per_step", action="store_false")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no row is begun")
    parser.add_argument("--out")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
