"""Mamba2 decode by replay: the public operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm_cute import dispatch
from replayssm_cute.errors import ArgumentError
from replayssm_cute.rounding import check_rounds, default_seed_state
from replayssm_cute.types import Mamba2Problem
from replayssm_cute.validate import mamba2_problem

# Prepared launches that check their own arguments, by the few properties that tell them apart.
_fast: dict[tuple[Any, ...], dispatch.Launch] = {}
# Prepared launches by everything that was validated.
_checked: dict[tuple[Any, ...], dispatch.Launch] = {}


def selective_state_update_replayssm_output_only(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, dt_bias: Tensor | None = None, z: Tensor | None = None,
    dt_softplus: bool = False, x_cache: Tensor | None = None, dt_cache: Tensor | None = None,
    B_cache: Tensor | None = None, bc_pre: Tensor | None = None, write_pos: Tensor | None = None,
    is_flush: Tensor | None = None, max_cache_len: int = 16,
    state_batch_indices: Tensor | None = None, null_block_id: int = 0,
    out: Tensor | None = None, enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0, *, rand_seed: Tensor | None = None, state_scale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """One decode token per batch row: ``y = S C + D x`` with S kept as checkpoint plus ring.

    For a row with slot s and w = ``write_pos``: rows 0..w-1 of the slot's rings and the current
    token are replayed on top of the checkpoint. Without a flush the current token is appended at
    ring row w and the checkpoint stays; with a flush the folded state replaces the checkpoint
    and nothing is appended (the caller's next cursor is 0). ``y`` always comes from the unrounded
    fp32 state. The signature is that of the function of the same name in vLLM 0.32 and 0.33;
    the keyword-only arguments are ours. Method: ReplaySSM on the SSM recurrence of arXiv:2405.21060.

    Args:
        state: (slots, H, P, N) checkpoints, fp32, fp16 or bf16; or, with ``state_scale``, codes in
            int8 or float8_e4m3fn. Caller's; changed in place on a flush. The slot stride may exceed
            H*P*N, inner strides are dense.
        x, z: (batch, H, P), bf16, fp16 or fp32; rows may be padded. With ``z``, y *= silu(z).
        dt: (batch, H, P) view of (batch, H) with stride 0 on the last axis; any float dtype.
        A: (H, P, N) fp32 view of (H,) with two zero strides; negative.
        B, C: (batch, G, N) in the dtype of ``x``; G divides H; rows may be padded.
        D: (H, P), stride 0 or 1 on the last axis; optional.
        dt_bias: (H, P) view of (H,); optional.
        dt_softplus: dt' = softplus(dt + dt_bias) up to 20, the identity above.
        x_cache: (slots, H, L, P) ring, any float dtype. Caller's; row w is written in place.
        dt_cache: (slots, H, L) fp32 ring of dt' after bias and softplus. Same.
        B_cache: (slots, G, L, N) ring in the dtype of ``x_cache``. Same.
        bc_pre: accepted for two-kernel designs, ignored.
        write_pos: (>= batch,) int32, 0 <= w < L. Ring rows >= w may hold anything.
        is_flush: (>= batch,) int8 or bool, independent of ``write_pos``.
        max_cache_len: L, 1 to 64.
        state_batch_indices: (>= batch,) or (>= batch, k) int32 or int64; column 0 is the slot.
            A row whose slot is ``null_block_id`` or negative is padding: it changes nothing, not
            even ``out``. Two live rows of a batch never name the same slot.
        out: (batch, H, P) in the dtype of ``x``. Caller's; written.
        enable_stochastic_rounding: round the stored checkpoint stochastically (``rounding``); any
            type but fp32.
        cache_philox_rounds: rounds of its random generator, 1 to 16; 0 means 10.
        rand_seed: (8,) int64 of ``rounding.seed_state``. Caller's; every launch, also of a captured
            graph, advances its step. None takes a state of this package, one a device.
        state_scale: (slots, H, P) fp32, one scale a row of an 8-bit checkpoint: value = code * scale.
            Caller's; changed in place with the state. The slot stride may be padded. None otherwise.
        backend: ``"cute"``, ``"triton"`` or ``"torch"`` to insist on one; None chooses.

    Returns:
        ``out``.

    Raises:
        ArgumentError: an argument breaks the contract; nothing was changed.
        UnsupportedError: the named backend cannot serve this problem, or none can; or an fp32
            checkpoint is to be rounded stochastically.
    """
    rounds = 0
    if enable_stochastic_rounding:
        rounds = check_rounds(cache_philox_rounds)
        if rand_seed is None and isinstance(state, Tensor):
            rand_seed = default_seed_state(state.device)
    args: tuple[Any, ...] = (
        state, x, dt, A, B, C, D, dt_bias, z, x_cache, dt_cache, B_cache, write_pos, is_flush,
        state_batch_indices, null_block_id, out, rand_seed if rounds else None)
    if state_scale is not None:
        args += (state_scale,)
    try:
        # The launch checks all else. Whatever a tensor is asked costs 0.1 us, its shape 0.2, len() more than all.
        key = (state.device, state.dtype, state.shape, x.dtype, x.numel(), B.numel(), D is None, dt_bias is None,
               z is None, dt_softplus, write_pos.numel(), is_flush.numel(), max_cache_len,  # type: ignore[union-attr]
               state_batch_indices.shape, rounds, state_scale is None, backend)  # type: ignore[union-attr]
        launch = _fast.get(key)
    except (AttributeError, TypeError):
        launch = None  # something is not a tensor: the boundary says what
    if launch is not None:
        try:
            launch.call(*args)
            dispatch.served[launch.counter] += 1
            return out  # type: ignore[return-value]
        except (TypeError, ValueError):
            pass  # other strides, alignment or dtypes than this launch was compiled for
    launch = _resolve(args, dt_softplus, max_cache_len, rounds, x.shape[0] if isinstance(x, Tensor) else 0, backend)
    if launch is not None:
        dispatch.served[launch.counter] += 1
        if launch.self_checking:
            _fast[key] = launch
    return out  # type: ignore[return-value]


def _resolve(args: tuple[Any, ...], dt_softplus: bool, max_cache_len: int, rounds: int, batch: int,
             backend: str | None) -> dispatch.Launch | None:
    """Validate, choose and run; launches are kept by the validated signature."""
    signature = (dt_softplus, max_cache_len, rounds, backend, args[15], *(
        (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 32) if isinstance(t, Tensor) else t
        for t in args[:15] + args[16:]))
    launch = _checked.get(signature)
    if launch is not None:
        launch.call(*args)
        return launch
    problem = mamba2_problem(*args, dt_softplus=dt_softplus, max_cache_len=max_cache_len, philox_rounds=rounds)
    if batch == 0:
        return None
    launch = dispatch.run(problem, batch, args[0].device, backend, args)
    _checked[signature] = launch
    return launch


def warmup_mamba2(problem: Mamba2Problem, batches: list[int],
                  device: torch.device | str | None = None, backend: str | None = None) -> list[str]:
    """Compile every kernel that these batch sizes will use, so that no later step compiles.

    Args:
        problem: what will be posed; ``replayssm_cute.validate.mamba2_problem`` derives it from
            tensors.
        batches: the batch sizes to come, for example those a graph is captured for.
        device: default the current GPU.
        backend: as in the step.

    Returns:
        The backend that will serve each batch.
    """
    if not batches:
        raise ArgumentError("batches", "at least one batch size", batches)
    from replayssm_cute import arch
    where = torch.device(device) if device is not None else arch.default_device()
    return [dispatch.prepare(problem, b, where, backend).backend for b in batches]
