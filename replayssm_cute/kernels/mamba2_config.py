"""Static choices of the Mamba2 replay kernels, their validity, and the measured heuristic.

Two designs:

* ``register``  one CTA per (row, head, tile); the state goes straight to registers. Shortest
  latency: best for small batches.
* ``bulk``  persistent CTAs; a producer warp keeps bulk copies in flight, the other warps compute
  out of shared memory. Best bandwidth: best for large batches.

Both work on a tile of ``tile_p`` rows of a head's state with ``threads`` compute threads, in
groups of eight lanes. A lane group owns ring entries and state rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from replayssm_cute.errors import ArgumentError
from replayssm_cute.kernels.targets import REGISTERS_PER_SM, SMEM_PER_CTA, Target
from replayssm_cute.types import SUPPORTED, Mamba2Problem, Support

LANES = 8                       # lanes of a group
MAX_STATE_PER_THREAD = 64       # state elements a thread holds; more spill on every target


@dataclass(frozen=True)
class Mamba2Config:
    """Launch choices of one compiled Mamba2 replay kernel.

    Attributes:
        design: ``"register"`` or ``"bulk"``.
        tile_p: rows of a head's state per work item; divides P.
        threads: compute threads of a CTA; the bulk design adds one producer warp.
        vec_bits: width of a state load, 128 or 256 (register design, where the target has it).
        min_ctas: CTAs the compiler must let a multiprocessor hold; the bulk design launches
            exactly these, because a persistent grid that does not fit runs in two rounds.
        stages: bulk copies of whole items in flight per CTA (bulk design).
        evict_first: the state's bulk copies carry the evict_first policy in L2.
    """

    design: str
    tile_p: int
    threads: int
    vec_bits: int = 128
    min_ctas: int = 1
    stages: int = 0
    evict_first: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Mamba2Config:
        """Raises ArgumentError on unknown keys or values of another type."""
        known = {f.name: f.type for f in fields(cls)}
        for key, value in values.items():
            if key not in known or type(value).__name__ != known[key]:
                raise ArgumentError(f"config[{key!r}]", f"one of {known}", repr(value))
        return cls(**values)


def state_vector(problem: Mamba2Problem, config: Mamba2Config) -> int:
    """State elements of one load."""
    return config.vec_bits // (8 * problem.state_dtype.itemsize)


def stage_bytes(problem: Mamba2Problem, config: Mamba2Config) -> int:
    """Shared memory of one stage of the bulk design: a tile's state, whole rings and C."""
    g, L, act = problem.geometry, problem.buffer_len, problem.act_dtype.itemsize
    state = config.tile_p * g.dstate * problem.state_dtype.itemsize
    rings = (g.headdim + g.dstate) * L * act + 4 * L
    return state + rings + g.dstate * act + 32


def smem_bytes(problem: Mamba2Problem, config: Mamba2Config) -> int:
    """Shared memory of a CTA, alignment gaps included (an upper estimate)."""
    g, L, warps = problem.geometry, problem.buffer_len, config.threads // 32
    fold = 4 * config.tile_p * L
    if config.design == "register":
        return 4 * config.tile_p * (warps + 1) + fold + 4 * g.dstate * L + 256
    buffers = 2 * 4 * config.tile_p * (warps + 1)
    return config.stages * (stage_bytes(problem, config) + 16) + buffers + fold + 1024


