"""Bank conflicts of the kernels against committed limits, and how they are counted."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("cutlass")

from tests.ptx.kernels import ptx
from tests.ptx.vectors_cases import KERNELS
from tests.ptx.wavefronts import LIMITS, TARGETS, count, limits_of, ratios, violations, wavefronts

LANE = np.arange(32)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_conflicts_stay_within_the_committed_limits(name: str, target: str) -> None:
    """``python -m tests.ptx.wavefronts`` writes the limits anew."""
    assert not violations(ratios(count(name, target)), json.loads(LIMITS.read_text())[target][name])


@pytest.mark.parametrize("name", KERNELS)
def test_one_count_for_both_blackwells(name: str) -> None:
    """Both have the same PTX, but for the line that names the target."""
    first, second = (ptx(name, target)[0].replace(target, "") for target in ("sm_100a", "sm_103a"))
    assert first == second


@pytest.mark.parametrize(("offset", "size", "taken", "ideal"), [
    (4 * LANE, 4, 1, 1), (2 * LANE, 2, 1, 1), (0 * LANE, 4, 1, 1),       # neighbours; words that lanes share
    (8 * LANE, 4, 2, 1), (128 * LANE, 4, 32, 1), (132 * LANE, 4, 1, 1),    # strides; a row padded by a word
    (8 * LANE, 8, 2, 2), (16 * LANE, 16, 4, 4),                        # whole phases
    (128 * (LANE // 4) + 8 * (LANE % 4), 8, 8, 2),                     # four rows of half a warp in the same banks
    (128 * (LANE % 8) + 16 * (LANE // 8), 16, 32, 4),                  # ldmatrix on rows of 128 bytes
    (144 * (LANE % 8) + 16 * (LANE // 8), 16, 4, 4),                   # and on padded ones
    (16 * (LANE % 8), 16, 4, 4)])                                      # the same words in every phase
def test_wavefronts_of_a_warp(offset: np.ndarray, size: int, taken: int, ideal: int) -> None:
    assert wavefronts(0 * LANE, LANE, offset, size) == (taken, ideal)


def test_warps_and_lanes_count_by_themselves() -> None:
    warp, lane = np.repeat([0, 3], 32), np.tile(LANE, 2)
    assert wavefronts(warp, lane, 8 * lane, 4) == (4, 2)
    assert wavefronts(0 * LANE[:4], LANE[:4], 128 * LANE[:4], 16) == (4, 1), "a phase without lanes takes nothing"


def test_a_conflict_more_is_seen() -> None:
    found = {"all": 1.2, "load 128": 1.4, "store 64": 1.0}
    assert not violations(found, limits_of(found))
    for kind in found:
        assert len(violations({**found, kind: found[kind] + 0.1}, limits_of(found))) == 1
    assert violations({"load 64": 1.1}, limits_of(found)), "of a width that had none"
    assert not violations({"load 64": 1.0}, limits_of(found))
