"""The PyTorch reference of Gated DeltaNet as a backend: any device, any shape the contract allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from replayssm_cute.arch import Arch
from replayssm_cute.gdn_dispatch import Problem, TunedPlan
from replayssm_cute.gdn_layout import RAW_NAMES, RING_NAMES
from replayssm_cute.gdn_types import GdnFoldProblem, GdnProblem
from replayssm_cute.reference import gdn, gdn_spec
from replayssm_cute.types import SUPPORTED, Support


def supports(problem: Problem, arch: Arch) -> Support:
    return SUPPORTED


def prepare(problem: Problem, arch: Arch, tuned: TunedPlan = ()) -> Callable[..., object]:
    if isinstance(problem, GdnFoldProblem):
        return _fold(problem)
    return _verify(problem) if problem.tokens else _decode(problem)


def _decode(problem: GdnProblem) -> Callable[..., object]:
    def decode(*args: Any) -> object:
        return gdn.replay_decode(*args, scale=problem.scale, l2norm=problem.l2norm,
                                 philox_rounds=problem.philox_rounds)
    return decode


def _verify(problem: GdnProblem) -> Callable[..., object]:
    def verify(*args: Any) -> object:
        rings = dict(zip(RING_NAMES + RAW_NAMES, args[8:14], strict=True))
        values: tuple[Any, ...] = (*args[:8], rings, *args[14:])
        return gdn_spec.verify(*values, scale=problem.scale, l2norm=problem.l2norm, launch_mode=problem.launch_mode)
    return verify


def _fold(problem: GdnFoldProblem) -> Callable[..., object]:
    def fold(state: Tensor, *args: Any) -> None:
        rings, (sources, targets, keys, write_pos, cache_base, is_flush, counts, null) = args[:6], args[6:]
        rows = gdn.live_rows(sources, len(keys), null)
        rows = rows[(keys[rows] >= 0) & (keys[rows] != null) & (targets[rows] >= 0) & (targets[rows] != null)]
        if is_flush is not None:
            rows = rows[is_flush[keys[rows].long()] != 0]
        key = keys[rows].long()
        many = write_pos[key].long() if counts is None else counts[rows].long()
        for layer in range(len(state)):
            named = {name: None if ring is None else ring[layer]
                     for name, ring in zip(RING_NAMES + RAW_NAMES, rings, strict=True)}
            gdn_spec.fold(state[layer], named, sources[rows].long(), targets[rows].long(), key, many,
                          cache_base[key].long(), l2norm=problem.l2norm)
    return fold