def validate(problem: Mamba2Problem, config: Mamba2Config, target: Target) -> Support:
    """Whether this kernel can be built for the problem: the one predicate of heuristic and tuner."""
    g, c = problem.geometry, config
    if problem.ring_dtype != problem.act_dtype:
        return Support(False, f"rings in {problem.ring_dtype} beside inputs in {problem.act_dtype}")
    if problem.row_align < 16:
        return Support(False, f"input or ring rows are aligned to {problem.row_align} bytes, not 16")
    if c.design not in ("register", "bulk"):
        return Support(False, f"unknown design {c.design!r}")
    if g.headdim % c.tile_p or c.tile_p % LANES or c.threads % 32 or c.threads > 512:
        return Support(False, f"tile_p={c.tile_p} and threads={c.threads} do not split P={g.headdim}")
    if c.tile_p % (c.threads // LANES):
        return Support(False, f"{c.threads // LANES} lane groups do not split {c.tile_p} rows")
    if c.tile_p * g.dstate > MAX_STATE_PER_THREAD * c.threads or c.threads < c.tile_p:
        return Support(False, f"{c.threads} threads are too few for a tile of {c.tile_p}x{g.dstate}")
    if g.dstate % (LANES * state_vector(problem, c)):
        return Support(False, f"N={g.dstate} is no multiple of {LANES} loads of {c.vec_bits} bits")
    if c.vec_bits == 256 and not (target.wide_loads and c.design == "register"):
        return Support(False, f"no 256-bit loads in the {c.design} design on {target.name}")
    if problem.state_align < c.vec_bits // 8:
        return Support(False, f"state rows are aligned to {problem.state_align} bytes only")
    if c.design == "bulk" and (problem.buffer_len % 4 or problem.dt_align < 16):
        return Support(False, "bulk copies need dt_cache rows of a multiple of 16 bytes")
    if c.design == "bulk" and not 1 <= c.stages <= 16:
        return Support(False, f"stages={c.stages} is not in 1..16")
    return _resident(problem, c, target)


def _resident(problem: Mamba2Problem, config: Mamba2Config, target: Target) -> Support:
    """Whether ``min_ctas`` CTAs fit a multiprocessor."""
    smem = smem_bytes(problem, config)
    if smem > SMEM_PER_CTA or config.min_ctas * (smem + 1024) > target.smem_per_sm:
        return Support(False, f"{config.min_ctas} CTAs of {smem} bytes of shared memory do not fit")
    threads = config.threads + (32 if config.design == "bulk" else 0)
    # 80 registers a thread is the least the kernels were seen to need without spilling much.
    if config.min_ctas * threads > min(2048, REGISTERS_PER_SM // 80):
        return Support(False, f"{config.min_ctas} CTAs of {threads} threads do not fit")
    return SUPPORTED


def default_config(problem: Mamba2Problem, batch: int, target: Target) -> Mamba2Config | None:
    """The first valid choice in the order measured as best on an H200; None where none is valid.

    Measured on 64x64x128 in 8 groups, L = 16, cold L2 (benchmarks/results). The register design
    wins while all heads are resident at once and latency rules; above, the bulk design keeps
    96 to 130 KB in flight per multiprocessor. evict_first on the state gains while the pools of
    one step fit the L2 beside each other and costs 2% beyond.
    """
    for config in _ranked(problem, batch, target):
        if validate(problem, config, target):
            return config
    return None


def _ranked(problem: Mamba2Problem, batch: int, target: Target) -> list[Mamba2Config]:
    g = problem.geometry
    tile_p, threads = _tile(problem)
    wide = 256 if target.wide_loads else 128
    items = batch * g.nheads * (g.headdim // tile_p)
    fp32 = problem.state_dtype == torch.float32
    register = [Mamba2Config("register", tile_p, threads, bits, min_ctas=ctas)
                for bits in (wide, 128) for ctas in (4, 3, 1)]
    evict = items <= 128 * 64
    plans = ((2, 2), (2, 1), (1, 2), (1, 1)) if fp32 else ((3, 2), (2, 2), (1, 2), (1, 1)) if evict \
        else ((2, 4), (2, 3), (2, 2), (1, 2), (1, 1))
    bulk = [Mamba2Config("bulk", tile_p, threads, min_ctas=ctas, stages=stages, evict_first=evict)
            for ctas, stages in plans]
    return register + bulk if items <= (32 if fp32 else 8) * 64 else bulk + register


def _tile(problem: Mamba2Problem) -> tuple[int, int]:
    """(tile_p, threads): the largest tile of up to 80x128 that leaves a thread 64 state elements.

    Four rows a thread measured best at N = 128 (two threads per row of P); fewer where N is larger.
    """
    g = problem.geometry
    for tile_p in range(min(g.headdim, 80), LANES - 1, -LANES):
        if g.headdim % tile_p == 0 and tile_p * g.dstate <= 80 * 128:
            for rows in (4, 2, 1, 8):
                threads = LANES * tile_p // rows
                if tile_p % rows == 0 and threads % 32 == 0 and threads >= tile_p and threads <= 256 \
                        and rows * g.dstate // LANES <= MAX_STATE_PER_THREAD:
                    return tile_p, threads
    return g.headdim, 2 * g.headdim  # no valid split; ``validate`` says why
