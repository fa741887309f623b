"""Gated DeltaNet standard decode by replay in Triton: one launch a step, for any GPU that Triton serves.

A program holds rows of one value head of one batch row. The ring enters through scores k_j . q and k_j . k, and the
checkpoint through two products with one read of it; the state itself is built only by a flush, from the tiles that are
in registers. Loads come in two generations, each ended by a barrier, as in ``fallback_triton.mamba2``. q and k stay as
they came in every product: their norms multiply the results.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fallback_triton.device import let_successor_begin, load_vector, row_dots, store_vector, wait_for_predecessor
from fallback_triton.gdn_config import GdnTritonConfig
from fallback_triton.gdn_device import (
    add_records,
    dot,
    gates,
    inverse_norm,
    load_gates,
    load_tiles,
    scaled,
    store_tile,
)
from fallback_triton.launch import Target, compile_kernel, compile_options, kernel
from fallback_triton.mamba2_config import next_power_of_two
from fallback_triton.rounding import count, load_dice, random_bits, round_stochastic
from replayssm_cute.gdn_types import GdnProblem


@triton.jit
def fold_and_store(state, S, d_cache, k_cache, g_cache, v, w, decay, g, d, k_now, k_norm, dice, slot, K: tl.constexpr,
                   V: tl.constexpr, L: tl.constexpr, STEP: tl.constexpr, PHILOX_ROUNDS: tl.constexpr):
    """Store ring and token folded into the checkpoint, a tile of columns after the other; ``decay`` is exp of all g."""
    for i in tl.static_range(len(S)):
        k = i * STEP + tl.arange(0, STEP)
        tile = S[i].to(tl.float32) * decay + d[:, None] * (k_now[i].to(tl.float32) * k_norm)[None, :]
        tile = add_records(tile, d_cache, k_cache, g_cache, v, k, w, 0, g, K, V, L)
        if PHILOX_ROUNDS > 0:
            bits = random_bits(dice, slot, v, i * STEP, V, K, STEP, PHILOX_ROUNDS)
            rounded = round_stochastic(tile, bits, state.dtype.element_ty)
        else:
            rounded = tile.to(state.dtype.element_ty)
        store_tile(state, rounded, v, v < V, k, K, K)


@triton.jit
def folding_rows(write_pos_ptr, force_ptr, indices_ptr, null_block_id, rows, L: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the batch's rows fold; padded ones do not."""
    found = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, rows, BLOCK, num_stages=1):
        row = start + tl.arange(0, BLOCK)
        slot = tl.load(indices_ptr + row, mask=row < rows, other=-1).to(tl.int64)
        folds = tl.load(write_pos_ptr + row, mask=row < rows, other=0) == L - 1
        if force_ptr is not None:
            folds = folds | (tl.load(force_ptr + row, mask=row < rows, other=0) != 0)
        found += tl.where((slot >= 0) & (slot != null_block_id) & folds, 1, 0)
    return tl.sum(found)


