"""Fold of the speculative ring in Triton outside of a verify step: any checkpoint into any slot, all layers at once."""

from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from fallback_triton.gdn_config import GdnTritonConfig
from fallback_triton.gdn_device import fold_exact, fold_ring, load_gates, load_tiles, store_tiles, widened
from fallback_triton.launch import compile_kernel, compile_options, kernel
from fallback_triton.mamba2_config import next_power_of_two
from replayssm_cute.gdn_types import GdnFoldProblem


@kernel
def fold_kernel(
    state_ptr, d_cache_ptr, k_cache_ptr, g_cache_ptr, rawv_ptr, rawk_ptr, beta_cache_ptr, sources_ptr, targets_ptr,
    keys_ptr, write_pos_ptr, base_ptr, flush_ptr, counts_ptr, batch: tl.int64, null_block_id: tl.int64,
    state_layer: tl.int64, state_slot: tl.int64, d_cache_layer: tl.int64, d_cache_slot: tl.int64,
    k_cache_layer: tl.int64, k_cache_slot: tl.int64, g_cache_layer: tl.int64, g_cache_slot: tl.int64,
    rawv_layer: tl.int64, rawv_slot: tl.int64, rawk_layer: tl.int64, rawk_slot: tl.int64, beta_layer: tl.int64,
    beta_slot: tl.int64,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, L2NORM: tl.constexpr,
    STATE_ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr,
    STATE_K: tl.constexpr,
):
    """Program = (layer, row, value head, tile of V). Shapes as in ``replayssm_cute.gdn_fold``."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    layer = program // (HV * TILES) // batch
    row = program // (HV * TILES) % batch
    head = program // TILES % HV
    v = program % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    source = tl.load(sources_ptr + row).to(tl.int64)
    target = tl.load(targets_ptr + row).to(tl.int64)
    key = tl.load(keys_ptr + row).to(tl.int64)
    idle = (source < 0) | (target < 0) | (key < 0)
    idle |= (source == null_block_id) | (target == null_block_id) | (key == null_block_id)
    if flush_ptr is not None:
        idle |= tl.load(flush_ptr + key, mask=key >= 0, other=0) == 0
    if idle:
        return
    count = tl.load(counts_ptr + row) if counts_ptr is not None else tl.load(write_pos_ptr + key)
    base = tl.load(base_ptr + key)

    pool = tl.multiple_of(state_ptr + layer * state_layer, STATE_ALIGN)
    state = tl.multiple_of(pool + source * state_slot, STATE_ALIGN) + head * (V * K)
    g_cache = g_cache_ptr + layer * g_cache_layer + key * g_cache_slot + head * L
    S = widened(load_tiles(state, v, v < V, K, K, STATE_K))
    if rawv_ptr is not None:
        rawv = tl.multiple_of(rawv_ptr + layer * rawv_layer + key * rawv_slot, ROW_ALIGN) + head * (L * V)
        rawk = tl.multiple_of(rawk_ptr + layer * rawk_layer + key * rawk_slot, ROW_ALIGN) + head // RATIO * (L * K)
        beta_cache = beta_cache_ptr + layer * beta_layer + key * beta_slot + head * L
        S = fold_exact(S, rawv, rawk, g_cache, beta_cache, v, count, base, K, V, L, STATE_K, L2NORM)
    else:
        d_cache = tl.multiple_of(d_cache_ptr + layer * d_cache_layer + key * d_cache_slot, ROW_ALIGN) + head * (L * V)
        k_cache = tl.multiple_of(k_cache_ptr + layer * k_cache_layer + key * k_cache_slot, ROW_ALIGN) \
            + head // RATIO * (L * K)
        _, decay = load_gates(g_cache, count, base, L, BLOCK_L)
        S = fold_ring(S, d_cache, k_cache, g_cache, v, count, base, decay, K, V, L, STATE_K)
    store_tiles(tl.multiple_of(pool + target * state_slot, STATE_ALIGN) + head * (V * K), S, v, v < V, K, K, STATE_K)


def fold_arguments(problem: GdnFoldProblem) -> list[torch.dtype | int | None]:
    """The kernel's run-time arguments as ``compile_kernel`` takes them: dtypes, integers, None where absent."""
    p, f32, i32 = problem, torch.float32, torch.int32
    raw = [p.raw_dtype, p.raw_dtype, None if p.raw_dtype is None else f32]
    integers = 16  # batch, null_block_id and the strides
    return [p.state_dtype, p.ring_dtype, p.ring_dtype, f32, *raw, *p.index_dtypes, i32, i32, p.flag_dtype,
            i32 if p.has_counts else None, *[0] * integers]


def fold_constants(problem: GdnFoldProblem, config: GdnTritonConfig) -> dict[str, int | bool]:
    """The kernel's compile-time constants, in the order of its signature."""
    g = problem.geometry
    return {"HV": g.num_v_heads, "RATIO": g.ratio, "K": g.head_k_dim, "V": g.head_v_dim, "L": problem.buffer_len,
            "L2NORM": problem.l2norm, "STATE_ALIGN": problem.state_align, "ROW_ALIGN": problem.row_align,
            "BLOCK_V": config.block_v, "BLOCK_L": next_power_of_two(problem.buffer_len), "STATE_K": config.state_k}


def compile_fold(problem: GdnFoldProblem, config: GdnTritonConfig) -> Callable[..., None]:
    """Compile the fold for the current device; the result takes the arguments that ``gdn_fold._run`` passes."""
    launch = compile_kernel(fold_kernel, fold_arguments(problem), fold_constants(problem, config),
                            compile_options(config.num_warps, config.max_registers))
    programs = problem.geometry.num_v_heads * config.tiles(problem.geometry.head_v_dim)

    def fold(state: Tensor, *args: Tensor | int | None) -> None:
        pools, (sources, targets, keys, *cursors, null_block_id) = (state, *args[:6]), args[6:]
        batch = len(keys)  # type: ignore[arg-type]
        strides = [0 if t is None else t.stride(axis) for t in pools for axis in (0, 1)]  # type: ignore[union-attr]
        if batch:
            launch(len(state) * batch * programs, *pools, sources, targets, keys, *cursors, batch, null_block_id,
                   *strides)
    return fold
