"""Barriers, fences and bulk copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.builder import Builder, Run, translates
from tests.ptx.isa_warp import whole_warp
from tests.ptx.parser import Instruction

if TYPE_CHECKING:
    from tests.ptx.machine import Lanes

BULK_LOAD = ("async", "bulk", "shared::cluster", "global", "mbarrier::complete_tx::bytes")
BULK_STORE = ("async", "bulk", "global", "shared::cta", "bulk_group")


@translates("fence", "griddepcontrol")
def fence(b: Builder, ins: Instruction) -> Run:
    whole = ".".join((ins.name, *ins.modifiers))
    if whole == "griddepcontrol.launch_dependents":  # the next grid is none of this launch's business
        return lambda lanes: None
    if whole == "fence.mbarrier_init.release.cluster":
        return lambda lanes: lanes.machine.barriers.fence(lanes)
    if whole == "fence.proxy.async.shared::cta":
        return lambda lanes: lanes.machine.fence_copies(lanes)
    if whole == "griddepcontrol.wait":
        return lambda lanes: lanes.machine.wait_for_grid(lanes)
    raise ins.unknown()


@translates("bar")
def bar(b: Builder, ins: Instruction) -> Run:
    match ins.modifiers:
        case ("warp", "sync"):
            whole_warp(b, b.operand(0))
            return lambda lanes: lanes.machine.sync_warps(lanes)
        case ("sync",) if ins.operands == ["0"]:
            b.needs = "cta"
            return lambda lanes: lanes.machine.sync_ctas(lanes)
    raise ins.unknown()


@translates("mbarrier")
def mbarrier(b: Builder, ins: Instruction) -> Run:
    match ins.modifiers:
        case ("init", "shared", "b64"):
            b.expect(2)
            at, count = b.address(b.operand(0), "u32"), b.read(b.operand(1), "s32")
            return lambda lanes: lanes.machine.barriers.init(lanes, at(lanes), lanes.all(count(lanes)))
        case ("arrive", "shared", "b64"):
            return _arrive(b, False)
        case ("arrive", "expect_tx", "shared", "b64"):
            return _arrive(b, True)
        case ("try_wait", "parity", "shared", "b64"):
            return _try_wait(b)
    raise ins.unknown()


def _arrive(b: Builder, expecting: bool) -> Run:
    """The state that it returns is the phase; nothing here takes one."""
    put, at = b.write(b.operand(0), "b64"), b.address(b.operand(1), "u32")
    amount = b.read(b.operand(2), "s32") if len(b.instruction.operands) > 2 else None
    if expecting and amount is None:
        raise b.instruction.unknown()

    def run(lanes: Lanes) -> None:
        one = np.ones(lanes.count, np.int64)
        n = one if amount is None else lanes.all(amount(lanes)).astype(np.int64)
        arrivals, expected = (one, n) if expecting else (n, 0 * n)
        put(lanes, lanes.machine.barriers.arrive(lanes, at(lanes), arrivals, expected).astype(np.uint64))
    return run


def _try_wait(b: Builder) -> Run:
    """Runs once the phase of the given parity has ended, and is then true; in a seeded order it may run out of time."""
    put, at = b.write(b.operand(0), "pred"), b.address(b.operand(1), "u32")
    parity = b.read(b.operand(2), "u32")
    b.needs = "wait"
    b.ready = lambda lanes: lanes.machine.barriers.ready(lanes, at(lanes), lanes.all(parity(lanes)))

    def run(lanes: Lanes) -> None:
        if lanes.machine.runs_out_of_time():
            put(lanes, np.zeros(1, bool))
        else:
            lanes.machine.barriers.acquire(lanes, at(lanes))
            put(lanes, np.ones(1, bool))
    return run


@translates("cp")
def cp(b: Builder, ins: Instruction) -> Run:
    match ins.modifiers:
        case ("async", "bulk", "commit_group"):
            return lambda lanes: lanes.machine.copies.commit(lanes)
        case ("async", "bulk", "wait_group", *rest) if rest in ([], ["read"]) and len(ins.operands) == 1:
            pending = int(str(ins.operands[0]), 0)
            return lambda lanes: lanes.machine.copies.wait(lanes, pending)
    if ins.modifiers == ("async", "bulk", "prefetch", "L2", "global"):
        source, size = b.address(b.operand(0), "u64"), b.read(b.operand(1), "u32")
        return lambda lanes: lanes.machine.copies.prefetch(source(lanes), lanes.all(size(lanes)))
    if ins.modifiers == BULK_STORE:
        b.expect(3)
        target, source = b.address(b.operand(0), "u64"), b.address(b.operand(1), "u32")
        size = b.read(b.operand(2), "u32")
        return lambda lanes: lanes.machine.copies.store(lanes, target(lanes), source(lanes), lanes.all(size(lanes)))
    if ins.modifiers in (BULK_LOAD, (*BULK_LOAD, "L2::cache_hint")):
        b.expect(4 + (len(ins.modifiers) > len(BULK_LOAD)))
        target, source = b.address(b.operand(0), "u32"), b.address(b.operand(1), "u64")
        size, barrier = b.read(b.operand(2), "u32"), b.address(b.operand(3), "u32")
        return lambda lanes: lanes.machine.copies.load(lanes, target(lanes), source(lanes), lanes.all(size(lanes)),
                                                       barrier(lanes))
    raise ins.unknown()
