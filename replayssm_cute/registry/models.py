"""Model entries: geometry, what it was checked with, and where every number comes from.

The data lies in ``replayssm_cute/models``, one JSON file a family. Every number has a status,
*verified* (read in a config, a copy or a quote of it, or the vendor's own script), *inferred*
(derived, or a default) or *unknown*, and names its sources. docs/models.md shows all entries.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replayssm_cute.errors import ArgumentError, RegistryError
from replayssm_cute.layout import MAX_BUFFER_LEN
from replayssm_cute.registry.schema import (
    BOOL,
    COUNT,
    OBJECT,
    OBJECTS,
    TEXT,
    Check,
    list_of,
    one_of,
    read_json,
    record,
)
from replayssm_cute.types import Mamba2Geometry

MODELS_FOLDER = Path(__file__).parents[1] / "models"
TP_SIZES = (1, 2, 4, 8)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Evidence:
    """How sure a number is.

    Attributes:
        status: ``"verified"``, ``"inferred"`` or ``"unknown"``.
        sources: what was read, in words; empty where unknown.
    """

    status: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class StateAdvice:
    """A way to store the checkpoint that the vendor or the engines publish for serving.

    Attributes:
        state_dtype: dtype of the checkpoint.
        stochastic_rounding: it goes with stochastic rounding.
        philox_rounds: rounds of its random generator, None where not stated.
        sources: what was read, in words.
    """

    state_dtype: torch.dtype
    stochastic_rounding: bool
    philox_rounds: int | None
    sources: tuple[str, ...]


@dataclass(frozen=True)
class ModelEntry:
    """One published model.

    Attributes:
        name: registry name, kebab-case.
        display_name: as its vendor writes it.
        family: of its file.
        hub_ids: Hugging Face ids that share all numbers.
        architecture, model_type: as in the config; the canonical ones for older formats.
        geometry: heads of one Mamba2 layer, before tensor parallelism.
        mamba_layers: layers that hold a Mamba2 block.
        layers: all layers.
        hidden_size: width of the residual stream.
        conv_kernel: width of the causal convolution in front of the recurrence.
        act_dtype: dtype of the activations.
        config_state_dtype: checkpoint dtype that the config asks for, None where it does not.
        mtp_layers: multi-token-prediction layers; None where unknown.
        state_advice: published ways to store the checkpoint, the preferred first.
        validated_state_dtypes, validated_buffer_lens: what the test suites of this package hold
            this geometry to.
        notes: what a reader should know.
        evidence: status and sources by the name of the number in the file.
    """

    name: str
    display_name: str
    family: str
    hub_ids: tuple[str, ...]
    architecture: str
    model_type: str
    geometry: Mamba2Geometry
    mamba_layers: int
    layers: int
    hidden_size: int
    conv_kernel: int
    act_dtype: torch.dtype
    config_state_dtype: torch.dtype | None
    mtp_layers: int | None
    state_advice: tuple[StateAdvice, ...]
    validated_state_dtypes: tuple[torch.dtype, ...]
    validated_buffer_lens: tuple[int, ...]
    notes: str
    evidence: dict[str, Evidence]

    def needs_stochastic_rounding(self, state_dtype: torch.dtype) -> bool:
        """Whether a checkpoint of this dtype is published with stochastic rounding only."""
        advised = [advice.stochastic_rounding for advice in self.state_advice if advice.state_dtype == state_dtype]
        return bool(advised) and all(advised)

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Those of 1, 2, 4 and 8 ranks that the heads and groups split over."""
        return tuple(tp for tp in TP_SIZES if _splits(self.geometry, tp))

    @property
    def vllm_tp_sizes(self) -> tuple[int, ...]:
        """Those of ``tp_sizes`` that vLLM's Mamba2 mixer takes (0.33: whole groups, or one group)."""
        return tuple(tp for tp in self.tp_sizes if splits_in_vllm(self.geometry, tp))


def _splits(geometry: Mamba2Geometry, tp: int) -> bool:
    try:
        geometry.shard(tp)
    except ArgumentError:
        return False
    return True


def splits_in_vllm(geometry: Mamba2Geometry, tp: int) -> bool:
    """vLLM 0.33 replicates a single group only; this package also splits inside one of several."""
    return geometry.ngroups % tp == 0 or geometry.ngroups == 1


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


def get(name: str) -> ModelEntry:
    """The entry of this name.

    Raises:
        ArgumentError: there is none; the message names the nearest.
    """
    entries = {entry.name: entry for entry in all_models()}
    if name not in entries:
        near = difflib.get_close_matches(str(name), entries, n=3, cutoff=0.0)
        raise ArgumentError("model", f"a registry name such as {', '.join(near)}", repr(name))
    return entries[name]


def find_by_geometry(geometry: Mamba2Geometry, model_type: str | None = None) -> tuple[ModelEntry, ...]:
    """The entries with this geometry before tensor parallelism, ordered by name.

    Args:
        geometry: of a whole layer.
        model_type: only entries of this type; None takes any.
    """
    return tuple(entry for entry in all_models() if entry.geometry == geometry
                 and model_type in (None, entry.model_type))


_NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
_ANY_TEXT = Check("a string", lambda value: isinstance(value, str))
_DTYPE = one_of(*DTYPES)
_FAMILY = {"schema": Check("1", lambda value: type(value) is int and value == 1), "family": TEXT,
           "architecture": TEXT, "model_type": TEXT, "models": OBJECTS,
           "sources": Check("an object of strings", lambda value: isinstance(value, dict)
                            and all(map(TEXT.holds, value.values())))}
_MODEL = {"name": Check("a kebab-case name", lambda value: isinstance(value, str)
                        and _NAME.fullmatch(value) is not None),
          "display_name": TEXT, "hub_ids": list_of(TEXT), "numbers": OBJECT, "evidence": OBJECT,
          "state_advice": OBJECTS, "validated": OBJECT, "notes": _ANY_TEXT}
_NUMBERS = {"nheads": COUNT, "headdim": COUNT, "dstate": COUNT, "ngroups": COUNT,
            "mamba_layers": COUNT, "layers": COUNT, "hidden_size": COUNT, "conv_kernel": COUNT,
            "act_dtype": _DTYPE, "config_state_dtype": _DTYPE.or_null(),
            "mtp_layers": Check("a count", lambda value: type(value) is int and value >= 0).or_null()}
_EVIDENCE = {"status": one_of("verified", "inferred", "unknown"), "sources": list_of(TEXT)}
_ADVICE = {"state_dtype": _DTYPE, "stochastic_rounding": BOOL, "philox_rounds": COUNT.or_null(),
           "sources": list_of(TEXT)}
_VALIDATED = {"state_dtypes": list_of(_DTYPE), "buffer_lens": list_of(Check(
    f"an integer in 1..{MAX_BUFFER_LEN}", lambda value: type(value) is int and 1 <= value <= MAX_BUFFER_LEN))}


def load_family(path: Path) -> tuple[ModelEntry, ...]:
    """The entries of one file.

    Raises:
        RegistryError: naming the file, the field, what was expected and what came.
    """
    family = record(str(path), read_json(path), _FAMILY)
    return tuple(_entry(f"{path}: models[{i}]", family, model) for i, model in enumerate(family["models"]))


def _entry(where: str, family: dict[str, Any], value: object) -> ModelEntry:
    model = record(where, value, _MODEL)
    numbers = dict(record(f"{where}.numbers", model["numbers"], _NUMBERS))
    evidence = _evidence(where, family["sources"], numbers, model["evidence"])
    validated = record(f"{where}.validated", model["validated"], _VALIDATED)
    try:
        geometry = Mamba2Geometry(*(numbers.pop(n) for n in ("nheads", "headdim", "dstate", "ngroups")))
    except ArgumentError as error:
        raise RegistryError(f"{where}.numbers.{error}") from error
    if numbers["mamba_layers"] > numbers["layers"]:
        raise RegistryError(f"{where}.numbers.mamba_layers: expected at most layers={numbers['layers']}, "
                            f"got {numbers['mamba_layers']}")
    return ModelEntry(
        name=model["name"], display_name=model["display_name"], family=family["family"],
        hub_ids=tuple(model["hub_ids"]), architecture=family["architecture"],
        model_type=family["model_type"], geometry=geometry,
        act_dtype=DTYPES[numbers.pop("act_dtype")],
        config_state_dtype=DTYPES.get(numbers.pop("config_state_dtype")), **numbers,
        state_advice=tuple(_advice(f"{where}.state_advice[{i}]", family["sources"], advice)
                           for i, advice in enumerate(model["state_advice"])),
        validated_state_dtypes=tuple(DTYPES[d] for d in validated["state_dtypes"]),
        validated_buffer_lens=tuple(validated["buffer_lens"]), notes=model["notes"], evidence=evidence)


def _evidence(where: str, sources: dict[str, str], numbers: dict[str, Any],
              given: dict[str, Any]) -> dict[str, Evidence]:
    """Evidence of every number; the entry ``*`` stands for those that are not listed."""
    if not given.keys() <= {"*", *numbers}:
        raise RegistryError(f"{where}.evidence: expected some of *, {', '.join(numbers)}, "
                            f"got {', '.join(given)}")
    found = {}
    for number, value in numbers.items():
        at = f"{where}.evidence.{number}"
        entry = record(at, given.get(number, given.get("*")), _EVIDENCE)
        unknown = entry["status"] == "unknown"
        if (unknown and value is not None) or unknown == bool(entry["sources"]):
            raise RegistryError(f"{at}: expected sources, or unknown, no source and the value null; "
                                f"got {entry} for {value!r}")
        found[number] = Evidence(entry["status"], _sources(at, sources, entry["sources"]))
    return found


def _advice(where: str, sources: dict[str, str], value: object) -> StateAdvice:
    advice = record(where, value, _ADVICE)
    return StateAdvice(DTYPES[advice["state_dtype"]], advice["stochastic_rounding"],
                       advice["philox_rounds"], _sources(where, sources, advice["sources"]))


def _sources(where: str, sources: dict[str, str], names: list[str]) -> tuple[str, ...]:
    for name in names:
        if name not in sources:
            raise RegistryError(f"{where}.sources: expected some of {', '.join(sources)}, got {name}")
    return tuple(sources[name] for name in names)
