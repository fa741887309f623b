"""The operations that several packages have: who is compared, on what, and by which bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.peers import gdn, mamba2
from benchmarks.peers.kernel import OURS, Bound, Kernel
from replayssm_tune.gdn_workload import GdnWorkload, make_gdn_workload
from replayssm_tune.subject import parse_gdn, parse_geometry
from replayssm_tune.workload import make_workload

WINDOW = 4
QWEN3_NEXT = "32/16x128x128"


@dataclass(frozen=True)
class Operation:
    """What is compared.

    Attributes:
        name: as the dispatch counts it.
        layers: Mamba2 as HxPxN/G, Gated DeltaNet as HV/HkxVxK.
        kernels: ours first.
        make: (layer, *, batch, dtype of the state, philox_rounds, device, cold_bytes) -> workload.
        step_bytes: (workload, by replay) -> bytes that a step must move.
        error: (workload, () -> bound kernel) -> worst relative error of its outputs over a cycle.
    """

    name: str
    layers: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    make: Callable[..., Any]
    step_bytes: Callable[[Any, bool], float]
    error: Callable[[Any, Callable[[], Bound]], float]

    def served_by(self, backends: list[str]) -> Operation:
        """The same with one kernel of ours for each backend; "auto" is the dispatcher's choice."""
        ours, *others = self.kernels
        named = [ours if b == "auto" else replace(ours, name=f"ours, {b}", bind=functools.partial(ours.bind, backend=b))
                 for b in backends]
        assert ours.package == OURS
        return replace(self, kernels=(*named, *others))


def _mamba2(layer: str, *, batch: int, dtype: torch.dtype, **rest: Any) -> Any:
    return make_workload(parse_geometry(layer), batch, dtype, **rest)


def _gdn(tokens: int, layer: str, *, batch: int, dtype: torch.dtype, philox_rounds: int, **where: Any) -> Any:
    if philox_rounds:
        raise ValueError("stochastic rounding is compared for Mamba2 only")
    return make_gdn_workload(parse_gdn(layer), batch, dtype, tokens=tokens, **where)


def _gdn_bytes(w: GdnWorkload, is_replay: bool) -> float:
    """Without the raw rings of our exact fold, which come on top."""
    return w.step_bytes(is_replay)


OPERATIONS = {op.name: op for op in (
    Operation(mamba2.OP, ("64x64x128/8", "128x64x128/8"), mamba2.KERNELS, _mamba2, mamba2.step_bytes, mamba2.error),
    Operation(gdn.DECODE, (QWEN3_NEXT,), gdn.DECODE_KERNELS, functools.partial(_gdn, 0), _gdn_bytes, gdn.error),
    Operation(gdn.VERIFY, (QWEN3_NEXT,), gdn.VERIFY_KERNELS, functools.partial(_gdn, WINDOW), _gdn_bytes, gdn.error))}
