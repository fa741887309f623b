"""vLLM plugin: this package serves the engine's replay decode of Mamba2.

``register`` is the entry point of the group ``vllm.general_plugins``. The engine calls it in every
process, early: in those that never load a model, and before a worker has chosen its device.
So it imports nothing of the engine; the names are rebound right after the engine itself has
imported its Mamba2 layer.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import os
from typing import Any

import torch
from torch import Tensor

from replayssm_cute import arch, dispatch, mamba2
from replayssm_cute.errors import ReplayError, UnsupportedError
from replayssm_cute.integrations._patching import Function, OnImport, Patch, Patches
from replayssm_cute.rounding import check_rounds, seed_state
from replayssm_cute.types import SUPPORTED, Mamba2Problem, Support
from replayssm_cute.validate import mamba2_problem

log = logging.getLogger("replayssm_cute")

#: Engine versions whose function was read and found to have the contract's meaning, not only its names.
VERSIONS = ((0, 30), (0, 31), (0, 32), (0, 33))
MIXER = "vllm.model_executor.layers.mamba.mamba_mixer2"
DISPATCH = "vllm.model_executor.layers.mamba.ops.ssu_dispatch"
RUNNER = "vllm.v1.worker.gpu_model_runner"

_PARAMETERS = tuple(inspect.signature(mamba2.selective_state_update_replayssm_output_only).parameters)


class _EngineLog(logging.Handler):
    """Pass our lines on to the engine's logger.

    The engine sets up only its own logger, and in some processes only after its plugins are
    loaded; without this no INFO line of ours would be seen.
    """

    def emit(self, record: logging.LogRecord) -> None:
        engine = logging.getLogger("vllm")
        if engine.isEnabledFor(record.levelno):
            engine.handle(record)


_engine_log = _EngineLog()
_patches = Patches()
_pending: OnImport | None = None


def register() -> None:
    """Serve the engine's replay decode, or leave the engine alone and log why.

    May be called any number of times in a process; never raises. With ``REPLAYSSM_DISABLE=1`` in
    the environment it leaves the engine alone.
    """
    global _pending
    if _pending is not None:
        return
    try:
        _join_engine_log()
        allowed = _allowed()
        if allowed:
            _pending = OnImport(MIXER, _install)
        else:
            _left_alone(allowed.reason)
    except Exception as error:
        _left_alone(f"{type(error).__name__}: {error}")


def unregister() -> None:
    """Undo ``register``: the engine's own functions serve again."""
    global _pending
    if _pending is not None:
        _pending.cancel()
        _pending = None
    _patches.revert()
    _leave_engine_log()


def _join_engine_log() -> None:
    if not log.handlers:  # else the user has set up our logger
        log.addHandler(_engine_log)
        log.setLevel(logging.INFO)
        log.propagate = False


def _leave_engine_log() -> None:
    if _engine_log in log.handlers:
        log.removeHandler(_engine_log)
        log.setLevel(logging.NOTSET)
        log.propagate = True


def _left_alone(reason: str) -> None:
    dispatch.warn_once(f"replayssm_cute: vLLM left alone: {reason}")


def _allowed() -> Support:
    """Whether the user lets us, and the running engine is one we know."""
    if os.environ.get("REPLAYSSM_DISABLE", "") not in ("", "0"):
        return Support(False, "REPLAYSSM_DISABLE is set")
    engine = importlib.import_module("vllm")
    if engine.__version_tuple__[:2] in VERSIONS:
        return SUPPORTED
    known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
    return Support(False, f"version {engine.__version__} is not one of those known ({known})")


def _install() -> None:
    """Rebind the engine's functions; runs once, when its Mamba2 layer has been imported."""
    patches = [Patch(MIXER, "selective_state_update_replayssm_output_only", _serving)]
    try:
        if _on_cpu():
            patches.append(Patch(DISPATCH, "initialize_mamba_ssu_backend", _allowing_cpu, (RUNNER,)))
        installed = _patches.apply(patches)
    except Exception as error:
        installed = Support(False, f"{type(error).__name__}: {error}")
    if installed:
        log.info("replayssm_cute: patched vLLM's %s", " and ".join(p.name for p in patches))
    else:
        _left_alone(installed.reason)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _allowing_cpu(original: Function) -> Function:
    """The engine's backend set-up without its refusal of replay on a CPU.

    The engine has no replay kernel there; we have one.
    """

    def initialize_mamba_ssu_backend(mamba_config: Any, kv_cache_config: Any, *,
                                     use_replayssm: bool = False) -> None:
        # On a CPU the engine turns "triton" into its CPU backend and only then refuses replay;
        # that of FlashInfer stays refused, it does not come through the function we serve.
        if mamba_config.backend.value == "triton":
            use_replayssm = False
        original(mamba_config, kv_cache_config, use_replayssm=use_replayssm)

    return initialize_mamba_ssu_backend


