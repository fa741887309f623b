"""Cursors of the speculative ring: all that acceptance, rollback and a new request change.

One set for all layers, keyed by ring row: ``write_pos`` committed records, ``cache_base`` where the first one lies,
``is_flush`` whether the next verify step folds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_layout import check_buffer_len, check_tokens
from replayssm_cute.gdn_validate import cursor_rows
from replayssm_cute.reference import gdn_spec


@dataclass(frozen=True)
class GdnCursors:
    """The cursor tensors of ``rings`` rings: int32, int32 and int8, (rings,) each. Caller's."""

    write_pos: Tensor
    cache_base: Tensor
    is_flush: Tensor

    @classmethod
    def allocate(cls, rings: int, device: torch.device | str = "cpu") -> GdnCursors:
        """Cursors of empty rings."""
        return cls(*(torch.zeros(rings, dtype=dtype, device=device)
                     for dtype in (torch.int32, torch.int32, torch.int8)))


def commit_gdn_replayssm_spec(
    write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, num_accepted: Tensor | None, replay_indices: Tensor,
    max_cache_len: int, max_spec_len: int, fold_every_commit: bool = False, cache_buf_len: int | None = None,
    null_block_id: int = 0,
) -> None:
    """Move the cursors of the named rings past the accepted tokens, in one launch on the device.

    Where ``is_flush`` is set the verify step has folded the committed records, so they leave the ring whatever was
    accepted: ``cache_base`` moves past them and ``write_pos`` = n. Elsewhere ``write_pos`` += n. Then ``is_flush`` =
    (write_pos + 2 T > L): two more windows would not fit. Names are those of SGLang 0.5.23.

    Args:
        write_pos, cache_base, is_flush: cursors of all rings, as in ``GdnCursors``. Changed in place.
        num_accepted: (>= rows,) int32 or int64, accepted tokens of each row, the bonus token included; negative
            counts as 0. None: 0 for all rows, after a fold that was not a verify step's.
        replay_indices: (rows,) int32 or int64; ``null_block_id`` or negative is padding. No ring twice.
        max_cache_len, max_spec_len: L and T.
        fold_every_commit: every committed record is folded by the next step.
        cache_buf_len: rows of the ring where more than L; None means L.

    Raises:
        ArgumentError: naming the argument, what was expected and what came; nothing was changed.
    """
    check_buffer_len(max_cache_len, check_tokens(max_spec_len))
    rows = max_cache_len if cache_buf_len is None else check_buffer_len(cache_buf_len, 1, "cache_buf_len")
    if rows < max_cache_len:
        raise ArgumentError("cache_buf_len", f"at least max_cache_len={max_cache_len}", rows)
    cursor_rows(write_pos, cache_base, is_flush, replay_indices, num_accepted, null_block_id)
    if write_pos.device.type != "cpu":
        from fallback_triton.gdn_cursors import commit
    else:
        commit = gdn_spec.commit
    commit(write_pos, cache_base, is_flush, num_accepted, replay_indices, null_block_id, ring_len=rows,
           max_cache_len=max_cache_len, max_spec_len=max_spec_len, fold_every_commit=bool(fold_every_commit))


def reset_gdn_replayssm_spec(write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, replay_indices: Tensor,
                             max_cache_len: int, max_spec_len: int, null_block_id: int = 0) -> None:
    """Empty the named rings, in one launch: for a slot that a new request takes over.

    Arguments as in ``commit_gdn_replayssm_spec``.
    """
    check_buffer_len(max_cache_len, check_tokens(max_spec_len))
    cursor_rows(write_pos, cache_base, is_flush, replay_indices, None, null_block_id)
    if write_pos.device.type != "cpu":
        from fallback_triton.gdn_cursors import reset
    else:
        reset = gdn_spec.reset
    reset(write_pos, cache_base, is_flush, replay_indices, null_block_id)
