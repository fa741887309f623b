"""Speculative verify of Gated DeltaNet in Triton: a window of T tokens a row, one launch, flush rows included.

A program holds rows of one value head of one batch row. It reads the checkpoint once; of a flush row it first folds the
committed records into it, in registers. Each token's output is then read from checkpoint and records by scores, as in
``gdn_decode``, with the d of the window's earlier tokens as further records: forward substitution of the window's
triangular system, in fp32. Nothing that another program reads is written: records go behind the committed ones.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fallback_triton.device import load_vector, row_dots
from fallback_triton.gdn_config import GdnTritonConfig
from fallback_triton.gdn_device import (
    dot,
    fold_exact,
    fold_ring,
    gates,
    inverse_norm,
    load_gates,
    load_tiles,
    ring_row,
    rounded,
    row_squares,
    scaled,
    store_tiles,
    widened,
)
from fallback_triton.launch import compile_kernel, compile_options, kernel
from fallback_triton.mamba2_config import next_power_of_two
from replayssm_cute.gdn_types import GdnProblem

#: Longest window whose tokens are unrolled, so that the loads of one overlap with the sums of another.
UNROLLED = tl.constexpr(4)


@triton.jit
def pick(rows, which):
    """The row of an fp32 tile for which the mask ``which`` is set."""
    return tl.sum(tl.where(which, rows, 0.0), 0)


@triton.jit
def verify_token(s, here, d, since, total, S, history, window, q_at, k_at, out_at, v, V: tl.constexpr, K: tl.constexpr,
                 SCALE: tl.constexpr, L2NORM: tl.constexpr, STATE_K: tl.constexpr, RING_K: tl.constexpr):
    """Store the output of token s of the window; returns (d, since, total) with it.

    ``d`` (BLOCK_T, rows) holds the d of the tokens before; ``since`` (BLOCK_T,) the sum of g behind each of them,
    ``total`` that of the window so far. ``here``: the row has such a token; else it is zeros and changes nothing.
    """
    k_old, d_old, weight, decay = history
    window_k, norm, window_v, g, beta = window
    t = tl.arange(0, norm.shape[0])
    q_state, k_state = load_vector(q_at, K, STATE_K), load_vector(k_at, K, STATE_K)
    q_ring, k_ring = load_vector(q_at, K, RING_K), load_vector(k_at, K, RING_K)
    g_now = pick(g, t == s)
    total += g_now
    since = tl.where(t < s, since + g_now, 0.0)
    step = tl.exp(total)
    share = tl.exp(since) * norm  # of the window's tokens, as ``weight`` is of the ring's records
    q_norm, k_norm = inverse_norm(dot(q_ring, q_ring), L2NORM) * SCALE, pick(norm, t == s)

    before = row_dots(S, k_state) * decay + tl.sum(d_old * (weight * row_dots(k_old, k_ring))[:, None], 0)
    inner = tl.where(t < s, share * row_dots(window_k, k_ring), 0.0)
    read = (before * step + tl.sum(d * inner[:, None], 0)) * k_norm
    now = pick(beta, t == s) * (pick(window_v, (t == s)[:, None]) - read)
    d = tl.where((t == s)[:, None], now[None, :], d)

    before = row_dots(S, q_state) * decay + tl.sum(d_old * (weight * row_dots(k_old, q_ring))[:, None], 0)
    inner = tl.where(t <= s, share * row_dots(window_k, q_ring), 0.0)
    o = (before * step + tl.sum(d * inner[:, None], 0)) * q_norm
    tl.store(out_at + v, o.to(out_at.dtype.element_ty), mask=v < tl.where(here, V, 0))
    return d, since, total


@kernel
def verify_kernel(
    state_ptr, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, d_cache_ptr, k_cache_ptr, g_cache_ptr,
    rawv_ptr, rawk_ptr, beta_cache_ptr, out_ptr, starts_ptr, indices_ptr, keys_ptr, write_pos_ptr, base_ptr, flush_ptr,
    null_block_id: tl.int64, state_slot: tl.int64, q_row: tl.int64, k_row: tl.int64, v_row: tl.int64, a_row: tl.int64,
    b_row: tl.int64, d_cache_slot: tl.int64, k_cache_slot: tl.int64, g_cache_slot: tl.int64, rawv_slot: tl.int64,
    rawk_slot: tl.int64, beta_slot: tl.int64, out_row: tl.int64,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, T: tl.constexpr,
    SKIP_FLUSH: tl.constexpr, SKIP_OTHERS: tl.constexpr, SCALE: tl.constexpr, L2NORM: tl.constexpr,
    STATE_ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr, STATE_K: tl.constexpr, RING_K: tl.constexpr,
):
    """One verify step; program = (batch row, value head, tile of V). Shapes as in ``replayssm_cute.gdn``."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    row = (program // (HV * TILES)).to(tl.int64)
    head = program // TILES % HV
    tile = program % TILES
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, BLOCK_T)

    start = tl.load(starts_ptr + row).to(tl.int64)
    count = tl.load(starts_ptr + row + 1) - start.to(tl.int32)
    slot = tl.load(indices_ptr + row).to(tl.int64)
    key = tl.load(keys_ptr + row).to(tl.int64)
    used = (t < count)[:, None] & (v < V)[None, :]
    out_at = out_ptr + start * out_row + head * V
    if (slot == null_block_id) | (slot < 0) | (key == null_block_id) | (key < 0):
        tl.store(out_at + t[:, None] * out_row + v[None, :], tl.zeros((BLOCK_T, BLOCK_V), out_ptr.dtype.element_ty),
                 mask=used)
        return
    flush = tl.load(flush_ptr + key) != 0
    if (flush & SKIP_FLUSH) | ((flush == 0) & SKIP_OTHERS):
        return

    m = tl.load(write_pos_ptr + key)
    base = tl.load(base_ptr + key)
    state = tl.multiple_of(state_ptr + slot * state_slot, STATE_ALIGN) + head * (V * K)
    d_cache = tl.multiple_of(d_cache_ptr + key * d_cache_slot, ROW_ALIGN) + head * (L * V)
    k_cache = tl.multiple_of(k_cache_ptr + key * k_cache_slot, ROW_ALIGN) + head // RATIO * (L * K)
    g_cache = g_cache_ptr + key * g_cache_slot + head * L
    S = widened(load_tiles(state, v, v < V, K, K, STATE_K))
    if rawv_ptr is not None:
        rawv = tl.multiple_of(rawv_ptr + key * rawv_slot, ROW_ALIGN) + head * (L * V)
        rawk = tl.multiple_of(rawk_ptr + key * rawk_slot, ROW_ALIGN) + head // RATIO * (L * K)
        beta_cache = beta_cache_ptr + key * beta_slot + head * L
    if flush:
        if rawv_ptr is not None:
            S = fold_exact(S, rawv, rawk, g_cache, beta_cache, v, m, base, K, V, L, STATE_K, L2NORM)
        else:
            _, decay = load_gates(g_cache, m, base, L, BLOCK_L)
            S = fold_ring(S, d_cache, k_cache, g_cache, v, m, base, decay, K, V, L, STATE_K)
        store_tiles(state, S, v, v < V, K, K, STATE_K)
        S = rounded(S, state_ptr.dtype.element_ty)
    if count == 0:
        return

    # The records that the checkpoint does not hold, and the window.
    held = tl.where(flush, 0, m)
    j = tl.arange(0, BLOCK_L)
    at = ring_row(base, j, L)
    k_old = load_tiles(k_cache, at, j < held, K, K, RING_K)
    d_old = tl.load(d_cache + at[:, None] * V + v[None, :], mask=(j < held)[:, None] & (v < V)[None, :], other=0.0)
    weight, decay = load_gates(g_cache, held, base, L, BLOCK_L)
    q_at = tl.multiple_of(q_ptr + start * q_row, ROW_ALIGN) + head // RATIO * K
    k_at = tl.multiple_of(k_ptr + start * k_row, ROW_ALIGN) + head // RATIO * K
    window_k = load_tiles(k_at, t, t < count, k_row, K, RING_K)
    window_norm = inverse_norm(row_squares(window_k), L2NORM)
    raw = tl.load(v_ptr + start * v_row + head * V + t[:, None] * v_row + v[None, :], mask=used, other=0.0)
    a = tl.load(a_ptr + (start + t) * a_row + head, mask=t < count, other=0.0)
    b = tl.load(b_ptr + (start + t) * b_row + head, mask=t < count, other=0.0)
    g, beta = gates(a, b, tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head))
    g = tl.where(t < count, g, 0.0)
    history = k_old, d_old.to(tl.float32), weight, decay
    window = window_k, window_norm, raw.to(tl.float32), g, beta
    d, since, total = window[2] * 0.0, g * 0.0, tl.full((), 0.0, tl.float32)
    if T <= UNROLLED:
        for s in tl.static_range(T):
            at_s = tl.where(s < count, s, 0)
            d, since, total = verify_token(s, s < count, d, since, total, S, history, window, q_at + at_s * q_row,
                                           k_at + at_s * k_row, out_at + s * out_row, v, V, K, SCALE, L2NORM, STATE_K,
                                           RING_K)
    else:
        for s in range(count):
            d, since, total = verify_token(s, True, d, since, total, S, history, window, q_at + s * q_row,
                                           k_at + s * k_row, out_at + s * out_row, v, V, K, SCALE, L2NORM, STATE_K,
                                           RING_K)

    behind = ring_row(base, m + t, L)
    tl.store(d_cache + behind[:, None] * V + v[None, :], d.to(d_cache_ptr.dtype.element_ty), mask=used)
    if rawv_ptr is not None:
        tl.store(rawv + behind[:, None] * V + v[None, :], raw, mask=used)
    if tile == 0:
        tl.store(g_cache + behind, g, mask=t < count)
        if rawv_ptr is not None:
            tl.store(beta_cache + behind, beta, mask=t < count)
        if head % RATIO == 0:
            store_tiles(k_cache, scaled(window_k, window_norm[:, None]), behind, t < count, K, K, RING_K)
            if rawv_ptr is not None:
                store_tiles(rawk, window_k, behind, t < count, K, K, RING_K)


