"""Reading a model's config, in any form it comes in, into the numbers that matter here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.registry.entries import Geometry
from replayssm_cute.registry.hf_rules import ARCHITECTURES, REFUSED, RULES, Config, count, has

#: A limit of the time step from here on is none: one published config spells infinity 1e+308.
NO_LIMIT = 1e30


@dataclass(frozen=True)
class ModelConfig:
    """What a config says about its recurrent layers.

    Attributes:
        architecture: first entry of ``architectures``, empty where the format has none.
        model_type: canonical family name, for example ``"nemotron_h"``.
        geometry: of a whole layer, before tensor parallelism.
        recurrent_layers, layers: layers with a Mamba2 or a Gated DeltaNet block, and all layers.
        hidden_size: width of the residual stream, None where absent.
        conv_kernel: width of the convolution in front of the recurrence.
        state_dtype: dtype of the checkpoint that the config asks for, None where it does not.
        act_dtype: dtype of the activations, None where absent.
        mtp_layers: multi-token-prediction layers.
        name_or_path: where the config says it comes from, empty where it does not.
    """

    architecture: str
    model_type: str
    geometry: Geometry
    recurrent_layers: int
    layers: int
    hidden_size: int | None
    conv_kernel: int
    state_dtype: torch.dtype | None
    act_dtype: torch.dtype | None
    mtp_layers: int
    name_or_path: str


def load_config(config: object) -> dict[str, Any]:
    """The config as a dict.

    Args:
        config: a dict; an object with ``to_dict()`` or plain attributes; JSON text; or the path of
            a JSON file or of a folder with a ``config.json``. A bare ``Infinity`` is understood.

    Raises:
        ArgumentError: it is none of these, or cannot be read.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (str, os.PathLike)):
        return _load_text(config)
    if callable(getattr(config, "to_dict", None)):
        return dict(config.to_dict())  # type: ignore[attr-defined]
    if hasattr(config, "__dict__") and not isinstance(config, type):
        model_type = getattr(config, "model_type", None)  # often set on the class
        return {"model_type": model_type, **vars(config)}
    raise ArgumentError("config", "a config object, a dict, JSON text or a path", type(config).__name__)


def _load_text(source: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        if isinstance(source, str) and source.lstrip().startswith("{"):
            text = source
        else:
            path = Path(source)
            text = (path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise ArgumentError("config", "JSON text or the path of a JSON file", error) from error
    if not isinstance(content, dict):
        raise ArgumentError("config", "a JSON object", type(content).__name__)
    return content


def read_config(config: object) -> ModelConfig:
    """Geometry and dtypes of a model, from its config in any form ``load_config`` takes.

    Raises:
        ArgumentError: the config cannot be read, or lacks a key that must not be guessed.
        UnsupportedError: the model has no layers that replay serves, or limits its time step.
    """
    outer = load_config(config)
    inner = next((load_config(outer[key]) for key in ("text_config", "llm_config") if outer.get(key)), outer)
    family = _family(outer, inner)
    rules = RULES[family]
    geometry = rules.kind(*rules.geometry(inner))
    recurrent_layers, layers = rules.layers(inner)
    if recurrent_layers == 0:
        raise UnsupportedError(family, f"none of its {layers} layers is a recurrent one")
    _refuse_limit(rules.limit(inner))
    return ModelConfig(
        architecture=_architecture(outer) or _architecture(inner),
        model_type=rules.model_type or family, geometry=geometry,
        recurrent_layers=recurrent_layers, layers=layers,
        hidden_size=count(inner, rules.hidden) if has(inner, rules.hidden) else None,
        conv_kernel=rules.conv(inner),
        state_dtype=_dtype(inner, rules.state_dtype) if rules.state_dtype else None,
        act_dtype=_dtype(inner, "dtype", "torch_dtype") or _dtype(outer, "dtype", "torch_dtype"),
        mtp_layers=count(inner, rules.mtp, least=0) if has(inner, rules.mtp) else 0,
        name_or_path=str(outer.get("_name_or_path") or ""))


def _architecture(config: Config) -> str:
    return str((config.get("architectures") or [""])[0])


def _family(outer: Config, inner: Config) -> str:
    """The key of ``RULES``: by architecture, by the shape of the oldest formats, by model type."""
    found = next((ARCHITECTURES[name] for name in map(_architecture, (outer, inner))
                  if name in ARCHITECTURES), None)
    if found is None and not _architecture(outer):
        # Neither format has `architectures`, and the second one says model_type "mamba".
        if has(outer, "d_model") and has(outer, "n_layer"):
            found = "mamba_ssm" if (outer.get("ssm_cfg") or {}).get("layer") == "Mamba2" else "mamba"
        elif has(outer, "dim") and has(outer, "n_layers") and outer.get("model_type") in (None, "mamba"):
            found = "mistral"
    if found is None:
        found = next((str(config.get("model_type")) for config in (inner, outer)
                      if config.get("model_type") in {*RULES, *REFUSED}), None)
    if found is None:
        raise UnsupportedError(_architecture(outer) or str(outer.get("model_type") or "config"),
                               "not an architecture whose geometry this package can read: "
                               + ", ".join(name for name, family in ARCHITECTURES.items() if family in RULES))
    if found in REFUSED:
        raise UnsupportedError(found, REFUSED[found])
    return found


def _dtype(config: Config, *keys: str) -> torch.dtype | None:
    """The dtype that the first present key names; None where none does or it says "auto"."""
    value = next((config[key] for key in keys if config.get(key) is not None), "auto")
    if isinstance(value, torch.dtype):
        return value
    if value == "auto":
        return None
    found = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(f"config[{' or '.join(map(repr, keys))}]", "the name of a dtype", repr(value))
    return found


def _refuse_limit(limit: object) -> None:
    """No kernel and no engine clamps dt at decode; a finite limit would be ignored silently."""
    if limit is None:
        return
    if not isinstance(limit, (list, tuple)) or len(limit) != 2:
        raise ArgumentError("config['time_step_limit']", "a pair (least, greatest)", repr(limit))
    low, high = map(_limit, limit)
    if low > 0 or high < NO_LIMIT:
        raise UnsupportedError("time_step_limit", "the time step of this model is limited to "
                               f"[{low:g}, {high:g}], and decode does not clamp it")


def _limit(value: object) -> float:
    """A number in any spelling that configs use for infinity."""
    if isinstance(value, Mapping):
        value = value.get("__float__")
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ArgumentError("config['time_step_limit']", "two numbers", repr(value)) from None
