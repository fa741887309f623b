"""The benchmark's workload: whole ring cycles, rows at different cursors, states cold in L2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm_cute.layout import Mamba2Pool, allocate_mamba2_pool, mamba2_state_bytes
from replayssm_cute.rounding import LARGEST_CODE, seed_state
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from replayssm_cute.validate import mamba2_problem

COLD_BYTES = 250e6  # state bytes of all pools together: four times the L2 of an H200


@dataclass
class Workload:
    """Inputs of a decode layer at one batch size, with the pools that a graph rotates through.

    Attributes:
        pools: as many layers' pools as make their states exceed ``cold_bytes``.
        inputs: x, dt, A, B, C, D, dt_bias, out, by argument name.
        phases: L pairs (write_pos, is_flush); in phase k row i is at (offset_i + k) mod L, so one
            pass over all phases is a whole ring cycle in which every row flushes once.
        indices: (batch,) slots, a random permutation of 1..batch; slot 0 is the null block. All
            pools share it, as the layers of a model do.
        philox_rounds, rand_seed: of a stochastically rounded checkpoint; 0 and None otherwise.
        seed: of the noise in the pools.
    """

    geometry: Mamba2Geometry
    buffer_len: int
    batch: int
    pools: list[Mamba2Pool]
    inputs: dict[str, Tensor]
    phases: list[tuple[Tensor, Tensor]]
    indices: Tensor
    philox_rounds: int = 0
    rand_seed: Tensor | None = None
    seed: int = 0

    def restore(self) -> None:
        """Fill the pools with the noise that they began with."""
        gen = torch.Generator(self.indices.device).manual_seed(self.seed + 1)  # not the noise of the inputs
        for pool in self.pools:
            for tensor in (pool.x_cache, pool.B_cache):
                tensor.normal_(generator=gen)
            pool.dt_cache.uniform_(0.001, 0.1, generator=gen)
            if pool.state_scale is None:
                pool.state.normal_(generator=gen)
            else:
                largest = LARGEST_CODE[pool.state.dtype]
                pool.state.copy_(torch.rand(pool.state.shape, generator=gen, device=pool.state.device).mul_(2 * largest)
                                 .sub_(largest))
                pool.state_scale.fill_(1 / largest)

    @property
    def flushes(self) -> int:
        """Flushing rows of one pass over all phases, counted from the flags themselves."""
        return sum(int(flush.sum()) for _, flush in self.phases)

    def arguments(self, phase: int, pool: int) -> tuple[Any, ...]:
        """The canonical arguments of a step."""
        i, p = self.inputs, self.pools[pool]
        pos, flush = self.phases[phase]
        args = (p.state, i["x"], i["dt"], i["A"], i["B"], i["C"], i["D"], i["dt_bias"], None,
                p.x_cache, p.dt_cache, p.B_cache, pos, flush, self.indices, 0, i["out"], self.rand_seed)
        return args if p.state_scale is None else (*args, p.state_scale)

    def problem(self) -> Mamba2Problem:
        """The problem that every step poses."""
        return mamba2_problem(*self.arguments(0, 0), dt_softplus=True, max_cache_len=self.buffer_len,
                              philox_rounds=self.philox_rounds)


def make_workload(geometry: Mamba2Geometry, batch: int, state_dtype: torch.dtype, buffer_len: int = 16,
                  act_dtype: torch.dtype = torch.bfloat16, philox_rounds: int = 0, device: str = "cuda",
                  seed: int = 0, cold_bytes: float = COLD_BYTES) -> Workload:
    """Random inputs with trained-like decay, pools filled with noise, a random stagger."""
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device)

    g, L = geometry, buffer_len
    per_pool = batch * mamba2_state_bytes(g, state_dtype)
    pools = [allocate_mamba2_pool(batch + 1, g, L, state_dtype, act_dtype, device)
             for _ in range(max(2, int(-(-cold_bytes // per_pool))))]
    heads = torch.linspace(1.0, 16.0, g.nheads, device=device)
    inputs = {
        "x": normal(batch, g.nheads, g.headdim).to(act_dtype),
        "dt": normal(batch, g.nheads).to(act_dtype)[:, :, None].expand(-1, -1, g.headdim),
        "A": (-heads)[:, None, None].expand(-1, g.headdim, g.dstate),
        "B": normal(batch, g.ngroups, g.dstate).to(act_dtype),
        "C": normal(batch, g.ngroups, g.dstate).to(act_dtype),
        "D": normal(g.nheads).to(act_dtype)[:, None].expand(-1, g.headdim),
        "dt_bias": (normal(g.nheads) - 4).to(act_dtype)[:, None].expand(-1, g.headdim),
        "out": torch.empty(batch, g.nheads, g.headdim, dtype=act_dtype, device=device)}
    # Offsets 0..L-1 in equal shares, in random order: each phase flushes batch / L rows, or, below
    # L rows, one row in batch of the L phases.
    offset = (torch.arange(batch) + int(torch.randint(L, ())))[torch.randperm(batch)] % L
    phases = []
    for phase in range(L):
        pos = (offset + phase) % L
        phases.append((pos.to(device, torch.int32), (pos == L - 1).to(device, torch.int8)))
    indices = (torch.randperm(batch) + 1).to(device, torch.int32)
    rand_seed = seed_state(seed, device) if philox_rounds else None
    w = Workload(g, L, batch, pools, inputs, phases, indices, philox_rounds, rand_seed, seed)
    w.restore()
    return w
