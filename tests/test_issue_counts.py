"""The instructions counted for the speed model are those of the kernels as they are."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from benchmarks.issue_counts import COUNTED, count, kernels
from replayssm_cute.kernels.targets import TARGETS
from replayssm_tune.speed_model import issue_counts


def test_committed_counts_are_complete() -> None:
    assert {target: set(counts) for target, counts in issue_counts().items()} == \
        {target: set(kernels(target)) for target in TARGETS}
    assert all(issue_counts()[target] == issue_counts()[code] for target, code in COUNTED.items())


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_committed_count_is_counted_again(target: str) -> None:
    """Within 5%: the versions of the DSL differ a little. ``python -m benchmarks.issue_counts`` counts anew."""
    for name in ("64x128 float16 tile=64", "64x128 float8_e4m3fn SR5 tile=64", "64x128 float16 float16 inputs tile=64"):
        assert count(target, [name])[name] == pytest.approx(issue_counts()[target][name], rel=0.05), name


def test_packed_products_need_fewer_instructions() -> None:
    counts = issue_counts()
    assert all(counts["sm_100a"][name]["issued"] < counts["sm_90a"][name]["issued"] for name in kernels("sm_100a"))
