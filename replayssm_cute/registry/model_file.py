"""Reading one family's file of model entries, strictly. Its format is that of the entries (``entries.py``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayssm_cute.errors import ArgumentError, RegistryError
from replayssm_cute.gdn_layout import MAX_TOKENS
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.layout import MAX_BUFFER_LEN
from replayssm_cute.registry.entries import DTYPES, Evidence, GdnEntry, Geometry, Mamba2Entry, ModelEntry, StateAdvice
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


def _up_to(most: int) -> Check:
    return list_of(Check(f"an integer in 1..{most}", lambda value: type(value) is int and 1 <= value <= most))


_NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
_ANY_TEXT = Check("a string", lambda value: isinstance(value, str))
_DTYPE = one_of(*DTYPES)
_MODEL = {"name": Check("a kebab-case name", lambda value: isinstance(value, str)
                        and _NAME.fullmatch(value) is not None),
          "display_name": TEXT, "hub_ids": list_of(TEXT), "numbers": OBJECT, "evidence": OBJECT,
          "state_advice": OBJECTS, "validated": OBJECT, "notes": _ANY_TEXT}
_NUMBERS = {"recurrent_layers": COUNT, "layers": COUNT, "hidden_size": COUNT, "conv_kernel": COUNT,
            "act_dtype": _DTYPE, "config_state_dtype": _DTYPE.or_null(),
            "mtp_layers": Check("a count", lambda value: type(value) is int and value >= 0).or_null()}
_EVIDENCE = {"status": one_of("verified", "inferred", "unknown"), "sources": list_of(TEXT)}
_ADVICE = {"state_dtype": _DTYPE, "stochastic_rounding": BOOL, "philox_rounds": COUNT.or_null(),
           "sources": list_of(TEXT)}
_VALIDATED = {"state_dtypes": list_of(_DTYPE), "buffer_lens": _up_to(MAX_BUFFER_LEN)}


@dataclass(frozen=True)
class _Kind:
    """What sets the entries of one recurrence apart: their classes, the names of the heads, what is validated."""

    entry: type[ModelEntry]
    geometry: type[Geometry]
    heads: tuple[str, ...]
    validated: dict[str, Check]


_KINDS = {
    "mamba2": _Kind(Mamba2Entry, Mamba2Geometry, ("nheads", "headdim", "dstate", "ngroups"), _VALIDATED),
    "gdn": _Kind(GdnEntry, GdnGeometry, ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
                 {**_VALIDATED, "tokens": _up_to(MAX_TOKENS)}),
}
_FAMILY = {"schema": Check("1", lambda value: type(value) is int and value == 1), "kind": one_of(*_KINDS),
           "family": TEXT, "architecture": TEXT, "model_type": TEXT, "models": OBJECTS,
           "sources": Check("an object of strings", lambda value: isinstance(value, dict)
                            and all(map(TEXT.holds, value.values())))}


def load_family(path: Path) -> tuple[ModelEntry, ...]:
    """The entries of one file.

    Raises:
        RegistryError: naming the file, the field, what was expected and what came.
    """
    family = record(str(path), read_json(path), _FAMILY)
    return tuple(_entry(f"{path}: models[{i}]", family, model) for i, model in enumerate(family["models"]))


def _entry(where: str, family: dict[str, Any], value: object) -> ModelEntry:
    kind, model = _KINDS[family["kind"]], record(where, value, _MODEL)
    numbers = dict(record(f"{where}.numbers", model["numbers"], {**dict.fromkeys(kind.heads, COUNT), **_NUMBERS}))
    evidence = _evidence(where, family["sources"], numbers, model["evidence"])
    validated = dict(record(f"{where}.validated", model["validated"], kind.validated))
    dtypes = tuple(DTYPES[name] for name in validated.pop("state_dtypes"))
    own: dict[str, Any] = {f"validated_{what}": tuple(values) for what, values in validated.items()}
    try:
        geometry = kind.geometry(*(numbers.pop(name) for name in kind.heads))
    except ArgumentError as error:
        raise RegistryError(f"{where}.numbers.{error}") from error
    if numbers["recurrent_layers"] > numbers["layers"]:
        raise RegistryError(f"{where}.numbers.recurrent_layers: expected at most layers={numbers['layers']}, "
                            f"got {numbers['recurrent_layers']}")
    return kind.entry(
        name=model["name"], display_name=model["display_name"], family=family["family"],
        hub_ids=tuple(model["hub_ids"]), architecture=family["architecture"],
        model_type=family["model_type"], geometry=geometry,
        act_dtype=DTYPES[numbers.pop("act_dtype")],
        config_state_dtype=DTYPES.get(numbers.pop("config_state_dtype")), **numbers,
        state_advice=tuple(_advice(f"{where}.state_advice[{i}]", family["sources"], advice)
                           for i, advice in enumerate(model["state_advice"])),
        validated_state_dtypes=dtypes, **own, notes=model["notes"], evidence=evidence)


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
