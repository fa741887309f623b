"""Basic blocks: where threads may part, meet or wait."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from tests.ptx import isa_data, isa_float, isa_integer, isa_sync, isa_warp
from tests.ptx.builder import Step, translate
from tests.ptx.errors import UnknownInstructionError
from tests.ptx.parser import Instruction, Program, parse

LOADED = (isa_data, isa_float, isa_integer, isa_sync, isa_warp)  # importing them fills TRANSLATORS
BRANCHES = ("bra", "ret", "exit")


@dataclass
class Block:
    """Steps that the same threads execute one after the other.

    Attributes:
        number: of the block in the program.
        needs: as ``Step.needs``, for the whole block; a step that waits, or needs a CTA, stands alone.
        branch: the instruction that ends the block, if any.
        target, next: the block behind the branch, and the one that follows; the number of blocks is the exit.
        uses: registers that are read before the block writes them.
        keeps: registers that it writes and another block may read.
    """

    number: int
    steps: list[Step]
    needs: str
    branch: Instruction | None
    target: int = -1
    next: int = -1
    uses: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset()


@dataclass
class Code:
    """A translated program."""

    program: Program
    blocks: list[Block] = field(default_factory=list)


def load(text: str) -> Code:
    """Translate a PTX module with one entry.

    Raises:
        UnknownInstructionError: names what is not implemented.
    """
    code = Code(parse(text))
    starts: dict[int, int] = {}
    for first, end in _ranges(code.program):
        starts[first] = len(code.blocks)
        code.blocks.append(_block(code.program, len(code.blocks), first, end))
    last = len(code.blocks)
    starts[len(code.program.body)] = last
    for number, block in enumerate(code.blocks):
        block.next, ins = number + 1, block.branch
        if ins is not None:
            block.target = last if ins.name != "bra" else starts[code.program.labels[str(ins.operands[0])]]
            if ins.guard is None:
                block.next = block.target
    _find_uses(code.blocks)
    return code


def _ranges(program: Program) -> list[tuple[int, int]]:
    """Where blocks begin and end in the body."""
    cuts = {0, len(program.body), *program.labels.values()}
    for i, ins in enumerate(program.body):
        if ins.name in BRANCHES:
            cuts.add(i + 1)
        elif (ins.name, *ins.modifiers[:1]) in (("bar", "sync"), ("mbarrier", "try_wait")):
            cuts |= {i, i + 1}
    ordered = sorted(cuts)
    return list(itertools.pairwise(ordered))


def _block(program: Program, number: int, first: int, end: int) -> Block:
    branch = program.body[end - 1] if program.body[end - 1].name in BRANCHES else None
    if branch is not None and branch.modifiers not in ((), ("uni",)):
        raise branch.unknown()
    steps = [translate(program, ins) for ins in program.body[first:end - (branch is not None)]]
    needs = {step.needs for step in steps if step.needs}
    if len(needs) > 1 or ("wait" in needs and len(steps) > 1):
        raise UnknownInstructionError(f"line {program.body[first].line}: a block that waits in {sorted(needs)} ways")
    uses: set[str] = set()
    writes: set[str] = set()
    for step in steps:
        uses |= step.reads - writes
        writes |= step.writes
    if branch is not None and branch.guard is not None:
        uses |= {branch.guard} - writes
    return Block(number, steps, needs.pop() if needs else "", branch, uses=frozenset(uses), writes=frozenset(writes))


def _find_uses(blocks: list[Block]) -> None:
    """Which of its registers a block must keep for others: backward data flow to a fixed point."""
    live = [set(block.uses) for block in blocks] + [set()]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(blocks))):
            block = blocks[number]
            after = live[block.next] | (live[block.target] if block.target >= 0 else set())
            before = block.uses | (after - block.writes)
            block.keeps = block.writes & after
            if before != live[number]:
                live[number], changed = set(before), True


