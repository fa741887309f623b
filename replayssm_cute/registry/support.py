"""Can this model be served by replay, here, with these options, and how well is it known?

The one question an integration or a user asks before anything runs. Unlike the other modules of
this folder it stands above the dispatcher, because its answer names the backend that would serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.layout import mamba2_ring_shapes
from replayssm_cute.registry import devices, tuned
from replayssm_cute.registry.hf_config import ModelConfig, load_config, read_config
from replayssm_cute.registry.models import DTYPES, ModelEntry, find_by_geometry, splits_in_vllm
from replayssm_cute.rounding import DEFAULT_ROUNDS, LARGEST_CODE, check_columns
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem, Support

CACHE_MODES = ("none", "align", "all")
STATE_DTYPES = {**DTYPES, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
# Batch sizes whose choice of backend is reported: a lone request, a busy and a full server.
_BATCHES = (1, 64, 512)


@dataclass(frozen=True)
class ModelSupport(Support):
    """Whether a model can be served, and everything that was found out on the way.

    Fields behind the point of a refusal keep their defaults.

    Attributes:
        ok: True when it can be served.
        reason: empty when ``ok``; otherwise one sentence.
        model: name of the registry entry, None where there is none.
        geometry: heads of one layer on one rank.
        state_dtype: dtype of the checkpoint that would be used.
        backend: which backend would serve at which batch, and why.
        rounding: how that backend rounds the stored checkpoint: ``"to nearest"``, or stochastically in
            hardware or in software.
        tuned: this very device has measured rows for this geometry, state dtype and ring length.
        tune_command: the call that fills the missing rows; None where they exist, and on a CPU.
        warnings: what to know although it works.
    """

    model: str | None = None
    geometry: Mamba2Geometry | None = None
    state_dtype: torch.dtype | None = None
    backend: str = ""
    rounding: str = ""
    tuned: bool = False
    tune_command: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """How the model is to be served; see ``supports_replayssm``."""

    tp: int
    state_dtype: torch.dtype | None
    buffer_len: int
    stochastic_rounding: bool
    speculative_tokens: int
    prefix_cache_mode: str | None
    kv_transfer: bool


def supports_replayssm(config: object, *, device: torch.device | str | Arch | None = None, tp: int = 1,
                       state_dtype: torch.dtype | str | None = None, buffer_len: int = 16,
                       stochastic_rounding: bool = False, speculative_tokens: int = 0,
                       prefix_cache_mode: str | None = None, kv_transfer: bool = False) -> ModelSupport:
    """Whether this model can be decoded by replay on this device with these options.

    Nothing is compiled and no tensor is made; without ``device`` the driver is asked which GPU
    there is, with a device name it is not.

    Args:
        config: the model's config: a Hugging Face config object, its dict, JSON text or a path.
        device: None for the current GPU, else the CPU; a torch device; an ``Arch``; or the name of
            a GPU such as ``"NVIDIA_B200"``.
        tp: ranks of tensor parallelism.
        state_dtype: dtype of the checkpoint, a torch dtype or its name. None or ``"auto"`` takes
            what the config asks for; else float32 for Nemotron and the dtype of the activations for
            the other families, as vLLM does. ``"int8"`` and ``"float8_e4m3fn"`` are options of this
            package's own operation.
        buffer_len: L, rows of the rings.
        stochastic_rounding: of the checkpoint.
        speculative_tokens: draft tokens per step.
        prefix_cache_mode: None or ``"none"``, ``"align"`` or ``"all"``.
        kv_transfer: caches are moved between engines (disaggregated serving).

    Raises:
        ArgumentError: an argument is no value of its kind. That a value cannot be served is
            never an exception.
    """
    raw, arch = load_config(config), _arch(device)
    options = Options(tp, _state_dtype(state_dtype), buffer_len, stochastic_rounding, speculative_tokens,
                      prefix_cache_mode, kv_transfer)
    _check(options)
    facts: dict[str, Any] = {}  # fields of the answer, as far as it gets
    try:
        model = read_config(raw)
        facts["state_dtype"] = options.state_dtype or _auto_state_dtype(model)
        facts["geometry"] = model.geometry.shard(tp)
        _refuse(options, facts)
        entry = _entry(model, options, facts)
        _choose(model, entry, options, arch, facts)
    except (ArgumentError, UnsupportedError) as refusal:
        return ModelSupport(False, str(refusal), **facts)
    return ModelSupport(True, **facts)


def _arch(device: torch.device | str | Arch | None) -> Arch:
    if isinstance(device, Arch):
        return device
    if device is None:
        return archs.of(archs.default_device())
    named = devices.arch_by_name(device) if isinstance(device, str) else None
    if named is not None:
        return named
    try:
        return archs.of(device)
    except (RuntimeError, AssertionError):  # the latter from a torch without CUDA
        raise ArgumentError("device", "a torch device, an Arch or the name of a GPU such as NVIDIA_B200 "
                            f"(known products: {', '.join(devices.PRODUCTS)})", repr(device)) from None


def _state_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    if value is None or value == "auto":
        return None
    dtype = STATE_DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if dtype not in STATE_DTYPES.values():
        raise ArgumentError("state_dtype", f"one of {', '.join(STATE_DTYPES)}, auto or None", repr(value))
    return dtype


def _auto_state_dtype(model: ModelConfig) -> torch.dtype:
    if model.state_dtype is not None:
        return model.state_dtype
    if model.model_type == "nemotron_h":
        return torch.float32
    return model.act_dtype or torch.bfloat16


def _check(options: Options) -> None:
    """Values of the wrong kind; whether a value of the right kind can be served is asked later."""
    for name, least in (("tp", 1), ("speculative_tokens", 0)):
        value = getattr(options, name)
        if type(value) is not int or value < least:
            raise ArgumentError(name, f"an integer of at least {least}", repr(value))
    if options.prefix_cache_mode not in (None, *CACHE_MODES):
        raise ArgumentError("prefix_cache_mode", f"None or one of {', '.join(CACHE_MODES)}",
                            repr(options.prefix_cache_mode))


def _refuse(options: Options, facts: dict[str, Any]) -> None:
    """The refusals that depend on the options alone."""
    mamba2_ring_shapes(facts["geometry"], options.buffer_len)
    if options.speculative_tokens:
        raise UnsupportedError("speculative_tokens", "the ring of standard decode cannot verify drafts")
    if options.kv_transfer:
        raise UnsupportedError("kv_transfer", "a transfer would move the checkpoint without its ring")
    if options.prefix_cache_mode == "all":
        raise UnsupportedError("prefix_cache_mode", "'all' caches states between flushes, which replay "
                               "never writes; use 'align'")
    if options.stochastic_rounding:
        if facts["state_dtype"] == torch.float32:
            raise UnsupportedError("stochastic_rounding", "a float32 checkpoint is not rounded; use float16")
        check_columns(facts["state_dtype"], facts["geometry"].dstate)


def _entry(model: ModelConfig, options: Options, facts: dict[str, Any]) -> ModelEntry:
    """The registry entry that fits the config best."""
    def misfit(entry: ModelEntry) -> tuple[bool, int]:
        return (model.name_or_path not in entry.hub_ids,
                sum(getattr(entry, name) != getattr(model, name)
                    for name in ("mamba_layers", "layers", "hidden_size", "mtp_layers")))

    entries = find_by_geometry(model.geometry, model.model_type)
    if not entries:
        facts["tune_command"] = _tune_command(f"--geometry {facts['geometry']}", options, facts)
        raise UnsupportedError(
            f"{model.model_type} {model.geometry}", "no registry entry has this geometry. To validate it, "
            "add an entry to replayssm_cute/models and run make test and make test-gpu; to tune it, run "
            + facts["tune_command"])
    entry = min(entries, key=misfit)
    facts["model"] = entry.name
    if facts["state_dtype"] not in (*entry.validated_state_dtypes, *LARGEST_CODE):
        raise UnsupportedError(entry.name, f"not validated with a {_name(facts['state_dtype'])} checkpoint")
    return entry


def _choose(model: ModelConfig, entry: ModelEntry, options: Options, arch: Arch,
            facts: dict[str, Any]) -> None:
    """Which backend serves, what is known about its speed here, and what to be warned of."""
    act, g = model.act_dtype or entry.act_dtype, facts["geometry"]
    problem = Mamba2Problem(g, options.buffer_len, facts["state_dtype"], act, act, act, torch.int8,
                            torch.int32, dt_bias_dtype=act, D_dtype=act,
                            philox_rounds=DEFAULT_ROUNDS if options.stochastic_rounding else 0)
    choices: dict[tuple[str, str], list[str]] = {}
    for batch in _BATCHES:
        first = next(c for c in dispatch.candidates(problem, batch, arch) if c.support)
        choices.setdefault((first.backend, first.why), []).append(str(batch))
    facts["backend"] = "; ".join(f"batch {', '.join(batches)}: {backend} ({why})"
                                 for (backend, why), batches in choices.items())
    facts["rounding"] = "; ".join(dict.fromkeys(dispatch.rounding(problem, arch, backend) for backend, _ in choices))
    facts["tuned"] = any(row.measured and row.key[:3] == (g.nheads, g.ngroups, options.buffer_len)
                         for row in tuned.rows_for(dispatch.OP, problem, arch))
    if not facts["tuned"] and arch.kind != "cpu" and facts["state_dtype"] not in LARGEST_CODE:
        facts["tune_command"] = _tune_command(f"--model {entry.name} --tp {options.tp}", options, facts)
    slow = arch.kind != "cpu" and any(backend == "torch" for backend, _ in choices)
    facts["warnings"] = (*_warnings(model, entry, options, facts["state_dtype"]),
                         *["only the slow PyTorch backend can serve on this GPU"] * slow)


def _tune_command(subject: str, options: Options, facts: dict[str, Any]) -> str:
    return f"replayssm-tune run {subject} --state-dtype {_name(facts['state_dtype'])} " \
           f"--buffer-len {options.buffer_len}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _warnings(model: ModelConfig, entry: ModelEntry, options: Options,
              state_dtype: torch.dtype) -> list[str]:
    found = []
    if (model.mamba_layers, model.hidden_size) != (entry.mamba_layers, entry.hidden_size):
        found.append(f"the geometry is that of {entry.name}, the layers or the width are not: what is "
                     "known about its state dtype may not hold")
    if options.buffer_len not in entry.validated_buffer_lens:
        found.append(f"buffer_len {options.buffer_len} works, but {entry.name} was validated with "
                     f"{', '.join(map(str, entry.validated_buffer_lens))}")
    if options.state_dtype is None and model.state_dtype is None and model.model_type != "nemotron_h":
        found.append(f"the config names no state dtype: {_name(state_dtype)} as in vLLM, where SGLang "
                     "takes float32")
    if state_dtype in LARGEST_CODE:
        found.append(f"{_name(state_dtype)} checkpoints are an option of this package's own operation: no engine "
                     "offers them and no model was evaluated with them; docs/accuracy.md says what they cost")
    elif entry.state_advice and all(advice.state_dtype != state_dtype for advice in entry.state_advice):
        found.append(f"no source advises a {_name(state_dtype)} checkpoint for {entry.name}")
    elif entry.needs_stochastic_rounding(state_dtype) and not options.stochastic_rounding:
        found.append(f"a {_name(state_dtype)} checkpoint of {entry.name} is advised with stochastic "
                     "rounding only")
    if not splits_in_vllm(model.geometry, options.tp):
        found.append(f"vLLM 0.33 does not split {model.geometry.ngroups} groups over {options.tp} ranks")
    return found
