"""Static choices of the Gated DeltaNet kernels, their validity, and the measured heuristic. Imports no DSL.

Two designs:

* ``staged``  persistent CTAs; a producer warp keeps whole items in flight in shared memory.
* ``register``  one CTA per (row, value head, tile of V); the checkpoint goes straight into registers. For small
  batches, where latency rules.

A warp's arithmetic is the same in both and does not depend on how rows are dealt to warps, so that no choice
changes a bit, and the batch may decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.kernels.targets import REGISTERS_PER_SM, SMEM_PER_CTA, Target
from replayssm_cute.launch_config import LaunchConfig
from replayssm_cute.types import SUPPORTED, Support

HEAD_SIZE = 128          # K and V that the kernels take
RECORDS = 32             # ring rows at most: a lane holds one
FOLDED = 2               # state rows that a lane folds at a time in the exact fold
REGISTER_ITEMS = 128     # heads of a batch up to which the register design is faster, but for exact folds


@dataclass(frozen=True)
class GdnConfig(LaunchConfig):
    """Launch choices of one compiled kernel.

    Attributes:
        design: ``"register"`` or ``"staged"``.
        rows: rows of V that a lane owns, 2 or 4; a warp owns 8 times as many.
        tile_v: rows of V of a CTA or work item; divides V.
        min_ctas: CTAs the compiler must let a multiprocessor hold; the staged design launches exactly these.
        stages: items in flight per CTA (staged design).
        evict_first: the checkpoint's bulk copies carry the evict_first policy in L2 (staged design).
        pdl: programmatic dependent launch: set up while the launch before drains.
    """

    design: str
    rows: int
    tile_v: int
    min_ctas: int = 1
    stages: int = 0
    evict_first: bool = False
    pdl: bool = False

    @property
    def warps(self) -> int:
        """Compute warps of a CTA."""
        return self.tile_v // (8 * self.rows)


def max_records(problem: GdnProblem) -> int:
    """Most valid ring rows of a step: a verify step leaves room for its window, a decode step for its token."""
    return problem.buffer_len - (problem.tokens or 1)


def extra_warps(problem: GdnProblem, config: GdnConfig) -> int:
    """Warps of the staged design besides those that compute: a producer, and one that prepares exact folds."""
    return 0 if config.design == "register" else 2 if problem.exact_fold else 1


def smem_bytes(problem: GdnProblem, config: GdnConfig) -> int:
    """Shared memory of a CTA, alignment gaps included (an upper estimate)."""
    records, tokens = max_records(problem), problem.tokens or 1
    fold = records * (4 * HEAD_SIZE + 8) if problem.exact_fold else 0
    if config.design == "register":
        return fold + 2 * HEAD_SIZE * records * (fold > 0) + 512
    state = config.tile_v * HEAD_SIZE * problem.state_dtype.itemsize
    vectors = 2 * HEAD_SIZE * (problem.ring_dtype.itemsize * records + 2 * tokens) + 2 * config.tile_v * tokens
    return config.stages * (state + vectors + fold + 8 * tokens + 512) + 1024 + 4096 * (fold > 0)


def takes(problem: GdnProblem) -> Support:
    """Whether the kernels take the problem's shapes, dtypes and layout, in any config."""
    g, p = problem.geometry, problem
    if (g.head_k_dim, g.head_v_dim) != (HEAD_SIZE, HEAD_SIZE):
        return Support(False, f"the kernels take K = V = {HEAD_SIZE}, not {g.head_k_dim} and {g.head_v_dim}")
    if p.act_dtype != torch.bfloat16:
        return Support(False, f"the kernels take bf16 inputs, not {p.act_dtype}")
    if min(p.state_align, p.row_align) < 16:
        return Support(False, f"state rows are aligned to {p.state_align} bytes and input or ring rows to "
                              f"{p.row_align}, not 16")
    if not 2 <= p.buffer_len <= RECORDS:
        return Support(False, f"L={p.buffer_len} is not in 2..{RECORDS}")
    return SUPPORTED


def validate(problem: GdnProblem, config: GdnConfig, target: Target) -> Support:
    """Whether this kernel can be built for the problem: the one predicate of heuristic and tuner."""
    c, support = config, takes(problem)
    if not support:
        return support
    if c.design not in ("register", "staged") or c.rows not in (2, 4):
        return Support(False, f"unknown design {c.design!r}, or rows={c.rows} is neither 2 nor 4")
    if HEAD_SIZE % c.tile_v or c.tile_v % (8 * c.rows):
        return Support(False, f"tile_v={c.tile_v} does not split V={HEAD_SIZE} into warps of {8 * c.rows} rows")
    if (c.design == "staged") != (1 <= c.stages <= 16) or (c.evict_first and c.design != "staged"):
        return Support(False, f"stages={c.stages} and evict_first={c.evict_first} do not fit the {c.design} design")
    smem = smem_bytes(problem, c)
    if smem > SMEM_PER_CTA or c.min_ctas * (smem + 1024) > target.smem_per_sm:
        return Support(False, f"{c.min_ctas} CTAs of {smem} bytes of shared memory do not fit")
    warps = c.warps + extra_warps(problem, c)
    registers = REGISTERS_PER_SM // (64 * -(-warps // 2) * c.min_ctas)     # the compiler counts warps in pairs
    if registers < (96 if c.rows == 2 else 160):
        return Support(False, f"{c.min_ctas} CTAs leave {registers} registers a thread, too few for rows={c.rows}")
    return SUPPORTED


def heuristic(problem: GdnProblem, batch: int, target: Target) -> GdnConfig | None:
    """The first valid choice in the order measured as best on an H200 (docs/gdn.md); None where none is valid."""
    return next((c for c in ranked(problem, batch, target) if validate(problem, c, target)), None)


def ranked(problem: GdnProblem, batch: int, target: Target) -> list[GdnConfig]:
    """Sensible choices, valid or not, the one that should be fastest first."""
    p, items = problem, batch * problem.geometry.num_v_heads
    wide, small = p.state_dtype == torch.float32, items <= (512 if p.tokens else 2048)
    splits = [(2, 64, 2), (2, 64, 1)] if p.exact_fold else [(2, 32, 4), (2, 32, 2), (2, 32, 1)]
    register = [GdnConfig("register", rows, tile_v, ctas, pdl=True) for rows, tile_v, ctas in splits]
    few = REGISTER_ITEMS
    if p.tokens > 8:
        plans = [(2, 64, 1, 3)]        # registers for four tiles of tokens
    elif p.exact_fold:
        few = 32 if wide else 0
        plans = [_exact_plan(wide, items)]
    elif wide:
        plans = [(4 if p.tokens else 2, 64, 2, 2)]
    else:  # three CTAs would spill with random words, or with two tiles of tokens
        plans = [(2, 64, 2, 3)] if p.philox_rounds or p.tokens > 4 else [(2, 64, 3, 2)]
    plans += [(2, 64, 2, 2), (2, 64, 1, 2), (2, 64, 1, 1)]
    staged = [GdnConfig("staged", rows, tile_v, ctas, stages, evict_first=small and not p.exact_fold, pdl=True)
              for rows, tile_v, ctas, stages in plans]
    return register + staged if items <= few else staged + register


def _exact_plan(wide: bool, items: int) -> tuple[int, int, int, int]:
    """(rows, tile_v, CTAs, stages) of the staged design where ``items`` heads of a batch may fold exactly."""
    if wide:
        return (2, 64, 1, 4) if items <= 512 else (2, 64, 2, 2)
    if items <= 128:
        return (2, 64, 1, 2)
    return (2, 64, 2, 2) if items <= 512 else (4, 128, 2, 2)
