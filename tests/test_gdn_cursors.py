"""The cursor algebra of speculative verify, against a model of one ring in plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from replayssm_cute.reference import gdn_spec

NULL = -1


def cursors(rows: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    m, base, flush = zip(*rows, strict=True)
    return (torch.tensor(m, dtype=torch.int32), torch.tensor(base, dtype=torch.int32),
            torch.tensor(flush, dtype=torch.int8))


def state(tensors: tuple[Tensor, Tensor, Tensor]) -> list[tuple[int, int, int]]:
    return list(zip(*(t.tolist() for t in tensors), strict=True))


def commit(tensors: tuple[Tensor, Tensor, Tensor], accepted: list[int], keys: list[int], L: int, T: int,
           null: int = NULL, every: bool = False) -> None:
    gdn_spec.commit(*tensors, torch.tensor(accepted, dtype=torch.int32), torch.tensor(keys, dtype=torch.int32), null,
                    max_cache_len=L, max_spec_len=T, fold_every_commit=every)


@pytest.mark.parametrize(("T", "L"), [(1, 2), (2, 4), (2, 8), (3, 8), (4, 8), (4, 16), (8, 16), (16, 32)])
def test_a_ring_never_overflows_and_loses_no_record(T: int, L: int) -> None:
    """Random acceptance for many steps: what is committed and not folded is always in the ring, in order."""
    rng, t = random.Random(T * L), cursors([(5, 5, 1)])
    gdn_spec.reset(*t, torch.tensor([0]), NULL, max_cache_len=L, max_spec_len=T)
    ring: list[int | None] = [None] * L
    accepted_tokens: list[int] = []
    folded, bases, token = 0, set(), 0
    for _ in range(40 * L):
        m, base, flush = state(t)[0]
        assert m + T <= L, "the window does not fit behind the records"
        pending = [ring[(base + j) % L] for j in range(m)]
        assert pending == accepted_tokens[folded:], "a record was lost, doubled or overwritten"
        for s in range(T):
            ring[(base + m + s) % L] = token + s
        n = rng.randint(0, T)
        if flush:
            folded += m
        accepted_tokens += range(token, token + n)
        token += T
        commit(t, [n], [0], L, T)
        bases.add(base)
    assert bases == set(range(L))


def test_commit_rules() -> None:
    """Without a flush the records grow; with one they are gone, whatever was accepted; the flag looks ahead."""
    L, T = 16, 4
    rows = [(3, 5, 0), (5, 5, 0), (12, 14, 1), (12, 14, 1), (9, 0, 1), (7, 0, 0)]
    t = cursors(rows)
    commit(t, [4, 4, 2, 0, -1, 0], [0, 1, 2, 3, 4, 5], L, T)
    assert state(t) == [(7, 5, 0), (9, 5, 1), (2, 10, 0), (0, 10, 0), (0, 9, 0), (7, 0, 0)]


def test_flush_flag_is_exact() -> None:
    for m in range(13):
        t = cursors([(m, 0, 0)])
        commit(t, [0], [0], 16, 4)
        assert state(t)[0][2] == int(m + 8 > 16)
    t = cursors([(0, 0, 0), (0, 0, 0)])
    commit(t, [1, 0], [0, 1], 16, 4, every=True)
    assert [s[2] for s in state(t)] == [1, 0], "fold_every_commit: whatever is committed is folded next"


@pytest.mark.parametrize("null", [-1, 0, 2])
def test_padded_rows_and_unnamed_rings_stay(null: int) -> None:
    before = [(1, 2, 0), (3, 4, 1), (5, 6, 0), (7, 1, 1)]
    t, live = cursors(before), [k for k in (0, 1, 2) if k != null]
    keys = [null, *live, -7]
    commit(t, [2] * len(keys), keys, 16, 2, null=null)
    assert state(t)[3] == before[3]
    assert null < 0 or state(t)[null] == before[null]
    assert all(state(t)[k] != before[k] for k in live)
    t = cursors(before)
    gdn_spec.reset(*t, torch.tensor(keys), null, max_cache_len=16, max_spec_len=2)
    assert state(t)[3] == before[3] and all(state(t)[k] == (0, 0, 0) for k in live)


def test_reset_of_a_ring_for_one_window_flushes_at_once() -> None:
    t = cursors([(1, 1, 0)])
    gdn_spec.reset(*t, torch.tensor([0]), NULL, max_cache_len=4, max_spec_len=3)
    assert state(t) == [(0, 0, 1)]