def _serving(original: Function) -> Function:
    """The engine's replay step, served by us where we can and by ``original`` where not."""
    ours: dict[tuple[Any, ...], bool] = {}

    def selective_state_update_replayssm_output_only(
        state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor | None = None, dt_bias: Tensor | None = None, z: Tensor | None = None,
        dt_softplus: bool = False, x_cache: Tensor | None = None, dt_cache: Tensor | None = None,
        B_cache: Tensor | None = None, bc_pre: Tensor | None = None,
        write_pos: Tensor | None = None, is_flush: Tensor | None = None, max_cache_len: int = 16,
        state_batch_indices: Tensor | None = None, null_block_id: int = 0,
        out: Tensor | None = None, enable_stochastic_rounding: bool = False,
        cache_philox_rounds: int = 0,
    ) -> Tensor:
        args = (state, x, dt, A, B, C, D, dt_bias, z, dt_softplus, x_cache, dt_cache, B_cache,
                bc_pre, write_pos, is_flush, max_cache_len, state_batch_indices, null_block_id,
                out, enable_stochastic_rounding, cache_philox_rounds)
        seed = _seed(state.device, state.shape[1]) if enable_stochastic_rounding else None
        # What decides who serves: the same for all layers and batch sizes of a model.
        key = (state.dtype, state.shape, x.dtype, B.shape[1], max_cache_len,
               enable_stochastic_rounding)
        try:
            if ours.get(key):
                return mamba2.selective_state_update_replayssm_output_only(*args, rand_seed=seed)
            if key not in ours:
                y = _first_step(args, seed)
                ours[key] = True
                return y
        except ReplayError as error:  # nothing has been changed, so the engine can take the step
            if state.device.type == "cpu":
                raise  # but it has no kernel there
            ours[key] = False
            log.warning("replayssm_cute: left to vLLM's own kernel: state %s %s, L=%d: %s",
                        state.dtype, tuple(state.shape[1:]), max_cache_len, error)
        return original(*args)

    return selective_state_update_replayssm_output_only


@functools.cache
def _seed(device: torch.device, nheads: int) -> Tensor:
    """This rank's generator state, seeded as the engine seeded torch: the same draws at any split."""
    parallel = importlib.import_module("vllm.distributed")
    rank, ranks = parallel.get_tensor_model_parallel_rank(), parallel.get_tensor_model_parallel_world_size()
    return seed_state(torch.initial_seed(), device, first_head=rank * nheads, total_heads=ranks * nheads)


def _first_step(args: tuple[Any, ...], seed: Tensor | None) -> Tensor:
    """Serve the first step of a problem and log which backend does.

    Raises:
        ReplayError: the problem is better left to the engine; nothing was changed.
    """
    op = mamba2.selective_state_update_replayssm_output_only
    problem, batch, device = _problem(args), args[1].shape[0], args[1].device
    try:
        backend = mamba2.warmup_mamba2(problem, [batch], device)[0]
    except ReplayError:
        raise
    except Exception as error:  # our fault, and no reason for the engine to stop
        raise UnsupportedError(dispatch.describe(problem), f"{type(error).__name__}: {error}") from error
    if backend == "torch" and device.type != "cpu":
        raise UnsupportedError(dispatch.describe(problem),
                               "only the PyTorch backend could serve it, slower than the engine's kernel")
    out = op(*args, rand_seed=seed)
    rounding = f", stochastic rounding ({problem.philox_rounds} rounds)" if problem.philox_rounds else ""
    log.info("replayssm_cute: serving %s%s on %s with the %s backend", dispatch.describe(problem), rounding,
             arch.of(device), backend)
    return out


def _problem(args: tuple[Any, ...]) -> Mamba2Problem:
    """The problem that the arguments of the step, in its order, pose."""
    named = dict(zip(_PARAMETERS, args, strict=False))  # all but ours, which the engine does not know
    asked = inspect.signature(mamba2_problem).parameters
    problem = mamba2_problem(**{name: value for name, value in named.items() if name in asked})
    if not named["enable_stochastic_rounding"]:
        return problem
    return dataclasses.replace(problem, philox_rounds=check_rounds(named["cache_philox_rounds"]))
