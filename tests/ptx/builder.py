"""From instructions to closures: how operands are read and written, and the table of instructions.

A step is a function of ``Lanes``: the threads that execute it together. Registers are arrays of unsigned
integers (predicates of bool), one element a lane; they are never changed in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.ptx.memory import SHARED_BASE
from tests.ptx.parser import Address, Instruction, Operand, Program

if TYPE_CHECKING:
    from tests.ptx.machine import Lanes

Array = NDArray[np.generic]
Reader = Callable[["Lanes"], Array]
Writer = Callable[["Lanes", Array], None]
Run = Callable[["Lanes"], None]

#: dtype of a value by PTX type; 16-bit floats travel as bits, packed pairs as one word.
TYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "f16": np.uint16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "f16x2": np.uint32, "bf16x2": np.uint32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f32x2": np.uint64}
WORDS = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SPECIAL = re.compile(r"%(tid|ctaid|ntid|nctaid)\.([xyz])|%laneid")


class Step(NamedTuple):
    """A translated instruction.

    Attributes:
        run: its effect on the lanes that execute it.
        reads, writes: registers.
        needs: what must have arrived before it runs: ``""``, the whole ``"warp"``, the whole ``"cta"``, or
            ``"wait"``, the lanes for which ``ready`` is true.
    """

    instruction: Instruction
    run: Run
    reads: frozenset[str]
    writes: frozenset[str]
    needs: str = ""
    ready: Reader | None = None


class Builder:
    """What a translator uses to build one step; records the registers that it touches."""

    def __init__(self, program: Program, instruction: Instruction) -> None:
        self.program, self.instruction = program, instruction
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        self.needs = ""
        self.ready: Reader | None = None

    def operand(self, index: int) -> Operand:
        """Raises UnknownInstructionError where there is no such operand."""
        if index >= len(self.instruction.operands):
            raise self.instruction.unknown("operands are missing")
        return self.instruction.operands[index]

    def expect(self, count: int) -> None:
        if len(self.instruction.operands) != count:
            raise self.instruction.unknown(f"it has {len(self.instruction.operands)} operands, not {count}")

    def read(self, operand: Operand, kind: str) -> Reader:
        """A function that gives the operand's values as ``TYPES[kind]``: one a lane, or one for all."""
        if not isinstance(operand, str):
            raise self.instruction.unknown(f"operand {operand}")
        dtype = np.dtype(TYPES[kind])
        if SPECIAL.fullmatch(operand):
            return lambda lanes: lanes.special(operand).astype(dtype)
        if operand in self.program.shared:
            operand = str(SHARED_BASE)
        constant = _immediate(operand, dtype)
        if constant is not None:
            return lambda lanes: constant
        width = self._width(operand)
        self.reads.add(operand)
        if kind == "pred" or (width == 8 * dtype.itemsize and dtype == WORDS[width]):
            return lambda lanes: lanes.env[operand]
        if width == 8 * dtype.itemsize:
            return lambda lanes: lanes.env[operand].view(dtype)
        if width < 8 * dtype.itemsize:
            raise self.instruction.unknown(f"{operand} is narrower than {kind}")
        narrow = np.dtype(f"u{dtype.itemsize}")
        return lambda lanes: lanes.env[operand].astype(narrow).view(dtype)

    def write(self, operand: Operand, kind: str) -> Writer:
        """A function that stores values of ``TYPES[kind]``, extended by sign or zeros to the register."""
        if operand == "_":
            return lambda lanes, value: None
        if not isinstance(operand, str):
            raise self.instruction.unknown(f"operand {operand}")
        width, dtype = self._width(operand), np.dtype(TYPES[kind])
        self.writes.add(operand)
        word = np.dtype(WORDS[width])
        if width < 8 * dtype.itemsize and kind != "pred":
            raise self.instruction.unknown(f"{operand} is narrower than {kind}")
        extended = np.dtype(f"i{word.itemsize}") if dtype.kind == "i" else word

        def put(lanes: Lanes, value: Array) -> None:
            if value.shape[0] != lanes.count:
                value = np.repeat(value, lanes.count)
            if value.dtype.itemsize == word.itemsize:
                lanes.env[operand] = value if value.dtype == word else value.view(word)
            else:
                lanes.env[operand] = value.astype(extended).view(word)
        return put

    def address(self, operand: Operand, kind: str) -> Reader:
        """A function that gives the byte addresses of ``[register + offset]`` as int64."""
        if not isinstance(operand, Address):
            raise self.instruction.unknown(f"operand {operand} is no address")
        base, offset = self.read(operand.base, kind), operand.offset
        if offset == 0:
            return lambda lanes: lanes.all(base(lanes).astype(np.int64))
        return lambda lanes: lanes.all(base(lanes).astype(np.int64) + offset)

    def elementwise(self, kinds: tuple[str, ...], result: str, f: Callable[..., Array]) -> Run:
        """The run of ``operand 0 = f(operands 1, 2, ...)``; pairs of f32 come as twice as many f32."""
        self.expect(len(kinds) + 1)
        sources = [self.read(self.operand(i + 1), kind) for i, kind in enumerate(kinds)]
        put = self.write(self.operand(0), result)
        if result == "f32x2":
            return lambda lanes: put(lanes, f(*[lanes.all(s(lanes)).view(np.float32) for s in sources]).view(np.uint64))
        if len(sources) == 2:
            first, second = sources
            return lambda lanes: put(lanes, f(first(lanes), second(lanes)))
        return lambda lanes: put(lanes, f(*[source(lanes) for source in sources]))

    def _width(self, register: str) -> int:
        return self.program.width(register)

    def step(self, run: Run) -> Step:
        run = run if self.instruction.guard is None else self._guarded(run)
        return Step(self.instruction, run, frozenset(self.reads), frozenset(self.writes), self.needs, self.ready)

    def _guarded(self, run: Run) -> Run:
        """Run on the lanes whose guard holds; the others keep what they have."""
        if self.needs:
            raise self.instruction.unknown("a guard on an instruction that synchronises")
        guard, negated = self.instruction.guard, self.instruction.negated
        reads, writes = set(self.reads), set(self.writes)
        assert guard is not None
        self.reads |= {guard} | writes  # lanes without the guard need their old values

        def guarded(lanes: Lanes) -> None:
            chosen = lanes.env[guard] != negated
            if chosen.any():
                part = lanes.subset(chosen, reads)
                run(part)
                for register in writes:
                    merged = lanes.env[register].copy()
                    merged[chosen] = part.env[register]
                    lanes.env[register] = merged
        return guarded


def _immediate(text: str, dtype: np.dtype) -> Array | None:  # type: ignore[type-arg]
    """The one value of a literal, None for anything else."""
    if text.startswith("0f"):
        return np.array([int(text[2:], 16)], np.uint32).view(dtype)
    try:
        value = int(text, 0)
    except ValueError:
        return None
    if dtype == np.bool_:
        return np.array([value != 0])
    return np.array([value & (1 << 8 * dtype.itemsize) - 1], f"u{dtype.itemsize}").view(dtype)


Translator = Callable[[Builder, Instruction], Run]
TRANSLATORS: dict[str, Translator] = {}


def translates(*names: str) -> Callable[[Translator], Translator]:
    """Enter a translator for instructions of these names (the part before the first dot)."""
    def enter(translator: Translator) -> Translator:
        TRANSLATORS.update(dict.fromkeys(names, translator))
        return translator
    return enter


def translate(program: Program, instruction: Instruction) -> Step:
    """The step of an instruction.

    Raises:
        UnknownInstructionError: it is not in the table, or one of its modifiers or operands is unknown.
    """
    translator = TRANSLATORS.get(instruction.name)
    if translator is None:
        raise instruction.unknown()
    builder = Builder(program, instruction)
    return builder.step(translator(builder, instruction))
