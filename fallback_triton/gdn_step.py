"""The gated delta rule in Triton, one token a launch, the state loaded and stored: the yardstick without replay.

Its state goes through ``gdn_device.advance`` like the exact fold's, so that both leave the same bits.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from fallback_triton.device import load_vector, row_dots, wait_for_predecessor
from fallback_triton.gdn_config import GdnTritonConfig, default_config
from fallback_triton.gdn_device import (
    advance,
    dot,
    gates,
    inverse_norm,
    load_tiles,
    normalised,
    store_tiles,
    widened,
)
from fallback_triton.launch import Target, compile_kernel, compile_options, kernel, row_alignment
from replayssm_cute.gdn_types import GdnGeometry, GdnProblem


@kernel
def step_kernel(
    state_ptr, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, indices_ptr, out_ptr, null_block_id: tl.int64,
    state_slot: tl.int64, q_row: tl.int64, k_row: tl.int64, v_row: tl.int64, a_row: tl.int64, b_row: tl.int64,
    out_row: tl.int64,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, L2NORM: tl.constexpr,
    STATE_ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_V: tl.constexpr, STATE_K: tl.constexpr, PDL: tl.constexpr,
):
    """One recurrent step; program = (batch row, value head, tile of V). Shapes as in ``recurrent_step``."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    wait_for_predecessor(PDL)
    row = (program // (HV * TILES)).to(tl.int64)
    head = program // TILES % HV
    v = program % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.load(indices_ptr + row).to(tl.int64)
    out = out_ptr + row * out_row + head * V + v
    if (slot == null_block_id) | (slot < 0):
        tl.store(out, tl.zeros((BLOCK_V,), out_ptr.dtype.element_ty), mask=v < V)
        return
    state = tl.multiple_of(state_ptr + slot * state_slot, STATE_ALIGN) + head * (V * K)
    q = load_vector(tl.multiple_of(q_ptr + row * q_row, ROW_ALIGN) + head // RATIO * K, K, STATE_K)
    k = load_vector(tl.multiple_of(k_ptr + row * k_row, ROW_ALIGN) + head // RATIO * K, K, STATE_K)
    now = tl.load(v_ptr + row * v_row + head * V + v, mask=v < V, other=0.0).to(tl.float32)
    g, beta = gates(tl.load(a_ptr + row * a_row + head), tl.load(b_ptr + row * b_row + head),
                    tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head))
    S = widened(load_tiles(state, v, v < V, K, K, STATE_K))
    S = advance(S, normalised(k, STATE_K, L2NORM), now, g, beta)
    o = row_dots(S, q) * (inverse_norm(dot(q, q), L2NORM) * SCALE)
    tl.store(out, o.to(out_ptr.dtype.element_ty), mask=v < V)
    store_tiles(state, S, v, v < V, K, K, STATE_K)


def step_arguments(problem: GdnProblem) -> list[torch.dtype | int | None]:
    """The kernel's run-time arguments as ``compile_kernel`` takes them."""
    act = problem.act_dtype
    return [problem.state_dtype, act, act, act, *problem.gate_dtypes, problem.index_dtype, act, *[0] * 8]


def step_constants(problem: GdnProblem, config: GdnTritonConfig, target: Target) -> dict[str, int | float | bool]:
    """The kernel's compile-time constants, in the order of its signature."""
    g = problem.geometry
    return {"HV": g.num_v_heads, "RATIO": g.ratio, "K": g.head_k_dim, "V": g.head_v_dim, "SCALE": problem.scale,
            "L2NORM": problem.l2norm, "STATE_ALIGN": problem.state_align, "ROW_ALIGN": problem.row_align,
            "BLOCK_V": config.block_v, "STATE_K": config.state_k, "PDL": target.pdl}


@lru_cache(maxsize=256)
def compile_recurrent_step(problem: GdnProblem, config: GdnTritonConfig, device: torch.device) -> Callable[..., None]:
    """Compile for the current device, ``device``: ``launch(batch, *runtime arguments)``."""
    constants = step_constants(problem, config, Target.of(step_kernel))
    launch = compile_kernel(step_kernel, step_arguments(problem), constants,
                            compile_options(config.num_warps, config.max_registers))
    programs = problem.geometry.num_v_heads * config.tiles(problem.geometry.head_v_dim)
    return lambda batch, *values: launch(batch * programs, *values)


def recurrent_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
                   ssm_state_indices: Tensor, null_block_id: int, out: Tensor, *, scale: float, l2norm: bool = True,
                   config: GdnTritonConfig | None = None) -> Tensor:
    """One token per batch row, in place. Shapes and dtypes are those of ``replayssm_cute.gdn``; nothing is checked.

    ``state`` (slots, HV, V, K) and ``out`` (batch, HV, V) are the caller's and are changed; a padded row's ``out``
    becomes zero.
    """
    (_, HV, V, K), Hk = state.shape, k.shape[1]
    problem = GdnProblem(GdnGeometry(Hk, HV, K, V), 1, state.dtype, v.dtype, v.dtype,
                         (a.dtype, b.dtype, A_log.dtype, dt_bias.dtype), ssm_state_indices.dtype, scale=scale,
                         l2norm=l2norm, state_align=row_alignment([state]), row_align=row_alignment([q, k]))
    launch = compile_recurrent_step(problem, config or default_config(problem), state.device)
    launch(v.shape[0], state, q, k, v, a, b, A_log, dt_bias, ssm_state_indices, out, null_block_id, state.stride(0),
           q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), out.stride(0))
    return out
