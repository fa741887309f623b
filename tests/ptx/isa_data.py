"""Moves, and loads and stores of parameters, global and shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.builder import TYPES, Builder, Run, Writer, translates
from tests.ptx.memory import UNSIGNED
from tests.ptx.parser import Address, Instruction, Operand

if TYPE_CHECKING:
    from tests.ptx.machine import Lanes

HALVES = {"b32": "b16", "b64": "b32"}
VECTORS = {"v2": 2, "v4": 4, "v8": 8}
CACHE_HINTS = ("L1::no_allocate", "L1::evict_last", "L1::evict_first", "nc")
LOADED = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64")


@translates("mov")
def mov(b: Builder, ins: Instruction) -> Run:
    b.expect(2)
    target, source = b.operand(0), b.operand(1)
    match ins.modifiers:
        case (("b32" | "b64") as kind,) if isinstance(target, tuple):
            return _unpack(b, kind, target, source)
        case (("b32" | "b64") as kind,) if isinstance(source, tuple):
            return _pack(b, kind, target, source)
        case (kind,) if kind in ("pred", "b16", "u16", "b32", "u32", "s32", "f32", "b64", "u64", "s64"):
            return b.elementwise((kind,), kind, lambda x: x)
    raise ins.unknown()


def _unpack(b: Builder, kind: str, target: tuple[str, ...], source: Operand) -> Run:
    """The first of the targets gets the low half."""
    half = HALVES[kind]
    whole, puts = b.read(source, kind), [b.write(part, half) for part in target]

    def run(lanes: Lanes) -> None:
        halves = lanes.all(whole(lanes)).view(TYPES[half]).reshape(lanes.count, 2)
        for i, put in enumerate(puts):
            put(lanes, np.ascontiguousarray(halves[:, i]))
    return run


def _pack(b: Builder, kind: str, target: Operand, source: tuple[str, ...]) -> Run:
    half = HALVES[kind]
    parts, put = [b.read(part, half) for part in source], b.write(target, kind)
    return lambda lanes: put(lanes, np.stack([lanes.all(p(lanes)) for p in parts], 1).view(TYPES[kind])[:, 0])


@translates("ld")
def ld(b: Builder, ins: Instruction) -> Run:
    relaxed = ins.modifiers[:2] == ("relaxed", "gpu")
    space, kind, count = _access(ins, ins.modifiers[2:] if relaxed else ins.modifiers)
    targets, address = _vector(b, b.operand(0), count), b.operand(1)
    puts = [b.write(target, kind) for target in targets]
    width = np.dtype(TYPES[kind]).itemsize
    if space == "param":
        return _ld_param(b, kind, puts[0], address)
    at = b.address(address, "u64" if space == "global" else "u32")

    def run(lanes: Lanes) -> None:
        if space == "global":
            values = lanes.machine.load_global(lanes, at(lanes), width, count, relaxed)
        else:
            values = lanes.machine.load_shared(lanes, at(lanes), width, count)
        for put, value in zip(puts, values, strict=True):
            put(lanes, value.view(TYPES[kind]))
    return run


def _ld_param(b: Builder, kind: str, put: Writer, address: Operand) -> Run:
    if not isinstance(address, Address):
        raise b.instruction.unknown()
    param = next((p for p in b.program.params if p.name == address.base), None)
    dtype = np.dtype(TYPES[kind])
    if param is None or address.offset + dtype.itemsize > param.size:
        raise b.instruction.unknown("no such parameter")
    at = param.offset + address.offset
    return lambda lanes: put(lanes, np.frombuffer(lanes.machine.params, dtype, 1, at))


@translates("st")
def st(b: Builder, ins: Instruction) -> Run:
    space, kind, count = _access(ins, ins.modifiers)
    if space == "param":
        raise ins.unknown()
    at = b.address(b.operand(0), "u64" if space == "global" else "u32")
    sources = [b.read(source, kind) for source in _vector(b, b.operand(1), count)]
    word = UNSIGNED[np.dtype(TYPES[kind]).itemsize]

    def run(lanes: Lanes) -> None:
        values = [lanes.all(source(lanes)).view(word) for source in sources]
        if space == "global":
            lanes.machine.store_global(lanes, at(lanes), values)
        else:
            lanes.machine.store_shared(lanes, at(lanes), values)
    return run


def _access(ins: Instruction, modifiers: tuple[str, ...]) -> tuple[str, str, int]:
    """(space, type, vector length) of a load or store."""
    space, *rest = modifiers
    rest = [m for m in rest if m not in CACHE_HINTS]
    count = VECTORS.get(rest[0], 1) if rest else 1
    kind = rest[-1] if len(rest) == 1 + (count > 1) else ""
    if space not in ("param", "global", "shared") or kind not in LOADED:
        raise ins.unknown()
    return space, kind, count


def _vector(b: Builder, operand: Operand, count: int) -> tuple[str, ...]:
    parts = operand if isinstance(operand, tuple) and not isinstance(operand, Address) else (operand,)
    if len(parts) != count:
        raise b.instruction.unknown(f"{len(parts)} registers for {count} elements")
    return parts  # type: ignore[return-value]


@translates("atom")
def atom(b: Builder, ins: Instruction) -> Run:
    """Lanes take effect one after the other."""
    match ins.modifiers:
        case ("global", "add", "u32") | ("global", "acq_rel" | "relaxed", "add", "u32"):
            pass
        case _:
            raise ins.unknown()
    put, at, operand = b.write(b.operand(0), "u32"), b.address(b.operand(1), "u64"), b.read(b.operand(2), "u32")

    def run(lanes: Lanes) -> None:
        addresses, values, old = at(lanes), lanes.all(operand(lanes)), np.empty(lanes.count, np.uint32)
        for i in range(lanes.count):
            old[i] = lanes.machine.load_global(lanes, addresses[i:i + 1], 4, 1)[0][0]
            lanes.machine.store_global(lanes, addresses[i:i + 1], [old[i:i + 1] + values[i:i + 1]])
        put(lanes, old)
    return run
