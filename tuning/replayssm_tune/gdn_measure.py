"""Correctness of a Gated DeltaNet candidate on whole staggered cycles, and the per-step baseline."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replayssm_cute.gdn_layout import RAW_NAMES, RING_NAMES
from replayssm_cute.reference import gdn, gdn_spec
from replayssm_tune.gdn_workload import GdnWorkload
from replayssm_tune.timing import time_graph

DECODE_CHANGES, VERIFY_CHANGES = (0, 8, 9, 10, 15), (0, *range(8, 15))  # of the canonical arguments: pool and out


def replay_error(w: GdnWorkload, launch: Callable[..., object]) -> float:
    """Worst relative error of outputs, new records and flushed checkpoints against the float64 reference.

    Looks at the first, a middle and the last phase of a cycle, each on restored pools, so that every candidate is asked
    the same. NaN or infinite where a result is, or where a checkpoint changed that no row flushed.
    """
    errors = []
    for phase in sorted({0, len(w.phases) // 2, len(w.phases) - 1}):
        w.restore()
        args = list(w.arguments(phase, 0))
        changes = VERIFY_CHANGES if w.tokens else DECODE_CHANGES
        before = [a.clone() if i in changes and a is not None else a for i, a in enumerate(args)]
        exact = [a.clone() if i in changes and a is not None else a for i, a in enumerate(args)]
        _reference(w)(*exact)
        launch(*args)
        flushed = _flushed(w, phase)
        kept = torch.ones(len(args[0]), dtype=torch.bool, device=flushed.device).index_fill(0, flushed, False)
        out = changes[-1]
        errors += [_relative(args[out], exact[out]), _relative(args[0][flushed], exact[0][flushed]),
                   0.0 if torch.equal(args[0][kept], exact[0][kept]) else math.inf]
        errors += [_relative(args[i], exact[i], before[i]) for i in changes[1:-1] if args[i] is not None]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _reference(w: GdnWorkload) -> Callable[..., object]:
    """The step in float64 on the canonical arguments."""
    scale = w.geometry.head_k_dim ** -0.5
    if not w.tokens:
        return functools.partial(gdn.replay_decode, scale=scale, dtype=torch.float64)

    def verify(*args: Any) -> object:
        rings = dict(zip(RING_NAMES + RAW_NAMES, args[8:14], strict=True))
        values: tuple[Any, ...] = (*args[:8], rings, *args[14:])
        return gdn_spec.verify(*values, scale=scale, dtype=torch.float64)
    return verify


def _flushed(w: GdnWorkload, phase: int) -> Tensor:
    """Slots of the rows that flush."""
    slots, cursors = w.inputs["slots"].long(), w.phases[phase]
    flush = cursors["is_flush"][slots] != 0 if w.tokens else cursors["write_pos"] == w.buffer_len - 1
    return slots[flush]


def _relative(got: Tensor, want: Tensor, before: Tensor | None = None) -> float:
    """Relative to what is wanted, or to what it changes of ``before``; 0 where neither has anything."""
    error, scale = (got.double() - want.double()).norm(), (want.double() - (0 if before is None else before)).norm()
    return float(error / scale) if float(scale) or float(error) else 0.0


def time_per_step(w: GdnWorkload) -> float | None:
    """Microseconds of the recurrence with the state stored at every token, on the same inputs; None for windows.

    A window would need a state for each of its tokens, which a kernel of one token does not keep.
    """
    if w.tokens:
        return None
    from fallback_triton.gdn_step import recurrent_step
    i = w.inputs

    def step() -> None:
        for state in w.pool.state:
            recurrent_step(state, i["q"], i["k"], i["v"], i["a"], i["b"], i["A_log"], i["dt_bias"], i["slots"], -1,
                           i["out"], scale=w.geometry.head_k_dim ** -0.5)

    return time_graph(step, len(w.pool.state))["us"]
