"""PTX text -> instructions. Takes the line-oriented text that NVVM prints, nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.ptx.errors import UnknownInstructionError


class Address(NamedTuple):
    """``[base + offset]``; the base is a register or the name of a parameter."""

    base: str
    offset: int


#: A register, immediate or symbol as text; several in braces; or an address.
Operand = str | tuple[str, ...] | Address


@dataclass
class Instruction:
    """One instruction: ``@guard name.modifiers operands``."""

    line: int
    text: str
    guard: str | None
    negated: bool
    name: str
    modifiers: tuple[str, ...]
    operands: list[Operand]

    def unknown(self, why: str = "") -> UnknownInstructionError:
        return UnknownInstructionError(f"line {self.line}: {self.text!r} is not implemented{why and ': ' + why}")


class Param(NamedTuple):
    """A parameter of the entry: where it lies in the parameter buffer."""

    name: str
    offset: int
    size: int


@dataclass
class Program:
    """The only entry of a PTX module.

    Attributes:
        target: for example ``"sm_100a"``.
        params: by position.
        threads: of a CTA (``.reqntid``).
        registers: bits by prefix (``%r`` -> 32); predicates have 1.
        shared: names of the dynamic shared memory.
        body: instructions in order; labels are positions in it.
    """

    target: str
    params: list[Param]
    threads: int
    registers: dict[str, int]
    shared: list[str]
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def width(self, register: str) -> int:
        """Bits of a register.

        Raises:
            UnknownInstructionError: not a declared register.
        """
        found = self.registers.get(register) or self.registers.get(register.rstrip("0123456789"))
        if found is None:
            raise UnknownInstructionError(f"{register} is not a register")
        return found


BITS = {"pred": 1, "b16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64, "u32": 32, "u64": 64}
_HEAD = re.compile(r"\.entry\s+\S+?\((.*?)\)\s*((?:\.\w+[^\n{]*\n)*)\s*\{", re.S)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+([^;]+);")
_INSTRUCTION = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*);", re.S)
_IGNORED = (".pragma", ".loc", ".file", ".section")


def parse(text: str) -> Program:
    """The program of a module with one entry.

    Raises:
        UnknownInstructionError: a line that is not understood.
    """
    text = text.rstrip("\0")
    head = _HEAD.search(text)
    if head is None or text.count(".entry") != 1:
        raise UnknownInstructionError("the module must have exactly one .entry")
    threads = re.search(r"\.reqntid\s+(\d+)(?:,\s*1)*\s*$", head[2], re.M)
    target = re.search(r"^\.target\s+(\w+)", text, re.M)
    if threads is None or target is None:
        raise UnknownInstructionError("the entry must name .target and one-dimensional .reqntid")
    shared = re.findall(r"^\.extern \.shared .*?\.b8 (\w+)\[\];", text, re.M)
    program = Program(target[1], _params(head[1]), int(threads[1]), {}, shared)
    first = text.count("\n", 0, head.end()) + 1
    _parse_body(program, text[head.end():].splitlines(), first)
    return program


def _params(text: str) -> list[Param]:
    params, end = [], 0
    for align, kind, name, count in _PARAM.findall(text):
        size = int(count) if count else int(kind[1:]) // 8
        end = -(-end // (int(align) if align else size)) * (int(align) if align else size)
        params.append(Param(name, end, size))
        end += size
    return params


def _parse_body(program: Program, lines: list[str], first: int) -> None:
    """Read lines up to the brace that closes the entry. Names of inner scopes get the scope's number."""
    scopes: list[dict[str, str]] = [{}]
    serial = 0
    statements = _statements(lines, first)
    for i, (number, line) in enumerate(statements):
        if line == "{":
            serial += 1
            scopes.append(_scope_names([text for _, text in statements[i + 1:]], serial))
        elif line == "}":
            scopes.pop()
            if not scopes:
                return
        elif label := re.fullmatch(r"([\w$]+):", line):
            program.labels[scopes[-1].get(label[1], label[1])] = len(program.body)
        elif declared := _REG.fullmatch(line):
            for name in _declared(declared[2]):
                program.registers[scopes[-1].get(name, name)] = BITS[declared[1]]
        else:
            program.body.append(_instruction(line, number, scopes[-1]))
    raise UnknownInstructionError("the entry's closing brace is missing")


def _statements(lines: list[str], first: int) -> list[tuple[int, str]]:
    """Numbered statements, labels and braces; a scope that stands on one line is taken apart."""
    found = []
    for number, raw in enumerate(lines, first):
        line = raw.split("//")[0].strip()
        if not line or line.startswith(_IGNORED):
            continue
        if line.startswith("{") and len(line) > 1:
            inner = [f"{text.strip()};" for text in line[1:].removesuffix("}").split(";") if text.strip()]
            found += [(number, text) for text in ("{", *inner, "}")]
        else:
            found.append((number, line))
    return found


def _declared(names: str) -> list[str]:
    """Names, or prefixes of names, of a .reg directive."""
    return [name.strip().partition("<")[0] for name in names.split(",")]


def _scope_names(lines: list[str], serial: int) -> dict[str, str]:
    """New names of the registers and labels that a scope declares."""
    names: list[str] = []
    for line in lines[:lines.index("}")]:
        if declared := _REG.fullmatch(line):
            names += _declared(declared[2])
        elif label := re.fullmatch(r"([\w$]+):", line):
            names.append(label[1])
    return {name: f"{name}@{serial}_" for name in names}


def _instruction(line: str, number: int, names: dict[str, str]) -> Instruction:
    match = _INSTRUCTION.fullmatch(line)
    if match is None:
        raise UnknownInstructionError(f"line {number}: {line!r} is not understood")
    negated, guard, opcode, rest = match.groups()
    name, *modifiers = opcode.split(".")
    operands = [_operand(part, names) for part in _split(rest)]
    return Instruction(number, line, names.get(guard, guard), negated == "!", name, tuple(modifiers), operands)


def _split(text: str) -> list[str]:
    """Operands, split at the commas outside of braces and brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip()]


def _operand(text: str, names: dict[str, str]) -> Operand:
    if text.startswith("{"):
        return tuple(names.get(part.strip(), part.strip()) for part in text[1:-1].split(","))
    if "|" in text:
        return tuple(names.get(part, part) for part in text.split("|"))
    if text.startswith("["):
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return Address(names.get(base, base), int(offset or "0", 0))
    return names.get(text, text)
