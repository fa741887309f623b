"""Flushing rows first: every row of a batch has one place of the grid, in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.interpreter import interpreted_import

order = interpreted_import("fallback_triton.order")
triton, tl = interpreted_import("triton"), interpreted_import("triton.language")

NULL = 2


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter asks for the variable again while it runs."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield


@pytest.mark.parametrize("ahead", [0, 1, 40])
@pytest.mark.parametrize("rows", [1, 31, 256, 600])
def test_every_row_has_a_place(rows: int, ahead: int) -> None:
    @triton.jit
    def walk(flag, rows, ahead, taken, went):  # type: ignore[no-untyped-def]
        place = tl.program_id(0)
        row = order.batch_row(place, ahead, flag, rows)
        tl.store(taken + place, row)
        if row >= 0:
            tl.store(went + place, order.went_ahead(row, ahead, flag).to(tl.int8))

    flag = torch.randint(0, 9, (rows,), generator=torch.Generator().manual_seed(rows)) == 0
    taken, went = torch.full((rows + ahead,), -7), torch.zeros(rows + ahead, dtype=torch.int8)
    walk[(rows + ahead,)](flag, rows, ahead, taken, went)
    want = flag.nonzero().flatten().tolist()[:ahead]
    assert taken[:ahead].tolist() == want + [-1] * (ahead - len(want))
    assert taken[ahead:].tolist() == list(range(rows))
    # What a kernel leaves out of the batch's walk is what went ahead.
    assert (flag & went[ahead:].bool()).nonzero().flatten().tolist() == want


@pytest.mark.parametrize("rows", [1, 31, 256, 600])
def test_rows_that_draw_are_counted(rows: int) -> None:
    @triton.jit
    def kernel(flag, indices, null, rows, out):  # type: ignore[no-untyped-def]
        tl.store(out, order.drawing_rows(flag, indices, 3, null, rows))

    gen, out = torch.Generator().manual_seed(rows), torch.empty(1, dtype=torch.int32)
    flag = torch.randint(0, 2, (rows + 5,), generator=gen).bool()
    indices = torch.randint(-1, 3, (rows + 5, 3), generator=gen, dtype=torch.int64)
    kernel[(1,)](flag, indices, NULL, rows, out)
    live = (indices[:rows, 0] >= 0) & (indices[:rows, 0] != NULL)
    assert int(out) == int((flag[:rows] & live).sum())


def test_rows_go_ahead_in_launches_of_middle_size() -> None:
    """None where all programs begin at once, and none where the end of the launch matters little."""
    state_bytes = 64 * 64 * 128 * 2
    assert [order.rows_ahead(batch, 64, state_bytes, 16) for batch in (8, 9, 64, 65, 128, 129)] == [0, 2, 8, 9, 16, 0]
