"""``replayssm-demo``: decode whole Mamba2 layers by replay and check every token.

Requests join at different steps, so rows stand at different cursors; the last row of the batch is
padding throughout, and a block boundary forces flushes at other cursors than the last. Every output
is compared with the plain recurrence in float64, and so is the state after a final flush.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.cursors import decode_cursors
from replayssm_cute.errors import ReplayError
from replayssm_cute.gdn_layout import gdn_memory
from replayssm_cute.layout import allocate_mamba2_pool, mamba2_ring_bytes, mamba2_step_bytes
from replayssm_cute.mamba2 import selective_state_update_replayssm_output_only
from replayssm_cute.reference.mamba2 import recurrent_step
from replayssm_cute.registry import models
from replayssm_cute.types import Mamba2Geometry

MODELS = ("nemotron-3-nano-30b-a3b", "nemotron-3-nano-4b", "nemotron-3-super-120b-a12b")
CYCLES = 3
BLOCK = 24          # tokens of a prefix-cache block; no multiple of L, so it flushes mid-ring
NULL_SLOT = 0
# The memory account of speculative decoding.
GDN_MODEL, GDN_REQUESTS, GDN_TOKENS, GDN_RING = "qwen3.5-35b-a3b", 48, 4, 16


@dataclass
class DemoResult:
    """What a decode of one model's layer showed; errors are relative, in the 2-norm of a row."""

    model: str
    geometry: str
    state_dtype: str
    buffer_len: int
    batch: int
    steps: int
    backends: dict[str, int]
    tokens: int
    flushes: int
    forced_flushes: int
    padded_rows: int
    output_error: float
    state_error: float
    bytes_moved: float
    bytes_per_step_baseline: float
    ring_bytes_per_request_and_layer: int
    mamba_layers: int | None = None
    us_per_step: float | None = None


class Layer:
    """One Mamba2 layer with trained-like parameters, its pool, and its float64 twin.

    Rows 0..batch-1 hold requests in slots 1..batch, in reverse order; row ``batch`` is padding.
    """

    def __init__(self, geometry: Mamba2Geometry, batch: int, buffer_len: int,
                 state_dtype: torch.dtype, device: torch.device) -> None:
        g, self.geometry, self.batch, self.buffer_len, self.device = geometry, geometry, batch, buffer_len, device
        self.gen = torch.Generator().manual_seed(0)
        heads = torch.arange(g.nheads, dtype=torch.float32)
        # Decay rates 1..16 and time steps 0.001..0.1, log-uniform: what Mamba2 starts training from.
        self.A = -(1 + 15 * heads / max(1, g.nheads - 1)).to(device)
        step = torch.exp(torch.empty(g.nheads).uniform_(-6.9, -2.3, generator=self.gen))
        self.dt_bias = (step + torch.log(-torch.expm1(-step))).to(device)
        self.D = torch.ones(g.nheads, device=device, dtype=torch.bfloat16)
        self.pool = allocate_mamba2_pool(batch + 1, g, buffer_len, state_dtype, torch.bfloat16, device)
        self.slots = torch.tensor([*range(batch, 0, -1), NULL_SLOT], dtype=torch.int32, device=device)
        self.out = torch.zeros(batch + 1, g.nheads, g.headdim, dtype=torch.bfloat16, device=device)
        self.exact = torch.zeros(batch, g.nheads, g.headdim, g.dstate, dtype=torch.float64, device=device)

    def token(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random (x, dt, B, C) of one step, for all rows, as the layer's convolution would give them."""
        g, rows = self.geometry, self.batch + 1

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=self.gen).to(self.device, torch.bfloat16)

        return (normal(rows, g.nheads, g.headdim), normal(rows, g.nheads), normal(rows, g.ngroups, g.dstate),
                normal(rows, g.ngroups, g.dstate))

    def step(self, token: tuple[Tensor, ...], write_pos: Tensor, is_flush: Tensor, slots: Tensor,
             backend: str | None) -> None:
        """One replay step of every row."""
        g, (x, dt, B, C) = self.geometry, token
        selective_state_update_replayssm_output_only(
            self.pool.state, x, dt[:, :, None].expand(-1, -1, g.headdim),
            self.A[:, None, None].expand(-1, g.headdim, g.dstate), B, C,
            self.D[:, None].expand(-1, g.headdim), self.dt_bias[:, None].expand(-1, g.headdim),
            dt_softplus=True, x_cache=self.pool.x_cache, dt_cache=self.pool.dt_cache,
            B_cache=self.pool.B_cache, write_pos=write_pos, is_flush=is_flush,
            max_cache_len=self.buffer_len, state_batch_indices=slots, null_block_id=NULL_SLOT,
            out=self.out, backend=backend)

    def exact_step(self, token: tuple[Tensor, ...], live: Tensor) -> Tensor:
        """The same token through the float64 recurrence, for live requests; returns their outputs."""
        x, dt, B, C = (t[:-1][live] for t in token)
        y, state = recurrent_step(self.exact[live], x, dt, self.A, B, C, self.D, self.dt_bias)
        self.exact[live] = state
        return y