@kernel
def decode_kernel(
    state_ptr, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, d_cache_ptr, k_cache_ptr, g_cache_ptr,
    write_pos_ptr, force_ptr, indices_ptr, out_ptr, seed_ptr, null_block_id: tl.int64, state_slot: tl.int64,
    q_row: tl.int64, k_row: tl.int64, v_row: tl.int64, a_row: tl.int64, b_row: tl.int64, d_cache_slot: tl.int64,
    k_cache_slot: tl.int64, g_cache_slot: tl.int64, out_row: tl.int64,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, SCALE: tl.constexpr,
    L2NORM: tl.constexpr, STATE_ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr, STATE_K: tl.constexpr, RING_K: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One decode step; program = (batch row, value head, tile of V). Shapes as in ``replayssm_cute.gdn``.

    With random numbers one more program, the first, says how many programs will draw; see ``rounding.count``.
    """
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    wait_for_predecessor(PDL)
    if PHILOX_ROUNDS > 0:
        if program == 0:
            rows = (tl.num_programs(0) - 1) // (HV * TILES)
            drawing = folding_rows(write_pos_ptr, force_ptr, indices_ptr, null_block_id, rows, L, 256)
            count(seed_ptr, -(drawing * (HV * TILES)).to(tl.int64))
            return
        program -= 1
    row = (program // (HV * TILES)).to(tl.int64)
    head = program // TILES % HV
    tile = program % TILES
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v < V

    # First generation of loads: the batch row's.
    slot = tl.load(indices_ptr + row).to(tl.int64)
    w = tl.load(write_pos_ptr + row)
    flush = w == L - 1
    if force_ptr is not None:
        flush = flush | (tl.load(force_ptr + row) != 0)
    a, b = tl.load(a_ptr + row * a_row + head), tl.load(b_ptr + row * b_row + head)
    A_log, dt_bias = tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head)
    q_at = tl.multiple_of(q_ptr + row * q_row, ROW_ALIGN) + head // RATIO * K
    k_at = tl.multiple_of(k_ptr + row * k_row, ROW_ALIGN) + head // RATIO * K
    q_ring, k_ring = load_vector(q_at, K, RING_K), load_vector(k_at, K, RING_K)
    q_state, k_state = load_vector(q_at, K, STATE_K), load_vector(k_at, K, STATE_K)
    v_now = tl.load(v_ptr + row * v_row + head * V + v, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + row * out_row + head * V + v
    tl.debug_barrier()
    if (slot == null_block_id) | (slot < 0):
        tl.store(out, tl.zeros((BLOCK_V,), out_ptr.dtype.element_ty), mask=inside)
        return

    # Second generation: the slot's.
    state = tl.multiple_of(state_ptr + slot * state_slot, STATE_ALIGN) + head * (V * K)
    d_cache = tl.multiple_of(d_cache_ptr + slot * d_cache_slot, ROW_ALIGN) + head * (L * V)
    k_cache = tl.multiple_of(k_cache_ptr + slot * k_cache_slot, ROW_ALIGN) + head // RATIO * (L * K)
    g_cache = g_cache_ptr + slot * g_cache_slot + head * L
    j = tl.arange(0, BLOCK_L)
    k_old = load_tiles(k_cache, j, j < w, K, K, RING_K)
    d_old = tl.load(d_cache + j[:, None] * V + v[None, :], mask=(j < w)[:, None] & inside[None, :], other=0.0)
    S = load_tiles(state, v, inside, K, K, STATE_K)
    tl.debug_barrier()

    g, beta = gates(a, b, A_log, dt_bias)
    step = tl.exp(g)
    q_norm, k_norm = inverse_norm(dot(q_ring, q_ring), L2NORM) * SCALE, inverse_norm(dot(k_ring, k_ring), L2NORM)
    weight, decay = load_gates(g_cache, w, 0, L, BLOCK_L)
    held = d_old.to(tl.float32)
    before_k = row_dots(S, k_state) * decay + tl.sum(held * (weight * row_dots(k_old, k_ring))[:, None], 0)
    before_q = row_dots(S, q_state) * decay + tl.sum(held * (weight * row_dots(k_old, q_ring))[:, None], 0)
    d = beta * (v_now - before_k * (step * k_norm))
    o = before_q * (step * q_norm) + d * (dot(q_ring, k_ring) * q_norm * k_norm)
    let_successor_begin(PDL)
    tl.store(out, o.to(out_ptr.dtype.element_ty), mask=inside)
    if flush:
        dice = ()
        if PHILOX_ROUNDS > 0:
            dice = load_dice(seed_ptr, head, HV)
        fold_and_store(state, S, d_cache, k_cache, g_cache, v, w, decay * step, g, d, k_state, k_norm, dice, slot, K, V,
                       L, STATE_K, PHILOX_ROUNDS)
        if PHILOX_ROUNDS > 0:
            count(seed_ptr, 1)
    else:
        tl.store(d_cache + w * V + v, d.to(d_cache_ptr.dtype.element_ty), mask=inside)
        if tile == 0:
            tl.store(g_cache + w, g)
            if head % RATIO == 0:
                store_vector(k_cache + w * K, scaled(k_ring, k_norm), K, RING_K)


def decode_arguments(problem: GdnProblem) -> list[torch.dtype | int | None]:
    """The kernel's run-time arguments as ``compile_kernel`` takes them: dtypes, integers, None where absent."""
    p, act, ring = problem, problem.act_dtype, problem.ring_dtype
    integers = 11  # null_block_id and the strides
    return [p.state_dtype, act, act, act, *p.gate_dtypes, ring, ring, torch.float32, torch.int32, p.flag_dtype,
            p.index_dtype, act, torch.int64 if p.philox_rounds else None, *[0] * integers]


def decode_constants(problem: GdnProblem, config: GdnTritonConfig, target: Target) -> dict[str, int | float | bool]:
    """The kernel's compile-time constants, in the order of its signature."""
    g = problem.geometry
    return {"HV": g.num_v_heads, "RATIO": g.ratio, "K": g.head_k_dim, "V": g.head_v_dim, "L": problem.buffer_len,
            "SCALE": problem.scale, "L2NORM": problem.l2norm, "STATE_ALIGN": problem.state_align,
            "ROW_ALIGN": problem.row_align, "BLOCK_V": config.block_v, "BLOCK_L": next_power_of_two(problem.buffer_len),
            "STATE_K": config.state_k, "RING_K": config.ring_k, "PHILOX_ROUNDS": problem.philox_rounds,
            "PDL": target.pdl}


def compile_decode(problem: GdnProblem, config: GdnTritonConfig) -> Callable[..., Tensor]:
    """Compile the step for the current device; the result takes the arguments of ``reference.gdn.replay_decode``.

    It serves every batch size, launches one kernel and does nothing else.
    """
    constants = decode_constants(problem, config, Target.of(decode_kernel))
    launch = compile_kernel(decode_kernel, decode_arguments(problem), constants,
                            compile_options(config.num_warps, config.max_registers))
    programs, more = problem.geometry.num_v_heads * config.tiles(problem.geometry.head_v_dim), problem.philox_rounds > 0

    def decode(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
               d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, write_pos: Tensor, force_flush: Tensor | None,
               ssm_state_indices: Tensor, null_block_id: int, out: Tensor, rand_seed: Tensor | None = None) -> Tensor:
        launch(v.shape[0] * programs + more, state, q, k, v, a, b, A_log, dt_bias, d_cache, k_cache, g_cache, write_pos,
               force_flush, ssm_state_indices, out, rand_seed, null_block_id, state.stride(0), q.stride(0), k.stride(0),
               v.stride(0), a.stride(0), b.stride(0), d_cache.stride(0), k_cache.stride(0), g_cache.stride(0),
               out.stride(0))
        return out
    return decode
