"""The CuTe kernels compile for every target, without spills and with the instructions they are for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from replayssm_cute.kernels.targets import TARGETS as DEVICES
from tests.compiled_kernels import kernels, model_kernels, row_kernels, shape_key
from tests.kernel_resources import LIMITS, count, limits_of, reports, resident_ctas, resources, violations

TARGETS = ("sm_90a", "sm_100a", "sm_103a")


def of_design(target: str, design: str) -> list[dict[str, Any]]:
    found = [r for r in reports(target).values() if r["config"]["design"] == design]
    assert len(found) >= 10, f"the {design} design must be covered"
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_resources_stay_within_the_committed_limits(target: str) -> None:
    limits = json.loads(LIMITS.read_text())[target]
    assert reports(target).keys() == limits.keys(), "python -m tests.kernel_resources writes the limits anew"
    found = {label: violations(resources(r, DEVICES[target]), limits[label]) for label, r in reports(target).items()}
    assert not {label: said for label, said in found.items() if said}


@pytest.mark.parametrize("target", TARGETS)
def test_limits_cover_the_registry(target: str) -> None:
    held = {shape_key(*kernel) for kernel in kernels(DEVICES[target]).values()}
    rows, models = list(row_kernels(DEVICES[target])), list(model_kernels(DEVICES[target]))
    assert {shape_key(*kernel) for kernel in rows + models} <= held
    assert models and (rows or target != "sm_90a")


def test_limits_leave_no_room_for_a_slower_kernel() -> None:
    target = DEVICES["sm_100a"]
    report = {"REG": 128, "STACK": 0, "LOCAL": 0, "shared": 70_000,
              "config": {"design": "bulk", "threads": 128, "min_ctas": 2},
              "opcodes": {"LDG.E.U16": 4, "LDG.E.NA.ENL2.256": 8, "STG.E.128": 2, "UBLKCP.S.G": 7, "FFMA2": 100,
                          "HMMA.16816.F32": 22, "F2FP.F16.F32.PACK_AB.RS": 32, "FADD": 500, "NOP": 20}}
    found = resources(report, target)
    limits = limits_of(found, 2)
    assert not violations(found, limits) and found.resident == 2 and found.instructions == 675
    worse = {"registers": 150, "spills": 8, "shared": 70_016, "instructions": 800, "narrow_loads": 6,
             "narrow_stores": 1, "resident": 1, "wide_loads": 4, "wide_stores": 1, "bulk_copies": 6, "packed_fma": 50,
             "tensor": 21, "hardware_sr": 16}
    assert worse.keys() == limits.keys()
    for name, value in worse.items():
        assert [said.split()[0] for said in violations(replace(found, **{name: value}), limits)] == [name]
    assert violations(found, {**limits, "instructions": 674}) == ["instructions 675, at most 674"]


@pytest.mark.parametrize("registers, shared, threads, expected", [
    (128, 70_000, 192, 2),        # 16 warps by registers
    (96, 50_000, 192, 3),         # 20 warps: 4 schedulers of 5
    (97, 50_000, 192, 2),         # the next step of 8 registers leaves 16 warps
    (32, 115_712, 192, 2), (32, 115_713, 192, 1),    # 113 KB and the reserved one are half of 228
    (32, 1024, 512, 4), (16, 1024, 32, 32)])
def test_resident_ctas(registers: int, shared: int, threads: int, expected: int) -> None:
    assert resident_ctas(registers, shared, threads, DEVICES["sm_90a"]) == expected


@pytest.mark.parametrize("target", TARGETS)
def test_register_design_accesses(target: str) -> None:
    for r in of_design(target, "register"):
        if r["config"]["vec_bits"] == 256:
            assert count(r, "LDG", "NA", "ENL2", "256") > 0 and count(r, "STG", "ENL2", "256") > 0, r
        else:
            assert count(r, "LDG", "NA", "128") > 0 and count(r, "STG", "128") > 0, r
    wide = [r["config"]["vec_bits"] for r in of_design(target, "register") if r["geometry"] == "64x64x128/8"]
    assert (256 in wide) == (target != "sm_90a")


@pytest.mark.parametrize("target", TARGETS)
def test_bulk_design_copies(target: str) -> None:
    for r in of_design(target, "bulk"):
        coded = r["state"] in ("torch.int8", "torch.float8_e4m3fn")
        assert r["opcodes"]["UBLKCP.S.G"] == 7 + coded, r    # state, three rings, current x and B, C; scales
        assert r["opcodes"]["UBLKCP.G.S"] == 2, r            # the append of x and B
        assert count(r, "LDSM") > 0, r


@pytest.mark.parametrize("target", TARGETS)
def test_products_on_the_tensor_cores(target: str) -> None:
    for r in reports(target).values():
        assert (count(r, "HMMA") > 0) == (r["config"]["design"] != "register"), r


@pytest.mark.parametrize("target", TARGETS)
def test_packed_fma(target: str) -> None:
    for r in reports(target).values():
        assert (count(r, "FFMA2") > 0) == (target != "sm_90a"), r


@pytest.mark.parametrize("target", TARGETS)
def test_stochastic_rounding_is_done_by_the_hardware_where_there_is_one(target: str) -> None:
    stochastic = [r for r in reports(target).values() if r["philox_rounds"]]
    assert {r["config"]["design"] for r in stochastic} == {"bulk", "register"}
    for r in reports(target).values():
        name = {"torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float8_e4m3fn": "E4M3"}.get(r["state"], "")
        instructions = count(r, "F2FP", name, "RS") if name else 0
        # int8 has no such instruction.
        assert (instructions >= 4) == (r["philox_rounds"] > 0 and target != "sm_90a" and r["state"] != "torch.int8"), r
