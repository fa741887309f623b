"""Which config keys carry the geometry, architecture by architecture.

A missing key is an error and never a default, because the class defaults of transformers are
wrong for published models. The exceptions are the groups of nemotron_h (8 in every published
model) and the two formats without a transformers class, whose keys are optional by design.
The inner width is always nheads * headdim; ``expand`` is read only where an architecture defines
headdim or nheads by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.registry.entries import Geometry
from replayssm_cute.types import Mamba2Geometry

Config = Mapping[str, Any]
Heads = tuple[int, int, int, int]  # in the order of a geometry's fields


@dataclass(frozen=True)
class Rules:
    """How one family spells its numbers.

    Attributes:
        geometry: fields of ``kind`` in their order, of a config.
        layers: (recurrent layers, all layers) of a config.
        conv: width of the convolution.
        hidden: key of the residual width.
        limit: the limits of the time step, None where the config sets none.
        model_type: canonical name where the key in ``RULES`` is not.
        kind: the geometry's class.
        state_dtype: key of the dtype of the checkpoint; None where vLLM reads none.
        mtp: key of the count of multi-token-prediction layers.
    """

    geometry: Callable[[Config], Heads]
    layers: Callable[[Config], tuple[int, int]]
    conv: Callable[[Config], int]
    hidden: str = "hidden_size"
    limit: Callable[[Config], object] = lambda config: config.get("time_step_limit")
    model_type: str | None = None
    kind: type[Geometry] = Mamba2Geometry
    state_dtype: str | None = None
    mtp: str = "num_nextn_predict_layers"


def has(config: Config, *keys: str) -> bool:
    """Whether one of the keys has a value; null counts as absent."""
    return any(config.get(key) is not None for key in keys)


def present(config: Config, *keys: str) -> tuple[str, Any]:
    """The first of the keys that has a value, and the value.

    Raises:
        ArgumentError: none has.
    """
    for key in keys:
        if config.get(key) is not None:
            return key, config[key]
    raise ArgumentError(f"config[{' or '.join(map(repr, keys))}]",
                        "a value (class defaults are wrong for published models)", "nothing")


def count(config: Config, *keys: str, least: int = 1) -> int:
    """The first of the keys that has a value, an integer of at least ``least``.

    Raises:
        ArgumentError: none has, or it is no such integer.
    """
    key, value = present(config, *keys)
    if type(value) is not int or value < least:
        raise ArgumentError(f"config[{key!r}]", f"an integer of at least {least}", repr(value))
    return value


def _whole(what: str, width: int, parts: int) -> int:
    if width % parts:
        raise ArgumentError("config", f"an expanded width that gives a whole {what}", f"{width} / {parts}")
    return width // parts


def _expanded(config: Config, *keys: str) -> int:
    return count(config, *keys) * count(config, "hidden_size")


# ---- geometry --------------------------------------------------------------------------------------

def _keys(*keys: str) -> Callable[[Config], Heads]:
    def read(config: Config) -> Heads:
        first, second, third, fourth = (count(config, key) for key in keys)
        return first, second, third, fourth
    return read


def _nemotron_h(config: Config) -> Heads:
    """``head_dim``, ``num_heads`` and ``n_group`` of this architecture are attention and routing."""
    groups = ("n_groups", "mamba_n_groups", "mamba_num_groups")
    return (count(config, "mamba_num_heads"), count(config, "mamba_head_dim"),
            count(config, "ssm_state_size", "mamba_state_dim"),
            count(config, *groups) if has(config, *groups) else 8)


def _bamba(config: Config) -> Heads:
    """Bamba and Granite: a headdim of "auto" divides the expanded width."""
    nheads = count(config, "mamba_n_heads")
    auto = present(config, "mamba_d_head")[1] == "auto"
    headdim = _whole("headdim", _expanded(config, "mamba_expand"), nheads) if auto \
        else count(config, "mamba_d_head")
    return nheads, headdim, count(config, "mamba_d_state"), count(config, "mamba_n_groups")


def _falcon_h1(config: Config) -> Heads:
    """A headdim that is absent or "auto" divides ``mamba_d_ssm``, never an expanded width."""
    nheads = count(config, "mamba_n_heads")
    derived = config.get("mamba_d_head") in (None, "auto")
    headdim = _whole("headdim", count(config, "mamba_d_ssm"), nheads) if derived \
        else count(config, "mamba_d_head")
    return nheads, headdim, count(config, "mamba_d_state"), count(config, "mamba_n_groups")


def _zamba2(config: Config) -> Heads:
    """One of nheads and headdim may be left to the expanded width."""
    expand = ("mamba_expand", "expansion_factor")
    if has(config, "n_mamba_heads"):
        nheads = count(config, "n_mamba_heads")
        headdim = count(config, "mamba_headdim") if has(config, "mamba_headdim") \
            else _whole("headdim", _expanded(config, *expand), nheads)
    else:
        headdim = count(config, "mamba_headdim")
        nheads = _whole("nheads", _expanded(config, *expand), headdim)
    return nheads, headdim, count(config, "mamba_d_state", "state_size"), count(config, "mamba_ngroups")


def _ssm_cfg(config: Config) -> Config:
    return config.get("ssm_cfg") or {}


def _mamba_ssm(config: Config) -> Heads:
    """``ssm_cfg`` overrides the module's arguments, whose defaults the published models keep."""
    module = {"expand": 2, "headdim": 64, "d_state": 128, "ngroups": 1, **_ssm_cfg(config)}
    width, headdim = count(module, "expand") * count(config, "d_model"), count(module, "headdim")
    return _whole("nheads", width, headdim), headdim, count(module, "d_state"), count(module, "ngroups")


