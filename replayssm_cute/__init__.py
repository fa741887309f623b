"""Replay decode for state-space and linear-attention layers.

Importing this package costs no more than torch: Triton, the CuTe DSL and the GPU driver are
touched on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "selective_state_update_replayssm_output_only": "mamba2", "warmup_mamba2": "mamba2",
    "explain": "dispatch", "served": "dispatch",
    "decode_cursors": "cursors",
    "Mamba2Pool": "layout", "allocate_mamba2_pool": "layout", "mamba2_ring_bytes": "layout",
    "mamba2_ring_shapes": "layout", "mamba2_state_bytes": "layout", "mamba2_step_bytes": "layout",
    "Mamba2Geometry": "types", "Mamba2Problem": "types", "Support": "types",
    "gdn_replayssm_decode": "gdn", "gdn_replayssm_spec_decode": "gdn", "fused_recurrent_linear_replayssm_decode": "gdn",
    "GdnCursors": "gdn_cursors", "commit_gdn_replayssm_spec": "gdn_cursors", "reset_gdn_replayssm_spec": "gdn_cursors",
    "fold_gdn_replayssm": "gdn_fold", "snapshot_gdn_replayssm": "gdn_fold", "retire_gdn_replayssm": "gdn_fold",
    "GdnPool": "gdn_layout", "allocate_gdn_pool": "gdn_layout", "gdn_memory": "gdn_layout",
    "gdn_ring_bytes": "gdn_layout", "gdn_snapshot_bytes": "gdn_layout", "GdnGeometry": "gdn_types",
    "ModelSupport": "registry.support", "supports_replayssm": "registry.support",
    "ArgumentError": "errors", "RegistryError": "errors", "ReplayError": "errors", "UnsupportedError": "errors",
}
__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from replayssm_cute.cursors import decode_cursors
    from replayssm_cute.dispatch import explain, served
    from replayssm_cute.errors import ArgumentError, RegistryError, ReplayError, UnsupportedError
    from replayssm_cute.gdn import (
        fused_recurrent_linear_replayssm_decode,
        gdn_replayssm_decode,
        gdn_replayssm_spec_decode,
    )
    from replayssm_cute.gdn_cursors import GdnCursors, commit_gdn_replayssm_spec, reset_gdn_replayssm_spec
    from replayssm_cute.gdn_fold import fold_gdn_replayssm, retire_gdn_replayssm, snapshot_gdn_replayssm
    from replayssm_cute.gdn_layout import GdnPool, allocate_gdn_pool, gdn_memory, gdn_ring_bytes, gdn_snapshot_bytes
    from replayssm_cute.gdn_types import GdnGeometry
    from replayssm_cute.layout import (
        Mamba2Pool,
        allocate_mamba2_pool,
        mamba2_ring_bytes,
        mamba2_ring_shapes,
        mamba2_state_bytes,
        mamba2_step_bytes,
    )
    from replayssm_cute.mamba2 import selective_state_update_replayssm_output_only, warmup_mamba2
    from replayssm_cute.registry.support import ModelSupport, supports_replayssm
    from replayssm_cute.types import Mamba2Geometry, Mamba2Problem, Support


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
