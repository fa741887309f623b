"""Reading registry files strictly: every mistake is one RegistryError that names its place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from replayssm_cute.errors import RegistryError


@dataclass(frozen=True)
class Check:
    """What a value must be: the words of the error message, and the test."""

    expected: str
    holds: Callable[[Any], bool]

    def or_null(self) -> Check:
        return Check(f"{self.expected} or null", lambda value: value is None or self.holds(value))


def list_of(check: Check) -> Check:
    return Check(f"a list, each entry {check.expected}",
                 lambda value: isinstance(value, list) and all(map(check.holds, value)))


def one_of(*words: str) -> Check:
    return Check(f"one of {', '.join(words)}", lambda value: value in words)


BOOL = Check("true or false", lambda value: isinstance(value, bool))
TEXT = Check("a non-empty string", lambda value: isinstance(value, str) and bool(value))
COUNT = Check("a positive integer", lambda value: type(value) is int and value > 0)
AMOUNT = Check("a positive finite number",
               lambda value: type(value) in (int, float) and math.isfinite(value) and value > 0)
OBJECT = Check("an object", lambda value: isinstance(value, dict))
OBJECTS = list_of(OBJECT)


def record(where: str, value: object, spec: Mapping[str, Check]) -> dict[str, Any]:
    """``value`` as an object with exactly the keys of ``spec``, each passing its check.

    Raises:
        RegistryError: naming ``where``, the field, what was expected and what came.
    """
    if not isinstance(value, dict):
        raise RegistryError(f"{where}: expected an object, got {type(value).__name__}")
    if value.keys() != spec.keys():
        missing, unknown = sorted(spec.keys() - value.keys()), sorted(value.keys() - spec.keys())
        raise RegistryError(f"{where}: expected the keys {', '.join(spec)}; missing "
                            f"{', '.join(missing) or 'none'}, unknown {', '.join(unknown) or 'none'}")
    for key, check in spec.items():
        if not check.holds(value[key]):
            raise RegistryError(f"{where}.{key}: expected {check.expected}, got {value[key]!r}")
    return value


def read_json(path: Path) -> Any:
    """The content of a JSON file; NaN and infinities are refused.

    Raises:
        RegistryError: the file cannot be read or is not JSON.
    """
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except (OSError, ValueError) as error:
        raise RegistryError(f"{path}: {error}") from error
