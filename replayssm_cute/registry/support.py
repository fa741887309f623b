"""Can this model be served by replay, here, with these options, and how well is it known?

The one question an integration or a user asks before anything runs. Unlike the other modules of
this folder it stands above the dispatcher, because its answer names the backend that would serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from replayssm_cute import arch as archs
from replayssm_cute.arch import Arch
from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.registry import devices, support_gdn, support_mamba2
from replayssm_cute.registry.entries import Geometry, ModelEntry
from replayssm_cute.registry.hf_config import ModelConfig, load_config, read_config
from replayssm_cute.registry.models import find_by_geometry
from replayssm_cute.registry.options import Options, dtype_name, read_state_dtype
from replayssm_cute.types import Support


class Half(Protocol):
    """What ``support_mamba2`` and ``support_gdn`` offer; ``geometry`` is theirs, of one rank."""

    OWN_DTYPES: tuple[torch.dtype, ...]

    def refuse(self, geometry: Any, state_dtype: torch.dtype, options: Options) -> None: ...

    def choose(self, geometry: Any, state_dtype: torch.dtype, act: torch.dtype, options: Options,
               arch: Arch) -> dict[str, Any]: ...

    def tune_command(self, subject: str, state_dtype: torch.dtype, options: Options) -> str | None: ...

    def warnings(self, entry: Any, state_dtype: torch.dtype, options: Options) -> list[str]: ...


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
        backend: which backend would serve at which batch, and why; for Gated DeltaNet in which operation, for
            the batch has no part in it: standard decode, or with drafts verify and the folds outside of it.
        rounding: how that backend rounds the stored checkpoint: ``"to nearest"``, or stochastically in
            hardware or in software.
        tuned: this very device has measured rows for this geometry, state dtype and ring length, and for
            Gated DeltaNet with drafts for the window, with the exact fold.
        predicted: the rows for them come from a model of the device instead: their times are no measurements.
        tune_command: the call that fills the missing rows; None where they exist and on a CPU.
        warnings: what to know although it works.
    """

    model: str | None = None
    geometry: Geometry | None = None
    state_dtype: torch.dtype | None = None
    backend: str = ""
    rounding: str = ""
    tuned: bool = False
    predicted: bool = False
    tune_command: str | None = None
    warnings: tuple[str, ...] = ()


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
        speculative_tokens: draft tokens per step, so that a window has 1 + as many tokens; Gated DeltaNet only.
        prefix_cache_mode: None or ``"none"``, ``"align"`` or ``"all"``.
        kv_transfer: caches are moved between engines (disaggregated serving).

    Raises:
        ArgumentError: an argument is no value of its kind. That a value cannot be served is
            never an exception.
    """
    raw, arch = load_config(config), _arch(device)
    options = Options(tp, read_state_dtype(state_dtype), buffer_len, stochastic_rounding, speculative_tokens,
                      prefix_cache_mode, kv_transfer)
    facts: dict[str, Any] = {}  # fields of the answer, as far as it gets
    try:
        model = read_config(raw)
        half: Half = support_gdn if isinstance(model.geometry, GdnGeometry) else support_mamba2
        facts["state_dtype"] = options.state_dtype or _auto_state_dtype(model)
        facts["geometry"] = model.geometry.shard(tp)
        half.refuse(facts["geometry"], facts["state_dtype"], options)
        entry = _entry(model, half, options, facts)
        _choose(model, entry, half, options, arch, facts)
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


def _auto_state_dtype(model: ModelConfig) -> torch.dtype:
    if model.state_dtype is not None:
        return model.state_dtype
    if model.model_type == "nemotron_h":
        return torch.float32
    return model.act_dtype or torch.bfloat16


def _entry(model: ModelConfig, half: Half, options: Options, facts: dict[str, Any]) -> ModelEntry:
    """The registry entry that fits the config best."""
    def misfit(entry: ModelEntry) -> tuple[bool, int]:
        return (model.name_or_path not in entry.hub_ids,
                sum(getattr(entry, name) != getattr(model, name)
                    for name in ("recurrent_layers", "layers", "hidden_size", "mtp_layers")))

    entries = find_by_geometry(model.geometry, model.model_type)
    if not entries:
        command = half.tune_command(f"--geometry {facts['geometry']}", facts["state_dtype"], options)
        facts["tune_command"] = command
        raise UnsupportedError(
            f"{model.model_type} {model.geometry}", "no registry entry has this geometry. To validate it, "
            "add an entry to replayssm_cute/models and run make test and make test-gpu"
            + (f"; to tune it, run {command}" if command else ""))
    entry = min(entries, key=misfit)
    facts["model"] = entry.name
    if facts["state_dtype"] not in (*entry.validated_state_dtypes, *half.OWN_DTYPES):
        raise UnsupportedError(entry.name, f"not validated with a {dtype_name(facts['state_dtype'])} checkpoint")
    return entry


def _choose(model: ModelConfig, entry: ModelEntry, half: Half, options: Options, arch: Arch,
            facts: dict[str, Any]) -> None:
    """Which backend serves, what is known about its speed here, and what to be warned of."""
    state_dtype = facts["state_dtype"]
    facts |= half.choose(facts["geometry"], state_dtype, model.act_dtype or entry.act_dtype, options, arch)
    slow = facts.pop("slow") and arch.kind != "cpu"
    if not facts.get("tuned") and arch.kind != "cpu":
        facts["tune_command"] = half.tune_command(f"--model {entry.name} --tp {options.tp}", state_dtype, options)
    facts["warnings"] = (*_warnings(model, entry, options, state_dtype, half.OWN_DTYPES),
                         *half.warnings(entry, state_dtype, options),
                         *["only the slow PyTorch backend can serve on this GPU"] * slow)


def _warnings(model: ModelConfig, entry: ModelEntry, options: Options, state_dtype: torch.dtype,
              own_dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """What to be warned of whatever the recurrence."""
    found = []
    if (model.recurrent_layers, model.hidden_size) != (entry.recurrent_layers, entry.hidden_size):
        found.append(f"the geometry is that of {entry.name}, the layers or the width are not: what is "
                     "known about its state dtype may not hold")
    if options.buffer_len not in entry.validated_buffer_lens:
        found.append(f"buffer_len {options.buffer_len} works, but {entry.name} was validated with "
                     f"{', '.join(map(str, entry.validated_buffer_lens))}")
    if options.state_dtype is None and model.state_dtype is None and model.model_type != "nemotron_h":
        found.append(f"the config names no state dtype: {dtype_name(state_dtype)} as in vLLM, where SGLang "
                     "takes float32")
    if state_dtype in own_dtypes:
        return found  # nobody publishes advice about these
    if entry.state_advice and all(advice.state_dtype != state_dtype for advice in entry.state_advice):
        found.append(f"no source advises a {dtype_name(state_dtype)} checkpoint for {entry.name}")
    elif entry.needs_stochastic_rounding(state_dtype) and not options.stochastic_rounding:
        found.append(f"a {dtype_name(state_dtype)} checkpoint of {entry.name} is advised with stochastic "
                     "rounding only")
    return found
