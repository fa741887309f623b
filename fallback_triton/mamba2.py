"""Mamba2 decode by replay in Triton: one launch a step, for any GPU that Triton serves.

A program holds the rows of one head of one batch row, or a part of them. What it does, and why so:

* Loads come in two generations, each ended by a barrier: what depends on the program alone (slot,
  cursor, flag, dt, x, B, C, D, z), then what depends on slot and cursor (state, rings). Without the
  barriers the compiler moves arithmetic that waits for the first between the loads of the second, and
  a small batch pays the latencies one after the other. No barrier waits for a load.
* Every product is fp32 on the ordinary cores: the step is bound by the bytes of the checkpoint, and
  the exact kinds of tensor-core product cost more registers than they save instructions.
* A flush does not use the state tiles that were loaded for the other branch: it re-reads them from
  the cache, ``FOLD_N`` columns at a time, so that the rare branch needs no more registers than the
  common one. Registers decide how many programs, that is how many bytes in flight, a multiprocessor
  holds.
* Nothing reads a row that another program writes: ring rows below the cursor are only read, and row
  w is written by the program that has its part of the current token.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fallback_triton.device import (
    LOG2E,
    let_successor_begin,
    load_dt,
    load_rows,
    load_skip_and_gate,
    load_vector,
    row_dots,
    softplus,
    store_out,
    store_vector,
    wait_for_predecessor,
)
from fallback_triton.launch import Target, compile_kernel, compile_options, kernel, stride
from fallback_triton.mamba2_config import Mamba2TritonConfig, default_config, next_power_of_two
from fallback_triton.order import batch_row, drawing_rows, rows_ahead, went_ahead
from fallback_triton.rounding import (
    code_bits,
    count,
    decode,
    decode_rows,
    encode,
    load_dice,
    load_scale,
    magnitude_bits,
    random_words,
    round_pairs,
    row_scale,
)
from replayssm_cute.rounding import LARGEST_CODE
from replayssm_cute.types import Mamba2Problem
from replayssm_cute.validate import mamba2_problem

#: Ring rows that a flush requests at once, to wait for the cache once and not for every row.
FOLD_ROWS = tl.constexpr(4)


@triton.jit
def load_ring(ring, p, w, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr):
    """Columns ``p`` of the valid rows of a (., WIDTH) ring; zero elsewhere, whatever the ring holds."""
    j = tl.arange(0, BLOCK_L)
    return tl.load(ring + j[:, None] * WIDTH + p[None, :], mask=(j < w)[:, None] & (p < WIDTH)[None, :], other=0.0)


@triton.jit
def with_current(ring, now, w, BLOCK_L: tl.constexpr):
    """The window of a replay in fp32: the valid ring rows, the current token at row w, zeros behind."""
    j = tl.arange(0, BLOCK_L)
    return tl.where((j == w)[:, None], now.to(tl.float32)[None, :], ring.to(tl.float32))


@triton.jit
def window_scores(B_ring, B_now, C, w, BLOCK_L: tl.constexpr):
    """(BLOCK_L,) products B_j . C over the window; all arguments are tuples of tiles of columns."""
    total = with_current(B_ring[0], B_now[0], w, BLOCK_L) * C[0].to(tl.float32)[None, :]
    for i in tl.static_range(1, len(B_ring)):
        total += with_current(B_ring[i], B_now[i], w, BLOCK_L) * C[i].to(tl.float32)[None, :]
    return tl.sum(total, 1)


@triton.jit
def window_weights(dt_ring, dt, w, A, BLOCK_L: tl.constexpr):
    """(weight (BLOCK_L,), decay) with weight_j = dt'_j exp(A * the later dt') and decay = exp(A * all dt').

    The later dt' are summed as such, from the ring shifted by one row: total minus prefix would
    cancel, and a large dt' would spoil the weights of its neighbours. ``A`` carries log2(e).
    """
    j = tl.arange(0, BLOCK_L)
    here = tl.where(j == w, dt, tl.load(dt_ring + j, mask=j < w, other=0.0))
    after = tl.where(j + 1 == w, dt, tl.load(dt_ring + j + 1, mask=j + 1 < w, other=0.0))
    later = tl.cumsum(after, reverse=True)
    return here * tl.exp2(A * later), tl.exp2(A * tl.sum(here))


@triton.jit
def read_rows(state, scale, x_ring, x_now, weight, C, decay, w, BLOCK_L: tl.constexpr, CODES: tl.constexpr):
    """y of rows p without a flush: decay * (S0 C) plus the weighted window of x."""
    y = tl.sum(with_current(x_ring, x_now, w, BLOCK_L) * weight[:, None], 0)
    if CODES != "":
        y += row_dots(decode_rows(state, CODES), C) * (decay * scale)
    else:
        y += row_dots(state, C) * decay
    return y


@triton.jit
def fold_columns(at, mask, scale, x_ring, dt_ring, B_ring, x_now, B_row, p, n, w, dt, A, decay,
                 HEADDIM: tl.constexpr, DSTATE: tl.constexpr, CODES: tl.constexpr):
    """(ROWS, FOLD_N) fp32 folded state of rows p and columns n, whose checkpoint lies at the pointers ``at``.

    The ring is walked from its newest row backwards, which gives the sum of the later dt' as it goes.
    """
    B_now = tl.load(B_row + n, mask=n < DSTATE, other=0.0).to(tl.float32)
    if CODES != "":
        folded = decode(tl.load(at, mask=mask, other=0), CODES) * scale[:, None] * decay
    else:
        folded = tl.load(at, mask=mask, other=0.0).to(tl.float32) * decay
    folded += (x_now.to(tl.float32) * dt)[:, None] * B_now[None, :]
    later = dt
    j = w - 1
    while j >= 0:
        d, x, B = (), (), ()
        for i in tl.static_range(FOLD_ROWS):
            # Below row 0 nothing is loaded. Said by a bound: the interpreter of some Triton versions
            # makes an integer of a block mask combined with a scalar one.
            p_end, n_end = tl.where(j >= i, HEADDIM, 0), tl.where(j >= i, DSTATE, 0)
            d += (tl.load(dt_ring + j - i, mask=j >= i, other=0.0),)  # type: ignore[assignment]
            x += (tl.load(x_ring + (j - i) * HEADDIM + p, mask=p < p_end, other=0.0),)  # type: ignore[assignment]
            B += (tl.load(B_ring + (j - i) * DSTATE + n, mask=n < n_end, other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(FOLD_ROWS):
            scaled = x[i].to(tl.float32) * (d[i] * tl.exp2(A * later))
            folded += scaled[:, None] * B[i].to(tl.float32)[None, :]
            later += d[i]
        j -= FOLD_ROWS
    return folded


@triton.jit
def fold_scale(state, scale, scale_row, x_ring, dt_ring, B_ring, x_now, B_row, p, w, dt, A, decay,
               HEADDIM: tl.constexpr, DSTATE: tl.constexpr, FOLD_N: tl.constexpr, CODES: tl.constexpr):
    """Store the scales of the folded rows p; returns their reciprocals, and which rows have one.

    A scale depends on the whole row, so the fold is done twice; to hold a row would take more registers
    than the common branch.
    """
    largest = tl.zeros(p.shape, tl.int32)
    for n0 in tl.range(0, DSTATE, FOLD_N, num_stages=1):
        n = n0 + tl.arange(0, FOLD_N)
        mask = (p < HEADDIM)[:, None] & (n < DSTATE)[None, :]
        folded = fold_columns(state + p[:, None] * DSTATE + n[None, :], mask, scale, x_ring, dt_ring, B_ring, x_now,
                              B_row, p, n, w, dt, A, decay, HEADDIM, DSTATE, CODES)
        largest = tl.maximum(largest, tl.max(magnitude_bits(folded), 1))
    stored, reciprocal, finite = row_scale(largest, CODES)
    tl.store(scale_row + p, stored, mask=p < HEADDIM)
    return reciprocal, finite


@triton.jit
def fold_rows(state, scale, scale_row, x_ring, dt_ring, B_ring, x_now, B_row, C_row, p, w, dt, A, decay, dice, slot,
              HEADDIM: tl.constexpr, DSTATE: tl.constexpr, FOLD_N: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
              CODES: tl.constexpr, PTX: tl.constexpr):
    """Fold window and checkpoint of rows p, store them, and return their y from the unrounded state."""
    valid = p < HEADDIM
    reciprocal, finite = (), ()
    if CODES != "":
        reciprocal, finite = fold_scale(state, scale, scale_row, x_ring, dt_ring, B_ring, x_now, B_row, p, w, dt, A,
                                        decay, HEADDIM, DSTATE, FOLD_N, CODES)
    y = tl.zeros(p.shape, tl.float32)
    for n0 in tl.range(0, DSTATE, FOLD_N, num_stages=1):
        n = n0 + tl.arange(0, FOLD_N)
        inside = n < DSTATE
        at = state + p[:, None] * DSTATE + n[None, :]
        folded = fold_columns(at, valid[:, None] & inside[None, :], scale, x_ring, dt_ring, B_ring, x_now, B_row, p, n,
                              w, dt, A, decay, HEADDIM, DSTATE, CODES)
        if CODES != "":
            bits = 0
            if PHILOX_ROUNDS > 0:
                bits = code_bits(random_words(dice, slot, p, n0, HEADDIM, DSTATE, FOLD_N, PHILOX_ROUNDS, 16))
            codes = encode(folded, reciprocal, finite, bits, CODES, PHILOX_ROUNDS > 0)
            tl.store(at, codes, mask=valid[:, None] & inside[None, :])
        elif PHILOX_ROUNDS > 0:
            words = random_words(dice, slot, p, n0, HEADDIM, DSTATE, FOLD_N, PHILOX_ROUNDS, 8)
            pair = n0 // 2 + tl.arange(0, FOLD_N // 2)
            at_pair = state.to(tl.pointer_type(tl.int32), bitcast=True) + p[:, None] * (DSTATE // 2) + pair[None, :]
            tl.store(at_pair, round_pairs(folded, words, state.dtype.element_ty, PTX),
                     mask=valid[:, None] & (pair < DSTATE // 2)[None, :])
        else:
            tl.store(at, folded.to(state.dtype.element_ty), mask=valid[:, None] & inside[None, :])
        y += tl.sum(folded * tl.load(C_row + n, mask=inside, other=0.0).to(tl.float32)[None, :], 1)
    return y


@kernel
def replay_kernel(
    state_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, dt_bias_ptr, z_ptr, x_cache_ptr, dt_cache_ptr, B_cache_ptr,
    write_pos_ptr, is_flush_ptr, indices_ptr, out_ptr, seed_ptr, scale_ptr, null_block_id: tl.int64,
    state_slot: tl.int64, x_row: tl.int64, dt_row: tl.int64, dt_head: tl.int64, A_head: tl.int64, B_row: tl.int64,
    C_row: tl.int64, D_head: tl.int64, dt_bias_head: tl.int64, z_row: tl.int64, x_cache_slot: tl.int64,
    dt_cache_slot: tl.int64, B_cache_slot: tl.int64, indices_row: tl.int64, out_row: tl.int64,
    scale_slot: tl.int64, rows: tl.int32,
    NHEADS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, NGROUPS: tl.constexpr,
    BUFFER_LEN: tl.constexpr, DT_SOFTPLUS: tl.constexpr, D_TIED: tl.constexpr, STATE_ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr, BLOCK_P: tl.constexpr, TAIL_P: tl.constexpr, BLOCK_L: tl.constexpr,
    STATE_N: tl.constexpr, RING_N: tl.constexpr, FOLD_N: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
    CODES: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr, ORDER: tl.constexpr,
):
    """One replay step; program = (batch row, head, tile of P), the tile fastest. Shapes as in ``replay_step``.

    With ``ORDER`` the grid is longer than the batch, of ``rows`` rows: flushing ones come first, see ``order``. With
    random numbers one more program, the first, says how many programs will draw; see ``count``.
    """
    TILES: tl.constexpr = (HEADDIM + BLOCK_P + TAIL_P - 1) // (BLOCK_P + TAIL_P)
    program = tl.program_id(0)
    wait_for_predecessor(PDL)
    if PHILOX_ROUNDS > 0:
        if program == 0:
            drawing = drawing_rows(is_flush_ptr, indices_ptr, indices_row, null_block_id, rows)
            count(seed_ptr, -(drawing * (NHEADS * TILES)).to(tl.int64))
            return
        program -= 1
    head = program // TILES % NHEADS
    tile = program % TILES
    place = program // (NHEADS * TILES)
    row = place.to(tl.int64)
    if ORDER:
        ahead = (tl.num_programs(0) - (1 if PHILOX_ROUNDS > 0 else 0)) // (NHEADS * TILES) - rows
        row = batch_row(place, ahead, is_flush_ptr, rows).to(tl.int64)
        if row < 0:
            return
    group = head // (NHEADS // NGROUPS)
    p = tile * (BLOCK_P + TAIL_P) + tl.arange(0, BLOCK_P)

    # First generation of loads: the batch row's.
    slot = tl.load(indices_ptr + row * indices_row).to(tl.int64)
    w = tl.load(write_pos_ptr + row)
    flush = tl.load(is_flush_ptr + row)
    dt = load_dt(dt_ptr, dt_bias_ptr, row * dt_row + head * dt_head, head * dt_bias_head)
    A = tl.load(A_ptr + head * A_head) * LOG2E
    x_row_ptr = tl.multiple_of(x_ptr + row * x_row, ROW_ALIGN) + head * HEADDIM
    B_row_ptr = tl.multiple_of(B_ptr + row * B_row, ROW_ALIGN) + group * DSTATE
    C_row_ptr = tl.multiple_of(C_ptr + row * C_row, ROW_ALIGN) + group * DSTATE
    D_at, z_at = head * D_head, row * z_row + head * HEADDIM
    B_now = load_vector(B_row_ptr, DSTATE, RING_N)
    C_ring = load_vector(C_row_ptr, DSTATE, RING_N)
    C_state = load_vector(C_row_ptr, DSTATE, STATE_N)
    x_now = tl.load(x_row_ptr + p, mask=p < HEADDIM, other=0.0)
    D, z = load_skip_and_gate(D_ptr, z_ptr, D_at, z_at, p, HEADDIM, D_TIED)
    if TAIL_P > 0:
        q = BLOCK_P + tl.arange(0, TAIL_P)
        x_now_q = tl.load(x_row_ptr + q, mask=q < HEADDIM, other=0.0)
        D_q, z_q = load_skip_and_gate(D_ptr, z_ptr, D_at, z_at, q, HEADDIM, D_TIED)
    tl.debug_barrier()
    if (slot == null_block_id) | (slot < 0):
        return
    if ORDER:  # noqa: SIM102  a constant; and the search is for programs that flush
        if (flush != 0) & (ahead > 0) & (place >= ahead):  # noqa: SIM102
            if went_ahead(place - ahead, ahead, is_flush_ptr):
                return

    # Second generation: the slot's. dt comes behind the barrier, for what needs it would be moved before it.
    state = tl.multiple_of(state_ptr + slot * state_slot, STATE_ALIGN) + head * (HEADDIM * DSTATE)
    x_ring = tl.multiple_of(x_cache_ptr + slot * x_cache_slot, ROW_ALIGN) + head * (BUFFER_LEN * HEADDIM)
    B_ring = tl.multiple_of(B_cache_ptr + slot * B_cache_slot, ROW_ALIGN) + group * (BUFFER_LEN * DSTATE)
    dt_ring = dt_cache_ptr + slot * dt_cache_slot + head * BUFFER_LEN
    j = tl.arange(0, BLOCK_L)
    B_old = load_rows(B_ring, j, j < w, DSTATE, RING_N)
    x_old = load_ring(x_ring, p, w, HEADDIM, BLOCK_L)
    S = load_rows(state, p, p < HEADDIM, DSTATE, STATE_N)
    scale_row, scale, scale_q = (), (), ()
    if CODES != "":
        scale_row = scale_ptr + slot * scale_slot + head * HEADDIM
        scale = load_scale(scale_row, p, HEADDIM, CODES)
        if TAIL_P > 0:
            scale_q = load_scale(scale_row, q, HEADDIM, CODES)
    if TAIL_P > 0:
        x_old_q = load_ring(x_ring, q, w, HEADDIM, BLOCK_L)
        S_q = load_rows(state, q, q < HEADDIM, DSTATE, STATE_N)
    tl.debug_barrier()

    if DT_SOFTPLUS:
        dt = softplus(dt)
    weight, decay = window_weights(dt_ring, dt, w, A, BLOCK_L)
    if flush:
        dice = ()
        if PHILOX_ROUNDS > 0:
            dice = load_dice(seed_ptr, head, NHEADS)
        y = fold_rows(state, scale, scale_row, x_ring, dt_ring, B_ring, x_now, B_row_ptr, C_row_ptr, p, w, dt, A, decay,
                      dice, slot, HEADDIM, DSTATE, FOLD_N, PHILOX_ROUNDS, CODES, PTX)
        if TAIL_P > 0:
            y_q = fold_rows(state, scale_q, scale_row, x_ring, dt_ring, B_ring, x_now_q, B_row_ptr, C_row_ptr, q, w, dt,
                            A, decay, dice, slot, HEADDIM, DSTATE, FOLD_N, PHILOX_ROUNDS, CODES, PTX)
        if PHILOX_ROUNDS > 0:
            count(seed_ptr, 1)
    else:
        weight *= window_scores(B_old, B_now, C_ring, w, BLOCK_L)
        y = read_rows(S, scale, x_old, x_now, weight, C_state, decay, w, BLOCK_L, CODES)
        tl.store(x_ring + w * HEADDIM + p, x_now.to(x_ring.dtype.element_ty), mask=p < HEADDIM)
        if TAIL_P > 0:
            y_q = read_rows(S_q, scale_q, x_old_q, x_now_q, weight, C_state, decay, w, BLOCK_L, CODES)
            tl.store(x_ring + w * HEADDIM + q, x_now_q.to(x_ring.dtype.element_ty), mask=q < HEADDIM)
        if tile == 0:
            tl.store(dt_ring + w, dt)
            if head % (NHEADS // NGROUPS) == 0:
                store_vector(B_ring + w * DSTATE, B_now, DSTATE, RING_N)

    let_successor_begin(PDL)
    out_row_ptr = out_ptr + row * out_row + head * HEADDIM
    store_out(out_row_ptr, y, x_now, D, z, p, HEADDIM, D_ptr is not None, z_ptr is not None)
    if TAIL_P > 0:
        store_out(out_row_ptr, y_q, x_now_q, D_q, z_q, q, HEADDIM, D_ptr is not None, z_ptr is not None)


def compile_replay_step(problem: Mamba2Problem, config: Mamba2TritonConfig) -> Callable[..., Tensor]:
    """Compile the step for the current device; the result takes the arguments of ``replay_step``.

    It serves every batch size. It launches one kernel and does nothing else: what it needs of shapes,
    dtypes and alignment it takes from ``problem``, which the arguments must pose.
    """
    target = Target.of(replay_kernel)
    launch = compile_kernel(replay_kernel, replay_arguments(problem), replay_constants(problem, config, target),
                            compile_options(config.num_warps, config.max_registers))
    g = problem.geometry
    programs = g.nheads * config.tiles(g.headdim)
    state_bytes = g.nheads * g.headdim * g.dstate * problem.state_dtype.itemsize
    counting = 1 if problem.philox_rounds else 0
    as_integers = problem.state_dtype in LARGEST_CODE

    def step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
             dt_bias: Tensor | None, z: Tensor | None, x_cache: Tensor, dt_cache: Tensor, B_cache: Tensor,
             write_pos: Tensor, is_flush: Tensor, state_batch_indices: Tensor, null_block_id: int,
             out: Tensor, rand_seed: Tensor | None = None, state_scale: Tensor | None = None) -> Tensor:
        pool = state.view(torch.int8) if as_integers else state
        batch = x.shape[0]
        ahead = rows_ahead(batch, programs, state_bytes, problem.buffer_len) if target.order else 0
        grid = (batch + ahead) * programs + counting
        launch(grid, pool, x, dt, A, B, C, D, dt_bias, z, x_cache, dt_cache, B_cache,
               write_pos, is_flush, state_batch_indices, out, rand_seed, state_scale, null_block_id, state.stride(0),
               x.stride(0), dt.stride(0), dt.stride(1), A.stride(0), B.stride(0), C.stride(0), stride(D),
               stride(dt_bias), stride(z), x_cache.stride(0), dt_cache.stride(0), B_cache.stride(0),
               state_batch_indices.stride(0), out.stride(0), stride(state_scale), batch)
        return out
    return step


def replay_arguments(problem: Mamba2Problem) -> list[torch.dtype | int | None]:
    """The kernel's run-time arguments as ``compile_kernel`` takes them: dtypes, integers, None where absent."""
    p, act, ring = problem, problem.act_dtype, problem.ring_dtype
    integers = 18  # null_block_id, the strides and the batch's rows
    eight_bit = p.state_dtype in LARGEST_CODE
    return [torch.int8 if eight_bit else p.state_dtype, act, p.dt_dtype, torch.float32, act, act, p.D_dtype,
            p.dt_bias_dtype, act if p.has_z else None, ring, torch.float32, ring, torch.int32, p.flush_dtype,
            p.index_dtype, act, torch.int64 if p.philox_rounds else None, torch.float32 if eight_bit else None,
            *[0] * integers]


def replay_constants(problem: Mamba2Problem, config: Mamba2TritonConfig, target: Target) -> dict[str, int | bool | str]:
    """The kernel's compile-time constants, in the order of its signature."""
    g = problem.geometry
    return {"NHEADS": g.nheads, "HEADDIM": g.headdim, "DSTATE": g.dstate, "NGROUPS": g.ngroups,
            "BUFFER_LEN": problem.buffer_len, "DT_SOFTPLUS": problem.dt_softplus, "D_TIED": problem.D_tied,
            "STATE_ALIGN": problem.state_align, "ROW_ALIGN": problem.row_align,
            "BLOCK_P": config.block_p, "TAIL_P": config.tail_p, "BLOCK_L": next_power_of_two(problem.buffer_len),
            "STATE_N": config.state_n, "RING_N": config.ring_n, "FOLD_N": config.fold_n,
            "PHILOX_ROUNDS": problem.philox_rounds,
            "CODES": {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}.get(problem.state_dtype, ""),
            "PTX": target.ptx, "PDL": target.pdl, "ORDER": target.order}


@lru_cache(maxsize=1024)
def _compiled(problem: Mamba2Problem, config: Mamba2TritonConfig, device: torch.device) -> Callable[..., Tensor]:
    return compile_replay_step(problem, config)


def replay_step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
                dt_bias: Tensor | None, z: Tensor | None, x_cache: Tensor, dt_cache: Tensor, B_cache: Tensor,
                write_pos: Tensor, is_flush: Tensor, state_batch_indices: Tensor, null_block_id: int, out: Tensor,
                rand_seed: Tensor | None = None, state_scale: Tensor | None = None, *, dt_softplus: bool,
                philox_rounds: int = 0, config: Mamba2TritonConfig | None = None) -> Tensor:
    """One token per batch row by replay. Shapes, dtypes and rules: ``replayssm_cute.mamba2``.

    Checks its arguments and compiles at the first call with a new kind of them; ``state``, the rings,
    ``out``, ``rand_seed`` and ``state_scale`` are the caller's and are changed in place. A decode loop prepares the
    step once with ``compile_replay_step`` instead.

    Raises:
        ArgumentError: an argument breaks the contract; nothing was changed.
    """
    args = (state, x, dt, A, B, C, D, dt_bias, z, x_cache, dt_cache, B_cache, write_pos, is_flush,
            state_batch_indices, null_block_id, out, rand_seed, state_scale)
    problem = mamba2_problem(*args, dt_softplus=dt_softplus, max_cache_len=x_cache.shape[2],
                             philox_rounds=philox_rounds)
    if x.shape[0] == 0:
        return out
    chosen = config or default_config(problem)
    return _compiled(problem, chosen, state.device)(*args)
