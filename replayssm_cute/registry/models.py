"""The models that the registry knows, by name and by geometry.

The data lies in ``replayssm_cute/models``, one JSON file a family. Every number has a status,
*verified* (read in a config, a copy or a quote of it, or the vendor's own script), *inferred*
(derived, or a default) or *unknown*, and names its sources. docs/models.md shows all entries.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from replayssm_cute.errors import ArgumentError, RegistryError
from replayssm_cute.registry.entries import (
    DTYPES,
    TP_SIZES,
    GdnEntry,
    Geometry,
    Mamba2Entry,
    ModelEntry,
    splits_in_vllm,
)
from replayssm_cute.registry.model_file import load_family

__all__ = ["DTYPES", "TP_SIZES", "GdnEntry", "Geometry", "Mamba2Entry", "ModelEntry", "all_models",
           "find_by_geometry", "gdn_models", "get", "get_gdn", "get_mamba2", "load_family", "mamba2_models",
           "splits_in_vllm"]

MODELS_FOLDER = Path(__file__).parents[1] / "models"
Entry = TypeVar("Entry", bound=ModelEntry)


@functools.cache
def all_models() -> tuple[ModelEntry, ...]:
    """Every entry, ordered by name.

    Raises:
        RegistryError: a file is malformed, or two entries share a name.
    """
    entries: dict[str, ModelEntry] = {}
    for path in sorted(MODELS_FOLDER.glob("*.json")):
        for entry in load_family(path):
            if entry.name in entries:
                raise RegistryError(f"{path}: models: two entries are named {entry.name}")
            entries[entry.name] = entry
    return tuple(entries[name] for name in sorted(entries))


def mamba2_models() -> tuple[Mamba2Entry, ...]:
    """The entries with Mamba2 layers, ordered by name."""
    return tuple(entry for entry in all_models() if isinstance(entry, Mamba2Entry))


def gdn_models() -> tuple[GdnEntry, ...]:
    """The entries with Gated DeltaNet layers, ordered by name."""
    return tuple(entry for entry in all_models() if isinstance(entry, GdnEntry))


def get(name: str) -> ModelEntry:
    """The entry of this name.

    Raises:
        ArgumentError: there is none; the message names the nearest.
    """
    return _named(name, all_models())


def get_mamba2(name: str) -> Mamba2Entry:
    """``get`` among the entries with Mamba2 layers."""
    return _named(name, mamba2_models())


def get_gdn(name: str) -> GdnEntry:
    """``get`` among the entries with Gated DeltaNet layers."""
    return _named(name, gdn_models())


def _named(name: str, among: Iterable[Entry]) -> Entry:
    entries = {entry.name: entry for entry in among}
    if name not in entries:
        near = difflib.get_close_matches(str(name), entries, n=3, cutoff=0.0)
        raise ArgumentError("model", f"a registry name such as {', '.join(near)}", repr(name))
    return entries[name]


def find_by_geometry(geometry: Geometry, model_type: str | None = None) -> tuple[ModelEntry, ...]:
    """The entries with this geometry before tensor parallelism, ordered by name.

    Args:
        geometry: of a whole layer.
        model_type: only entries of this type; None takes any.
    """
    return tuple(entry for entry in all_models() if entry.geometry == geometry
                 and model_type in (None, entry.model_type))
