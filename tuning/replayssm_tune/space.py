"""What is worth timing: candidates of each backend, the most promising first.

All candidates of a backend give a row the same bits: the batch decides which of them serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fallback_triton import gdn_config as gdn_triton_config
from fallback_triton import mamba2_config as triton_config
from replayssm_cute.arch import Arch
from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.kernels import gdn_config as gdn_cute_config
from replayssm_cute.kernels import mamba2_config as cute_config
from replayssm_cute.kernels.gdn_config import GdnConfig
from replayssm_cute.kernels.targets import REGISTERS_PER_SM, for_capability
from replayssm_cute.types import Mamba2Problem

# (CTAs a multiprocessor, stages) of the bulk design.
PLANS = ((3, 2), (2, 2), (2, 3), (3, 3), (2, 4), (1, 4))

# Gated DeltaNet: (rows of V a lane, tile of V), and (CTAs a multiprocessor, stages) of the staged design.
GDN_TILES = ((2, 64), (4, 64), (4, 128), (2, 32))
GDN_PLANS = ((2, 2), (2, 3), (3, 2), (1, 3), (1, 2), (1, 4))
GDN_CTAS = (4, 2, 1)
REGISTERS = (0, 168, 128, 96)   # limits a thread of the Triton kernels


def candidates(backend: str, problem: Mamba2Problem | GdnProblem, batch: int, arch: Arch) -> list[dict[str, Any]]:
    """Configs of a backend that are valid for the problem, the heuristic's choice first."""
    if isinstance(problem, GdnProblem):
        return {"cute": _gdn_cute, "triton": _gdn_triton}[backend](problem, batch, arch)
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
    near = (replace(default, max_registers=registers) for registers in REGISTERS)
    return [c.to_dict() for c in dict.fromkeys((default, *near)) if triton_config.validate(problem, c, warp)]


def _gdn_cute(problem: GdnProblem, batch: int, arch: Arch) -> list[dict[str, Any]]:
    """Tiles, CTAs and stages of the heuristic's design, and what the heuristic has of the other."""
    target = for_capability(arch.capability)
    default = None if target is None else gdn_cute_config.heuristic(problem, batch, target)
    if target is None or default is None:
        return []
    ranked = gdn_cute_config.ranked(problem, batch, target)
    own = [c for c in ranked if c.design == default.design]
    near: Iterable[GdnConfig] = (replace(default, rows=rows, tile_v=tile, min_ctas=ctas)
                                 for rows, tile in GDN_TILES for ctas in GDN_CTAS)
    if default.design == "staged":
        turned = replace(default, evict_first=not default.evict_first)
        plans = [replace(c, min_ctas=ctas, stages=stages) for c in (default, turned) for ctas, stages in GDN_PLANS]
        near = (turned, *plans, *(replace(default, rows=rows, tile_v=tile, min_ctas=ctas, stages=stages)
                                  for rows, tile in GDN_TILES for ctas, stages in GDN_PLANS))
    found: dict[GdnConfig, GdnConfig] = {}
    for config in (default, *own, *near, *ranked):
        if gdn_cute_config.validate(problem, config, target):
            found.setdefault(_code(config), config)
    return [c.to_dict() for c in found.values()]


def _code(config: GdnConfig) -> GdnConfig:
    """What the compiler sees: in the register design CTAs only limit the registers, and no thread has more than 255."""
    if config.design != "register":
        return config
    limit = REGISTERS_PER_SM // (64 * -(-config.warps // 2) * config.min_ctas)     # the compiler counts warps in pairs
    return replace(config, min_ctas=-min(limit, 255))


def _gdn_triton(problem: GdnProblem, batch: int, arch: Arch) -> list[dict[str, Any]]:
    """As ``_triton``."""
    warp = 64 if arch.kind == "hip" else 32
    default = gdn_triton_config.default_config(problem, warp)
    near = (replace(default, max_registers=registers) for registers in REGISTERS)
    return [c.to_dict() for c in dict.fromkeys((default, *near)) if gdn_triton_config.validate(problem, c, warp)]