def _mistral(config: Config) -> Heads:
    """``params.json``: all but the width and the groups is fixed by the converter."""
    return _whole("nheads", 2 * count(config, "dim"), 64), 64, 128, count(config, "n_groups")


# ---- layers ----------------------------------------------------------------------------------------

# transformers renames "mamba" on load; "hybrid" is a Mamba2 block beside attention.
_RECURRENT_WORDS = {"mamba", "linear_attention", "hybrid"}
_OTHER_WORDS = {"attention", "full_attention", "moe", "mlp"}
_LISTS = ("layers_block_type", "layer_types")


def _listed(config: Config, *keys: str) -> tuple[int, int]:
    """Counts of a list of layer types; an unknown word is an error, because it might be a recurrent one."""
    key, words = present(config, *keys)
    strange = sorted({str(word) for word in words} - _RECURRENT_WORDS - _OTHER_WORDS)
    if strange:
        raise ArgumentError(f"config[{key!r}]", "known layer types", ", ".join(strange))
    return sum(word in _RECURRENT_WORDS for word in words), len(words)


def _nemotron_layers(config: Config) -> tuple[int, int]:
    if has(config, *_LISTS):
        return _listed(config, *_LISTS)
    pattern = str(present(config, "hybrid_override_pattern")[1])
    return pattern.count("M"), len(pattern)


def _bamba_layers(config: Config) -> tuple[int, int]:
    if has(config, *_LISTS):
        return _listed(config, *_LISTS)
    layers = count(config, "num_hidden_layers")
    return layers - len(present(config, "attn_layer_indices")[1]), layers


def _granite_layers(config: Config) -> tuple[int, int]:
    return _listed(config, *_LISTS)


def _every(*keys: str) -> Callable[[Config], tuple[int, int]]:
    def read(config: Config) -> tuple[int, int]:
        return count(config, *keys), count(config, *keys)
    return read


def _zamba2_layers(config: Config) -> tuple[int, int]:
    """Every layer holds a Mamba2 block, the hybrid ones too."""
    key, value = present(config, "num_hidden_layers", "layers_block_type", "layer_mapping")
    layers = count(config, key) if key == "num_hidden_layers" else len(value)
    return layers, layers


def _mamba_ssm_layers(config: Config) -> tuple[int, int]:
    layers = count(config, "n_layer")
    return layers - len(config.get("attn_layer_idx") or ()), layers


