"""Static choices of the Mamba2 replay kernels, their validity, and the measured heuristic.

Two designs:

* ``bulk``  persistent CTAs; a producer warp keeps bulk copies in flight, the other warps compute
  out of shared memory with tensor-core products.
* ``register``  one CTA per (row, head, tile); the state goes straight to registers, products in FFMA.
  For inputs, shapes and rings that the bulk design does not take.

Both work on a tile of ``tile_p`` rows of a head's state with ``threads`` compute threads. The problem
alone decides between them: they sum in different orders, and a row of a batch must have the same bits
whatever stands beside it. Within the bulk design no choice changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm_cute.kernels.targets import REGISTERS_PER_SM, SMEM_PER_CTA, SORTED_ROWS, Target
from replayssm_cute.launch_config import LaunchConfig
from replayssm_cute.rounding import LARGEST_CODE
from replayssm_cute.types import SUPPORTED, Mamba2Problem, Support

LANES = 8                       # lanes of a group
MAX_STATE_PER_THREAD = 64       # state elements a thread holds; more spill on every target
MAX_TILE = 80 * 128             # state elements of a tile: a stage of 40 KB in fp32


@dataclass(frozen=True)
class Mamba2Config(LaunchConfig):
    """Launch choices of one compiled Mamba2 replay kernel.

    Attributes:
        design: ``"register"`` or ``"bulk"``.
        tile_p: rows of a head's state per work item; divides P.
        threads: compute threads of a CTA; the bulk design adds a producer and a scorer warp.
        vec_bits: width of a state load, 128 or 256 (register design, where the target has it);
            the order of its sums depends on it.
        min_ctas: CTAs the compiler must let a multiprocessor hold; the bulk design launches
            exactly these, because a persistent grid that does not fit runs in two rounds.
        stages: bulk copies of whole items in flight per CTA (bulk design).
        evict_first: the state's bulk copies carry the evict_first policy in L2.
        pdl: programmatic dependent launch: set up while the launch before drains.
        prefetch: bring the first items' states into L2 meanwhile (bulk design, with ``pdl``).
    """

    design: str
    tile_p: int
    threads: int
    vec_bits: int = 128
    min_ctas: int = 1
    stages: int = 0
    evict_first: bool = False
    pdl: bool = False
    prefetch: bool = False


def state_vector(problem: Mamba2Problem, config: Mamba2Config) -> int:
    """State elements of one load."""
    return config.vec_bits // (8 * problem.state_dtype.itemsize)


def smem_bytes(problem: Mamba2Problem, config: Mamba2Config) -> int:
    """Shared memory of a CTA, alignment gaps included (an upper estimate)."""
    g, L, act = problem.geometry, problem.buffer_len, problem.act_dtype.itemsize
    if config.design == "register":
        sums = 4 * config.tile_p * (config.threads // 32 + 1)
        return sums + 4 * (config.tile_p + g.dstate) * L + 256
    entries = -(-L // 16) * 16
    state = config.tile_p * (g.dstate * problem.state_dtype.itemsize + 4)
    window = (g.headdim + g.dstate + 8) * entries * act + 4 * L + g.dstate * act
    scores = 2 * (g.dstate + 32) * 2 + entries * (3 * act + 4)
    order = 8 * SORTED_ROWS if problem.philox_rounds else 0
    return config.stages * (state + window + scores + 96) + order + 4096


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
    check = {"register": _validate_register, "bulk": _validate_bulk}.get(c.design)
    if check is None:
        return Support(False, f"unknown design {c.design!r}")
    support = check(problem, c, target)
    return support if not support else _resident(problem, c, target)


def _validate_register(problem: Mamba2Problem, config: Mamba2Config, target: Target) -> Support:
    c = config
    if takes_bulk(problem):
        return Support(False, "the bulk design serves it, and a row's bits must not change with the batch")
    if problem.state_dtype in LARGEST_CODE:
        return Support(False, f"of an 8-bit checkpoint the bulk design takes only: {takes_bulk(problem).reason}")
    if problem.geometry.dstate % (LANES * state_vector(problem, c)):
        return Support(False, f"N={problem.geometry.dstate} is no multiple of {LANES} loads of {c.vec_bits} bits")
    if c.tile_p % (c.threads // LANES) or c.threads < c.tile_p:
        return Support(False, f"{c.threads} threads do not split {c.tile_p} rows")
    if c.tile_p * problem.geometry.dstate > MAX_STATE_PER_THREAD * c.threads:
        return Support(False, f"{c.threads} threads are too few for a tile of {c.tile_p} rows")
    if c.vec_bits == 256 and not target.wide_loads:
        return Support(False, f"no 256-bit loads on {target.name}")
    return SUPPORTED


def takes_bulk(problem: Mamba2Problem) -> Support:
    """Whether the bulk design takes the problem's inputs, shape and ring; some tile of it always fits."""
    g = problem.geometry
    if problem.act_dtype != torch.bfloat16:
        return Support(False, f"the bulk design takes bf16 inputs, not {problem.act_dtype}")
    if g.headdim % 16 or g.dstate % 64:
        return Support(False, f"P={g.headdim} is no multiple of 16 or N={g.dstate} none of 64")
    if problem.buffer_len % 4 or problem.dt_align < 16:
        return Support(False, "bulk copies need rows of dt_cache and state_scale in multiples of 16 bytes")
    return SUPPORTED


