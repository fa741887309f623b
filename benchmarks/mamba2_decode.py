"""Benchmark of the Mamba2 replay step on a GPU: whole staggered ring cycles, cold L2, CUDA graphs.

    python -m benchmarks.mamba2_decode --out results.json [--batch 1,64] [--dtype float32,bfloat16]
                                       [--geometry 64x64x128/8] [--backend cute,triton]
                                       [--philox-rounds 0,5] [--rows FOLDER]

Every time stands beside the bytes that the algorithm must move, the bandwidth of a large copy and
the time of an elementwise kernel of the same size, all measured in the same run. The per-step
baseline is this project's own Triton kernel of the plain recurrence. ``--rows`` also writes the choices
that were timed as registry rows, as ``replayssm-tune run`` does after a search.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.layout import mamba2_step_bytes
from replayssm_cute.mamba2 import selective_state_update_replayssm_output_only
from replayssm_tune.cli import merge_row, parse_geometry
from replayssm_tune.measure import registry_row, time_per_step, time_replay
from replayssm_tune.timing import copy_bandwidth, provenance, same_size_us
from replayssm_tune.workload import Workload, make_workload

GEOMETRIES = ("64x64x128/8", "96x80x128/8", "128x64x128/8")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def time_backend(w: Workload, backend: str) -> dict[str, Any]:
    """Time what the backend would run for this problem; the row says which config that is."""
    problem, arch = w.problem(), archs.of("cuda")
    chosen = next(c for c in dispatch.candidates(problem, w.batch, arch) if c.backend == backend)
    if not chosen.support:
        return {"error": chosen.support.reason}
    module = dispatch.backend_module(backend)
    config = module.choose(problem, arch, w.batch, chosen.config).to_dict()
    launch = module.prepare(problem, arch, w.batch, config)
    return {**time_replay(w, launch), "config": config}


def host_us(w: Workload, backend: str) -> float:
    """Median microseconds of host time of one call of the public operation, eager."""
    i, p, (pos, flush) = w.inputs, w.pools[0], w.phases[0]
    times = []
    for _ in range(400):
        start = time.perf_counter()
        selective_state_update_replayssm_output_only(
            p.state, i["x"], i["dt"], i["A"], i["B"], i["C"], i["D"], i["dt_bias"], dt_softplus=True,
            x_cache=p.x_cache, dt_cache=p.dt_cache, B_cache=p.B_cache, write_pos=pos, is_flush=flush,
            max_cache_len=w.buffer_len, state_batch_indices=w.indices, out=i["out"], state_scale=p.state_scale,
            backend=backend)
        times.append((time.perf_counter() - start) * 1e6)
        if len(times) % 50 == 0:
            torch.cuda.synchronize()
    return statistics.median(times[100:])


def run(args: argparse.Namespace) -> None:
    bandwidth = copy_bandwidth()
    report: dict[str, Any] = {"provenance": provenance(bandwidth), "rows": []}
    same_size = functools.cache(same_size_us)
    deadline = time.monotonic() + args.budget
    points = itertools.product(map(parse_geometry, args.geometry.split(",")), args.dtype.split(","),
                               map(int, args.philox_rounds.split(",")), map(int, args.batch.split(",")))
    for geometry, name, rounds, batch in points:
        if time.monotonic() > deadline:
            print("budget spent; the rest is not measured", file=sys.stderr)
            return
        w = make_workload(geometry, batch, getattr(torch, name), args.buffer_len, philox_rounds=rounds)
        nbytes = round(mamba2_step_bytes(geometry, args.buffer_len, getattr(torch, name)) * batch)
        row: dict[str, Any] = {"geometry": str(geometry), "state_dtype": name, "philox_rounds": rounds, "batch": batch,
                               "buffer_len": args.buffer_len, "bytes": nbytes, "same_size_us": same_size(nbytes),
                               "backends": {}}
        if args.per_step and w.pools[0].state_scale is None:  # the baseline takes no codes
            row["per_step_us"] = time_per_step(w)
        for backend in args.backend.split(","):
            row["backends"][backend] = measured(time_backend(w, backend), nbytes, bandwidth, row["same_size_us"])
            if batch == 1 and "us" in row["backends"][backend]:
                row["backends"][backend]["host_us"] = host_us(w, backend)
        report["rows"].append(row)
        print(line(row), flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
        if args.rows and not rounds:
            entries = {k: {"config": b["config"], "us": round(b["us"], 3), "runner_up": None}
                       for k, b in row["backends"].items() if "us" in b}
            merge_row(Path(args.rows), geometry, name, report["provenance"],
                      registry_row(w, entries, row.get("per_step_us"), bandwidth))
        del w
        gc.collect()
        torch.cuda.empty_cache()


def measured(result: dict[str, Any], nbytes: float, bandwidth: float, same_us: float) -> dict[str, Any]:
    if "us" in result:
        result["copy_percent"] = 100 * nbytes / (result["us"] * 1e-6) / bandwidth
        result["same_size_percent"] = 100 * same_us / result["us"]
    return result


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['geometry']:13s} {row['state_dtype']:8s} R{row['philox_rounds']:<2d} b{row['batch']:<4d} "
             f"same-size {row['same_size_us']:7.2f}"]
    if "per_step_us" in row:
        cells.append(f"per-step {row['per_step_us']:7.2f}")
    for name, b in row["backends"].items():
        host = f" host {b['host_us']:.1f} us" if "host_us" in b else ""
        cells.append(f"{name} {b['us']:7.2f} us {b['copy_percent']:5.1f}% copy {b['same_size_percent']:5.1f}% size"
                     f"{host}" if "us" in b else f"{name} {b['error']}")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default=",".join(GEOMETRIES))
    parser.add_argument("--dtype", default="float32,float16,bfloat16")
    parser.add_argument("--batch", default=",".join(map(str, BATCHES)))
    parser.add_argument("--backend", default="cute,triton")
    parser.add_argument("--buffer-len", type=int, default=16)
    parser.add_argument("--philox-rounds", default="0", help="0: round to nearest")
    parser.add_argument("--no-per-step", dest="per_step", action="store_false")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no row is begun")
    parser.add_argument("--rows", help="folder of registry files to write the timed choices to")
    parser.add_argument("--out")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
