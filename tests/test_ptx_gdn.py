"""The Gated DeltaNet CuTe kernels' PTX, executed against the float64 oracle, the recurrence and the rounding rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from replayssm_cute.kernels.targets import SORTED_ROWS
from replayssm_cute.reference import gdn
from replayssm_cute.rounding import seed_state
from tests.cases import View, bits
from tests.gdn_cases import POOLS, Case, check, make_case, make_exact
from tests.gdn_chain import Chain, Shape, acceptance, reference_commit, reference_reset
from tests.ptx import gdn_recurrence
from tests.ptx.gdn_kernels import NAMES, SPECS, kernel
from tests.ptx.gdn_launch import launch
from tests.ptx.launch import Options

ALL = [(name, target) for target, names in NAMES.items() for name in names]
BOTH = [(name, target) for name, target in ALL if "launch_mode" not in SPECS[name].problem]
SEED, STEP = 2 ** 63 + 12345, 2 ** 33 + 7
EXTREME = (-100.0, 19.9, 20.0, 20.1, 88.0, 89.0, 1e4, -8.0)


def case_of(name: str, **options: Any) -> Case:
    """A case that the kernel takes: rows at several cursors, flushes, all that may not be read NaN or not mapped."""
    spec = SPECS[name]
    Hk, ratio = spec.heads
    return make_case(**{"spec": spec.tokens > 0, "batch": 4, "k_heads": Hk, "ratio": ratio, "K": 128, "V": 128,
                        "buffer_len": spec.buffer_len, "tokens": spec.tokens or 1, "state": spec.state,
                        "ring": spec.ring, "exact": spec.exact, **spec.case, **options})


def step(name: str, target: str, case: Case, **options: Any) -> Case:
    """The case after a step of the kernel, whose generator, if it has one, must have counted it."""
    after, rounds = case.clone(), SPECS[name].problem.get("philox_rounds", 0)
    dice = seed_state(SEED, "cpu", step=STEP, first_head=1, total_heads=5) if rounds else None
    launch(kernel(name, target), after, Options(**options, dice=dice))
    if dice is not None:
        assert dice[1:3].tolist() == [STEP + 1, 0], "the step is counted once, and the arrivals are reset"
    return after


def check_step(name: str, target: str, case: Case, **options: Any) -> None:
    check(case, step(name, target, case, **options))


def assert_same_bits(a: Case, b: Case) -> None:
    for name, buffer in a.buffers.items():
        assert torch.equal(bits(buffer), bits(b.buffers[name])), name


@pytest.mark.parametrize(("name", "target"), [p for p in BOTH if not SPECS[p[0]].problem], ids=str)
def test_the_oracle(name: str, target: str) -> None:
    check_step(name, target, case_of(name, padded=(2,)))


@pytest.mark.parametrize("name", ["decode-bf16", "exact-f32-reg"])
@pytest.mark.parametrize("options", [
    {"padded": (0, 1, 2, 3)}, {"padded": (0, 3), "null_block_id": 0}, {"slot_padding": 8, "row_padding": 8},
    {"packed": True, "row_padding": 16}, {"batch": 1, "cursors": [(0, 0, True)]}], ids=str)
def test_layouts_and_padding(name: str, options: dict[str, Any]) -> None:
    check_step(name, "sm_100a", case_of(name, **options))


@pytest.mark.parametrize("name", ["decode-l32", "ring-t16"])
def test_extreme_gates(name: str) -> None:
    """Decays down to nothing beside ones of next to nothing: no difference of sums may carry them."""
    check_step(name, "sm_100a", case_of(name, raw_gates=EXTREME, batch=2))


@pytest.mark.parametrize("name", ["decode-bf16", "decode-f32-reg", "decode-f32-f32"])
def test_decode_flushes_at_every_cursor(name: str) -> None:
    cursors = [(w, 0, True) for w in (0, 1, 2, 7, 8, 9, 14, 15)]
    check_step(name, "sm_100a", case_of(name, batch=8, cursors=cursors))


@pytest.mark.parametrize("name", ["ring-bf16", "exact-f32", "exact-f32-f32"])
def test_verify_wraps_and_windows_are_short(name: str) -> None:
    """Rings that wrap in front of, inside and behind the records; windows of 0 to T tokens, full and empty rings."""
    cursors = [(12, base, base % 2 == 0) for base in (0, 4, 5, 11, 15)] + [(0, 9, True), (8, 12, True), (3, 14, False)]
    check_step(name, "sm_100a", case_of(name, batch=8, cursors=cursors, lengths=[4, 1, 4, 0, 3, 4, 0, 2]))


@pytest.mark.parametrize(("name", "target"), [
    ("decode-bf16", "sm_90a"), ("decode-f32", "sm_100a"), ("decode-bf16-reg", "sm_100a"), ("decode-f32-f32", "sm_100a"),
    ("exact-f32", "sm_100a"), ("exact-bf16", "sm_90a")])
def test_slots_past_two_to_the_32_elements(name: str, target: str) -> None:
    """Of every pool, the gates included; what lies 2^32 elements before a slot is not mapped."""
    check_step(name, target, case_of(name, batch=2), first_slot=2 ** 32 // SPECS[name].buffer_len + 5)


def test_one_cta_works_through_many_items() -> None:
    """Several blocks of the producer's facts; several blocks of rows that are sorted by their flags."""
    check_step("decode-bf16", "sm_100a", case_of("decode-bf16", batch=18, padded=(7,)), ctas=1)
    check_step("exact-bf16", "sm_100a", case_of("exact-bf16", batch=35, padded=(9,), lengths=[1] * 35), ctas=2)
    assert SORTED_ROWS >= 64


