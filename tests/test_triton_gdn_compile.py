"""The Gated DeltaNet Triton kernels compile for every target, without a GPU, and take what they should of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.test_triton_compile import TARGETS, results


def compiled(target: str) -> list[dict[str, Any]]:
    return results("offline_gdn.py", target)


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spilling(target: str) -> None:
    rows = compiled(target)
    assert {row["kernel"] for row in rows} >= {"decode", "verify", "fold"}
    for row in rows:
        # Windows of 16 tokens beside a ring of 32 rows need all 255 registers and a few bytes of stack.
        assert row["spilled"] <= (32 if "T16" in row["label"] else 0), row
        assert row["shared"] <= 4096, "partial sums only, never a state"
        # A dependent launch reads nothing before it waits.
        dependent = row["kernel"] in ("decode", "step") and target in ("sm_90", "sm_100", "sm_120")
        assert row["waits"] == dependent, row


def test_the_state_is_read_once_in_16_byte_loads() -> None:
    """One read of the checkpoint serves both products: no second set of wide loads, and no narrow ones."""
    rows = {row["label"]: row for row in compiled("sm_90") if row["kernel"] != "step"}
    row = rows["decode float32"]
    state = row["state_bytes"] / row["threads"] / 16
    assert state <= row["loads_128"] < 2 * state, row
    for label in ("fold float32", "verify T4 float32"):
        assert rows[label]["loads_128"] >= rows[label]["state_bytes"] / rows[label]["threads"] / 16, rows[label]


def test_decode_leaves_room_for_bytes_in_flight() -> None:
    """Registers bound how many programs a multiprocessor holds: at least 80 KB of an fp32 state must fit."""
    [row] = [r for r in compiled("sm_90") if r["label"] == "decode float32" and r["kernel"] == "decode"]
    programs = 65536 // (row["threads"] * -(-row["registers"] // 8) * 8)
    assert programs * row["state_bytes"] >= 80 * 1024, row


def test_what_is_prepared_never_compiles_again() -> None:
    """On a driver that is only pretended: one load a problem at any batch, stride and slot, other problems apart."""
    [result] = results("fake_gpu_gdn.py")
    assert result["loaded"] == {"decode_kernel": 9, "verify_kernel": 4, "fold_kernel": 1, "commit_kernel": 2,
                                "reset_kernel": 1, "step_kernel": 1}