def _validate_bulk(problem: Mamba2Problem, config: Mamba2Config, target: Target) -> Support:
    c = config
    if not takes_bulk(problem):
        return takes_bulk(problem)
    if c.tile_p % 16 or c.threads != 2 * c.tile_p or c.vec_bits != 128:
        return Support(False, f"the bulk design takes tile_p in steps of 16 with {2 * c.tile_p} threads")
    if c.prefetch and not c.pdl:
        return Support(False, "prefetch without pdl has nothing to overlap with")
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
    if config.design == "bulk":
        return 112 if problem.philox_rounds else 96
    passes = -(-problem.buffer_len * LANES // config.threads)
    per_pass = problem.geometry.dstate // LANES * problem.act_dtype.itemsize // 2
    return 144 + (passes - 1) * per_pass + (64 if problem.philox_rounds else 0)


def default_config(problem: Mamba2Problem, batch: int, target: Target) -> Mamba2Config | None:
    """The first valid choice in the order measured as best on an H200; None where none is valid.

    Measured on the rows that are shipped, L = 16, cold L2: some 125 KB in flight per multiprocessor; more
    stages only lengthen the tail, and more CTAs beat more stages; 8-bit checkpoints, whose items are small,
    take four stages (64x64x128, batch 256: 62.7 us against 67.9 with two). evict_first on the state gains up
    to batch 128 and costs 1 to 2% beyond. Dependent launch gains 0.5 to 0.9 us in the bulk design and nothing
    in the other. Prefetching into L2 gains 0.2 to 0.7 us while the items are few, and then one CTA a
    multiprocessor less another 0.5 (it may be that the next launch finds room to set out).
    """
    for config in ranked(problem, batch, target):
        if validate(problem, config, target):
            return config
    return None


def ranked(problem: Mamba2Problem, batch: int, target: Target) -> list[Mamba2Config]:
    """Sensible choices, valid or not, the one that should be fastest first."""
    g = problem.geometry
    if not takes_bulk(problem):
        tile_p, threads = _register_tile(problem)
        return [Mamba2Config("register", tile_p, threads, bits, min_ctas=ctas)
                for bits in ((256, 128) if target.wide_loads else (128,)) for ctas in (3, 2, 1)]
    tile_p = max(t for t in range(16, 129, 16) if g.headdim % t == 0 and (t == 16 or t * g.dstate <= MAX_TILE))
    items = batch * g.nheads * (g.headdim // tile_p)
    width = problem.state_dtype.itemsize
    # Not on Blackwell: unmeasured there, and it would cost two kernels a spill.
    prefetch = items <= (256 if width == 4 else 768) and not target.wide_loads
    plans = {4: [(2, 2), (2, 1), (1, 2), (1, 1)], 2: [(3, 2), (2, 3), (2, 2), (1, 2), (1, 1)],
             1: [(3, 4), (3, 3), (2, 6), (2, 4), (2, 2), (1, 2), (1, 1)]}[width]
    if prefetch and width > 1 and 64 < items <= 512:
        plans.insert(0, (1, 4) if width == 4 else (2, 2))
    return [Mamba2Config("bulk", tile_p, 2 * tile_p, min_ctas=ctas, stages=stages,
                         evict_first=items <= 128 * 64, pdl=True, prefetch=prefetch) for ctas, stages in plans]


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
