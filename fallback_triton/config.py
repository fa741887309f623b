"""What the launch parameters of all Triton kernels share: the form in which a registry holds them.

Nothing here imports Triton, so that a tuner or a registry can read it anywhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from replayssm_cute.errors import ArgumentError

Config = TypeVar("Config", bound="LaunchConfig")


@dataclass(frozen=True)
class LaunchConfig:
    """Base of the launch parameters of a kernel; every field is an integer."""

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls: type[Config], values: dict[str, Any]) -> Config:
        """Raises ArgumentError on unknown keys or values that are no integers."""
        known = [f.name for f in fields(cls)]
        for key, value in values.items():
            if key not in known or type(value) is not int:
                raise ArgumentError(f"config[{key!r}]", f"an integer under one of {known}", repr(value))
        return cls(**values)
