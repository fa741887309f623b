"""SGLang plugin: this package serves the engine's Gated DeltaNet replay, standard decode and speculative verify.

``register`` is the entry point of the group ``sglang.srt.plugins``. It wraps four functions by the engine's own hooks;
the engine applies them in every process before it starts. Who serves is decided once for every pool of rings, at the
first step that sees it, because the two sides keep different things in the rings:

* SGLang 0.5.23 keeps d and the normalised k, where they are narrow with their low parts in ``rawv`` and ``rawk``.
* We keep the raw v and k in those two, and beta in a ring of our own, for the exact fold; with fp32 rings the engine
  allocates neither, and the fold is from the ring's d.

What we do not serve (KDA, an engine or an argument that we do not know) goes to the engine's function.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replayssm_cute import gdn
from replayssm_cute.dispatch import warn_once
from replayssm_cute.errors import ReplayError, UnsupportedError
from replayssm_cute.gdn_cursors import GdnCursors, commit_gdn_replayssm_spec
from replayssm_cute.gdn_fold import fold_gdn_replayssm, snapshot_gdn_replayssm
from replayssm_cute.types import SUPPORTED, Support

log = logging.getLogger("replayssm_cute")
Function = Callable[..., Any]

#: Engine versions whose functions were read and found to have the contract's meaning, not only its names.
VERSIONS = ((0, 5, 23),)
KERNELS = "sglang.kernels.ops.attention.linear"
REGISTRY = "sglang.srt.plugins.hook_registry"

VERIFY = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "checkpoint_state", "d_cache", "k_cache", "g_cache",
          "rawv_cache", "rawk_cache", "beta_cache", "out", "query_start_loc", "ssm_state_indices", "replay_indices",
          "write_pos", "cache_base", "is_flush", "max_cache_len", "max_spec_len", "scale", "use_qk_l2norm_in_kernel",
          "null_block_id", "launch_mode")
COMMIT = ("write_pos", "cache_base", "is_flush", "num_accepted", "replay_indices", "max_cache_len", "max_spec_len",
          "fold_every_commit", "cache_buf_len", "null_block_id")
CIRCULAR = ("checkpoint_state", "d_cache", "k_cache", "g_cache", "d_residual_cache", "k_residual_cache",
            "state_batch_indices", "replay_indices", "write_pos", "cache_base", "is_flush", "accept_lens",
            "mamba_track_indices", "mamba_steps_to_track", "null_block_id")
DECODE = ("mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "initial_state", "d_cache", "k_cache", "g_cache", "out",
          "ssm_state_indices", "write_pos", "force_flush", "use_qk_l2norm_in_kernel", "is_kda")

#: Whether we serve the rings in the storage at an address; absent until a step has seen it.
_ours: dict[int, bool] = {}
#: Our beta rings, by the address of the engine's storage of g; flat, and of its size.
_betas: dict[int, Tensor] = {}
_registered = False


def register() -> None:
    """Hook the engine's functions, or leave the engine alone and log why.

    May be called any number of times in a process; never raises. With ``REPLAYSSM_DISABLE=1`` in the environment it
    leaves the engine alone.
    """
    global _registered
    if _registered:
        return
    try:
        allowed = _allowed()
        if not allowed:
            warn_once(f"replayssm_cute: SGLang left alone: {allowed.reason}")
            return
        registry = importlib.import_module(REGISTRY)
        for target, hook in HOOKS.items():
            registry.HookRegistry.register(target, hook, registry.HookType.AROUND)
        _registered = True
    except Exception as error:
        warn_once(f"replayssm_cute: SGLang left alone: {type(error).__name__}: {error}")


def _allowed() -> Support:
    """Whether the user lets us, and the running engine is one we know."""
    if os.environ.get("REPLAYSSM_DISABLE", "") not in ("", "0"):
        return Support(False, "REPLAYSSM_DISABLE is set")
    version = importlib.import_module("sglang.version").__version__
    if tuple(int(n) for n in version.split("+")[0].split(".")[:3] if n.isdigit()) in VERSIONS:
        return SUPPORTED
    known = ", ".join(".".join(map(str, v)) for v in VERSIONS)
    return Support(False, f"version {version} is not one of those known ({known})")


def _hook(names: tuple[str, ...], serve: Callable[[dict[str, Any]], Any], decides: bool) -> Function:
    """An AROUND hook that serves a call of a function whose parameters are known to include ``names``.

    Args:
        decides: the first call decides who serves a pool; else a pool that no call has decided is the engine's.
    """

    def hook(original: Function, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(_parameters(original), args, strict=False)) | kwargs
        rings = _address(call["d_cache"])
        known = _ours.get(rings)
        if known is False or (known is None and not decides):
            return original(*args, **kwargs)
        if known:
            return serve(call)
        try:
            _check(original, names, call)
            result = serve(call)
        except Exception as error:
            _ours[rings] = False
            log.warning("replayssm_cute: left to SGLang's own %s: %s", original.__name__, error)
            return original(*args, **kwargs)
        _ours[rings] = True
        log.info("replayssm_cute: serving SGLang's %s, rings %s %s", original.__name__, call["d_cache"].dtype,
                 tuple(call["d_cache"].shape[1:]))
        return result

    return hook


@functools.cache
def _parameters(original: Function) -> tuple[str, ...]:
    return tuple(inspect.signature(original).parameters)


def _check(original: Function, names: tuple[str, ...], call: dict[str, Any]) -> None:
    """Raises UnsupportedError where the engine's function or the moment is not one that we know."""
    missing = [n for n in names if n not in _parameters(original)]
    if missing:
        raise UnsupportedError(original.__name__, f"it has no parameter {missing[0]}")
    if call["d_cache"].is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(original.__name__, "its first call is being captured in a graph")


