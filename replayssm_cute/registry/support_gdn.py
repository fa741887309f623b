"""The Gated DeltaNet half of ``supports_replayssm``: what is refused, who serves, what to be warned of."""

from __future__ import annotations

from typing import Any

import torch

from replayssm_cute import dispatch, gdn_dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.gdn_layout import MAX_TOKENS
from replayssm_cute.gdn_types import GdnFoldProblem, GdnGeometry, GdnProblem
from replayssm_cute.gdn_validate import MEASURED_DRIFT, STATE_DTYPES, check_serving
from replayssm_cute.registry import tuned
from replayssm_cute.registry.entries import GdnEntry
from replayssm_cute.registry.options import Options, dtype_name, refuse_rounding
from replayssm_cute.rounding import DEFAULT_ROUNDS

#: Checkpoint dtypes that are served without being an entry's.
OWN_DTYPES: tuple[torch.dtype, ...] = ()


def refuse(geometry: GdnGeometry, state_dtype: torch.dtype, options: Options) -> None:
    """The refusals that depend on the options alone. Raises ArgumentError or UnsupportedError."""
    drafts = options.speculative_tokens
    if drafts >= MAX_TOKENS:
        raise ArgumentError("speculative_tokens", f"at most {MAX_TOKENS - 1} drafts, a window of {MAX_TOKENS}", drafts)
    check_serving(speculative=drafts > 0, buffer_len=options.buffer_len, tokens=1 + drafts,
                  disaggregated=options.kv_transfer, prefix_cache_mode=options.prefix_cache_mode or "none")
    if state_dtype not in STATE_DTYPES:
        raise UnsupportedError("state_dtype", f"a Gated DeltaNet checkpoint cannot be {dtype_name(state_dtype)}")
    if options.stochastic_rounding:
        if drafts:
            raise UnsupportedError("stochastic_rounding", "a verify step rounds its checkpoint to nearest")
        refuse_rounding(state_dtype, geometry.head_k_dim)


def choose(geometry: GdnGeometry, state_dtype: torch.dtype, act: torch.dtype, options: Options,
           arch: Arch) -> dict[str, Any]:
    """The fields ``backend``, ``rounding``, ``tuned`` and ``predicted`` of the answer, and ``slow``: PyTorch serves one
    of the operations.

    Without drafts that is standard decode; with drafts the verify step, and the folds that an engine makes outside of
    it. The rings have the dtype of the activations. For decode, SGLang allocates them in that of the checkpoint: where
    that changes who serves, both are named.
    """
    if not options.speculative_tokens:
        problem = _decode(geometry, state_dtype, act, act, options)
        backend, why = _first(problem, arch)
        other, cause = _first(_decode(geometry, state_dtype, act, state_dtype, options), arch)
        beside = f"; with {dtype_name(state_dtype)} rings: {other} ({cause})" if other != backend else ""
        return {"backend": f"decode: {backend} ({why}){beside}", "rounding": dispatch.rounding(problem, arch, backend),
                "slow": backend == "torch", **_rows(problem, arch)}
    verify = GdnProblem(geometry, options.buffer_len, state_dtype, act, act, (act, act, torch.float32, act),
                        flag_dtype=torch.int8, scale=geometry.head_k_dim ** -0.5,
                        tokens=1 + options.speculative_tokens, exact_fold=True)
    fold = GdnFoldProblem(geometry, options.buffer_len, state_dtype, act, act, (torch.int32,) * 3, torch.int8, False,
                          True)
    step, folds = _first(verify, arch), _first(fold, arch)
    return {"backend": f"verify of {verify.tokens} tokens: {step[0]} ({step[1]}); "
                       f"folds outside of it: {folds[0]} ({folds[1]})",
            "rounding": dispatch.rounding(verify, arch, step[0]), "slow": "torch" in (step[0], folds[0]),
            **_rows(verify, arch)}


def _decode(geometry: GdnGeometry, state_dtype: torch.dtype, act: torch.dtype, ring: torch.dtype,
            options: Options) -> GdnProblem:
    return GdnProblem(geometry, options.buffer_len, state_dtype, act, ring, (act, act, torch.float32, act),
                      scale=geometry.head_k_dim ** -0.5,
                      philox_rounds=DEFAULT_ROUNDS if options.stochastic_rounding else 0)


def _rows(problem: GdnProblem, arch: Arch) -> dict[str, bool]:
    """The fields ``tuned`` and ``predicted``."""
    rows = tuned.of_layer(problem.op, problem, arch)
    return {"tuned": any(row.measured for row in rows), "predicted": any(row.provenance.predicted for row in rows)}


def _first(problem: GdnProblem | GdnFoldProblem, arch: Arch) -> tuple[str, str]:
    """The backend that would serve a problem, and why: what keeps the faster ones from it, or that it was measured."""
    answers = {name: gdn_dispatch.backend_module(name).supports(problem, arch) for name in dispatch.BACKENDS}
    backend, why = next((name, why) for name, why in gdn_dispatch.preference(problem, arch) if answers[name])
    if arch.kind == "cpu":
        return backend, "no GPU"
    faster = dispatch.BACKENDS[:dispatch.BACKENDS.index(backend)]
    return backend, "; ".join(f"{name}: {answers[name].reason}" for name in faster if not answers[name]) \
        or (why if why.startswith("measured as faster: ") else "the first choice on this architecture")


def tune_command(subject: str, state_dtype: torch.dtype, options: Options) -> str | None:
    """The call that measures standard decode, or with drafts the verify step with the exact fold."""
    tokens = 1 + options.speculative_tokens
    step = f"gdn_verify --spec-tokens {tokens}" if options.speculative_tokens else "gdn_decode"
    return f"replayssm-tune run {subject} --op {step} --state-dtype {dtype_name(state_dtype)} " \
           f"--buffer-len {options.buffer_len}"


def warnings(entry: GdnEntry, state_dtype: torch.dtype, options: Options) -> list[str]:
    """What to know although it works, beside what holds for every model."""
    found, tokens = [], 1 + options.speculative_tokens
    if tokens > 1 and tokens not in entry.validated_tokens:
        found.append(f"{options.speculative_tokens} drafts work, but {entry.name} was validated with windows of "
                     f"{', '.join(map(str, entry.validated_tokens))} tokens (1 + drafts)")
    if state_dtype != torch.float32 and not options.stochastic_rounding:
        found.append(f"every flush rounds a {dtype_name(state_dtype)} checkpoint: state error after 14 verify steps "
                     f"{MEASURED_DRIFT[state_dtype]:.1e}, with float32 {MEASURED_DRIFT[torch.float32]:.0e}")
    return found
