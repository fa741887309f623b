"""Mamba2 decode: the kernels that are compared, their arguments, and the check of what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.kernel import OURS, Bound, Kernel
from replayssm_cute.layout import mamba2_step_bytes
from replayssm_cute.reference.mamba2 import recurrent_step
from replayssm_tune.workload import Workload

OP = "mamba2_decode"
Function = Callable[..., Any]


def replay(w: Workload, function: Function, **options: Any) -> Bound:
    """A function with vLLM's signature of the replay step, which is also ours."""
    i, g = w.inputs, w.geometry
    scratch = torch.empty((w.batch, g.ngroups, w.buffer_len), device=w.indices.device)
    options |= _vllm_rounding(w)

    def step(phase: int, layer: int) -> Tensor:
        p, (write_pos, is_flush) = w.pools[layer], w.phases[phase]
        function(p.state, i["x"], i["dt"], i["A"], i["B"], i["C"], D=i["D"], dt_bias=i["dt_bias"], dt_softplus=True,
                 x_cache=p.x_cache, dt_cache=p.dt_cache, B_cache=p.B_cache, bc_pre=scratch, write_pos=write_pos,
                 is_flush=is_flush, max_cache_len=w.buffer_len, state_batch_indices=w.indices, out=i["out"], **options)
        return i["out"]

    return Bound(w.buffer_len, len(w.pools), step)


def vllm_step(w: Workload, function: Function) -> Bound:
    """vLLM's kernel of the plain recurrence."""
    return _per_step(w, function, **_vllm_rounding(w))


def flashinfer_step(w: Workload, function: Function) -> Bound:
    """FlashInfer's kernel of the plain recurrence."""
    return _per_step(w, function, **_flashinfer_rounding(w))


def _per_step(w: Workload, function: Function, **options: Any) -> Bound:
    i = w.inputs

    def step(phase: int, layer: int) -> Tensor:
        function(w.pools[layer].state, i["x"], i["dt"], i["A"], i["B"], i["C"], i["D"], dt_bias=i["dt_bias"],
                 dt_softplus=True, state_batch_indices=w.indices, out=i["out"], **options)
        return i["out"]

    return Bound(w.buffer_len, len(w.pools), step)


def _vllm_rounding(w: Workload) -> dict[str, Any]:
    return {"enable_stochastic_rounding": True, "cache_philox_rounds": w.philox_rounds} if w.philox_rounds else {}


def _flashinfer_rounding(w: Workload) -> dict[str, Any]:
    if not w.philox_rounds:
        return {}
    return {"rand_seed": torch.tensor([w.seed], device=w.indices.device), "philox_rounds": w.philox_rounds}


def flashinfer_replay(w: Workload, function: Function, allocate: Function, algorithm: str) -> Bound:
    """FlashInfer's ``checkpointing_ssu`` for windows of one token.

    Its ring has a row more than ours, for a flush leaves the new token in it: rows hold 1 to L old tokens where ours
    hold 0 to L - 1, and flush once in L steps as ours do. Cursors belong to slots, and the ring turns by L at a flush.
    """
    rows, b, g, device = w.buffer_len + 1, w.batch, w.geometry, w.indices.device
    slots, at = len(w.pools[0].state), w.indices.long()

    def longer(ring: Tensor) -> Tensor:
        return torch.cat((ring, torch.zeros_like(ring[:, :, :1])), 2)

    def of_slots(values: Tensor) -> Tensor:
        return torch.zeros(slots, dtype=torch.int32, device=device).index_copy_(0, at, values.int())

    start, cursors = torch.zeros(b, dtype=torch.int32, device=device), []
    for write_pos, is_flush in w.phases:
        cursors.append((of_slots(start), of_slots(write_pos + 1)))
        start = torch.where(is_flush != 0, (start + w.buffer_len) % rows, start)
    rings = [(longer(p.x_cache), longer(p.B_cache), longer(p.dt_cache)) for p in w.pools]
    scratch = dict(zip(("cb_scaled", "cumAdt_vec", "cb_old"),
                       allocate(b, g.nheads, 1, w.buffer_len, w.inputs["x"].dtype, device), strict=True))
    i = {name: w.inputs[name][:, None] for name in ("x", "dt", "B", "C", "out")}
    A, D, dt_bias = (w.inputs[name] for name in ("A", "D", "dt_bias"))
    rounding = _flashinfer_rounding(w)

    def step(phase: int, layer: int) -> Tensor:
        function(w.pools[layer].state, *rings[layer], *cursors[phase], i["x"], i["dt"], A, i["B"], i["C"], i["out"],
                 D=D, dt_bias=dt_bias, dt_softplus=True, state_batch_indices=w.indices, algorithm=algorithm,
                 **scratch, **rounding)
        return w.inputs["out"]

    return Bound(w.buffer_len, len(w.pools), step)


_VLLM = "vllm.model_executor.layers.mamba.ops"
_REPLAY = "selective_state_update_replayssm_output_only"
_CHECKPOINTING = ("flashinfer.mamba.checkpointing_ssu:checkpointing_ssu",
                  "flashinfer.mamba.checkpointing_ssu:allocate_checkpointing_ssu_scratch")

KERNELS = (
    Kernel("ours", OURS, (f"replayssm_cute.mamba2:{_REPLAY}",), True, replay),
    Kernel("vllm per-step", "vllm", (f"{_VLLM}.mamba_ssm:selective_state_update",), False, vllm_step),
    Kernel("vllm replay", "vllm", (f"{_VLLM}.{_REPLAY}:{_REPLAY}",), True, replay),
    Kernel("flashinfer per-step", "flashinfer", ("flashinfer.mamba.selective_state_update:selective_state_update",),
           False, flashinfer_step),
    Kernel("flashinfer replay", "flashinfer", _CHECKPOINTING, True,
           lambda w, function, allocate: flashinfer_replay(w, function, allocate, "auto")),
    Kernel("flashinfer replay, one kernel", "flashinfer", _CHECKPOINTING, True,
           lambda w, function, allocate: flashinfer_replay(w, function, allocate, "monolith")),
)


def step_bytes(w: Workload, is_replay: bool) -> float:
    """Bytes that one step of one layer must move, by replay with the workload's ring or without any."""
    state, x = w.pools[0].state, w.inputs["x"]
    return w.batch * mamba2_step_bytes(w.geometry, w.buffer_len, state.dtype, x.dtype, replay=is_replay)


def error(w: Workload, bind: Callable[[], Bound]) -> float:
    """Relative error of the outputs of one ring cycle against the recurrence in float64, of the worst step.

    It begins with ring rows that change nothing, dt' = 0, so that rows may stand anywhere, and with states as small as
    what a few tokens add; every step has other inputs.
    """
    w.restore()
    for pool in w.pools:
        pool.dt_cache.zero_()
        pool.state.mul_(0.1)
    bound = bind()
    i, gen = w.inputs, torch.Generator(w.indices.device).manual_seed(w.seed + 2)
    state, worst = w.pools[0].state[w.indices.long()].double(), []
    heads = {"A": i["A"][:, 0, 0], "D": i["D"][:, 0], "dt_bias": i["dt_bias"][:, 0]}
    for phase in range(bound.rounds):
        for tensor in (i["x"], i["B"], i["C"], i["dt"][..., 0]):
            tensor.normal_(generator=gen)
        exact, state = recurrent_step(state, i["x"], i["dt"][..., 0], heads["A"], i["B"], i["C"], heads["D"],
                                      heads["dt_bias"])
        worst.append((bound.step(phase, 0).double() - exact).norm() / exact.norm())
    return float(torch.stack(worst).max())  # NaN where any is
