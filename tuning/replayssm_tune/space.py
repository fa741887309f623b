"""What is worth timing: candidates of each backend, the most promising first.

All candidates of a backend give a row the same bits: the batch decides which of them serves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fallback_triton import mamba2_config as triton_config
from replayssm_cute.arch import Arch
from replayssm_cute.kernels import mamba2_config as cute_config
from replayssm_cute.kernels.targets import for_capability
from replayssm_cute.types import Mamba2Problem

# (CTAs a multiprocessor, stages) of the bulk design.
PLANS = ((3, 2), (2, 2), (2, 3), (3, 3), (2, 4), (1, 4))


def candidates(backend: str, problem: Mamba2Problem, batch: int, arch: Arch) -> list[dict[str, Any]]:
    """Configs of a backend that are valid for the problem, the heuristic's choice first."""
    return {"cute": _cute, "triton": _triton}[backend](problem, batch, arch)


def _cute(problem: Mamba2Problem, batch: int, arch: Arch) -> list[dict[str, Any]]:
    target = for_capability(arch.capability)
    if target is None:
        return []
    near = []
    for first in cute_config.ranked(problem, batch, target):
        if first.design == "bulk":
            near += [replace(first, tile_p=rows, threads=2 * rows, min_ctas=ctas, stages=stages, evict_first=evict)
                     for rows in (first.tile_p, first.tile_p // 2)
                     for evict in (first.evict_first, not first.evict_first) for ctas, stages in PLANS]
    default = cute_config.default_config(problem, batch, target)
    if default is None:
        return []
    near.insert(0, replace(default, prefetch=not default.prefetch))
    if default.design == "register":  # other widths of a load sum in another order
        near = [c for c in cute_config.ranked(problem, batch, target) if c.vec_bits == default.vec_bits]
    found = [c for c in (default, *near) if cute_config.validate(problem, c, target)]
    return [c.to_dict() for c in dict.fromkeys(found)]


def _triton(problem: Mamba2Problem, batch: int, arch: Arch) -> list[dict[str, Any]]:
    """The heuristic's split with other register limits; another split would sum in another order."""
    warp = 64 if arch.kind == "hip" else 32
    default = triton_config.default_config(problem, warp)
    near = (replace(default, max_registers=registers) for registers in (0, 168, 128, 96))
    return [c.to_dict() for c in dict.fromkeys((default, *near)) if triton_config.validate(problem, c, warp)]
