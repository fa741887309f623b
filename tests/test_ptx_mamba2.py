"""Every CuTe kernel's PTX for every target, executed against the float64 oracle and the rounding specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from replayssm_cute.rounding import random_bits, round_stochastic, seed_state
from tests import tolerance
from tests.cases import POOLS, Case, bits, check, make_case, oracle, written
from tests.ptx.kernels import NAMES, kernel, spec_of
from tests.ptx.launch import Options, launch
from tests.ptx.machine import Machine

TARGETS = ("sm_90a", "sm_100a", "sm_103a")
ROUNDING = [name for name in NAMES if spec_of(name).rounds]
SEED, STEP = 2 ** 63 + 12345, 2 ** 33 + 7
#: Kernels of every kind, for tests that do not need them all.
SOME = ("bulk-f32", "bulk-f16", "bulk-bf16-sr", "bulk-p80-f16-sr", "register-act-f16-sr")
EXTREME_DT = (-100.0, 19.9, 20.0, 20.1, 88.0, 89.0, 1e3, -8.0)  # 1e4 leaves the range of an fp16 state


def case_of(name: str, **options: Any) -> Case:
    """A case that the kernel takes."""
    spec = spec_of(name)
    H, P, N, G = spec.shape
    return make_case(**{"batch": 5, "nheads": H, "headdim": P, "dstate": N, "ngroups": G, "buffer_len": spec.buffer_len,
                        "state": spec.state, "act": spec.act, **spec.case, **options})


def dice_of(name: str) -> torch.Tensor | None:
    """The generator's state on a rank that holds the second quarter of the heads."""
    spec = spec_of(name)
    return seed_state(SEED, "cpu", step=STEP, first_head=spec.shape[0], total_heads=4 * spec.shape[0]) \
        if spec.rounds else None


def run(name: str, target: str, case: Case, **options: Any) -> tuple[Case, Machine]:
    """The case after a step of the kernel, whose generator must have counted it, and the machine that ran it."""
    after, dice = case.clone(), dice_of(name)
    machine = launch(kernel(name, target), after, Options(**options, dice=dice))
    if dice is not None:
        assert dice[1:3].tolist() == [STEP + 1, 0], "the step is counted once, and the arrivals are reset"
    return after, machine


def step(name: str, target: str, case: Case, **options: Any) -> Case:
    return run(name, target, case, **options)[0]


def check_step(name: str, target: str, case: Case, **options: Any) -> Machine:
    """Run the kernel and check everything that it may and may not change."""
    after, machine = run(name, target, case, **options)
    exact = oracle(case)
    if spec_of(name).rounds:
        settle(case, after, exact)
    check(case, after, exact)
    return machine


def settle(before: Case, after: Case, exact: Case) -> None:
    """Replace stochastically rounded values by the nearest ones, where they are a neighbour of the exact value."""
    mask, state = written(before)["state"], after.buffers["state"]
    want = exact.buffers["state"][mask]
    unit = 2 * tolerance.STORAGE[state.dtype] * want.abs() + tolerance.FLOOR[state.dtype] * 2
    near = (state[mask].double() - want).abs() <= unit * 1.001    # fp32 errors of the sum, at the edge of a unit
    state[mask] = torch.where(near, want.to(state.dtype), state[mask])


def assert_same_bits(a: Case, b: Case) -> None:
    for name in (*POOLS, "out"):
        assert torch.equal(bits(a.buffers[name]), bits(b.buffers[name])), name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_the_oracle(name: str, target: str) -> None:
    """Rows at several cursors, forced flushes, a padded row; all that may not be read holds NaN or is not mapped."""
    batch, ctas = 5, 3
    if name.startswith("bulk") and spec_of(name).rounds:       # rows are sorted: more than one block of 32 items
        batch, ctas = 48 // spec_of(name).shape[0], 1
    machine = check_step(name, target, case_of(name, padded=(3,), batch=batch), ctas=ctas)
    assert not machine.missed(), "the case must reach every instruction"