def verify_arguments(problem: GdnProblem) -> list[torch.dtype | int | None]:
    """The kernel's run-time arguments as ``compile_kernel`` takes them: dtypes, integers, None where absent."""
    p, act, ring = problem, problem.act_dtype, problem.ring_dtype
    raw = [act, act, torch.float32] if p.exact_fold else [None] * 3
    integers = 14  # null_block_id and the strides
    return [p.state_dtype, act, act, act, *p.gate_dtypes, ring, ring, torch.float32, *raw, act, torch.int32,
            p.index_dtype, p.key_dtype, torch.int32, torch.int32, p.flag_dtype, *[0] * integers]


def verify_constants(problem: GdnProblem, config: GdnTritonConfig) -> dict[str, int | float | bool | str]:
    """The kernel's compile-time constants, in the order of its signature."""
    g = problem.geometry
    return {"HV": g.num_v_heads, "RATIO": g.ratio, "K": g.head_k_dim, "V": g.head_v_dim, "L": problem.buffer_len,
            "T": problem.tokens, "SKIP_FLUSH": problem.launch_mode == "verify",
            "SKIP_OTHERS": problem.launch_mode == "flush", "SCALE": problem.scale, "L2NORM": problem.l2norm,
            "STATE_ALIGN": problem.state_align, "ROW_ALIGN": problem.row_align, "BLOCK_V": config.block_v,
            "BLOCK_L": next_power_of_two(problem.buffer_len), "BLOCK_T": next_power_of_two(problem.tokens),
            "STATE_K": config.state_k, "RING_K": config.ring_k}


