"""One row of the registry that is to be measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from replayssm_cute.gdn_types import GdnGeometry, GdnProblem
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem


@dataclass(frozen=True)
class Point:
    """One row of the registry.

    Attributes:
        geometry: heads of one rank.
        state_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        buffer_len: L.
        batch: rows of the step.
        op: operation, as the dispatcher counts it.
        ring_dtype: of the d and k rings of Gated DeltaNet, one of the three.
        tokens: T of a verify step, 0 for others.
        fold: ``"exact"`` or ``"ring"`` in a verify step, else empty.
    """

    geometry: Mamba2Geometry | GdnGeometry
    state_dtype: str
    buffer_len: int
    batch: int
    op: str = "mamba2_decode"
    ring_dtype: str = "bfloat16"
    tokens: int = 0
    fold: str = ""

    def to_dict(self) -> dict[str, Any]:
        """What is not the default; so the journal's keys of an operation do not change when another comes."""
        values = asdict(self)
        return {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Point:
        geometry: Any = GdnGeometry if values.get("op", cls.op) != cls.op else Mamba2Geometry
        return cls(**{**values, "geometry": geometry(**values["geometry"])})

    @property
    def problem(self) -> Mamba2Problem | GdnProblem:
        """The problem that the workload of this point poses; the batch has no part in it."""
        from replayssm_tune.operations import OPERATIONS
        return OPERATIONS[self.op].problem(self)

    @property
    def mamba2(self) -> Mamba2Geometry:
        """The geometry of a point of Mamba2."""
        assert isinstance(self.geometry, Mamba2Geometry)
        return self.geometry

    @property
    def gdn(self) -> GdnGeometry:
        """The geometry of a point of Gated DeltaNet."""
        assert isinstance(self.geometry, GdnGeometry)
        return self.geometry

    @property
    def exact(self) -> bool:
        """The rings keep the raw inputs for the fold."""
        return self.fold == "exact"

    @property
    def step(self) -> str:
        """The operation in words, but Mamba2's, and what it has beside heads, dtype and L; with a space behind."""
        ring = "" if self.ring_dtype == "bfloat16" else f"{self.ring_dtype} rings, "
        kinds = {"mamba2_decode": "", "gdn_decode": f"decode {ring}",
                 "gdn_verify": f"verify T={self.tokens} {self.fold} fold {ring}"}
        return kinds[self.op]

    def __str__(self) -> str:
        return f"{self.step}{self.geometry} {self.state_dtype} L={self.buffer_len} batch {self.batch}"
