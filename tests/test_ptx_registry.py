"""Every kernel that a registry row or the heuristic names for a model, executed as a Blackwell would run it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from replayssm_cute.reference.mamba2 import replay_step
from replayssm_cute.rounding import LARGEST_CODE
from tests.cases import ARGUMENTS, bits, check
from tests.ptx.launch import Options, launch
from tests.ptx.registry_kernels import kernel, registered, texts
from tests.ptx.vectors import written_masks
from tests.ptx.vectors_cases import dice, make

NAMES = list(registered("sm_100a"))


def test_both_blackwells_are_named_the_same_kernels() -> None:
    assert registered("sm_100a") == registered("sm_103a") and len(NAMES) >= 30


@pytest.mark.parametrize("name", NAMES)
def test_sm_103a_has_the_code_of_sm_100a(name: str) -> None:
    """But for the line that names the target: one execution stands for both."""
    first, second = (texts(target)[name]["ptx"].replace(target, "") for target in ("sm_100a", "sm_103a"))
    assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_the_specification(name: str) -> None:
    """Of everything that a step writes, in a case whose sums are exact; every instruction is reached."""
    spec, _ = registered("sm_100a")[name]
    before = make(spec, "exact", NAMES.index(name))
    got, want = before.clone(), before.clone()
    machine = launch(kernel(name, "sm_100a"), got, Options(dice=dice(spec)))
    rounding = {} if not spec.rounds else {"rand_seed": dice(spec), "philox_rounds": spec.rounds}
    scale = {"state_scale": want["state_scale"]} if spec.state in LARGEST_CODE else {}
    replay_step(*(want.get(a) for a in ARGUMENTS), dt_softplus=True, **rounding, **scale)
    masks = written_masks(before)
    assert all(torch.equal(bits(got.buffers[a]), bits(want.buffers[a])) for a in before.buffers)
    assert all(not torch.equal(bits(got.buffers[a]), bits(before.buffers[a])) for a in masks)
    assert not machine.missed(), "the case must reach every instruction"


@pytest.mark.parametrize("name", [name for name in NAMES if not registered("sm_100a")[name][0].rounds
                                  and registered("sm_100a")[name][0].state not in LARGEST_CODE])
def test_the_oracle(name: str) -> None:
    """General numbers within the tolerance, nothing else changed, and warps in a random order."""
    spec, _ = registered("sm_100a")[name]
    before = make(spec, "general", 1000 + NAMES.index(name))
    after = before.clone()
    launch(kernel(name, "sm_100a"), after, Options(ctas=4, seed=NAMES.index(name)))
    check(before, after)
