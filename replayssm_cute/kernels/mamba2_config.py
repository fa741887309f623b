"""Static choices of the Mamba2 replay kernels, their validity, and the measured heuristic.

Three designs:

* ``direct``  one CTA per (row, head, tile), a warp for 16 state rows, straight to registers. Shortest
  latency: best for small batches.
* ``bulk``  persistent CTAs; a producer warp keeps bulk copies in flight, the other warps compute
  out of shared memory. Best bandwidth: best for large batches.
* ``register``  one CTA per (row, head, tile), products in FFMA: for inputs and shapes that the tensor
  cores do not take.

All work on a tile of ``tile_p`` rows of a head's state with ``threads`` compute threads. Direct and
bulk give the same bits; which of them serves, at which tile and how many stages, may depend on the
batch. Between them and the register design the problem alone decides: a row of a batch has the same
bits whatever stands beside it.
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
MAX_TILE = 80 * 128             # state elements of a tile: a stage of 40 KB in fp32


@dataclass(frozen=True)
class Mamba2Config:
    """Launch choices of one compiled Mamba2 replay kernel.

    Attributes:
        design: ``"direct"``, ``"bulk"`` or ``"register"``.
        tile_p: rows of a head's state per work item; divides P.
        threads: compute threads of a CTA; the bulk design adds a producer and a scorer warp.
        vec_bits: width of a state load, 128 or 256 (not the bulk design; where the target has it).
        min_ctas: CTAs the compiler must let a multiprocessor hold; the bulk design launches
            exactly these, because a persistent grid that does not fit runs in two rounds.
        stages: bulk copies of whole items in flight per CTA (bulk design).
        evict_first: the state's bulk copies carry the evict_first policy in L2.
        pdl: programmatic dependent launch: set up while the launch before drains.
    """

    design: str
    tile_p: int
    threads: int
    vec_bits: int = 128
    min_ctas: int = 1
    stages: int = 0
    evict_first: bool = False
    pdl: bool = False

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


def smem_bytes(problem: Mamba2Problem, config: Mamba2Config) -> int:
    """Shared memory of a CTA, alignment gaps included (an upper estimate)."""
    g, L, act = problem.geometry, problem.buffer_len, problem.act_dtype.itemsize
    if config.design == "direct":
        return 0
    if config.design == "register":
        sums = 4 * config.tile_p * (config.threads // 32 + 1)
        return sums + 4 * (config.tile_p + g.dstate) * L + 256
    entries = -(-L // 16) * 16
    state = config.tile_p * g.dstate * problem.state_dtype.itemsize
    window = (g.headdim + g.dstate + 8) * entries * act + 4 * L + g.dstate * act
    scores = 2 * (g.dstate + 8) * 2 + entries * (3 * act + 4)
    return config.stages * (state + window + scores + 96) + 4096


def validate(problem: Mamba2Problem, config: Mamba2Config, target: Target) -> Support:
    """Whether this kernel can be built for the problem: the one predicate of heuristic and tuner."""
    g, c = problem.geometry, config
    if problem.ring_dtype != problem.act_dtype:
        return Support(False, f"rings in {problem.ring_dtype} beside inputs in {problem.act_dtype}")
    if problem.row_align < 16:
        return Support(False, f"input or ring rows are aligned to {problem.row_align} bytes, not 16")
    if g.headdim % c.tile_p or c.tile_p % LANES or c.threads % 32 or c.threads > 512:
        return Support(False, f"tile_p={c.tile_p} and threads={c.threads} do not split P={g.headdim}")
    if problem.state_align < c.vec_bits // 8:
        return Support(False, f"state rows are aligned to {problem.state_align} bytes only")
    if c.vec_bits == 256 and not target.wide_loads:
        return Support(False, f"no 256-bit loads on {target.name}")
    check = {"direct": _validate_direct, "register": _validate_register, "bulk": _validate_bulk}.get(c.design)
    if check is None:
        return Support(False, f"unknown design {c.design!r}")
    support = check(problem, c, target)
    return support if not support else _resident(problem, c, target)


def _validate_register(problem: Mamba2Problem, config: Mamba2Config, target: Target) -> Support:
    g, c = problem.geometry, config
    if takes_products(problem):
        return Support(False, "the direct and the bulk design serve it: the bits must not change with the batch")
    if g.dstate % (LANES * state_vector(problem, c)):
        return Support(False, f"N={g.dstate} is no multiple of {LANES} loads of {c.vec_bits} bits")
    if c.tile_p % (c.threads // LANES) or c.threads < c.tile_p:
        return Support(False, f"{c.threads} threads do not split {c.tile_p} rows")
    if c.tile_p * g.dstate > MAX_STATE_PER_THREAD * c.threads:
        return Support(False, f"{c.threads} threads are too few for a tile of {c.tile_p} rows")
    return SUPPORTED


def takes_products(problem: Mamba2Problem) -> Support:
    """Whether the tensor cores take the problem's inputs and shape."""
    g = problem.geometry
    if problem.act_dtype != torch.bfloat16:
        return Support(False, f"tensor-core products take bf16 inputs, not {problem.act_dtype}")
    if g.headdim % 16 or g.dstate % 64:
        return Support(False, f"P={g.headdim} is no multiple of 16 or N={g.dstate} none of 64")
    return SUPPORTED


