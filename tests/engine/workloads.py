"""What the engine is asked to do: waves of requests that join at given steps, each with a fixed length."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tiny_nemotron_h import VOCABULARY


@dataclass(frozen=True)
class Request:
    """One request: it joins when the engine has made ``step`` steps in its wave."""

    name: str
    prompt: tuple[int, ...]
    output: int
    step: int = 0


def tokens(seed: int, count: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCABULARY) for _ in range(count))


#: What the requests of earlier waves have generated, by name.
Outputs = dict[str, list[int]]
#: A wave, given the engine's block size (tokens) and those outputs.
Wave = Callable[[int, Outputs], list[Request]]


def mixed(block: int, outputs: Outputs) -> list[Request]:
    """Unequal prompts and answers, more requests than rows, joining while others decode.

    With 64 tokens a step, prompts are read in chunks; that of 65 ends in a one-token chunk, which is run as decode.
    """
    shapes = [(65, 100, 0), (17, 70, 1), (150, 56, 1), (1, 64, 3), (129, 52, 10), (40, 90, 30), (97, 60, 31)]
    return [Request(f"r{i}", tokens(i, prompt), output, step) for i, (prompt, output, step) in enumerate(shapes)]


def crowded(block: int, outputs: Outputs) -> list[Request]:
    """Three requests that each need one more block while they decode, where there is room for one."""
    return [Request(f"r{i}", tokens(10 + i, block - 30 + 8 * i), 90) for i in range(3)]


def first_visit(block: int, outputs: Outputs) -> list[Request]:
    """``a`` completes a block while it decodes, ``b`` two in its prefill."""
    return [Request("a", tokens(20, block - 10), 70), Request("b", tokens(21, 2 * block + 20), 52)]


def second_visit(block: int, outputs: Outputs) -> list[Request]:
    """``c`` comes back with ``a``'s answer in its prompt, ``d`` with the prefix of ``b``."""
    return [Request("c", tokens(20, block - 10) + tuple(outputs["a"][:40]) + tokens(22, 5), 60),
            Request("d", tokens(21, 2 * block) + tokens(23, 30), 52)]


WORKLOADS: dict[str, list[Wave]] = {
    "mixed": [mixed], "crowded": [crowded], "returning": [first_visit, second_visit]}
