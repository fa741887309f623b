"""What the launch choices of all kernels share: the form in which a registry holds them. Imports no compiler."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, TypeVar

from replayssm_cute.errors import ArgumentError

Config = TypeVar("Config", bound="LaunchConfig")


@dataclass(frozen=True)
class LaunchConfig:
    """Base of the launch choices of a kernel."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls: type[Config], values: dict[str, Any]) -> Config:
        """Raises ArgumentError on unknown or missing keys or values of another type."""
        known = {f.name: f.type for f in fields(cls)}
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            raise ArgumentError("config", f"one with {', '.join(missing)}", values)
        for key, value in values.items():
            if key not in known or type(value).__name__ != known[key]:
                raise ArgumentError(f"config[{key!r}]", f"one of {known}", repr(value))
        return cls(**values)
