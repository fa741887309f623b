"""Cursors of standard decode against a request that remembers its own ring, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_cute.cursors import decode_cursors
from replayssm_cute.errors import ArgumentError

lengths = st.integers(1, 64)


def cursors(rows: list[tuple[int, int, int]], buffer_len: int, block_size: int | None = None,
            dtype: torch.dtype = torch.int32) -> list[tuple[int, int]]:
    """(write_pos, is_flush) of rows (num_computed, query_len, decode_base)."""
    columns = [torch.tensor(c, dtype=dtype) for c in zip(*rows, strict=True)]
    write_pos, is_flush = decode_cursors(*columns, buffer_len, block_size=block_size)
    assert write_pos.dtype == torch.int32 and is_flush.dtype == torch.int8
    return list(zip(write_pos.tolist(), is_flush.tolist(), strict=True))


@dataclass
class Request:
    """The brute force: a request that keeps its ring as a list of token positions.

    ``folded`` tokens are in the checkpoint, ``ring`` holds the positions behind it.
    """

    buffer_len: int
    block_size: int | None
    decode_base: int = 0
    folded: int = 0
    ring: list[int] = None  # type: ignore[assignment]
    flushes: int = 0

    def admit(self, tokens: int) -> None:
        """Prefill of all ``tokens`` so far: the checkpoint is exact, the ring empty."""
        self.decode_base = self.folded = tokens
        self.ring = []

    @property
    def computed(self) -> int:
        return self.folded + len(self.ring)

    def expect(self) -> tuple[int, int]:
        """What the ring itself says: its fill, and whether it must flush now."""
        full = len(self.ring) == self.buffer_len - 1
        completes = self.block_size is not None and (self.computed + 1) % self.block_size == 0
        return len(self.ring), int(full or completes)

    def step(self, write_pos: int, is_flush: int) -> None:
        """Do what the cursors say, as a kernel would, and see that no token is lost or doubled."""
        position = self.computed
        assert write_pos == len(self.ring), "a replay would read rows that are not there, or miss some"
        if is_flush:
            self.folded, self.ring = position + 1, []
            self.flushes += 1
        else:
            assert len(self.ring) < self.buffer_len - 1, "the ring overflows at the next step"
            self.ring.append(position)


@settings(max_examples=60, deadline=None)
@given(buffer_len=lengths, prompt=st.integers(1, 200), steps=st.integers(1, 300))
def test_flushes_once_a_cycle(buffer_len: int, prompt: int, steps: int) -> None:
    request = Request(buffer_len, None)
    request.admit(prompt)
    seen = []
    for write_pos, is_flush in cursors([(prompt + i, 1, prompt) for i in range(steps)], buffer_len):
        assert (write_pos, is_flush) == request.expect()
        request.step(write_pos, is_flush)
        seen.append(write_pos)
    assert request.flushes == steps // buffer_len
    assert seen == [i % buffer_len for i in range(steps)]


@settings(max_examples=60, deadline=None)
@given(buffer_len=lengths, block_size=st.none() | st.integers(1, 40), prompt=st.integers(1, 100),
       bursts=st.lists(st.tuples(st.integers(0, 70), st.booleans()), min_size=1, max_size=6))
def test_preempted_requests_anchor_anew(buffer_len: int, block_size: int | None, prompt: int,
                                        bursts: list[tuple[int, bool]]) -> None:
    """Bursts of decode steps; between them the request is preempted, loses its state and ring and is
    prefilled again, up to its last token (which decode computes) or, as a tail, one short of it."""
    request = Request(buffer_len, block_size)
    tokens = prompt
    for steps, tail in bursts:
        request.admit(tokens)
        if tail:
            # The last token of the prefill runs as a decode step before decode_base.
            request.folded = tokens - 1
            (write_pos, is_flush), = cursors([(tokens - 1, 1, tokens)], buffer_len, block_size)
            assert (write_pos, is_flush) == (0, 1)
            request.step(write_pos, is_flush)
        assert request.computed == tokens
        for _ in range(steps):
            (write_pos, is_flush), = cursors([(request.computed, 1, request.decode_base)],
                                             buffer_len, block_size)
            assert (write_pos, is_flush) == request.expect()
            request.step(write_pos, is_flush)
        tokens = request.computed


@settings(max_examples=60, deadline=None)
@given(buffer_len=lengths, block_size=st.integers(1, 96), prompt=st.integers(1, 200))
def test_every_completed_block_is_in_the_checkpoint(buffer_len: int, block_size: int, prompt: int) -> None:
    request = Request(buffer_len, block_size)
    request.admit(prompt)
    for _ in range(3 * block_size + buffer_len):
        (write_pos, is_flush), = cursors([(request.computed, 1, prompt)], buffer_len, block_size)
        request.step(write_pos, is_flush)
        if request.computed % block_size == 0:
            assert request.folded == request.computed, "a cached block would lack its last tokens"


def test_the_rules_by_hand() -> None:
    assert cursors([(100, 1, 100), (114, 1, 100), (115, 1, 100), (116, 1, 100)], 16) \
        == [(0, 0), (14, 0), (15, 1), (0, 0)]
    # one-token tail of a prefill: before the base, one exact step
    assert cursors([(99, 1, 100)], 16) == [(0, 1)]
    # far before the base as well: no remainder of a negative count shows
    assert cursors([(83, 1, 100), (84, 1, 100)], 16) == [(0, 1), (0, 1)]
    # a padded row holds whatever its last tenant left
    assert cursors([(115, 0, 100), (99, 0, 100), (0, 0, 0)], 16) == [(0, 0)] * 3


def test_align_mode_by_hand() -> None:
    block = {"block_size": 24}
    # before the first boundary the base is the admission; the step that completes the block flushes
    assert cursors([(22, 1, 20), (23, 1, 20), (24, 1, 20), (25, 1, 20)], 16, **block) \
        == [(2, 0), (3, 1), (0, 0), (1, 0)]
    # inside a block the ring still flushes when it is full, and the boundary flushes early
    assert cursors([(39, 1, 20), (40, 1, 20), (47, 1, 20), (48, 1, 20)], 16, **block) \
        == [(15, 1), (0, 0), (7, 1), (0, 0)]
    # an admission in the middle of a later block outranks the boundary before it
    assert cursors([(61, 1, 60)], 16, **block) == [(1, 0)]
    # a tail of a prefill, a padded row on a boundary
    assert cursors([(59, 1, 60), (23, 0, 20)], 16, **block) == [(0, 1), (0, 0)]
    assert cursors([(23, 1, 20)], 16) == [(3, 0)], "without align mode nothing happens at a block"


def test_a_ring_of_one_row_is_the_per_step_baseline() -> None:
    assert cursors([(100 + i, 1, 100) for i in range(5)], 1) == [(0, 1)] * 5


@given(st.lists(st.tuples(st.integers(0, 2**31 - 2), st.integers(0, 1), st.integers(0, 2**31 - 1)),
                min_size=1, max_size=20), lengths, st.none() | st.integers(1, 5000))
def test_rows_do_not_depend_on_each_other(rows: list[tuple[int, int, int]], buffer_len: int,
                                          block_size: int | None) -> None:
    together = cursors(rows, buffer_len, block_size)
    assert together == [cursors([row], buffer_len, block_size)[0] for row in rows]
    assert together == cursors(rows, buffer_len, block_size, torch.int64)
    assert all(0 <= write_pos < buffer_len for write_pos, _ in together)


@pytest.mark.parametrize("flush_dtype", [torch.int8, torch.bool])
def test_out_is_overwritten_and_returned(flush_dtype: torch.dtype) -> None:
    counts = [torch.tensor(c) for c in ([115, 99, 7, 101], [1, 1, 0, 1], [100] * 4)]
    before = [c.clone() for c in counts]
    out = (torch.full((4,), 77, dtype=torch.int32), torch.ones(4).to(flush_dtype))
    result = decode_cursors(*counts, 16, out=out)
    assert result[0] is out[0] and result[1] is out[1]
    assert out[0].tolist() == [15, 0, 0, 1] and out[1].tolist() == [1, 1, 0, 0]
    assert all(torch.equal(c, b) for c, b in zip(counts, before, strict=True))


def test_out_may_be_an_input() -> None:
    num_computed = torch.tensor([115, 101], dtype=torch.int32)
    write_pos, is_flush = decode_cursors(num_computed, torch.ones_like(num_computed),
                                         torch.full_like(num_computed, 100), 16,
                                         out=(num_computed, torch.empty(2, dtype=torch.int8)))
    assert write_pos.tolist() == [15, 1] and is_flush.tolist() == [1, 0]


def test_empty_batch() -> None:
    none = torch.empty(0, dtype=torch.int64)
    write_pos, is_flush = decode_cursors(none, none, none, 16, block_size=32)
    assert write_pos.shape == is_flush.shape == (0,)


GOOD = {"num_computed": torch.tensor([3, 4]), "query_len": torch.tensor([1, 1]),
        "decode_base": torch.tensor([3, 3]), "buffer_len": 16}
OUT = (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int8))


@pytest.mark.parametrize(("change", "name"), [
    ({"num_computed": [3, 4]}, "num_computed"), ({"num_computed": torch.zeros(2)}, "num_computed"),
    ({"num_computed": torch.zeros(2, 1, dtype=torch.int32)}, "num_computed"),
    ({"query_len": torch.tensor([1])}, "query_len"), ({"query_len": 1}, "query_len"),
    ({"decode_base": torch.tensor([3, 3], dtype=torch.int16)}, "decode_base"),
    ({"decode_base": torch.tensor([3, 3], device="meta")}, "decode_base"),
    ({"buffer_len": 0}, "buffer_len"), ({"buffer_len": 65}, "buffer_len"),
    ({"buffer_len": 16.0}, "buffer_len"), ({"buffer_len": True}, "buffer_len"),
    ({"block_size": 0}, "block_size"), ({"block_size": 1.5}, "block_size"),
    ({"out": OUT[0]}, "out"), ({"out": (OUT[0], None)}, "out"), ({"out": OUT[::-1]}, r"out\[0\]"),
    ({"out": (OUT[0], torch.zeros(2))}, r"out\[1\]"),
    ({"out": (OUT[0], torch.zeros(3, dtype=torch.int8))}, r"out\[1\]"),
])
def test_bad_arguments(change: dict[str, object], name: str) -> None:
    OUT[0].fill_(9)
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        decode_cursors(**{"out": OUT, **GOOD, **change})  # type: ignore[arg-type]
    assert OUT[0].tolist() == [9, 9], "a refused call wrote"