def _qwen_layers(config: Config) -> tuple[int, int]:
    """Every ``full_attention_interval``-th layer is attention, where no list says so."""
    if has(config, *_LISTS):
        return _listed(config, *_LISTS)
    layers = count(config, "num_hidden_layers")
    return layers - layers // count(config, "full_attention_interval"), layers


def _conv(*keys: str) -> Callable[[Config], int]:
    return lambda config: count(config, *keys)


_QWEN3_NEXT = Rules(_keys("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                          "linear_value_head_dim"), _qwen_layers, _conv("linear_conv_kernel_dim"),
                    kind=GdnGeometry, mtp="mtp_num_hidden_layers")
_QWEN3_5 = replace(_QWEN3_NEXT, state_dtype="mamba_ssm_dtype", model_type="qwen3_5")
_QWEN3_5_MOE = replace(_QWEN3_5, model_type="qwen3_5_moe")

RULES = {
    "nemotron_h": Rules(_nemotron_h, _nemotron_layers, _conv("conv_kernel", "mamba_d_conv"),
                        state_dtype="mamba_ssm_cache_dtype"),
    "bamba": Rules(_bamba, _bamba_layers, _conv("mamba_d_conv")),
    "granitemoehybrid": Rules(_bamba, _granite_layers, _conv("mamba_d_conv")),
    "falcon_h1": Rules(_falcon_h1, _every("num_hidden_layers"), _conv("mamba_d_conv")),
    "zamba2": Rules(_zamba2, _zamba2_layers, _conv("mamba_d_conv", "conv_dimension")),
    "mamba2": Rules(_keys("num_heads", "head_dim", "state_size", "n_groups"),
                    _every("num_hidden_layers"), _conv("conv_kernel")),
    "mamba_ssm": Rules(_mamba_ssm, _mamba_ssm_layers,
                       lambda config: count({"d_conv": 4, **_ssm_cfg(config)}, "d_conv"), "d_model",
                       lambda config: _ssm_cfg(config).get("dt_limit"), "mamba2"),
    "mistral": Rules(_mistral, _every("n_layers"), lambda config: 4, "dim", model_type="mamba2"),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_5, "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE, "qwen3_5_moe_text": _QWEN3_5_MOE,
}

_MAMBA1 = "a Mamba1 model: one state per channel and a time step per channel, not per head"
_GDN = "a gated-delta-net model of a kind that was not examined, so this version does not serve it"
_KDA = "a delta-attention model, which this version does not serve"

#: Families that are known and cannot be served, with the reason.
REFUSED = {
    "jamba": _MAMBA1, "falcon_mamba": _MAMBA1, "mamba": _MAMBA1, "phi4flash": _MAMBA1, "hymba": _MAMBA1,
    "qwen4_exp": _GDN, "olmo_hybrid": _GDN,
    "kimi_linear": _KDA, "kimi_k3": _KDA, "glm5_next": _KDA, "bailing_hybrid": _KDA,
    "nemotron_h_puzzle": "its layers may differ in geometry (block_configs)",
}

#: Family of an entry of ``architectures``.
ARCHITECTURES = {
    "NemotronHForCausalLM": "nemotron_h", "NemotronHPuzzleForCausalLM": "nemotron_h_puzzle",
    "BambaForCausalLM": "bamba", "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "FalconH1ForCausalLM": "falcon_h1", "Zamba2ForCausalLM": "zamba2", "Mamba2ForCausalLM": "mamba2",
    "JambaForCausalLM": "jamba", "FalconMambaForCausalLM": "falcon_mamba", "MambaForCausalLM": "mamba",
    "Phi4FlashForCausalLM": "phi4flash", "HymbaForCausalLM": "hymba",
    "Qwen3NextForCausalLM": "qwen3_next", "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe", "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "KimiLinearForCausalLM": "kimi_linear", "KimiK3ForConditionalGeneration": "kimi_k3",
    "BailingMoeV3ForCausalLM": "bailing_hybrid", "Glm5NextForCausalLM": "glm5_next",
}