def worst_row_error(got: Tensor, exact: Tensor) -> float:
    """Largest relative error of a row in the 2-norm; NaN where a row is not finite."""
    difference, size = (got.double() - exact).flatten(1).norm(dim=1), exact.flatten(1).norm(dim=1)
    errors = difference / size
    return float("nan") if errors.isnan().any() else float(errors.max())


def decode(name: str, geometry: Mamba2Geometry, batch: int, state_dtype: torch.dtype, buffer_len: int,
           steps: int, device: torch.device, backend: str | None, tick: Callable[[], None]) -> DemoResult:
    """Decode ``steps`` steps of one layer, then flush every row; check outputs and state."""
    layer = Layer(geometry, batch, buffer_len, state_dtype, device)
    before, base = dict(dispatch.served), torch.zeros(batch + 1, dtype=torch.int32)
    # Request i joins at its own step and has as many tokens behind it as its prompt.
    joins = torch.arange(batch) * 3 % buffer_len
    prompt = torch.arange(batch) * 7 + 5
    result = DemoResult(name, str(geometry), str(state_dtype).removeprefix("torch."), buffer_len, batch, steps,
                        {}, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, mamba2_ring_bytes(geometry, buffer_len))
    for step in range(steps):
        live = joins <= step
        query = torch.cat([live, torch.tensor([False])]).int()
        base[:-1] = prompt
        computed = torch.cat([prompt + (step - joins).clamp(min=0), torch.tensor([0])]).int()
        pos, flush = decode_cursors(computed, query, base, buffer_len, block_size=BLOCK)
        if step == steps - 1:
            flush = query.to(torch.int8)  # the state must be complete to be compared
        slots = torch.where(query.to(device) > 0, layer.slots, NULL_SLOT)
        token, untouched = layer.token(), layer.out[batch].clone()
        layer.step(token, pos.to(device), flush.to(device), slots, backend)
        exact = layer.exact_step(token, live.to(device))
        result.output_error = max(result.output_error, worst_row_error(layer.out[:-1][live.to(device)], exact))
        assert torch.equal(layer.out[batch], untouched), "a padded row was written"
        account(result, geometry, pos, flush, query, state_dtype)
        tick()
    states = layer.pool.state[layer.slots[:-1].long()]
    result.state_error = worst_row_error(states, layer.exact)
    result.backends = {b: n - before.get((op, b), 0) for (op, b), n in dispatch.served.items()
                       if n > before.get((op, b), 0)}
    if device.type == "cuda":
        result.us_per_step = time_cycle(layer, buffer_len, backend)
    return result


def account(result: DemoResult, geometry: Mamba2Geometry, pos: Tensor, flush: Tensor, query: Tensor,
            state_dtype: torch.dtype) -> None:
    """Count the step's tokens, flushes and bytes from its cursors."""
    for w, f in zip(pos[query > 0].tolist(), flush[query > 0].tolist(), strict=True):
        result.tokens += 1
        result.flushes += f
        result.forced_flushes += f and w != result.buffer_len - 1
        result.bytes_moved += mamba2_step_bytes(geometry, result.buffer_len, state_dtype, ring_rows=w,
                                                flush_share=f)
        result.bytes_per_step_baseline += mamba2_step_bytes(geometry, result.buffer_len, state_dtype, replay=False)
    result.padded_rows += int((query == 0).sum())


