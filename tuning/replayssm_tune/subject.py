"""What is to be tuned: a model of the registry, a model's config, or explicit dimensions."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.layout import mamba2_ring_bytes, mamba2_state_bytes
from replayssm_cute.registry import models
from replayssm_cute.registry.hf_config import ModelConfig, read_config
from replayssm_cute.registry.models import DTYPES, ModelEntry
from replayssm_cute.types import Mamba2Geometry

_DIMENSIONS = re.compile(r"\d+x\d+x\d+/\d+")


@dataclass(frozen=True)
class Subject:
    """What is to be tuned.

    Attributes:
        name: as the user wrote it.
        geometry: heads of one layer on one rank.
        layers: layers with a Mamba2 block; None where only dimensions are known.
    """

    name: str
    geometry: Mamba2Geometry
    layers: int | None

    def memory(self, state_dtype: str, buffer_len: int) -> tuple[int, int]:
        """(checkpoint, bf16 rings): bytes of one request on one rank, over all layers that are known."""
        layers = self.layers or 1
        return (layers * mamba2_state_bytes(self.geometry, DTYPES[state_dtype]),
                layers * mamba2_ring_bytes(self.geometry, buffer_len))


def parse_geometry(text: str) -> Mamba2Geometry:
    """``HxPxN/G``, the heads of one rank."""
    try:
        shape, groups = text.split("/")
        nheads, headdim, dstate = map(int, shape.split("x"))
        return Mamba2Geometry(nheads, headdim, dstate, int(groups))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not HxPxN/G: {error}") from None


def find(text: str, tp: int = 1) -> Subject:
    """What a user means by ``--model``.

    Args:
        text: a registry name, the path of a ``config.json`` or of its folder, or ``HxPxN/G`` before
            tensor parallelism.
        tp: ranks that the heads are split over.

    Raises:
        ArgumentError: it is none of these, or its heads do not split.
        UnsupportedError: it is no Mamba2 model.
    """
    if _DIMENSIONS.fullmatch(text):
        return Subject(text, parse_geometry(text).shard(tp), None)
    if Path(text).exists():
        return _subject(text, tp, read_config(text))
    try:
        entry = models.get(text)
    except ArgumentError as error:
        raise ArgumentError("model", f"{error.expected}, the path of a config.json, or HxPxN/G", repr(text)) from None
    return _subject(text, tp, entry)


def _subject(text: str, tp: int, model: ModelEntry | ModelConfig) -> Subject:
    if not isinstance(model.geometry, Mamba2Geometry):
        raise UnsupportedError(text, "a Gated DeltaNet model; only Mamba2 kernels are tuned")
    return Subject(text, model.geometry.shard(tp), model.recurrent_layers)