@pytest.mark.parametrize("target", TARGETS[:2])
@pytest.mark.parametrize("name", ["bulk-f16", "bulk-p80-bf16", "register-act-f32"])
@pytest.mark.parametrize("options", [
    {"padded": (0, 1, 2, 3, 4)}, {"null_block_id": -1, "slots": [3, 6, 5, 0, 7], "pool_slots": 9},
    {"null_block_id": 3, "padded": (0, 4)}, {"slot_padding": 16, "row_padding": 16}, {"dt_values": EXTREME_DT},
    {"batch": 1, "cursors": [(0, True)]}, {"batch": 1, "cursors": [(0, False)]},
    {"batch": 16, "cursors": [(w, w == 15 or w % 3 == 1) for w in range(16)]}], ids=str)
def test_traps(name: str, target: str, options: dict[str, Any]) -> None:
    check_step(name, target, case_of(name, **options))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["bulk-f32", "bulk-f16-sr", "register-act-f16-sr"])
def test_slots_past_two_to_the_32_elements(name: str, target: str) -> None:
    """Of every pool, the step sizes included; what lies 2^32 elements before a slot is not mapped."""
    H, L = spec_of(name).shape[0], spec_of(name).buffer_len
    check_step(name, target, case_of(name), first_slot=2 ** 32 // (H * L) + 5)


@pytest.mark.parametrize("target", TARGETS)
def test_more_items_than_facts_are_kept(target: str) -> None:
    """One CTA works through 72 items: several blocks of the producer's facts."""
    check_step("bulk-f16", target, case_of("bulk-f16", batch=18, padded=(7,)), ctas=1)


@pytest.mark.parametrize("ctas", [1, 2, 7])
def test_rows_are_sorted_by_their_flags(ctas: int) -> None:
    """Every item is computed once, whichever rows flush: none, all, the first, the last, some."""
    for flushing in ((), range(40), (0, 1), (38, 39), (3, 17, 18, 30, 39)):
        cursors = [(15, True) if b in flushing else (b % 15, False) for b in range(40)]
        case = case_of("bulk-f16-sr", batch=40, padded=(7, 17), cursors=cursors)
        check_step("bulk-f16-sr", "sm_90a", case, ctas=ctas)


@pytest.mark.parametrize("name", SOME)
def test_hardware_may_err_as_documented(name: str) -> None:
    """The tolerance must hold on hardware whose approximations and matrix sums are not the executor's."""
    case = case_of(name)
    sharp, blurred = (step(name, "sm_100a", case, blur=blur, races=False)["dt_cache"] for blur in (None, 0))
    assert not torch.equal(bits(sharp), bits(blurred)), "step sizes are fp32, and show it"
    for blur in range(3):
        check_step(name, "sm_100a", case, blur=blur, races=False)


# ---- the same bits ----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_any_order_of_warps_gives_the_same_bits(name: str, target: str) -> None:
    case = case_of(name, padded=(1,))
    first = step(name, target, case)
    for seed in range(3):
        assert_same_bits(step(name, target, case, seed=seed, ctas=2 + seed), first)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("bulk") or spec_of(n).rounds])
def test_targets_agree_bit_for_bit(name: str) -> None:
    """sm_90a has neither packed nor mixed-precision FMA nor cvt.rs; none of that may show.

    (Where a thread of the register design loads 256 bits at once, its sums have another order.)
    """
    case = case_of(name)
    assert_same_bits(step(name, "sm_90a", case, races=False), step(name, "sm_100a", case, races=False))


@pytest.mark.parametrize(("name", "other"), [("bulk-f16", "bulk-f16-tile16"), ("bulk-f16", "bulk-f16-prefetch"),
                                             ("bulk-bf16-sr", "bulk-bf16-sr-tile32")])
