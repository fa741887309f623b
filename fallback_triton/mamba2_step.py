"""Mamba2 decode one token at a time in Triton: the state is read and stored at every step.

The yardstick of the benchmarks: the plain recurrence, built from the same parts and tuned as the
replay kernel is, so that a difference in time is one of the method and not of the craft.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fallback_triton.device import (
    LOG2E,
    load_dt,
    load_rows,
    load_skip_and_gate,
    load_vector,
    softplus,
    store_out,
    wait_for_predecessor,
)
from fallback_triton.launch import Target, compile_kernel, compile_options, kernel, row_alignment, stride
from fallback_triton.mamba2_config import Mamba2TritonConfig, default_step_config
from replayssm_cute.types import Mamba2Geometry


@triton.jit
def step_rows(state, S, x_now, B, C, p, dt, decay, HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
              STATE_N: tl.constexpr):
    """Advance rows p by one token, store them, and return their y from the unrounded state."""
    x_dt = x_now.to(tl.float32) * dt
    y = tl.zeros((p.shape[0], STATE_N), tl.float32)
    for i in tl.static_range(len(S)):
        n = i * STATE_N + tl.arange(0, STATE_N)
        new = S[i].to(tl.float32) * decay + x_dt[:, None] * B[i].to(tl.float32)[None, :]
        tl.store(state + p[:, None] * DSTATE + n[None, :], new.to(state.dtype.element_ty),
                 mask=(p < HEADDIM)[:, None] & (n < DSTATE)[None, :])
        y += new * C[i].to(tl.float32)[None, :]
    return tl.sum(y, 1)


@kernel
def step_kernel(
    state_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, dt_bias_ptr, z_ptr, indices_ptr, out_ptr,
    null_block_id: tl.int64, state_slot: tl.int64, x_row: tl.int64, dt_row: tl.int64, dt_head: tl.int64,
    A_head: tl.int64, B_row: tl.int64, C_row: tl.int64, D_head: tl.int64, dt_bias_head: tl.int64, z_row: tl.int64,
    indices_row: tl.int64, out_row: tl.int64,
    NHEADS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, NGROUPS: tl.constexpr,
    DT_SOFTPLUS: tl.constexpr, D_TIED: tl.constexpr, STATE_ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr,
    BLOCK_P: tl.constexpr, TAIL_P: tl.constexpr, STATE_N: tl.constexpr, PDL: tl.constexpr,
):
    """One recurrent step; program = (batch row, head, tile of P). Shapes as in ``recurrent_step``."""
    TILES: tl.constexpr = (HEADDIM + BLOCK_P + TAIL_P - 1) // (BLOCK_P + TAIL_P)
    program = tl.program_id(0)
    wait_for_predecessor(PDL)
    row = (program // (NHEADS * TILES)).to(tl.int64)
    head = program // TILES % NHEADS
    group = head // (NHEADS // NGROUPS)
    p = program % TILES * (BLOCK_P + TAIL_P) + tl.arange(0, BLOCK_P)

    # Two generations of loads, each ended by a barrier, as in the replay kernel; here the second one also
    # keeps the compiler from putting a tile's store before the next tile's load.
    slot = tl.load(indices_ptr + row * indices_row).to(tl.int64)
    dt = load_dt(dt_ptr, dt_bias_ptr, row * dt_row + head * dt_head, head * dt_bias_head)
    A = tl.load(A_ptr + head * A_head) * LOG2E
    x_row_ptr = tl.multiple_of(x_ptr + row * x_row, ROW_ALIGN) + head * HEADDIM
    B = load_vector(tl.multiple_of(B_ptr + row * B_row, ROW_ALIGN) + group * DSTATE, DSTATE, STATE_N)
    C = load_vector(tl.multiple_of(C_ptr + row * C_row, ROW_ALIGN) + group * DSTATE, DSTATE, STATE_N)
    D_at, z_at = head * D_head, row * z_row + head * HEADDIM
    x_now = tl.load(x_row_ptr + p, mask=p < HEADDIM, other=0.0)
    D, z = load_skip_and_gate(D_ptr, z_ptr, D_at, z_at, p, HEADDIM, D_TIED)
    if TAIL_P > 0:
        q = BLOCK_P + tl.arange(0, TAIL_P)
        x_now_q = tl.load(x_row_ptr + q, mask=q < HEADDIM, other=0.0)
        D_q, z_q = load_skip_and_gate(D_ptr, z_ptr, D_at, z_at, q, HEADDIM, D_TIED)
    tl.debug_barrier()
    if (slot == null_block_id) | (slot < 0):
        return

    state = tl.multiple_of(state_ptr + slot * state_slot, STATE_ALIGN) + head * (HEADDIM * DSTATE)
    S = load_rows(state, p, p < HEADDIM, DSTATE, STATE_N)
    if TAIL_P > 0:
        S_q = load_rows(state, q, q < HEADDIM, DSTATE, STATE_N)
    tl.debug_barrier()
    if DT_SOFTPLUS:
        dt = softplus(dt)
    decay = tl.exp2(A * dt)
    out_row_ptr = out_ptr + row * out_row + head * HEADDIM
    y = step_rows(state, S, x_now, B, C, p, dt, decay, HEADDIM, DSTATE, STATE_N)
    store_out(out_row_ptr, y, x_now, D, z, p, HEADDIM, D_ptr is not None, z_ptr is not None)
    if TAIL_P > 0:
        y_q = step_rows(state, S_q, x_now_q, B, C, q, dt, decay, HEADDIM, DSTATE, STATE_N)
        store_out(out_row_ptr, y_q, x_now_q, D_q, z_q, q, HEADDIM, D_ptr is not None, z_ptr is not None)


@dataclass(frozen=True)
class StepProblem:
    """What the kernel is compiled for; the fields are those of ``Mamba2Problem`` that a step without rings has."""

    geometry: Mamba2Geometry
    state_dtype: torch.dtype
    act_dtype: torch.dtype
    dt_dtype: torch.dtype
    index_dtype: torch.dtype
    dt_bias_dtype: torch.dtype | None
    D_dtype: torch.dtype | None
    D_tied: bool
    has_z: bool
    dt_softplus: bool
    state_align: int
    row_align: int


def step_arguments(problem: StepProblem) -> list[torch.dtype | int | None]:
    """The kernel's run-time arguments as ``compile_kernel`` takes them: dtypes, integers, None where absent."""
    p, act = problem, problem.act_dtype
    integers = 13  # null_block_id and the strides
    return [p.state_dtype, act, p.dt_dtype, torch.float32, act, act, p.D_dtype, p.dt_bias_dtype,
            act if p.has_z else None, p.index_dtype, act, *[0] * integers]