@pytest.mark.parametrize("name", ["decode-f32", "decode-f16", "decode-f32-f32", "decode-f16-f16", "ring-bf16",
                                  "exact-bf16"])
def test_hardware_may_err_as_documented(name: str) -> None:
    """The tolerance must hold on hardware whose approximations and matrix sums are not the executor's."""
    for blur in range(2):
        check_step(name, "sm_100a", case_of(name), blur=blur, races=False)


# ---- wide rings ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["decode-f32-f32", "decode-f16-f16"])
@pytest.mark.parametrize("ring", ["k_cache", "d_cache"])
def test_a_kernel_that_rounds_the_ring_to_bf16_would_be_seen(name: str, ring: str) -> None:
    """The tolerance of a folded state and of an appended d follows from the ring's dtype."""
    case = case_of(name, cursors=[(15, 0, True), (14, 0, False), (9, 0, True), (6, 0, False)])
    rounded = case.clone()
    rounded.buffers[ring] = rounded.buffers[ring].bfloat16().to(SPECS[name].ring)
    good, bad = (step(name, "sm_90a", c, races=False) for c in (case, rounded))
    for output in ("state", "d_cache") if ring == "k_cache" else ("state",):
        with pytest.raises(AssertionError, match=f"{output}: error is .* times its tolerance"):
            check(case, replace(good, buffers={**good.buffers, output: bad.buffers[output]}))


# ---- the same bits ----------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "other"), [
    ("decode-bf16", "decode-bf16-reg"), ("decode-f32", "decode-f32-reg"), ("decode-f32-f32", "decode-f32-f32-reg"),
    ("ring-bf16", "ring-bf16-reg"), ("exact-f32", "exact-f32-reg")])
def test_designs_agree_bit_for_bit(name: str, other: str) -> None:
    """The batch chooses between them, and a row's bits must not depend on the batch."""
    case = case_of(name)
    assert_same_bits(step(name, "sm_100a", case, races=False), step(other, "sm_100a", case, races=False))


@pytest.mark.parametrize("name", ["decode-bf16", "decode-f32-f32", "ring-f32", "exact-f32"])
def test_targets_agree_bit_for_bit(name: str) -> None:
    """sm_90a has no packed FMA; that may not show."""
    case = case_of(name)
    assert_same_bits(step(name, "sm_90a", case, races=False), step(name, "sm_100a", case, races=False))


@pytest.mark.parametrize(("name", "target"), [("decode-bf16", "sm_90a"), ("exact-f32", "sm_100a"),
                                              ("exact-f32-reg", "sm_100a")])