def test_tiles_and_stages_do_not_show(name: str, other: str) -> None:
    case = case_of(name)
    assert_same_bits(step(name, "sm_100a", case), step(other, "sm_100a", case))


@pytest.mark.parametrize("name", ["bulk-f16", "bulk-bf16", "register-act-f32"])
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    alone = case_of(name, batch=1, pool_slots=9, cursors=[(6, True)], slots=[4])
    for where in (0, 2, 4):
        cursors, slots = [(2, False), (15, True), (0, False), (9, True), (7, False)], [1, 2, 3, 5, 6]
        cursors[where], slots[where] = (6, True), 4
        crowd = case_of(name, cursors=cursors, slots=slots, pool_slots=9, seed=1)
        for argument in ("x", "B", "C", "z", "dt"):
            if argument in crowd.buffers:
                index = (where, slice(None), 0) if argument == "dt" else (where,)
                crowd[argument][index] = alone[argument][(0, *index[1:])]
        for argument in ("A", "D", "dt_bias"):
            crowd.buffers[argument].copy_(alone.buffers[argument])
        for pool in POOLS:
            crowd[pool][4] = alone[pool][4]
        got, want = step(name, "sm_100a", crowd), step(name, "sm_100a", alone)
        assert torch.equal(bits(got["out"][where]), bits(want["out"][0]))
        assert torch.equal(bits(got["state"][4]), bits(want["state"][4]))


# ---- stochastic rounding ----------------------------------------------------------------------------

def exact_case(name: str, times: int = 1, **options: Any) -> Case:
    """Flushes whose fp32 sums are exact in any order: no decay, few bits in every factor, more than are stored.

    Five rows, ``times`` over.
    """
    cursors = [(0, True), (3, True), (15, True), (8, False), (1, True)] * times
    case = case_of(name, **options, batch=len(cursors), cursors=cursors,
                   dt_values=(24.0,), dt_ring=[0.25 * (1 + j % 3) for j in range(16)])
    gen = torch.Generator().manual_seed(4)
    case.buffers["A"].zero_()
    scales = {"state": 2.0 ** -3, "x": 2.0 ** -11, "x_cache": 2.0 ** -11, "B": 1.0, "B_cache": 1.0}
    for argument, scale in scales.items():
        old = case.buffers[argument]
        values = torch.randint(-3, 4, old.shape, generator=gen) * scale
        old.copy_(torch.where(old.isnan(), old.float(), values))
    return case


def specified(name: str, case: Case, exact: Case, first_slot: int) -> dict[int, torch.Tensor]:
    """The stored states of flushed slots by ``replayssm_cute.rounding``."""
    spec = spec_of(name)
    H, P, N, _ = spec.shape
    inner = torch.arange(H * P * N).view(H, P, N) + H * P * N      # heads from ``first_head`` = H on
    states = {}
    for b in case.live:
        if case.cursors[b][1]:
            position = (case.slots[b] + first_slot) * 4 * H * P * N + inner
            drawn = random_bits(position, SEED, STEP, spec.state, spec.rounds)
            value = exact["state"][case.slots[b]]
            assert torch.equal(value.float().double(), value), "the sums must be exact in fp32"
            states[case.slots[b]] = round_stochastic(value.float(), drawn, spec.state)
    return states


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("first_slot", [0, 2 ** 27])
def test_stored_states_are_those_of_the_specification(name: str, target: str, first_slot: int) -> None:
    case = exact_case(name)
    after, exact = step(name, target, case, first_slot=first_slot), oracle(case)
    expected, moved = specified(name, case, exact, first_slot), False
    assert len(expected) == 4
    for slot, want in expected.items():
        assert torch.equal(bits(after["state"][slot]), bits(want)), slot
        moved |= not torch.equal(exact["state"][slot].to(want.dtype), want)
    assert moved, "the case must need rounding"
    settle(case, after, exact)
    check(case, after, exact)
