"""What the registry knows of a published model: its geometry, what it was validated with, the sources."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.types import Mamba2Geometry

Geometry = Mamba2Geometry | GdnGeometry

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
        geometry: heads of one recurrent layer, before tensor parallelism.
        recurrent_layers: layers with a Mamba2 or a Gated DeltaNet block.
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
    geometry: Geometry
    recurrent_layers: int
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


@dataclass(frozen=True)
class Mamba2Entry(ModelEntry):
    """A model with Mamba2 layers."""

    geometry: Mamba2Geometry

    @property
    def vllm_tp_sizes(self) -> tuple[int, ...]:
        """Those of ``tp_sizes`` that vLLM's Mamba2 mixer takes (0.33: whole groups, or one group)."""
        return tuple(tp for tp in self.tp_sizes if splits_in_vllm(self.geometry, tp))


@dataclass(frozen=True)
class GdnEntry(ModelEntry):
    """A model with Gated DeltaNet layers.

    Attributes:
        validated_tokens: T, tokens of a speculative window (1 + drafts), as ``validated_buffer_lens``; each with
            those rings that hold two windows.
    """

    geometry: GdnGeometry
    validated_tokens: tuple[int, ...]


def _splits(geometry: Geometry, tp: int) -> bool:
    try:
        geometry.shard(tp)
    except ArgumentError:
        return False
    return True


def splits_in_vllm(geometry: Mamba2Geometry, tp: int) -> bool:
    """vLLM 0.33 replicates a single group only; this package also splits inside one of several."""
    return geometry.ngroups % tp == 0 or geometry.ngroups == 1