def compile_verify(problem: GdnProblem, config: GdnTritonConfig) -> Callable[..., Tensor]:
    """Compile the step for the current device; the result takes the arguments that ``replayssm_cute.gdn`` passes.

    It serves every batch size, launches one kernel and does nothing else.
    """
    launch = compile_kernel(verify_kernel, verify_arguments(problem), verify_constants(problem, config),
                            compile_options(config.num_warps, config.max_registers))
    programs = problem.geometry.num_v_heads * config.tiles(problem.geometry.head_v_dim)

    def verify(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
               d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, rawv_cache: Tensor | None, rawk_cache: Tensor | None,
               beta_cache: Tensor | None, out: Tensor, query_start_loc: Tensor, ssm_state_indices: Tensor,
               replay_indices: Tensor, write_pos: Tensor, cache_base: Tensor, is_flush: Tensor,
               null_block_id: int) -> Tensor:
        raw = (0 if t is None else t.stride(0) for t in (rawv_cache, rawk_cache, beta_cache))
        launch((query_start_loc.shape[0] - 1) * programs, state, q, k, v, a, b, A_log, dt_bias, d_cache, k_cache,
               g_cache, rawv_cache, rawk_cache, beta_cache, out, query_start_loc, ssm_state_indices, replay_indices,
               write_pos, cache_base, is_flush, null_block_id, state.stride(0), q.stride(0), k.stride(0), v.stride(0),
               a.stride(0), b.stride(0), d_cache.stride(0), k_cache.stride(0), g_cache.stride(0), *raw, out.stride(0))
        return out
    return verify