def test_any_order_of_warps_gives_the_same_bits(name: str, target: str) -> None:
    case = case_of(name, padded=(1,))
    first = step(name, target, case)
    for seed in range(2):
        assert_same_bits(step(name, target, case, seed=seed, ctas=2 + seed), first)


def test_launch_modes_split_the_rows() -> None:
    case = case_of("exact-bf16", padded=(0,))
    whole = step("exact-bf16", "sm_100a", case)
    verified = step("exact-bf16-verify", "sm_100a", case)
    assert_same_bits(step("exact-bf16-flush", "sm_100a", verified), whole)


@pytest.mark.parametrize(("name", "target"), [("exact-f32", "sm_90a"), ("exact-f32-reg", "sm_100a")])
def test_exact_fold_has_the_bits_of_the_recurrence(name: str, target: str) -> None:
    """Windows of which 0 to T tokens are accepted, chained: folded checkpoints equal the tokens run one at a time.

    The recurrence is written down in NumPy in the order of the Triton kernels.
    """
    def recurrence(state: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.from_numpy(gdn_recurrence.step(state.numpy(), **{
            n: t.float().numpy() for n, t in inputs.items() if n != "q"}))
        q, _ = gdn.query_and_key(inputs["q"], inputs["k"], 1, 128 ** -0.5, True, torch.float32)
        return (new * q[:, :, None, :]).sum(-1), new

    def verify(chain: Chain, inputs: dict[str, Tensor]) -> None:
        launch(kernel(name, target), chain_case(chain, inputs), Options(races=False, ctas=12))

    chain = Chain(Shape(4, 16, 1, 1, 128, 128, requests=3), recurrence=recurrence)
    reference_reset(chain)
    for _ in range(9):
        chain.step(verify, reference_commit, acceptance(chain.gen, 3, 4))
    assert chain.flushes >= 3 and len(chain.bases) >= 3 and chain.output_error < 1e-2


def chain_case(chain: Chain, inputs: dict[str, Tensor]) -> Case:
    """The tensors of a chain's step as a case, in place."""
    tensors = {"state": chain.state, **inputs, **{n: r for n, r in chain.rings.items() if r is not None},
               **chain.cursors, "A_log": chain.A_log, "dt_bias": chain.dt_bias,
               "ssm_state_indices": chain.indices["ssm_state_indices"],
               "replay_indices": chain.indices["replay_indices"].long()}  # type: ignore[union-attr]
    views = {n: View(tuple(t.shape), tuple(t.stride())) for n, t in tensors.items()}
    return Case({n: t.view(-1) for n, t in tensors.items()}, views, -1, [], [chain.shape.tokens] * len(chain.slots),
                chain.slots.tolist(), chain.keys.tolist(), True)


# ---- stochastic rounding ----------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "target"), [p for p in ALL if "philox_rounds" in SPECS[p[0]].problem], ids=str)
@pytest.mark.parametrize("first_slot", [0, 2 ** 27])
def test_stored_states_are_those_of_the_specification(name: str, target: str, first_slot: int) -> None:
    """The bits of the PyTorch form, on flushes whose fp32 sums are exact but need more bits than are stored."""
    case = case_of(name, cursors=[(3, 0, True), (1, 0, False), (15, 0, True), (0, 0, True)], raw_gates=(-120.0,))
    make_exact(case)
    after, want = step(name, target, case, first_slot=first_slot), case.clone()
    seed = seed_state(SEED, "cpu", step=STEP, first_head=1, total_heads=5)
    if first_slot == 0:
        gdn.replay_decode(*want.decode_args(), seed, scale=want.scale, l2norm=False, philox_rounds=5)
        assert torch.equal(bits(after.buffers["state"]), bits(want.buffers["state"]))
    else:
        near = step(name, target, case)
        assert not torch.equal(bits(after.buffers["state"]), bits(near.buffers["state"])), "other slots, other words"
        assert torch.equal(bits(after.buffers["out"]), bits(near.buffers["out"])), "the output is not rounded"


def test_every_pool_is_checked() -> None:
    case = case_of("exact-f32")
    assert set(POOLS) <= set(case.buffers) and np.isnan(case.buffers["d_cache"].float().numpy()).any()
