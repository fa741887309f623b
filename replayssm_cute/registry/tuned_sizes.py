"""What a tuned row was measured for, by operation: its fields, and how far it is from a problem.

A size has the fields by which a row differs from the others of its file. ``DIMS`` are those of the file's name,
``CHECKS`` what a row's must be, in the order in which rows are sorted. See docs/registry.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol

import torch

from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_layout import MAX_TOKENS, check_buffer_len
from replayssm_cute.gdn_types import GdnGeometry, GdnProblem
from replayssm_cute.layout import MAX_BUFFER_LEN
from replayssm_cute.registry.schema import COUNT, Check, one_of
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem

Distance = tuple[Fraction | int, ...]

_LENGTH = Check(f"an integer in 1..{MAX_BUFFER_LEN}", lambda value: type(value) is int and 1 <= value <= MAX_BUFFER_LEN)
_TOKENS = Check(f"an integer in 1..{MAX_TOKENS}", lambda value: type(value) is int and 1 <= value <= MAX_TOKENS)


class Size(Protocol):
    """What every size offers."""

    DIMS: ClassVar[tuple[str, str]]
    CHECKS: ClassVar[dict[str, Check]]

    @property
    def buffer_len(self) -> int: ...

    @property
    def batch(self) -> int: ...

    #: All fields, in the order of ``CHECKS``; the batch is the last.
    @property
    def key(self) -> tuple[Any, ...]: ...

    #: Heads of a row of the batch, the largest count first.
    @property
    def heads(self) -> tuple[int, int]: ...

    def fault(self) -> str | None:
        """``field: expected ..., got ...`` where the fields do not fit each other."""

    def geometry(self, dims: tuple[int, int]) -> Any:
        """Heads of one rank; ``dims`` are those of the file's name."""

    @classmethod
    def layer(cls, problem: Any) -> tuple[Any, ...]:
        """``key`` of a row for this very problem, without the batch."""

    def misfit(self, problem: Any) -> Distance | None:
        """How far a problem is, whatever its batch; the least fits best. None: a row of this size never serves it."""


def ratio(a: int, b: int) -> Fraction:
    """How far two counts are apart, 1 where they are the same."""
    return Fraction(max(a, b), max(1, min(a, b)))


def _length(held: int, asked: int) -> Distance:
    """Ring lengths as near as possible; of two the larger, whose launch holds the smaller ring too."""
    return abs(held - asked), -held


class _Fields:
    """What all sizes derive from their ``CHECKS``."""

    CHECKS: ClassVar[dict[str, Check]]

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.CHECKS)

    def _indivisible(self, whole: str, part: str) -> str | None:
        """The fault of a count that the other does not divide."""
        all_of, some = getattr(self, whole), getattr(self, part)
        return f"{part}: expected a divisor of {whole}={all_of}, got {some}" if all_of % some else None


@dataclass(frozen=True)
class Mamba2Size(_Fields):
    """Mamba2 decode: H and G of one rank, L, rows of the step."""

    nheads: int
    ngroups: int
    buffer_len: int
    batch: int

    DIMS: ClassVar[tuple[str, str]] = ("headdim", "dstate")
    CHECKS: ClassVar[dict[str, Check]] = {"nheads": COUNT, "ngroups": COUNT, "buffer_len": _LENGTH, "batch": COUNT}

    @property
    def heads(self) -> tuple[int, int]:
        return self.nheads, self.ngroups

    def fault(self) -> str | None:
        return self._indivisible("nheads", "ngroups")

    def geometry(self, dims: tuple[int, int]) -> Mamba2Geometry:
        return Mamba2Geometry(self.nheads, *dims, self.ngroups)

    @classmethod
    def layer(cls, problem: Mamba2Problem) -> tuple[Any, ...]:
        return problem.geometry.nheads, problem.geometry.ngroups, problem.buffer_len

    def misfit(self, problem: Mamba2Problem) -> Distance | None:
        return (ratio(self.nheads // self.ngroups, problem.geometry.heads_per_group),
                *_length(self.buffer_len, problem.buffer_len))


@dataclass(frozen=True)
class GdnDecodeSize(_Fields):
    """Standard decode of Gated DeltaNet: HV and Hk of one rank, dtype of the d and k rings, L, rows of the step."""

    num_v_heads: int
    num_k_heads: int
    ring_dtype: str
    buffer_len: int
    batch: int

    DIMS: ClassVar[tuple[str, str]] = ("head_k_dim", "head_v_dim")
    CHECKS: ClassVar[dict[str, Check]] = {
        "num_v_heads": COUNT, "num_k_heads": COUNT, "ring_dtype": one_of("float32", "float16", "bfloat16"),
        "buffer_len": _LENGTH, "batch": COUNT}

    @property
    def heads(self) -> tuple[int, int]:
        return self.num_v_heads, self.num_k_heads

    def fault(self) -> str | None:
        return self._indivisible("num_v_heads", "num_k_heads")

    def geometry(self, dims: tuple[int, int]) -> GdnGeometry:
        return GdnGeometry(self.num_k_heads, self.num_v_heads, *dims)

    @classmethod
    def layer(cls, problem: GdnProblem) -> tuple[Any, ...]:
        g, ring = problem.geometry, str(problem.ring_dtype).removeprefix("torch.")
        return g.num_v_heads, g.num_k_heads, ring, problem.buffer_len

    def misfit(self, problem: GdnProblem) -> Distance | None:
        if problem.ring_dtype != getattr(torch, self.ring_dtype):
            return None
        return (ratio(self.num_v_heads // self.num_k_heads, problem.geometry.ratio),
                *_length(self.buffer_len, problem.buffer_len))


@dataclass(frozen=True)
class GdnVerifySize(GdnDecodeSize):
    """The verify step of Gated DeltaNet: also T and the fold, ``"exact"`` or ``"ring"``."""

    tokens: int
    fold: str

    CHECKS: ClassVar[dict[str, Check]] = {
        **dict(list(GdnDecodeSize.CHECKS.items())[:3]), "fold": one_of("exact", "ring"), "tokens": _TOKENS,
        "buffer_len": _LENGTH, "batch": COUNT}

    def fault(self) -> str | None:
        try:
            check_buffer_len(self.buffer_len, self.tokens, "buffer_len")
        except ArgumentError as error:
            return str(error)
        return super().fault()

    @classmethod
    def layer(cls, problem: GdnProblem) -> tuple[Any, ...]:
        *heads_and_ring, buffer_len = super().layer(problem)
        return *heads_and_ring, "exact" if problem.exact_fold else "ring", problem.tokens, buffer_len

    def misfit(self, problem: GdnProblem) -> Distance | None:
        """Kernels differ by the fold and by the tiles of tokens, which hold 4, 8 or 16."""
        base = super().misfit(problem)
        if base is None or problem.exact_fold != (self.fold == "exact") or _tile(problem.tokens) != _tile(self.tokens):
            return None
        return base[0], ratio(self.tokens, problem.tokens), -self.tokens, *base[1:]


def _tile(tokens: int) -> int:
    return 4 if tokens <= 4 else 8 if tokens <= 8 else 16


#: Classes that offer ``Size``, by operation as the dispatcher counts it.
SIZES: dict[str, type[Any]] = {
    "mamba2_decode": Mamba2Size, "gdn_decode": GdnDecodeSize, "gdn_verify": GdnVerifySize}