def _address(ring: Tensor) -> int:
    return ring.untyped_storage().data_ptr()


def _backend(tensor: Tensor) -> str | None:
    """On a GPU only a kernel is better than the engine's; PyTorch would not be."""
    return None if tensor.device.type == "cpu" else "triton"


def _beta_of(g_cache: Tensor) -> Tensor:
    """The part of our beta ring that belongs to these rings of g, whose layout it has."""
    storage = g_cache.untyped_storage()
    whole = _betas.get(storage.data_ptr())
    if whole is None or whole.nbytes != storage.nbytes():
        whole = torch.zeros(storage.nbytes() // 4, dtype=torch.float32, device=g_cache.device)
        _betas[storage.data_ptr()] = whole
    return whole.as_strided(g_cache.shape, g_cache.stride(), g_cache.storage_offset())


def _verify(call: dict[str, Any]) -> Tensor:
    options = {name: call[name] for name in VERIFY if name in call}
    if call["rawv_cache"] is not None:
        options["beta_cache"] = _beta_of(call["g_cache"])
    return gdn.gdn_replayssm_spec_decode(**options, backend=_backend(call["q"]))


def _decode(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return gdn.fused_recurrent_linear_replayssm_decode(**{name: call[name] for name in DECODE if name in call},
                                                       backend=_backend(call["mixed_qkv"]))


def _circular(call: dict[str, Any]) -> None:
    """Snapshot the rows to be tracked, then fold the rows that are due, in all layers."""
    raw = call.get("d_residual_cache")
    rings = {"d_cache": call["d_cache"], "k_cache": call["k_cache"], "g_cache": call["g_cache"]}
    if raw is not None:
        rings |= {"rawv_cache": raw, "rawk_cache": call["k_residual_cache"], "beta_cache": _beta_of(call["g_cache"])}
    cursors = GdnCursors(call["write_pos"], call["cache_base"], call["is_flush"])
    slots, keys, null = call["state_batch_indices"], call["replay_indices"], call.get("null_block_id", -1)
    backend = _backend(raw if raw is not None else call["d_cache"])
    tracks, steps = call.get("mamba_track_indices"), call.get("mamba_steps_to_track")
    if tracks is not None and steps is not None:
        accepted = call["accept_lens"]
        records = cursors.write_pos[keys.clamp(min=0).long()] - accepted + steps + 1
        targets = torch.where(steps >= 0, tracks, null).to(slots.dtype)
        snapshot_gdn_replayssm(call["checkpoint_state"], rings, slots, targets, keys, cursors,
                               num_records=records.int(), null_block_id=null, backend=backend)
    # Windows of one token: whatever is not due now was left undue by the commit, and an empty ring is not due.
    fold_gdn_replayssm(call["checkpoint_state"], rings, slots, keys, cursors, 1, null_block_id=null, backend=backend)


def _commit_cursors(original: Function, *args: Any, **kwargs: Any) -> Any:
    """The engine's cursor rules are ours, whoever keeps the rings."""
    call = dict(zip(_parameters(original), args, strict=False)) | kwargs
    try:
        return commit_gdn_replayssm_spec(**{name: call[name] for name in COMMIT if name in call})
    except ReplayError as error:
        warn_once(f"replayssm_cute: left to SGLang's own {original.__name__}: {error}")
        return original(*args, **kwargs)


HOOKS: dict[str, Function] = {
    f"{KERNELS}.gdn_replayssm_spec_decode.gdn_replayssm_spec_decode": _hook(VERIFY, _verify, True),
    f"{KERNELS}.gdn_replayssm_spec_decode.commit_gdn_replayssm_spec": _commit_cursors,
    f"{KERNELS}.gdn_replayssm_spec_decode.commit_gdn_replayssm_circular": _hook(CIRCULAR, _circular, False),
    f"{KERNELS}.fused_recurrent_linear_replayssm.fused_recurrent_linear_replayssm_decode":
        _hook(DECODE, _decode, True),
    # The engine's older name for the same function, which its decode backend imports.
    f"{KERNELS}.fused_recurrent_linear_replayssm.fused_recurrent_gdn_replayssm_decode": _hook(DECODE, _decode, True),
}
