"""Integer arithmetic, logic, comparison and selection."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ptx import isa_float, numerics
from tests.ptx.builder import TYPES, Array, Builder, Run, translates
from tests.ptx.parser import Instruction

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
BITWISE = ("pred", "b16", "b32", "b64")
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


@translates("add", "sub")
def add(b: Builder, ins: Instruction) -> Run:
    if isa_float.is_float(ins):
        return isa_float.add(b, ins)
    f = np.add if ins.name == "add" else np.subtract
    match ins.modifiers:
        case (kind,) if kind in INTEGERS:
            return b.elementwise((kind, kind), kind, f)
    raise ins.unknown()


@translates("mul")
def mul(b: Builder, ins: Instruction) -> Run:
    if isa_float.is_float(ins):
        return isa_float.mul(b, ins)
    match ins.modifiers:
        case ("lo", kind) if kind in INTEGERS:
            return b.elementwise((kind, kind), kind, np.multiply)
        case ("wide", kind) if kind in WIDE:
            wide = TYPES[WIDE[kind]]
            return b.elementwise((kind, kind), WIDE[kind], lambda x, y: x.astype(wide) * y.astype(wide))
        case ("hi", ("u32" | "s32") as kind):
            wide = TYPES[WIDE[kind]]
            return b.elementwise((kind, kind), kind,
                               lambda x, y: (x.astype(wide) * y.astype(wide) >> 32).astype(TYPES[kind]))
    raise ins.unknown()


@translates("mad")
def mad(b: Builder, ins: Instruction) -> Run:
    match ins.modifiers:
        case ("lo", kind) if kind in INTEGERS:
            return b.elementwise((kind,) * 3, kind, lambda x, y, z: x * y + z)
        case ("wide", kind) if kind in WIDE:
            wide = TYPES[WIDE[kind]]
            return b.elementwise((kind, kind, WIDE[kind]), WIDE[kind],
                               lambda x, y, z: x.astype(wide) * y.astype(wide) + z)
    raise ins.unknown()


@translates("div", "rem")
def div(b: Builder, ins: Instruction) -> Run:
    """Toward zero; the remainder has the dividend's sign."""
    if isa_float.is_float(ins):
        return isa_float.div(b, ins)
    quotient = ins.name == "div"

    def f(x: Array, y: Array) -> Array:
        q, r = np.divmod(np.abs(x), np.abs(y))
        return np.where((x < 0) != (y < 0), -q, q) if quotient else np.where(x < 0, -r, r)

    match ins.modifiers:
        case (("u32" | "u64") as kind,):
            return b.elementwise((kind, kind), kind, np.floor_divide if quotient else np.remainder)
        case ("s32",):  # in 64 bits, where the magnitude of every value exists
            return b.elementwise(("s32", "s32"), "s32",
                               lambda x, y: f(x.astype(np.int64), y.astype(np.int64)).astype(np.int32))
    raise ins.unknown()


@translates("min", "max")
def minmax(b: Builder, ins: Instruction) -> Run:
    if isa_float.is_float(ins):
        return isa_float.minmax(b, ins)
    match ins.modifiers:
        case (kind,) if kind in INTEGERS:
            return b.elementwise((kind, kind), kind, np.minimum if ins.name == "min" else np.maximum)
        case ("relu", "s32"):
            f = np.minimum if ins.name == "min" else np.maximum
            return b.elementwise(("s32", "s32"), "s32", lambda x, y: np.maximum(f(x, y), 0))
    raise ins.unknown()


@translates("neg", "abs")
def negate(b: Builder, ins: Instruction) -> Run:
    f = np.negative if ins.name == "neg" else np.abs
    match ins.modifiers:
        case (("s16" | "s32" | "s64" | "f32") as kind,):
            return b.elementwise((kind,), kind, f)
        case (("f16x2" | "bf16x2") as kind,) if ins.name == "abs":
            return b.elementwise((kind,), kind, lambda x: x & np.uint32(0x7FFF7FFF))
    raise ins.unknown()


@translates("and", "or", "xor", "not")
def logic(b: Builder, ins: Instruction) -> Run:
    f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}[ins.name]
    match ins.modifiers:
        case (kind,) if kind in BITWISE:
            return b.elementwise((kind,) * (1 if ins.name == "not" else 2), kind, f)
    raise ins.unknown()


@translates("shl", "shr")
def shift(b: Builder, ins: Instruction) -> Run:
    """Amounts at or above the width shift everything out."""
    match ins.modifiers:
        case (kind,) if kind in (*INTEGERS, *BITWISE[1:]):
            width, signed = 8 * np.dtype(TYPES[kind]).itemsize, kind[0] == "s"
        case _:
            raise ins.unknown()

    def f(x: Array, amount: Array) -> Array:
        within = np.minimum(amount, width - 1).astype(x.dtype)
        moved = np.left_shift(x, within) if ins.name == "shl" else np.right_shift(x, within)
        return moved if (signed and ins.name == "shr") or (amount < width).all() else \
            np.where(amount < width, moved, np.zeros(1, x.dtype))
    return b.elementwise((kind, "u32"), kind, f)


@translates("shf")
def funnel_shift(b: Builder, ins: Instruction) -> Run:
    """The upper half of (second, first) moved left, the amount modulo 32."""
    if ins.modifiers != ("l", "wrap", "b32"):
        raise ins.unknown()

    def f(low: Array, high: Array, amount: Array) -> Array:
        both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        return (both << (amount & 31).astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
    return b.elementwise(("b32", "b32", "u32"), "b32", f)


@translates("brev")
def brev(b: Builder, ins: Instruction) -> Run:
    """Bits in reverse order."""
    if ins.modifiers != ("b32",):
        raise ins.unknown()
    return b.elementwise(("b32",), "b32", numerics.reverse_bits)


@translates("popc")
def popc(b: Builder, ins: Instruction) -> Run:
    if ins.modifiers != ("b32",):
        raise ins.unknown()
    return b.elementwise(("u32",), "u32", lambda x: np.bitwise_count(x).astype(np.uint32))


@translates("prmt")
def prmt(b: Builder, ins: Instruction) -> Run:
    if ins.modifiers != ("b32",):
        raise ins.unknown()
    return b.elementwise(("b32",) * 3, "b32", numerics.permute)


@translates("setp")
def setp(b: Builder, ins: Instruction) -> Run:
    match ins.modifiers:
        case (relation, "f32"):
            compare = isa_float.comparison(relation)
        case (relation, kind) if kind in (*INTEGERS, *BITWISE[1:]):
            compare = COMPARE.get(relation)
        case _:
            compare = None
    if compare is None:
        raise ins.unknown()
    kind = ins.modifiers[1]
    return b.elementwise((kind, kind), "pred", compare)


@translates("selp")
def selp(b: Builder, ins: Instruction) -> Run:
    match ins.modifiers:
        case (("b16" | "b32" | "b64" | "s32" | "u32" | "f32" | "u64" | "s64") as kind,):
            return b.elementwise((kind, kind, "pred"), kind, lambda x, y, p: np.where(p, x, y))
    raise ins.unknown()
