"""8-bit checkpoints in the bulk kernel's PTX: the codes and scales of the specification, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from replayssm_cute.rounding import dequantize, quantize, random_bits
from tests.cases import Case, View, bits, check, oracle
from tests.ptx.kernels import CODED_NAMES, spec_of
from tests.ptx.machine import Machine
from tests.test_ptx_mamba2 import SEED, STEP, TARGETS, exact_case, run

E4M3 = torch.float8_e4m3fn


def coded_case(name: str, times: int = 1) -> tuple[Case, Case]:
    """(the kernel's case, the same with its checkpoint in fp32): folds that are exact in fp32, scales powers of two."""
    dtype, full = spec_of(name).state, exact_case(name, times, state=torch.float32, padded=(4,))
    view, gen = full.views["state"], torch.Generator().manual_seed(6)
    codes = torch.randint(-126, 127, view.size, generator=gen, dtype=torch.int8)
    codes = codes if dtype is torch.int8 else torch.where(codes.view(E4M3).float().isnan(), 0, codes).view(E4M3)
    scale = 2.0 ** torch.randint(-3, 1, view.size[:3], generator=gen)
    unnamed = [s for s in range(view.size[0]) if s not in {full.slots[b] for b in full.live}]
    scale[unnamed] = math.nan
    full["state"].copy_(dequantize(codes, scale))
    plain = View(tuple(codes.shape), tuple(codes.stride()))
    case = replace(full.clone(), views={**full.views, "state": plain,
                                        "state_scale": View(tuple(scale.shape), tuple(scale.stride()))})
    case.buffers |= {"state": codes.flatten(), "state_scale": scale.flatten()}
    return case, full


def specified(name: str, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a slot's exact new state."""
    spec = spec_of(name)
    H, P, N, _ = spec.shape
    assert torch.equal(value.float().double(), value), "the sums must be exact in fp32"
    if not spec.rounds:
        return quantize(value.float(), spec.state)
    position = (slot * 4 + 1) * H * P * N + torch.arange(H * P * N).view(H, P, N)
    return quantize(value.float(), spec.state, random_bits(position, SEED, STEP, spec.state, spec.rounds))


def check_codes(name: str, target: str, case: Case, full: Case, first_slot: int = 0, **options: Any) -> Machine:
    """Run the kernel; check codes and scales bit for bit, and everything else as of an fp32 checkpoint."""
    after, machine = run(name, target, case, first_slot=first_slot, **options)
    exact, same = oracle(full), full.clone()
    for argument in same.buffers:
        if argument != "state":
            same.buffers[argument].copy_(after.buffers[argument])
    expected = {argument: case[argument].clone() for argument in ("state", "state_scale")}
    for b in case.live:
        if case.cursors[b][1]:
            slot = case.slots[b]
            expected["state"][slot], expected["state_scale"][slot] = specified(
                name, exact["state"][slot], slot + first_slot)
            same["state"][slot] = exact["state"][slot].float()
    for argument, want in expected.items():
        assert torch.equal(bits(after[argument]), bits(want)), argument
    check(full, same, exact)
    return machine


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CODED_NAMES)
@pytest.mark.parametrize("first_slot", [0, 2 ** 27])
def test_codes_and_scales_are_those_of_the_specification(name: str, target: str, first_slot: int) -> None:
    # More items than stages; where rows are sorted, more than one block's.
    times = -(-40 // (5 * spec_of(name).shape[0])) if spec_of(name).rounds else 1
    machine = check_codes(name, target, *coded_case(name, times), first_slot, ctas=1)
    assert not machine.missed(), "the case must reach every instruction"


@pytest.mark.parametrize("name", ["bulk-i8-sr", "bulk-e4m3-sr"])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_warps(name: str, seed: int) -> None:
    check_codes(name, "sm_100a", *coded_case(name), seed=seed)