def time_cycle(layer: Layer, buffer_len: int, backend: str | None) -> float:
    """Microseconds of a step, the mean over a captured ring cycle with staggered rows (L2 warm)."""
    token, rows = layer.token(), torch.arange(layer.batch + 1, dtype=torch.int32)
    phases = []
    for k in range(buffer_len):
        pos = (rows + k) % buffer_len
        phases.append((pos.to(layer.device), (pos == buffer_len - 1).to(layer.device, torch.int8)))

    def cycle() -> None:
        for pos, flush in phases:
            layer.step(token, pos, flush, layer.slots, backend)

    cycle()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cycle()
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / buffer_len)
    return sorted(times)[len(times) // 2]


def slice_of(geometry: Mamba2Geometry) -> Mamba2Geometry:
    """Two heads of one group: what Triton's interpreter decodes in a few seconds."""
    return Mamba2Geometry(2, geometry.headdim, geometry.dstate, 1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="replayssm-demo", description=__doc__.split("\n")[0])
    parser.add_argument("--model", action="append", choices=sorted(m.name for m in models.mamba2_models()),
                        metavar="NAME", help=f"registry name, repeatable; default {', '.join(MODELS)}")
    parser.add_argument("--batch", type=int, default=4, help="requests (one padded row is added)")
    parser.add_argument("--state-dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--buffer-len", type=int, default=16, help="L, ring rows")
    parser.add_argument("--cycles", type=int, default=CYCLES, help="ring cycles to decode")
    parser.add_argument("--backend", choices=dispatch.BACKENDS, help="insist on a backend")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args(argv)
    for name in ("batch", "cycles"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


def run(args: argparse.Namespace, quiet: bool) -> list[DemoResult]:
    """Decode every model asked for and, without a GPU, a slice of each through the Triton kernel."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    device = archs.default_device()
    if device.type == "cpu" and args.backend is None:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported
    steps, names = args.cycles * args.buffer_len + 1, args.model or MODELS
    jobs: list[tuple[str, Mamba2Geometry, int, int, str | None]] = []
    for name in names:
        geometry = models.get_mamba2(name).geometry
        jobs.append((name, geometry, args.batch, steps, args.backend))
        if device.type == "cpu" and args.backend is None:
            jobs.append((f"{name} (2 heads)", slice_of(geometry), 2, args.buffer_len + 4, "triton"))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results = []
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("decode", total=sum(job[3] for job in jobs))
        for name, geometry, batch, count, backend in jobs:
            progress.update(task, description=name)
            result = decode(name, geometry, batch, getattr(torch, args.state_dtype), args.buffer_len, count,
                            device, backend, lambda: progress.advance(task))
            if geometry == models.get(name.split(" ")[0]).geometry:
                result.mamba_layers = models.get(name).recurrent_layers
            results.append(result)
    return results


def show(results: list[DemoResult], device: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for r in results:
        table = Table(title=f"{r.model}: {r.geometry}, state {r.state_dtype}, L={r.buffer_len}, on {device}",
                      show_header=False, title_justify="left")
        table.add_row("served by", ", ".join(f"{b} ({n} calls)" for b, n in r.backends.items()))
        table.add_row("decoded", f"{r.tokens} tokens in {r.steps} steps, {r.batch} requests, "
                      f"{r.padded_rows} padded rows")
        table.add_row("flushes", f"{r.flushes}, of them {r.forced_flushes} forced before the ring was full")
        cut = "triton" in r.backends and device == "CPU"
        table.add_row("worst output error", f"{r.output_error:.1e} of the float64 recurrence (of that bf16 alone up to "
                      + ("4e-3: the interpreter cuts it off)" if cut else "2e-3)"))
        table.add_row("worst state error", f"{r.state_error:.1e}")
        table.add_row("bytes moved", f"{r.bytes_moved / 2**20:.1f} MiB a layer; per-step baseline "
                      f"{r.bytes_per_step_baseline / 2**20:.1f} MiB ({r.bytes_per_step_baseline / r.bytes_moved:.2f}x)")
        ring = r.ring_bytes_per_request_and_layer
        layers = f", {ring * r.mamba_layers / 2**20:.1f} MiB for {r.mamba_layers} layers" if r.mamba_layers else ""
        table.add_row("ring memory", f"{ring / 2**10:.1f} KiB a request and layer{layers}")
        if r.us_per_step is not None:
            table.add_row("time", f"{r.us_per_step:.2f} us a step and layer (graph, L2 warm)")
        console.print(table)


def speculative_memory() -> str:
    """What a verify window's snapshots take in a Gated DeltaNet model, and the ring that replaces them."""
    model = models.get_gdn(GDN_MODEL)
    account = gdn_memory(model.geometry, model.recurrent_layers, GDN_REQUESTS, GDN_TOKENS, GDN_RING)
    return (f"{model.display_name}, {GDN_REQUESTS} requests, T={GDN_TOKENS}: {account.snapshot / 2**30:.2f} GiB of "
            f"fp32 state snapshots replaced by {account.ring / 2**30:.2f} GiB of rings (L={GDN_RING}, exact fold)")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        results = run(args, quiet=args.json)
    except ReplayError as error:
        print(f"replayssm-demo: {error}", file=sys.stderr)
        return 2
    device = str(archs.of(archs.default_device()))
    if args.json:
        print(json.dumps({"device": device, "results": [asdict(r) for r in results],
                          "speculative_memory": speculative_memory()}, indent=1))
    else:
        show(results, device)
        print(speculative_memory())
    return 0


if __name__ == "__main__":
    sys.exit(main())