def step_constants(problem: StepProblem, config: Mamba2TritonConfig, target: Target) -> dict[str, int | bool]:
    """The kernel's compile-time constants, in the order of its signature."""
    g = problem.geometry
    return {"NHEADS": g.nheads, "HEADDIM": g.headdim, "DSTATE": g.dstate, "NGROUPS": g.ngroups,
            "DT_SOFTPLUS": problem.dt_softplus, "D_TIED": problem.D_tied, "STATE_ALIGN": problem.state_align,
            "ROW_ALIGN": problem.row_align, "BLOCK_P": config.block_p, "TAIL_P": config.tail_p,
            "STATE_N": config.state_n, "PDL": target.pdl}


@lru_cache(maxsize=1024)
def compile_recurrent_step(problem: StepProblem, config: Mamba2TritonConfig,
                           device: torch.device) -> Callable[..., None]:
    """Compile for the current device, ``device``: ``launch(batch, *runtime arguments)``."""
    constants = step_constants(problem, config, Target.of(step_kernel))
    launch = compile_kernel(step_kernel, step_arguments(problem), constants,
                            compile_options(config.num_warps, config.max_registers))
    programs = problem.geometry.nheads * config.tiles(problem.geometry.headdim)
    return lambda batch, *values: launch(batch * programs, *values)


def recurrent_step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
                   dt_bias: Tensor | None, z: Tensor | None, state_batch_indices: Tensor, null_block_id: int,
                   out: Tensor, *, dt_softplus: bool, config: Mamba2TritonConfig | None = None) -> Tensor:
    """One token per batch row of ``S <- exp(A dt') S + dt' x B^T ; y = S C + D x ; y *= silu(z)``, in place.

    Shapes and dtypes are those of ``replayssm_cute.mamba2``, bar the rings; arguments are not checked.
    ``state`` (slots, H, P, N) and ``out`` (batch, H, P) are the caller's and are changed; a row whose
    slot is ``null_block_id`` or negative changes nothing.
    """
    (batch, nheads, headdim), (_, ngroups, dstate) = x.shape, B.shape
    problem = StepProblem(
        Mamba2Geometry(nheads, headdim, dstate, ngroups), state.dtype, x.dtype, dt.dtype, state_batch_indices.dtype,
        None if dt_bias is None else dt_bias.dtype, None if D is None else D.dtype, D is None or D.stride(1) == 0,
        z is not None, dt_softplus, row_alignment([state], 32), row_alignment([x, B, C]))
    chosen = config or default_step_config(problem.geometry, state.element_size())
    launch = compile_recurrent_step(problem, chosen, state.device)
    launch(batch, state, x, dt, A, B, C, D, dt_bias, z, state_batch_indices, out, null_block_id, state.stride(0),
           x.stride(0), dt.stride(0), dt.stride(1), A.stride(0), B.stride(0), C.stride(0), stride(D), stride(dt_bias),
           stride(z), state_batch_indices.stride(0), out.stride(0))
    return out
