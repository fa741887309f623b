"""The Mamba2 half of ``supports_replayssm``: what is refused, who serves, what to be warned of."""

from __future__ import annotations

from typing import Any

import torch

from replayssm_cute import dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.errors import UnsupportedError
from replayssm_cute.layout import mamba2_ring_shapes
from replayssm_cute.registry import tuned
from replayssm_cute.registry.entries import Mamba2Entry, splits_in_vllm
from replayssm_cute.registry.options import Options, dtype_name, refuse_rounding
from replayssm_cute.rounding import DEFAULT_ROUNDS, LARGEST_CODE
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem

#: Checkpoint dtypes that are served without being an entry's.
OWN_DTYPES = tuple(LARGEST_CODE)
# Batch sizes whose choice of backend is reported: a lone request, a busy and a full server.
_BATCHES = (1, 64, 512)


def refuse(geometry: Mamba2Geometry, state_dtype: torch.dtype, options: Options) -> None:
    """The refusals that depend on the options alone. Raises ArgumentError or UnsupportedError."""
    mamba2_ring_shapes(geometry, options.buffer_len)
    if options.speculative_tokens:
        raise UnsupportedError("speculative_tokens", "the ring of standard decode cannot verify drafts")
    if options.kv_transfer:
        raise UnsupportedError("kv_transfer", "a transfer would move the checkpoint without its ring")
    if options.prefix_cache_mode == "all":
        raise UnsupportedError("prefix_cache_mode", "'all' caches states between flushes, which replay "
                               "never writes; use 'align'")
    if options.stochastic_rounding:
        refuse_rounding(state_dtype, geometry.dstate)


def choose(geometry: Mamba2Geometry, state_dtype: torch.dtype, act: torch.dtype, options: Options,
           arch: Arch) -> dict[str, Any]:
    """The fields ``backend``, ``rounding``, ``tuned`` and ``predicted`` of the answer, and ``slow``: PyTorch serves."""
    problem = Mamba2Problem(geometry, options.buffer_len, state_dtype, act, act, act, torch.int8,
                            torch.int32, dt_bias_dtype=act, D_dtype=act,
                            philox_rounds=DEFAULT_ROUNDS if options.stochastic_rounding else 0)
    choices: dict[tuple[str, str], list[str]] = {}
    for batch in _BATCHES:
        first = next(c for c in dispatch.candidates(problem, batch, arch) if c.support)
        choices.setdefault((first.backend, first.why), []).append(str(batch))
    rows = tuned.of_layer(dispatch.OP, problem, arch)
    return {"backend": "; ".join(f"batch {', '.join(batches)}: {backend} ({why})"
                                 for (backend, why), batches in choices.items()),
            "rounding": "; ".join(dict.fromkeys(dispatch.rounding(problem, arch, backend) for backend, _ in choices)),
            "tuned": any(row.measured for row in rows), "predicted": any(row.provenance.predicted for row in rows),
            "slow": any(backend == "torch" for backend, _ in choices)}


def tune_command(subject: str, state_dtype: torch.dtype, options: Options) -> str | None:
    """The call that measures; None for 8-bit checkpoints, which are not tuned."""
    if state_dtype in LARGEST_CODE:
        return None
    return f"replayssm-tune run {subject} --state-dtype {dtype_name(state_dtype)} --buffer-len {options.buffer_len}"


def warnings(entry: Mamba2Entry, state_dtype: torch.dtype, options: Options) -> list[str]:
    """What to know although it works, beside what holds for every model."""
    found = []
    if state_dtype in LARGEST_CODE:
        found.append(f"{dtype_name(state_dtype)} checkpoints are an option of this package's own operation: no engine "
                     "offers them and no model was evaluated with them; docs/accuracy.md says what they cost")
    if not splits_in_vllm(entry.geometry, options.tp):
        found.append(f"vLLM 0.33 does not split {entry.geometry.ngroups} groups over {options.tp} ranks")
    return found
