"""Floating-point arithmetic and conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import numerics
from tests.ptx.builder import TYPES, Array, Builder, Run, translates
from tests.ptx.parser import Instruction

if TYPE_CHECKING:
    from tests.ptx.machine import Lanes

WIDEN = {"f32": lambda x: x, "f16": numerics.from_f16, "bf16": numerics.from_bf16}
INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
#: Function and documented relative error; that of lg2 is absolute between 0.5 and 2, where it is not blurred.
APPROXIMATE = {"ex2": (numerics.ex2, 2.0 ** -22), "lg2": (numerics.lg2, 2.0 ** -22), "rcp": (numerics.rcp, 2.0 ** -23),
               "rsqrt": (numerics.rsqrt, 2.0 ** -22.9), "tanh": (numerics.tanh, 2.0 ** -11)}


def is_float(ins: Instruction) -> bool:
    return any(m in ("f32", "f32x2", "f16x2") for m in ins.modifiers)


def _rounded(ins: Instruction) -> tuple[str, ...]:
    """The modifiers without ``.rn``, which is what no rounding means too."""
    return ins.modifiers[1:] if ins.modifiers[0] == "rn" else ins.modifiers


def add(b: Builder, ins: Instruction) -> Run:
    f = np.add if ins.name == "add" else np.subtract
    match _rounded(ins):
        case (("f32" | "f32x2") as kind,):
            return b.elementwise((kind, kind), kind, f)
        case ("f32", ("f16" | "bf16") as kind):
            widen = WIDEN[kind]
            return b.elementwise((kind, "f32"), "f32", lambda x, y: f(widen(x), y))
        case ("f16x2",):
            return b.elementwise(("f16x2", "f16x2"), "f16x2", lambda x, y: numerics.halves(f, x, y))
    raise ins.unknown()


def mul(b: Builder, ins: Instruction) -> Run:
    match _rounded(ins):
        case (("f32" | "f32x2") as kind,):
            return b.elementwise((kind, kind), kind, np.multiply)
        case ("rz", "f32"):
            return b.elementwise(("f32", "f32"), "f32", numerics.mul_toward_zero)
    raise ins.unknown()


@translates("fma")
def fma(b: Builder, ins: Instruction) -> Run:
    match ins.modifiers:
        case ("rn", ("f32" | "f32x2") as kind):
            return b.elementwise((kind,) * 3, kind, numerics.fma)
        case ("rz", "f32"):
            return b.elementwise(("f32",) * 3, "f32", numerics.fma_toward_zero)
        case ("rn", "f32", ("f16" | "bf16") as kind):
            widen = WIDEN[kind]
            return b.elementwise((kind, kind, "f32"), "f32", lambda x, y, z: numerics.fma(widen(x), widen(y), z))
    raise ins.unknown()


def minmax(b: Builder, ins: Instruction) -> Run:
    if ins.modifiers == ("f32",):
        return b.elementwise(("f32", "f32"), "f32", numerics.minimum if ins.name == "min" else numerics.maximum)
    raise ins.unknown()


def div(b: Builder, ins: Instruction) -> Run:
    if ins.modifiers == ("rn", "f32"):
        return b.elementwise(("f32", "f32"), "f32", np.divide)
    if ins.modifiers != ("full", "f32"):
        raise ins.unknown()
    b.expect(3)
    put, over, under = b.write(b.operand(0), "f32"), b.read(b.operand(1), "f32"), b.read(b.operand(2), "f32")

    def run(lanes: Lanes) -> None:  # two units in the last place
        result = np.divide(lanes.all(over(lanes)), lanes.all(under(lanes)))
        put(lanes, lanes.machine.blurred(result, 2.0 ** -22 * np.abs(result)))
    return run


@translates(*APPROXIMATE)
def approximate(b: Builder, ins: Instruction) -> Run:
    if (ins.name, *ins.modifiers) == ("rcp", "rn", "f32"):
        return b.elementwise(("f32",), "f32", lambda x: np.float32(1) / x)
    f, error = APPROXIMATE[ins.name]
    if ins.modifiers not in (("approx", "f32"), ("approx", "ftz", "f32")):
        raise ins.unknown()
    b.expect(2)
    flush = numerics.flush if "ftz" in ins.modifiers else (lambda x: x)
    put, source = b.write(b.operand(0), "f32"), b.read(b.operand(1), "f32")

    def run(lanes: Lanes) -> None:
        result = f(flush(lanes.all(source(lanes))))
        put(lanes, flush(lanes.machine.blurred(result, error * np.abs(result))))
    return run


@translates("set")
def mask(b: Builder, ins: Instruction) -> Run:
    match ins.modifiers:
        case ("lt", "u32", ("f16x2" | "bf16x2") as kind):
            return b.elementwise((kind, kind), "u32", lambda x, y: numerics.halves_below(WIDEN[kind[:-2]], x, y))
    raise ins.unknown()


def comparison(relation: str) -> Callable[[Array, Array], Array] | None:
    """A relation of ``setp.f32``; the ordered ones are false on NaN, those that end in u are true."""
    ordered: dict[str, Callable[[Array, Array], Array]] = {
        "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "ne": lambda x, y: (x < y) | (x > y), "nan": lambda x, y: np.isnan(x) | np.isnan(y),
        "num": lambda x, y: ~(np.isnan(x) | np.isnan(y))}
    if relation in ordered:
        return ordered[relation]
    if relation.endswith("u") and relation[:-1] in ("eq", "ne", "lt", "le", "gt", "ge"):
        f = ordered[relation[:-1]]
        return lambda x, y: f(x, y) | np.isnan(x) | np.isnan(y)
    return None


# ---- conversions ------------------------------------------------------------------------------------

@translates("cvt")
def cvt(b: Builder, ins: Instruction) -> Run:
    match ins.modifiers:
        case ("f32", ("f16" | "bf16") as kind):
            return b.elementwise((kind,), "f32", WIDEN[kind])
        case ("rn", "f16", "f32"):
            return b.elementwise(("f32",), "f16", numerics.to_f16)
        case ("rn", "bf16", "f32"):
            return b.elementwise(("f32",), "bf16", numerics.to_bf16)
        case ("rn", "f16x2", "f32"):
            return _packed(b, "f16x2", numerics.to_f16)
        case ("rn", "bf16x2", "f32"):
            return _packed(b, "bf16x2", numerics.to_bf16)
        case ("rz", "satfinite", "f16x2", "f32"):
            return _packed(b, "f16x2", numerics.to_f16_toward_zero)
        case ("rz", "satfinite", "bf16x2", "f32"):
            return _packed(b, "bf16x2", numerics.to_bf16_toward_zero)
        case ("rs", "satfinite", ("f16x2" | "bf16x2") as kind, "f32"):
            return _stochastic(b, kind)
        case ("rn", "f16x2", "e4m3x2"):
            return b.elementwise(("b16",), "f16x2", lambda x: _pack(
                numerics.to_f16(numerics.from_e4m3(x >> 8)), numerics.to_f16(numerics.from_e4m3(x & 255))))
        case ("rn", "satfinite", "e4m3x2", "f32"):
            return b.elementwise(("f32", "f32"), "b16", lambda high, low: (
                numerics.to_e4m3(high) << 8 | numerics.to_e4m3(low)).astype(np.uint16))
        case ("rs", "satfinite", "e4m3x4", "f32"):
            return _stochastic_codes(b)
        case (("rni" | "rzi") as mode, ("s32" | "u32") as to, "f32"):
            return b.elementwise(("f32",), to, lambda x: numerics.to_integer(x, mode == "rni", TYPES[to]))
        case ("rn", "f32", kind) if kind in INTEGERS:
            return b.elementwise((kind,), "f32", lambda x: x.astype(np.float32))
        case (to, kind) if to in INTEGERS and kind in INTEGERS:
            return b.elementwise((kind,), to, lambda x: x.astype(TYPES[to]))
    raise ins.unknown()


def _packed(b: Builder, kind: str, f: Callable[[Array], Array]) -> Run:
    """Two f32 -> one word; the first operand becomes the high half."""
    return b.elementwise(("f32", "f32"), kind, lambda high, low: _pack(f(high), f(low)))


def _pack(high: Array, low: Array) -> Array:
    return high.astype(np.uint32) << 16 | low


def _stochastic(b: Builder, kind: str) -> Run:
    """``cvt.rs``: the high half takes the random word's bits from 16 on, the low half those from 0 on."""
    if kind == "f16x2":
        f, mask = numerics.to_f16_stochastic, 0x1FFF
    else:
        f, mask = numerics.to_bf16_stochastic, 0xFFFF
    return b.elementwise(("f32", "f32", "b32"), kind, lambda high, low, word: _pack(
        f(high, (word >> 16 & mask).astype(np.int64)), f(low, (word & mask).astype(np.int64))))


def _stochastic_codes(b: Builder) -> Run:
    """``cvt.rs.e4m3x4``: the first of the four becomes the highest byte; 16 random bits for each.

    They are the word's low half for the lowest byte and its high half for the third; the second and the fourth
    take the same halves in reverse order of bits (the project's reading of the manual).
    """
    sources, word = b.operand(1), b.read(b.operand(2), "b32")
    if not isinstance(sources, tuple) or len(sources) != 4:
        raise b.instruction.unknown()
    values, put = [b.read(source, "f32") for source in reversed(sources)], b.write(b.operand(0), "b32")

    def run(lanes: Lanes) -> None:
        random = lanes.all(word(lanes))
        mirrored, codes = numerics.reverse_bits(random), np.zeros(lanes.count, np.uint32)
        for i, bits in enumerate((random & 0xFFFF, mirrored >> 16, random >> 16, mirrored & 0xFFFF)):
            code = numerics.to_e4m3_stochastic(lanes.all(values[i](lanes)), bits.astype(np.int64))
            codes |= code.astype(np.uint32) << 8 * i
        put(lanes, codes)
    return run
