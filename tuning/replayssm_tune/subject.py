"""What is to be tuned: a model of the registry, a model's config, or explicit dimensions; and which of its steps."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.registry import models
from replayssm_cute.registry.hf_config import ModelConfig, read_config
from replayssm_cute.registry.models import ModelEntry
from replayssm_cute.types import Mamba2Geometry
from replayssm_tune.operations import OPERATIONS
from replayssm_tune.point import Point

Geometry = Mamba2Geometry | GdnGeometry
Step = dict[str, Any]

_MAMBA2 = re.compile(r"\d+x\d+x\d+/\d+")
_GDN = re.compile(r"\d+/\d+x\d+x\d+")


@dataclass(frozen=True)
class Subject:
    """What is to be tuned.

    Attributes:
        name: as the user wrote it.
        geometry: heads of one layer on one rank.
        layers: layers with this recurrence; None where only dimensions are known.
        steps: fields of ``Point`` beside heads, state dtype, ring length and batch: one set a kind of step.
    """

    name: str
    geometry: Geometry
    layers: int | None
    steps: tuple[Step, ...] = ({},)

    @property
    def op(self) -> str:
        """The operation, which all steps share."""
        return str(self.steps[0].get("op", Point.op))

    def points(self, state_dtypes: Iterable[str], buffer_lens: Iterable[int], batches: Iterable[int]) -> list[Point]:
        """Every point, in the order in which it is measured."""
        return [Point(self.geometry, dtype, buffer_len, batch, **step) for step, dtype, buffer_len, batch
                in itertools.product(self.steps, state_dtypes, buffer_lens, batches)]

    def memory(self, state_dtype: str, buffer_len: int, step: Step | None = None) -> tuple[int, int]:
        """(checkpoint, rings): bytes of one request on one rank, over all layers that are known."""
        point = Point(self.geometry, state_dtype, buffer_len, 1, **(self.steps[0] if step is None else step))
        state, rings = OPERATIONS[self.op].memory(point)
        return (self.layers or 1) * state, (self.layers or 1) * rings


def parse_geometry(text: str) -> Mamba2Geometry:
    """``HxPxN/G``, the heads of one rank."""
    try:
        shape, groups = text.split("/")
        nheads, headdim, dstate = map(int, shape.split("x"))
        return Mamba2Geometry(nheads, headdim, dstate, int(groups))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not HxPxN/G: {error}") from None


def parse_gdn(text: str) -> GdnGeometry:
    """``HV/HkxVxK``, the heads of one rank."""
    try:
        heads, head_v_dim, head_k_dim = text.split("x")
        num_v_heads, num_k_heads = heads.split("/")
        return GdnGeometry(int(num_k_heads), int(num_v_heads), int(head_k_dim), int(head_v_dim))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not HV/HkxVxK: {error}") from None


def parse_any(text: str) -> Geometry:
    """The heads of one rank, of either recurrence."""
    if not (_MAMBA2.fullmatch(text) or _GDN.fullmatch(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not HxPxN/G (Mamba2) or HV/HkxVxK (Gated DeltaNet)")
    return parse_geometry(text) if _MAMBA2.fullmatch(text) else parse_gdn(text)


def steps_of(geometry: Geometry, op: str | None = None, tokens: Iterable[int] | None = None,
             folds: Iterable[str] | None = None, ring_dtypes: Iterable[str] | None = None) -> tuple[Step, ...]:
    """The steps that a user asks for; None takes the usual: standard decode, T = 4, exact folds, bf16 rings.

    Raises:
        ArgumentError: an option is of another operation, or the operation is not of these heads.
    """
    gdn = isinstance(geometry, GdnGeometry)
    op = op or ("gdn_decode" if gdn else Point.op)
    if (op == Point.op) == gdn:
        expected = "gdn_decode or gdn_verify, for these are Gated DeltaNet heads" if gdn else \
            f"{Point.op}, for these are Mamba2 heads"
        raise ArgumentError("op", expected, op)
    for name, value, wanted in (("spec-tokens", tokens, ("gdn_verify",)), ("fold", folds, ("gdn_verify",)),
                                ("ring-dtype", ring_dtypes, ("gdn_decode", "gdn_verify"))):
        if value is not None and op not in wanted:
            raise ArgumentError(f"--{name}", f"--op {' or '.join(wanted)} beside it", op)
    if not gdn:
        return ({},)
    rings = [{"op": op, "ring_dtype": ring} for ring in ring_dtypes or ("bfloat16",)]
    if op == "gdn_decode":
        return tuple(rings)
    return tuple({**ring, "tokens": n, "fold": fold}
                 for n, fold, ring in itertools.product(tokens or (4,), folds or ("exact",), rings))


def find(text: str, tp: int = 1) -> Subject:
    """What a user means by ``--model``, with the usual step.

    Args:
        text: a registry name, the path of a ``config.json`` or of its folder, or ``HxPxN/G`` or
            ``HV/HkxVxK`` before tensor parallelism.
        tp: ranks that the heads are split over.

    Raises:
        ArgumentError: it is none of these, or its heads do not split.
        UnsupportedError: it is no model with either recurrence.
    """
    if _MAMBA2.fullmatch(text) or _GDN.fullmatch(text):
        return _subject(text, parse_any(text).shard(tp), None)
    if Path(text).exists():
        model: ModelEntry | ModelConfig = read_config(text)
    else:
        try:
            model = models.get(text)
        except ArgumentError as error:
            raise ArgumentError("model", f"{error.expected}, the path of a config.json, HxPxN/G or HV/HkxVxK",
                                repr(text)) from None
    return _subject(text, model.geometry.shard(tp), model.recurrent_layers)


def _subject(text: str, geometry: Geometry, layers: int | None) -> Subject:
    return Subject(text, geometry, layers, steps_of(geometry))
