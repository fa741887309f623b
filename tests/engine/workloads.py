"""What the engine is asked to do: waves of requests that join at given steps, each with a fixed length."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tiny_nemotron_h import VOCABULARY

BLOCK = 640  # tokens of a prefix-cache block of the tiny checkpoint, which the engine derives from its page sizes


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
Wave = Callable[[Outputs], list[Request]]


def mixed(outputs: Outputs) -> list[Request]:
    """Unequal prompts and answers, more requests than rows, joining while others decode.

    With 64 tokens a step, the prompts of 65 and 129 end in a one-token tail, which is run as decode.
    """
    shapes = [(17, 70, 0), (65, 100, 0), (150, 56, 0), (1, 64, 3), (129, 52, 10), (40, 90, 30), (97, 60, 31)]
    return [Request(f"r{i}", tokens(i, prompt), output, step) for i, (prompt, output, step) in enumerate(shapes)]


def crowded(outputs: Outputs) -> list[Request]:
    """Three requests that each need one more block while they decode, where there is room for one."""
    return [Request(f"r{i}", tokens(10 + i, BLOCK - 30 + 8 * i), 90) for i in range(3)]


def first_visit(outputs: Outputs) -> list[Request]:
    """``a`` completes a block while decoding, ``b`` completes two in its prefill."""
    return [Request("a", tokens(20, BLOCK - 10), 70), Request("b", tokens(21, 2 * BLOCK + 20), 52)]


def second_visit(outputs: Outputs) -> list[Request]:
    """Both come back: ``c`` with an answer as part of its prompt, ``d`` with the same long prefix."""
    return [Request("c", tokens(20, BLOCK - 10) + tuple(outputs["a"][:40]) + tokens(22, 5), 60),
            Request("d", tokens(21, 2 * BLOCK) + tokens(23, 30), 52)]


WORKLOADS: dict[str, list[Wave]] = {
    "mixed": [mixed], "crowded": [crowded], "returning": [first_visit, second_visit]}
