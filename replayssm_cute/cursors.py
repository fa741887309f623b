"""Cursors of standard decode: where each row of a batch stands in its ring, and who flushes."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm_cute.errors import ArgumentError
from replayssm_cute.layout import MAX_BUFFER_LEN

_COUNT_DTYPES = (torch.int32, torch.int64)


def decode_cursors(num_computed: Tensor, query_len: Tensor, decode_base: Tensor, buffer_len: int, *,
                   block_size: int | None = None,
                   out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Ring cursor and flush flag of every row of a decode step.

    A row has taken ``steps = num_computed - base`` decode steps since its ring was last empty;
    it stands at ``steps mod L`` and flushes in the last ring row. The base is ``decode_base``; with
    ``block_size`` it is the last completed block where that is later, and a step that completes
    a block flushes too, so that the checkpoint of a full block is exact and can be cached.
    Three kinds of row are special:

    * a one-token tail of a prefill, run as decode before ``decode_base``: cursor 0 and a
      flush, which is one exact step of the recurrence;
    * a padded row, ``query_len`` 0: cursor 0, no flush;
    * with ``block_size``, a block boundary may force a flush at any cursor.

    After any flush the row's next cursor is 0, by this very formula.

    The work is elementwise on the tensors' device: no host sync, no data-dependent control
    flow. With ``out`` it can be captured in a CUDA graph and replayed with other contents in the
    same tensors.

    Args:
        num_computed: (batch,) int32 or int64, tokens of the request whose state is computed.
        query_len: (batch,) tokens of the request in this step: 1, or 0 for a padded row.
        decode_base: (batch,) the request's token count when it was admitted, or admitted again
            after a preemption (which re-anchors its ring).
        buffer_len: L, rows of the ring, 1 to 64.
        block_size: tokens of a prefix-cache block in align mode; None in any other mode.
        out: (write_pos, is_flush) buffers of the result, the caller's, overwritten; (batch,) int32
            and (batch,) int8 or bool on the same device. They may share memory with the inputs.
            None allocates.

    Returns:
        (write_pos, is_flush): (batch,) int32 with 0 <= w < L, and (batch,) int8, or ``out``.

    Raises:
        ArgumentError: naming the argument, what was expected and what came; nothing was written.
    """
    _check_counts(num_computed, query_len, decode_base)
    if not _is_int(buffer_len) or not 1 <= buffer_len <= MAX_BUFFER_LEN:
        raise ArgumentError("buffer_len", f"an integer in 1..{MAX_BUFFER_LEN}", buffer_len)
    if block_size is not None and (not _is_int(block_size) or block_size < 1):
        raise ArgumentError("block_size", "a positive integer or None", block_size)
    if out is None:
        out = (torch.empty_like(num_computed, dtype=torch.int32),
               torch.empty_like(num_computed, dtype=torch.int8))
    write_pos, is_flush = _check_out(out, num_computed)

    base = decode_base
    if block_size is not None:
        base = torch.maximum(base, num_computed - num_computed % block_size)
    steps = num_computed - base
    cursor = (steps % buffer_len).masked_fill_((steps < 0) | (query_len == 0), 0)
    flush = (steps < 0) | (cursor == buffer_len - 1)
    if block_size is not None:
        flush |= (num_computed + query_len) % block_size == 0
    flush &= query_len != 0
    write_pos.copy_(cursor)
    is_flush.copy_(flush)
    return out


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_counts(num_computed: Tensor, query_len: Tensor, decode_base: Tensor) -> None:
    for name, value in (("num_computed", num_computed), ("query_len", query_len),
                        ("decode_base", decode_base)):
        if not isinstance(value, Tensor):
            raise ArgumentError(name, "a tensor", type(value).__name__)
        if value.dtype not in _COUNT_DTYPES:
            raise ArgumentError(name, "dtype int32 or int64", value.dtype)
        _check_like(name, value, num_computed)


def _check_out(out: tuple[Tensor, Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(out, tuple) or len(out) != 2 or not all(isinstance(t, Tensor) for t in out):
        raise ArgumentError("out", "a tuple (write_pos, is_flush) of tensors", type(out).__name__)
    for name, value, dtypes in (("out[0]", out[0], (torch.int32,)),
                                ("out[1]", out[1], (torch.int8, torch.bool))):
        if value.dtype not in dtypes:
            raise ArgumentError(name, f"dtype {' or '.join(map(str, dtypes))}", value.dtype)
        _check_like(name, value, like)
    return out


def _check_like(name: str, value: Tensor, like: Tensor) -> None:
    if value.dim() != 1 or value.shape != like.shape:
        raise ArgumentError(name, "shape (batch,), that of num_computed", tuple(value.shape))
    if value.device != like.device:
        raise ArgumentError(name, f"device {like.device}, where num_computed is", value.device)
