"""Instructions that a whole warp executes together: shuffles, votes and matrix products.

A step of this kind runs on whole warps only; its values are viewed as (warps, 32 lanes). The layouts of
matrices over lanes are those of the PTX manual, with g = lane // 4 and q = lane % 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import numerics
from tests.ptx.builder import Array, Builder, Reader, Run, translates
from tests.ptx.parser import Instruction, Operand

if TYPE_CHECKING:
    from tests.ptx.machine import Lanes

LANE = np.arange(32)
MMA_ERROR = 2.0 ** -22     # terms are aligned to the largest and cut off, at its 24th bit or behind
ALL = ("-1", "0xffffffff", "4294967295")


def whole_warp(b: Builder, mask: Operand | None = None) -> None:
    """Demand that all lanes arrive; a mask that names fewer is not implemented."""
    if mask is not None and mask not in ALL:
        raise b.instruction.unknown("a mask of fewer than all lanes")
    b.needs = "warp"


@translates("shfl")
def shfl(b: Builder, ins: Instruction) -> Run:
    match ins.modifiers:
        case ("sync", ("idx" | "bfly" | "down" | "up") as mode, "b32"):
            pass
        case _:
            raise ins.unknown()
    b.expect(5)
    whole_warp(b, b.operand(4))
    put = b.write(b.operand(0), "b32")
    value, offset, clamp = (b.read(b.operand(i), "u32") for i in (1, 2, 3))

    def run(lanes: Lanes) -> None:
        values, by, c = (lanes.all(x(lanes)).reshape(-1, 32).astype(np.int64) for x in (value, offset, clamp))
        put(lanes, np.take_along_axis(values, shuffle_source(mode, by & 31, c), 1).astype(np.uint32).reshape(-1))
    return run


def shuffle_source(mode: str, by: Array, c: Array) -> Array:
    """Lane that each lane reads, its own where the source is outside its segment."""
    segment = c >> 8 & 31
    last, first = (LANE & segment) | (c & 31 & ~segment), LANE & segment
    source = {"idx": first | (by & ~segment), "bfly": LANE ^ by, "down": LANE + by, "up": LANE - by}[mode]
    inside = source >= last if mode == "up" else source <= last
    return np.where(inside, source, LANE)


@translates("vote")
def vote(b: Builder, ins: Instruction) -> Run:
    match ins.modifiers:
        case ("sync", ("all" | "any" | "uni") as mode, "pred"):
            kind = "pred"
        case ("sync", "ballot" as mode, "b32"):
            kind = "b32"
        case _:
            raise ins.unknown()
    b.expect(3)
    whole_warp(b, b.operand(2))
    put, source = b.write(b.operand(0), kind), b.read(b.operand(1), "pred")

    def run(lanes: Lanes) -> None:
        votes = lanes.all(source(lanes)).reshape(-1, 32)
        result = {"all": votes.all(1), "any": votes.any(1), "uni": votes.all(1) | ~votes.any(1),
                  "ballot": (votes.astype(np.uint32) << LANE.astype(np.uint32)).sum(1, dtype=np.uint32)}[mode]
        put(lanes, np.repeat(result, 32))
    return run


@translates("elect")
def elect(b: Builder, ins: Instruction) -> Run:
    """The lowest lane is elected."""
    if ins.modifiers != ("sync",) or not isinstance(b.operand(0), tuple):
        raise ins.unknown()
    whole_warp(b, b.operand(1))
    leader, chosen = b.operand(0)
    put_leader, put = b.write(leader, "b32"), b.write(chosen, "pred")

    def run(lanes: Lanes) -> None:
        put_leader(lanes, np.zeros(1, np.uint32))
        put(lanes, np.tile(LANE == 0, lanes.count // 32))
    return run


# ---- matrices ---------------------------------------------------------------------------------------

@translates("mma")
def mma(b: Builder, ins: Instruction) -> Run:
    """``mma.m16n8k16`` of 2-byte operands and ``mma.m16n8k8`` of tf32 ones.

    Products and sum are in float64, rounded to fp32 once. The hardware keeps fewer bits of the sum; a blurred run errs
    by as much as ``MMA_ERROR`` of the largest term. Of a tf32 operand it ignores the lowest 13 bits.
    """
    match ins.modifiers:
        case ("sync", "aligned", "m16n8k16", "row", "col", "f32", ("f16" | "bf16") as kind, other, "f32") \
                if other == kind:
            widen = numerics.from_f16 if kind == "f16" else numerics.from_bf16
            values, width = (lambda lanes, registers: _halves(lanes, registers, widen)), 2
        case ("sync", "aligned", "m16n8k8", "row", "col", "f32", "tf32", "tf32", "f32"):
            values, width = _tf32, 1
        case _:
            raise ins.unknown()
    b.expect(4)
    whole_warp(b)
    puts = [b.write(r, "f32") for r in b.operand(0)]
    A, B = ([b.read(r, "b32") for r in b.operand(i)] for i in (1, 2))
    C = [b.read(r, "f32") for r in b.operand(3)]
    if (len(puts), len(A), len(B), len(C)) != (4, 4, 2, 4):
        raise ins.unknown("wrong number of registers")

    def run(lanes: Lanes) -> None:
        # A register of A: rows g or g + 8, and columns from w q or w (q + 4), w being the values of a register.
        left = values(lanes, A).reshape(-1, 2, 2, 8, 4, width)              # warp, column half, row half, g, q, e
        left = left.transpose(0, 2, 3, 1, 4, 5).reshape(-1, 16, 8 * width)
        right = values(lanes, B).reshape(-1, 2, 8, 4, width)                # warp, k half, column g, q, e
        right = right.transpose(0, 1, 3, 4, 2).reshape(-1, 8 * width, 8)
        product = np.matmul(left, right).reshape(-1, 2, 8, 4, 2)            # warp, row half, g, q, e
        for i, (put, addend) in enumerate(zip(puts, C, strict=True)):
            part = product[:, i // 2, :, :, i % 2].reshape(-1)
            c = lanes.all(addend(lanes))
            largest = np.maximum(np.abs(part), np.abs(c))
            put(lanes, lanes.machine.blurred((part + c).astype(np.float32), MMA_ERROR * largest))
    return run


def _tf32(lanes: Lanes, registers: list[Reader]) -> Array:
    """fp32 words without their lowest 13 bits, as float64: (warps, registers, 32 lanes)."""
    words = np.stack([lanes.all(r(lanes)).reshape(-1, 32) for r in registers], 1)
    return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def _halves(lanes: Lanes, registers: list[Reader], widen: Callable[[Array], Array]) -> Array:
    """Packed registers as float64: (warps, registers, 32 lanes, 2)."""
    packed = np.stack([lanes.all(r(lanes)).reshape(-1, 32) for r in registers], 1)
    return widen(packed.view(np.uint16)).astype(np.float64)


@translates("movmatrix")
def movmatrix(b: Builder, ins: Instruction) -> Run:
    if ins.modifiers != ("sync", "aligned", "m8n8", "trans", "b16"):
        raise ins.unknown()
    whole_warp(b)
    put, source = b.write(b.operand(0), "b32"), b.read(b.operand(1), "b32")
    return lambda lanes: put(lanes, _transposed(lanes.all(source(lanes))))


@translates("ldmatrix")
def ldmatrix(b: Builder, ins: Instruction) -> Run:
    """Lane l names row l % 8 of matrix l // 8; a row is 16 bytes."""
    match ins.modifiers:
        case ("sync", "aligned", "m8n8", "x4", "trans", "shared", "b16"):
            transpose = True
        case ("sync", "aligned", "m8n8", "x4", "shared", "b16"):
            transpose = False
        case _:
            raise ins.unknown()
    whole_warp(b)
    puts, at = [b.write(r, "b32") for r in b.operand(0)], b.address(b.operand(1), "u32")

    def run(lanes: Lanes) -> None:
        words = lanes.machine.load_shared(lanes, at(lanes), 4, 4)
        rows = np.stack(words, 1).reshape(-1, 4, 32)                       # warp, matrix, (row, word)
        for i, put in enumerate(puts):
            matrix = np.ascontiguousarray(rows[:, i]).reshape(-1)
            put(lanes, _transposed(matrix) if transpose else matrix)
    return run


def _transposed(registers: Array) -> Array:
    """8x8 matrices of 2-byte elements, a packed pair a lane, transposed within each warp."""
    matrix = registers.view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(matrix.transpose(0, 2, 1)).reshape(-1).view(np.uint32)
