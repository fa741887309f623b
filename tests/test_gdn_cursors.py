"""The cursor algebra of speculative verify, against a model of one ring in plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_cursors import GdnCursors, commit_gdn_replayssm_spec, reset_gdn_replayssm_spec

NULL = -1


def cursors(rows: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    m, base, flush = zip(*rows, strict=True)
    return (torch.tensor(m, dtype=torch.int32), torch.tensor(base, dtype=torch.int32),
            torch.tensor(flush, dtype=torch.int8))


def state(tensors: tuple[Tensor, Tensor, Tensor]) -> list[tuple[int, int, int]]:
    return list(zip(*(t.tolist() for t in tensors), strict=True))


def commit(tensors: tuple[Tensor, Tensor, Tensor], accepted: list[int], keys: list[int], L: int, T: int,
           null: int = NULL, every: bool = False) -> None:
    commit_gdn_replayssm_spec(*tensors, torch.tensor(accepted, dtype=torch.int32),
                              torch.tensor(keys, dtype=torch.int32), L, T, every, null_block_id=null)


@pytest.mark.parametrize(("T", "L"), [(1, 2), (2, 4), (2, 8), (3, 8), (4, 8), (4, 16), (8, 16), (16, 32)])
def test_a_ring_never_overflows_and_loses_no_record(T: int, L: int) -> None:
    """Random acceptance for many steps: what is committed and not folded is always in the ring, in order."""
    rng, t = random.Random(T * L), cursors([(5, 5, 1)])
    reset_gdn_replayssm_spec(*t, torch.tensor([0]), L, T, NULL)
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
    reset_gdn_replayssm_spec(*t, torch.tensor(keys), 16, 2, null)
    assert state(t)[3] == before[3] and all(state(t)[k] == (0, 0, 0) for k in live)


def test_a_ring_longer_than_the_threshold_wraps_at_its_own_length() -> None:
    t = cursors([(6, 13, 1)])
    commit_gdn_replayssm_spec(*t, None, torch.tensor([0]), 8, 2, cache_buf_len=16, null_block_id=NULL)
    assert state(t) == [(0, 3, 0)]


def test_errors_name_the_argument_and_change_nothing() -> None:
    c, keys, n = GdnCursors.allocate(3), torch.tensor([0, 1]), torch.tensor([1, 1])
    t = (c.write_pos, c.cache_base, c.is_flush)
    for name, change in {"max_cache_len": {"max_cache_len": 12}, "max_spec_len": {"max_spec_len": 0},
                         "num_accepted": {"num_accepted": n[:1]}, "replay_indices": {"replay_indices": keys.float()},
                         "write_pos": {"write_pos": c.write_pos.long()}, "cache_buf_len": {"cache_buf_len": 8},
                         "is_flush": {"is_flush": c.is_flush[:2]}}.items():
        options = {"write_pos": t[0], "cache_base": t[1], "is_flush": t[2], "num_accepted": n, "replay_indices": keys,
                   "max_cache_len": 16, "max_spec_len": 4, **change}
        with pytest.raises(ArgumentError, match=f"^{name}"):
            commit_gdn_replayssm_spec(**options)
    with pytest.raises(ArgumentError, match="at least two windows"):
        reset_gdn_replayssm_spec(*t, keys, 8, 5)
    assert state(t) == [(0, 0, 0)] * 3
