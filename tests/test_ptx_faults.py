"""Faults put into the kernels' PTX must be caught: what the executor does not see, it does not prove."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass")

import torch

from tests.cases import bits
from tests.ptx.code import load
from tests.ptx.errors import MemoryFault, PtxError, RaceError
from tests.ptx.kernels import config_of, ptx
from tests.ptx.launch import Kernel, Options, launch
from tests.test_ptx_mamba2 import STEP, case_of, dice_of, exact_case, step

SYNCHRONISING = re.compile(r"bar\.(warp\.)?sync|mbarrier\.(arrive|init)|fence\.|griddepcontrol|bulk\.(commit|wait)_")
#: A launch that nothing depends on; the copies have been read before, and the grid's end waits for the rest.
NEEDLESS = ("griddepcontrol.launch_dependents;", "cp.async.bulk.wait_group \t0;")
TARGETS = ("sm_90a", "sm_100a")


def edited(name: str, target: str, text: str) -> Kernel:
    """A kernel with other PTX."""
    return Kernel(load(text), config_of(name, target), ptx(name, target)[1])


def without(lines: list[str], first: int, count: int = 1) -> str:
    return "\n".join(lines[:first] + lines[first + count:])


def survivors(name: str, target: str, faults: dict[str, str]) -> list[str]:
    """Those of the faulty programs, by what is wrong with them, that run without a report."""
    found = []
    for label, text in faults.items():
        try:
            launch(edited(name, target, text), case_of(name, batch=6, padded=(3,)), Options(dice=dice_of(name)))
            found.append(label)
        except PtxError:
            pass
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_every_barrier_fence_and_wait_is_needed(target: str) -> None:
    """Of the bulk kernel with a bf16 state, in which no wait implies another."""
    lines = ptx("bulk-bf16", target)[0].splitlines()
    named = [(i, f"{i + 1}: {line.strip()}") for i, line in enumerate(lines)]
    faults = {label: without(lines, i) for i, label in named if SYNCHRONISING.search(label)}
    waits = {label: without(lines, i, 3) for i, label in named if "mbarrier.try_wait" in label}  # and its loop
    assert len(faults) >= 25 and len(waits) == 6
    left = survivors("bulk-bf16", target, faults | waits)
    assert [label.partition(": ")[2] for label in left] == [label for label in NEEDLESS if label in "\n".join(faults)]


def test_a_dropped_barrier_of_the_register_kernel() -> None:
    """Each before the last sums; the first one orders global memory, which only the order of warps can show."""
    name, lines = "register-act-f16-sr", ptx("register-act-f16-sr", "sm_100a")[0].splitlines()
    first, *others = [i for i, line in enumerate(lines) if "bar.sync" in line]
    assert len(others) == 3
    for i in others:
        with pytest.raises(RaceError):
            launch(edited(name, "sm_100a", without(lines, i)), case_of(name), Options(dice=dice_of(name)))
    case = case_of(name)
    want, wrong = step(name, "sm_100a", case), 0
    for seed in range(6):
        got, dice = case.clone(), dice_of(name)
        assert dice is not None
        launch(edited(name, "sm_100a", without(lines, first)), got, Options(dice=dice, seed=seed))
        assert dice[1] == STEP + 1
        wrong += not torch.equal(bits(got.buffers["state"]), bits(want.buffers["state"]))
    assert wrong > 0, "warps that come late draw the next launch's words"


def truncated(text: str, param: int) -> dict[str, str]:
    """Programs in which one product with the slot stride of a tensor has 32 bits, by the line that is changed."""
    lines = text.splitlines()
    stride = re.search(rf"ld\.param\.b64\s+(%rd\d+), \[\w+_param_{param}\+16\];", text)
    assert stride is not None
    products = re.compile(rf"\s(?:mul|mad)\.lo\.s64\s+(%rd\d+),.*{stride[1]}\b")
    found = {}
    for i, line in enumerate(lines):
        if match := products.search(line):
            cut = f"\tand.b64 {match[1]}, {match[1]}, 4294967295;"
            found[f"{i + 1}: {line.strip()}"] = "\n".join([*lines[:i + 1], cut, *lines[i + 1:]])
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["bulk-f16", "register-act-f16-p80"])
def test_an_offset_of_32_bits(name: str, target: str) -> None:
    """In every product of a slot with the stride of the state (parameter 0) or of a ring (8, 9 and 10)."""
    for param in (0, 8, 9, 10):
        faults = truncated(ptx(name, target)[0], param)
        assert faults
        for label, text in faults.items():
            with pytest.raises(MemoryFault):
                launch(edited(name, target, text), case_of(name), Options(first_slot=2 ** 28, races=False))
                pytest.fail(label)


@pytest.mark.parametrize("name", ["bulk-f16-sr", "bulk-bf16-sr", "register-act-f16-sr"])
def test_swapped_halves_of_the_random_words(name: str) -> None:
    """The other halves of the words round as well, and are not those of the specification."""
    text = ptx(name, "sm_100a")[0]
    swap = (r"shl.b32 %swap0, \3, 16;" "\n" r"shr.u32 %swap1, \3, 16;" "\n" "or.b32 %swap0, %swap0, %swap1;\n"
            r"\1\2, %swap0;")
    convert = r"(cvt\.rs\.satfinite\.\w+\.f32)( %r\d+, %r\d+, %r\d+), (%r\d+);"
    wrong, count = re.subn(convert, lambda m: m.expand(swap), text)
    assert count >= 4
    wrong = wrong.replace("\t.reg .pred", "\t.reg .b32 \t%swap<2>;\n\t.reg .pred", 1)
    case = exact_case(name)
    got, dice = case.clone(), dice_of(name)
    launch(edited(name, "sm_100a", wrong), got, Options(dice=dice))
    want = step(name, "sm_100a", case)
    differ = bits(got.buffers["state"]) != bits(want.buffers["state"])
    assert 0.001 < float(differ.float().mean()) < 0.9
    assert torch.equal(bits(got["out"]), bits(want["out"]))