def _validate_direct(problem: Mamba2Problem, config: Mamba2Config, target: Target) -> Support:
    c = config
    if not takes_products(problem):
        return takes_products(problem)
    if c.tile_p % 16 or c.threads != 2 * c.tile_p:
        return Support(False, f"the {c.design} design takes tile_p in steps of 16 with {2 * c.tile_p} threads")
    return SUPPORTED


def _validate_bulk(problem: Mamba2Problem, config: Mamba2Config, target: Target) -> Support:
    c = config
    support = _validate_direct(problem, config, target)
    if not support:
        return support
    if c.vec_bits != 128:
        return Support(False, "the bulk design loads no state by itself: vec_bits is 128")
    if problem.buffer_len % 4 or problem.dt_align < 16:
        return Support(False, "bulk copies need dt_cache rows of a multiple of 16 bytes")
    if not 1 <= c.stages <= 16:
        return Support(False, f"stages={c.stages} is not in 1..16")
    return SUPPORTED


def _resident(problem: Mamba2Problem, config: Mamba2Config, target: Target) -> Support:
    """Whether ``min_ctas`` CTAs fit a multiprocessor."""
    smem = smem_bytes(problem, config)
    if smem > SMEM_PER_CTA or config.min_ctas * (smem + 1024) > target.smem_per_sm:
        return Support(False, f"{config.min_ctas} CTAs of {smem} bytes of shared memory do not fit")
    warps = config.threads // 32 + (2 if config.design == "bulk" else 0)
    # Each of the four schedulers holds a quarter of the registers and its share of the warps.
    registers = REGISTERS_PER_SM // 4 // (32 * -(-config.min_ctas * warps // 4))
    needed = _registers(problem, config)
    if config.min_ctas * warps > 64 or registers < needed:
        return Support(False, f"{config.min_ctas} CTAs leave {registers} of {needed} registers a thread")
    return SUPPORTED


def _registers(problem: Mamba2Problem, config: Mamba2Config) -> int:
    """Registers a thread needs to stay clear of spills, as seen in the compiled kernels."""
    if config.design == "direct":
        return 255
    if config.design == "bulk":
        return 112 if problem.philox_rounds else 96
    passes = -(-problem.buffer_len * LANES // config.threads)
    per_pass = problem.geometry.dstate // LANES * problem.act_dtype.itemsize // 2
    return 144 + (passes - 1) * per_pass + (64 if problem.philox_rounds else 0)


def default_config(problem: Mamba2Problem, batch: int, target: Target) -> Mamba2Config | None:
    """The first valid choice in the order measured as best on an H200; None where none is valid.

    Measured on 64x64x128 in 8 groups, L = 16, cold L2 (benchmarks/results). The direct design
    wins while all heads are resident at once and latency rules; above, the bulk design with some
    125 KB in flight per multiprocessor: more stages only lengthen the tail, and more CTAs beat more
    stages. evict_first on the state gains up to batch 128 and costs 1 to 2% beyond. Dependent launch
    gains 0.5 to 0.9 us in the bulk design and nothing in the others.
    """
    for config in ranked(problem, batch, target):
        if validate(problem, config, target):
            return config
    return None


def ranked(problem: Mamba2Problem, batch: int, target: Target) -> list[Mamba2Config]:
    """Sensible choices, valid or not, the one that should be fastest first."""
    g, widths = problem.geometry, (256, 128) if target.wide_loads else (128,)
    if not takes_products(problem):
        tile_p, threads = _register_tile(problem)
        return [Mamba2Config("register", tile_p, threads, bits, min_ctas=ctas) for bits in widths for ctas in (3, 2, 1)]
    tile_p = _largest_tile(g.headdim, 128)
    direct = [Mamba2Config("direct", tile_p, 2 * tile_p, bits) for bits in widths]
    tile_p = _largest_tile(g.headdim, max(16, MAX_TILE // g.dstate))
    items = batch * g.nheads * (g.headdim // tile_p)
    plans = ((2, 2), (2, 1), (1, 2), (1, 1)) if problem.state_dtype == torch.float32 else \
        ((3, 2), (2, 3), (2, 2), (1, 2), (1, 1))
    bulk = [Mamba2Config("bulk", tile_p, 2 * tile_p, min_ctas=ctas, stages=stages,
                         evict_first=items <= 128 * 64, pdl=True) for ctas, stages in plans]
    return direct + bulk if items <= 8 * 64 else bulk + direct


def _largest_tile(headdim: int, most: int) -> int:
    """The largest multiple of 16 rows, at most ``most``, that divides a head of a multiple of 16."""
    return max(t for t in range(16, min(headdim, most) + 1, 16) if headdim % t == 0)


def _register_tile(problem: Mamba2Problem) -> tuple[int, int]:
    """(tile_p, threads): the largest tile of up to 80x128 that leaves a thread 64 state elements.

    Four rows a thread measured best at N = 128 (two threads per row of P); fewer where N is larger.
    """
    g = problem.geometry
    for tile_p in range(min(g.headdim, 80), LANES - 1, -LANES):
        if g.headdim % tile_p == 0 and tile_p * g.dstate <= MAX_TILE:
            for rows in (4, 2, 1, 8):
                threads = LANES * tile_p // rows
                if tile_p % rows == 0 and threads % 32 == 0 and threads >= tile_p and threads <= 256 \
                        and rows * g.dstate // LANES <= MAX_STATE_PER_THREAD:
                    return tile_p, threads
    return g.headdim, 2 * g.headdim  # no valid split; ``validate`` says why
