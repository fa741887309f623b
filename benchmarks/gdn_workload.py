"""Workloads of the Gated DeltaNet benchmark: whole staggered flush cycles on pools that are cold in L2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm_cute.gdn_layout import RAW_NAMES, RING_NAMES, GdnPool, allocate_gdn_pool, gdn_state_bytes
from replayssm_cute.gdn_types import GdnGeometry, GdnProblem
from replayssm_cute.gdn_validate import decode_problem, verify_problem
from replayssm_tune.workload import COLD_BYTES

ACCEPTED = 3            # tokens of every window


@dataclass
class Workload:
    """A layer at one batch size.

    Attributes:
        tokens: T of a verify step, 0 for standard decode.
        pools: as many layers' pools as make their checkpoints exceed ``COLD_BYTES``; their slots are a random
            permutation, and slot 0 is nobody's.
        inputs: tensors by argument name.
        phases: by step of a cycle the cursors: ``write_pos``, and for verify steps ``cache_base`` and ``is_flush``.
            Rows are at random places of the cycle, in which each flushes once.
    """

    geometry: GdnGeometry
    tokens: int
    exact: bool
    batch: int
    buffer_len: int
    pools: list[GdnPool]
    inputs: dict[str, Tensor]
    phases: list[dict[str, Tensor]]

    def arguments(self, phase: int, pool: int) -> tuple[Any, ...]:
        """The canonical arguments of a step."""
        i, p, c = self.inputs, self.pools[pool], self.phases[phase]
        first = (p.state, *(i[n] for n in ("q", "k", "v", "a", "b", "A_log", "dt_bias")))
        if not self.tokens:
            return (*first, *(p.rings[n] for n in RING_NAMES), c["write_pos"], None, i["slots"], -1, i["out"], None)
        rings = (p.rings.get(n) for n in RING_NAMES + RAW_NAMES)
        return (*first, *rings, i["out"], i["starts"], i["slots"], i["slots"], c["write_pos"], c["cache_base"],
                c["is_flush"], -1)

    def problem(self) -> GdnProblem:
        args = self.arguments(0, 0)
        if not self.tokens:
            return decode_problem(*args, scale=self.geometry.head_k_dim ** -0.5, l2norm=True)
        rings = dict(zip(RING_NAMES + RAW_NAMES, args[8:14], strict=True))
        values: tuple[Any, ...] = (*args[:8], rings, *args[14:])
        return verify_problem(*values, max_cache_len=self.buffer_len, max_spec_len=self.tokens,
                              scale=self.geometry.head_k_dim ** -0.5, l2norm=True, launch_mode="both")

    def step_bytes(self) -> float:
        """Bytes that the mean step of the cycle must move."""
        g, n, width = self.geometry, self.tokens or 1, 2
        state = gdn_state_bytes(g, self.pools[0].state.dtype) * self.batch
        record = width * (g.num_v_heads * g.head_v_dim + g.num_k_heads * g.head_k_dim) + 4 * g.num_v_heads
        window = n * (width * (2 * g.num_v_heads * g.head_v_dim + 2 * g.num_k_heads * g.head_k_dim)
                      + 2 * width * g.num_v_heads)
        cycle = len(self.phases)
        read = sum(float(c["write_pos"][self.inputs["slots"].long() if self.tokens else slice(None)].sum())
                   for c in self.phases) * record / cycle
        written = n * record * (2 if self.exact else 1) * (1 if self.tokens else (cycle - 1) / cycle)
        return state * (1 + 1 / cycle) + read + self.batch * (window + written)


def make_workload(geometry: GdnGeometry, batch: int, state_dtype: torch.dtype, *, tokens: int = 0, exact: bool = False,
                  buffer_len: int = 16, seed: int = 0) -> Workload:
    """Random inputs of bf16 with trained-like decay, pools filled with noise."""
    gen = torch.Generator("cuda").manual_seed(seed)
    g, n = geometry, batch * (tokens or 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device="cuda").bfloat16()

    layers = max(2, int(-(-COLD_BYTES // (batch * gdn_state_bytes(g, state_dtype)))))
    pools = [allocate_gdn_pool(batch + 1, g, buffer_len, exact_fold=exact, state_dtype=state_dtype, device="cuda")
             for _ in range(layers)]
    for pool in pools:
        pool.state.normal_(generator=gen).mul_(0.05)
        for name, ring in pool.rings.items():
            ring.normal_(generator=gen).mul_(0.09 if name == "k_cache" else 0.5)
        pool.rings["g_cache"].uniform_(-0.2, -0.001, generator=gen)
        if exact:
            pool.rings["beta_cache"].uniform_(generator=gen)
    inputs = {"q": normal(n, g.num_k_heads, g.head_k_dim), "k": normal(n, g.num_k_heads, g.head_k_dim),
              "v": normal(n, g.num_v_heads, g.head_v_dim), "a": normal(n, g.num_v_heads),
              "b": normal(n, g.num_v_heads), "out": normal(n, g.num_v_heads, g.head_v_dim),
              "A_log": torch.log(0.5 + 3.5 * torch.rand(g.num_v_heads, generator=gen, device="cuda")),
              "dt_bias": -3 + 2 * torch.rand(g.num_v_heads, generator=gen, device="cuda"),
              "slots": torch.randperm(batch, generator=gen, device="cuda").int() + 1}
    if tokens:
        inputs["starts"] = torch.arange(0, n + 1, tokens, dtype=torch.int32, device="cuda")
    phases = _verify_phases(batch, tokens, buffer_len, gen) if tokens else _decode_phases(batch, buffer_len, gen)
    return Workload(g, tokens, exact, batch, buffer_len, pools, inputs, phases)


def _decode_phases(batch: int, buffer_len: int, gen: torch.Generator) -> list[dict[str, Tensor]]:
    """Cursors of a ring cycle; each step flushes batch / L rows, or fewer than L rows one of them now and then."""
    offset = torch.randperm(batch, generator=gen, device="cuda").int() % buffer_len
    return [{"write_pos": (offset + k) % buffer_len} for k in range(buffer_len)]


def _verify_phases(batch: int, tokens: int, buffer_len: int, gen: torch.Generator) -> list[dict[str, Tensor]]:
    """Cursors of whole cycles: ``ACCEPTED`` tokens a step; a row flushes when two windows no longer fit."""
    cycle = -(-(buffer_len - 2 * tokens + 1) // ACCEPTED)
    place = torch.randperm(batch + 1, generator=gen, device="cuda").int() % cycle
    base = torch.randint(0, buffer_len, (batch + 1,), generator=gen, device="cuda", dtype=torch.int32)
    phases = []
    for k in range(cycle):
        records = ((place + k) % cycle + 1) * ACCEPTED
        laps = (place + k) // cycle
        phases.append({"write_pos": records, "cache_base": (base + laps * (cycle * ACCEPTED)) % buffer_len,
                       "is_flush": (records + 2 * tokens > buffer_len).to(torch.int8)})
    return phases
