"""Checkpoints of the speculative ring outside of a verify step: fold, snapshot, retire; all layers in one launch.

``checkpoint_state`` (layers, slots, HV, V, K) and the rings (layers, rings, ...) carry a leading axis of layers. The
fold is the verify step's: exact with the raw rings, from the ring's d without.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from replayssm_cute import gdn_dispatch
from replayssm_cute.gdn_cursors import GdnCursors, commit_gdn_replayssm_spec, reset_gdn_replayssm_spec
from replayssm_cute.gdn_layout import RAW_NAMES, RING_NAMES
from replayssm_cute.gdn_validate import fold_problem


def fold_gdn_replayssm(checkpoint_state: Tensor, rings: Mapping[str, Tensor], ssm_state_indices: Tensor,
                       replay_indices: Tensor, cursors: GdnCursors, max_spec_len: int, *,
                       use_qk_l2norm_in_kernel: bool = True, null_block_id: int = 0,
                       backend: str | None = None) -> None:
    """Fold the committed records of every row whose ``is_flush`` is set, in all layers, and empty those rings.

    To be called behind a commit, so that the next verify step need not fold.

    Args:
        checkpoint_state: (layers, slots, HV, V, K). Changed in place.
        rings: by name, as in ``gdn_layout.GdnPool``. Not changed.
        ssm_state_indices, replay_indices: (rows,) int32 or int64; padding as in the verify step.
        cursors: changed in place.
        max_spec_len: T.

    Raises:
        ArgumentError, UnsupportedError: as in the verify step.
    """
    _run(checkpoint_state, rings, ssm_state_indices, ssm_state_indices, replay_indices, cursors, cursors.is_flush, None,
         null_block_id, use_qk_l2norm_in_kernel, backend)
    commit_gdn_replayssm_spec(cursors.write_pos, cursors.cache_base, cursors.is_flush, None, replay_indices,
                              rings["d_cache"].shape[3], max_spec_len, null_block_id=null_block_id)


def snapshot_gdn_replayssm(checkpoint_state: Tensor, rings: Mapping[str, Tensor], ssm_state_indices: Tensor,
                           target_indices: Tensor, replay_indices: Tensor, cursors: GdnCursors, *,
                           num_records: Tensor | None = None, use_qk_l2norm_in_kernel: bool = True,
                           null_block_id: int = 0, backend: str | None = None) -> None:
    """Store the state after a number of records in another slot: for a prefix cache. Nothing else changes.

    Args:
        target_indices: (rows,) slot of each row's copy; ``null_block_id`` or negative: none is made.
        num_records: (rows,) int32, records behind the checkpoint that the copy includes, 0 to ``write_pos``; None
            includes all. A copy at step i of the last window has ``write_pos`` before its commit plus i.

    Other arguments and errors as in ``fold_gdn_replayssm``.
    """
    _run(checkpoint_state, rings, ssm_state_indices, target_indices, replay_indices, cursors, None, num_records,
         null_block_id, use_qk_l2norm_in_kernel, backend)


def retire_gdn_replayssm(checkpoint_state: Tensor, rings: Mapping[str, Tensor], ssm_state_indices: Tensor,
                         target_indices: Tensor, replay_indices: Tensor, cursors: GdnCursors, max_spec_len: int, *,
                         use_qk_l2norm_in_kernel: bool = True, null_block_id: int = 0,
                         backend: str | None = None) -> None:
    """A request ends: store its state, all records folded, in ``target_indices`` (or its own slot), and empty its ring.

    Arguments and errors as in ``snapshot_gdn_replayssm`` and ``fold_gdn_replayssm``.
    """
    snapshot_gdn_replayssm(checkpoint_state, rings, ssm_state_indices, target_indices, replay_indices, cursors,
                           use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, null_block_id=null_block_id,
                           backend=backend)
    reset_gdn_replayssm_spec(cursors.write_pos, cursors.cache_base, cursors.is_flush, replay_indices,
                             rings["d_cache"].shape[3], max_spec_len, null_block_id)


def _run(state: Tensor, rings: Mapping[str, Tensor], sources: Tensor, targets: Tensor, keys: Tensor,
         cursors: GdnCursors, is_flush: Tensor | None, counts: Tensor | None, null_block_id: int, l2norm: bool,
         backend: str | None) -> None:
    named = {name: rings.get(name) for name in RING_NAMES + RAW_NAMES}
    rest = (sources, targets, keys, cursors.write_pos, cursors.cache_base, is_flush, counts, null_block_id)
    gdn_dispatch.serve((state, *named.values(), *rest), ("gdn_fold", l2norm),
                       lambda: fold_problem(state, named, *rest, l2norm=l2norm), state.device, backend)
