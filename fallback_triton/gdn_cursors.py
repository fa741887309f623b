"""Cursors of the speculative ring in Triton: one small launch for a commit or a reset."""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fallback_triton.launch import compile_kernel, compile_options, kernel

BLOCK = 128


@triton.jit
def load_keys(keys_ptr, rows, null_block_id, BLOCK: tl.constexpr):
    """(rows of this program, their keys, which of them are live)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    return row, key, (key >= 0) & (key != null_block_id)


@kernel
def commit_kernel(write_pos_ptr, base_ptr, flush_ptr, accepted_ptr, keys_ptr, rows: tl.int64, null_block_id: tl.int64,
                  RING_LEN: tl.constexpr, MAX_LEN: tl.constexpr, TOKENS: tl.constexpr, EVERY: tl.constexpr,
                  BLOCK: tl.constexpr):
    """Rules: ``replayssm_cute.gdn_cursors.commit_gdn_replayssm_spec``."""
    row, key, live = load_keys(keys_ptr, rows, null_block_id, BLOCK)
    w = tl.load(write_pos_ptr + key, mask=live, other=0)
    base = tl.load(base_ptr + key, mask=live, other=0)
    folded = tl.load(flush_ptr + key, mask=live, other=0) != 0
    accepted = tl.zeros((BLOCK,), tl.int32)
    if accepted_ptr is not None:
        accepted = tl.maximum(tl.load(accepted_ptr + row, mask=live, other=0), 0).to(tl.int32)
    tl.store(base_ptr + key, tl.where(folded, (base + w) % RING_LEN, base), mask=live)
    w = tl.where(folded, 0, w) + accepted
    tl.store(write_pos_ptr + key, w, mask=live)
    due = w > 0 if EVERY else w + 2 * TOKENS > MAX_LEN
    tl.store(flush_ptr + key, due.to(flush_ptr.dtype.element_ty), mask=live)


@kernel
def reset_kernel(write_pos_ptr, base_ptr, flush_ptr, keys_ptr, rows: tl.int64, null_block_id: tl.int64,
                 BLOCK: tl.constexpr):
    """Rules: ``replayssm_cute.gdn_cursors.reset_gdn_replayssm_spec``."""
    _, key, live = load_keys(keys_ptr, rows, null_block_id, BLOCK)
    zero = tl.zeros((BLOCK,), tl.int32)
    tl.store(write_pos_ptr + key, zero, mask=live)
    tl.store(base_ptr + key, zero, mask=live)
    tl.store(flush_ptr + key, zero.to(flush_ptr.dtype.element_ty), mask=live)


@functools.lru_cache(maxsize=256)
def _compiled(reset: bool, device: torch.device, dtypes: tuple[torch.dtype | None, ...],
              constants: tuple[tuple[str, int], ...]) -> Callable[..., None]:
    function = reset_kernel if reset else commit_kernel
    return compile_kernel(function, [torch.int32, torch.int32, *dtypes, 0, 0], dict(constants), compile_options(4, 0))


def commit(write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, num_accepted: Tensor | None,
           replay_indices: Tensor, null_block_id: int, *, ring_len: int, max_cache_len: int, max_spec_len: int,
           fold_every_commit: bool) -> None:
    """Move the named cursors past the accepted tokens; arguments as in ``reference.gdn_spec.commit``."""
    constants = {"RING_LEN": ring_len, "MAX_LEN": max_cache_len, "TOKENS": max_spec_len, "EVERY": fold_every_commit,
                 "BLOCK": BLOCK}
    dtypes = (is_flush.dtype, None if num_accepted is None else num_accepted.dtype, replay_indices.dtype)
    launch = _compiled(False, write_pos.device, dtypes, tuple(constants.items()))
    rows = len(replay_indices)
    if rows:
        launch(-(-rows // BLOCK), write_pos, cache_base, is_flush, num_accepted, replay_indices, rows, null_block_id)


def reset(write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, replay_indices: Tensor, null_block_id: int) -> None:
    """Empty the named rings; arguments as in ``reference.gdn_spec.reset``."""
    launch = _compiled(True, write_pos.device, (is_flush.dtype, replay_indices.dtype), (("BLOCK", BLOCK),))
    rows = len(replay_indices)
    if rows:
        launch(-(-rows // BLOCK), write_pos, cache_base, is_flush, replay_indices, rows, null_block_id)
