"""Configs of published models, in every spelling that occurs, read into geometry and dtypes.

The fixtures hold the keys that matter and traps beside them: keys of other meanings, ``expand``
factors that do not give the inner width.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm_cute.errors import ArgumentError, ReplayError, UnsupportedError
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.registry.hf_config import load_config, read_config
from replayssm_cute.registry.models import find_by_geometry, get

Json = dict[str, Any]
INF = float("inf")

NEMOTRON = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "conv_kernel": 4,
            "expand": 2, "head_dim": 128, "num_attention_heads": 32, "n_group": 1, "num_heads": 3,
            "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 0.0001}
NANO_30B = {**NEMOTRON, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
            "hidden_size": 2688, "num_hidden_layers": 52, "mamba_ssm_cache_dtype": "float32",
            "torch_dtype": "bfloat16",
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
ULTRA = {**NEMOTRON, "mamba_num_heads": 256, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
         "hidden_size": 8192, "mamba_ssm_cache_dtype": "float32", "dtype": "bfloat16",
         "time_step_limit": [0.0, 1e308], "num_nextn_predict_layers": 1,
         "layers_block_type": ["mamba"] * 48 + ["attention"] * 12 + ["moe"] * 48}
GRANITE = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
           "mamba_n_heads": 48, "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_n_groups": 1,
           "mamba_d_conv": 4, "mamba_expand": 2, "hidden_size": 1536, "num_hidden_layers": 40,
           "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "dtype": "bfloat16"}
BAMBA = {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "mamba_n_heads": 128,
         "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
         "mamba_expand": 2, "hidden_size": 4096, "num_hidden_layers": 32, "torch_dtype": "bfloat16",
         "attn_layer_indices": [9, 18, 27]}
FALCON = {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "mamba_n_heads": 32,
          "mamba_d_head": 128, "mamba_d_ssm": 4096, "mamba_d_state": 256, "mamba_n_groups": 2,
          "mamba_d_conv": 4, "mamba_expand": 2, "hidden_size": 5120, "num_hidden_layers": 72,
          "torch_dtype": "bfloat16"}
ZAMBA_7B = {"architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2", "mamba_headdim": 64,
            "expansion_factor": 2, "state_size": 64, "mamba_ngroups": 2, "conv_dimension": 4,
            "hidden_size": 3584, "num_hidden_layers": 81, "hidden_act": "gelu"}
CODESTRAL = {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_heads": 128,
             "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2,
             "hidden_size": 4096, "num_hidden_layers": 64, "torch_dtype": "bfloat16",
             "time_step_limit": [0.0, INF]}
MAMBA_SSM = {"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
             "attn_layer_idx": [], "attn_cfg": {}}
QWEN_HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
              "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
              "head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 2}
QWEN3_NEXT = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
              "num_hidden_layers": 48, "torch_dtype": "bfloat16", **QWEN_HEADS}
VISION = {"hidden_size": 1152, "depth": 27, "num_heads": 16, "out_hidden_size": 4096}
QWEN3_5_MOE = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
               "vision_config": VISION, "text_config": {
                   **QWEN_HEADS, "model_type": "qwen3_5_moe_text", "linear_num_value_heads": 64, "hidden_size": 4096,
                   "num_hidden_layers": 60, "mtp_num_hidden_layers": 1, "dtype": "bfloat16",
                   "mamba_ssm_dtype": "float32", "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15}}
QWEN3_5_27B = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
               "vision_config": VISION, "text_config": {
                   **QWEN_HEADS, "model_type": "qwen3_5_text", "linear_num_value_heads": 48, "hidden_size": 5120,
                   "num_hidden_layers": 64, "mtp_num_hidden_layers": 1, "dtype": "bfloat16",
                   "mamba_ssm_dtype": "float32"}}
QWEN3_8_FLAT = {**QWEN_HEADS, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
                "linear_num_value_heads": 128, "hidden_size": 8192, "num_hidden_layers": 92,
                "mtp_num_hidden_layers": 1, "dtype": "bfloat16"}
MISTRAL = {"dim": 4096, "n_layers": 64, "vocab_size": 32768, "n_groups": 8, "model_type": "mamba"}


def without(config: Json, *keys: str) -> Json:
    return {key: value for key, value in config.items() if key not in keys}


PUBLISHED = [
    ("nemotron-3-nano-30b-a3b", NANO_30B), ("nemotron-3-ultra-550b-a55b", ULTRA),
    ("granite-4.0-h-tiny", GRANITE), ("bamba-9b-v1", BAMBA), ("falcon-h1-34b", FALCON),
    ("zamba2-7b", ZAMBA_7B), ("mamba-codestral-7b-v0.1", CODESTRAL), ("mamba2-2.7b", MAMBA_SSM),
    ("qwen3-next-80b-a3b", QWEN3_NEXT), ("qwen3.5-397b-a17b", QWEN3_5_MOE), ("qwen3.5-27b", QWEN3_5_27B),
    ("qwen3.8-2.4t-a95b", QWEN3_8_FLAT),
]


@pytest.mark.parametrize(("name", "config"), PUBLISHED, ids=[name for name, _ in PUBLISHED])
def test_published_configs_give_the_numbers_of_their_entry(name: str, config: Json) -> None:
    read, entry = read_config(config), get(name)
    for field in ("geometry", "model_type", "recurrent_layers", "layers", "hidden_size", "conv_kernel"):
        assert getattr(read, field) == getattr(entry, field), field
    assert read.state_dtype == entry.config_state_dtype
    assert read.act_dtype in (None, entry.act_dtype)
    # Qwen3-Next has a draft layer that its config does not mention.
    assert read.mtp_layers == (0 if read.model_type == "qwen3_next" else entry.mtp_layers or 0)
    assert entry in find_by_geometry(read.geometry, read.model_type)


REWRITTEN = [
    # Nano-9B-v2 spells the state and the groups differently; the groups may be absent.
    ({**without(NANO_30B, "ssm_state_size", "n_groups"), "mamba_state_dim": 96, "mamba_num_groups": 4},
     (64, 64, 96, 4)),
    ({**without(NANO_30B, "n_groups"), "mamba_n_groups": 2}, (64, 64, 128, 2)),
    (without(NANO_30B, "n_groups"), (64, 64, 128, 8)),
    ({**NANO_30B, "ssm_state_size": 64, "mamba_state_dim": 96}, (64, 64, 64, 8)),
    ({**GRANITE, "mamba_d_head": 32}, (48, 32, 128, 1)),
    (without(FALCON, "mamba_d_head"), (32, 128, 256, 2)),
    ({**FALCON, "mamba_d_head": "auto", "mamba_d_ssm": 2048}, (32, 64, 256, 2)),
    (without(FALCON, "mamba_d_ssm", "mamba_expand"), (32, 128, 256, 2)),
    ({**ZAMBA_7B, "n_mamba_heads": 112, "mamba_d_state": 64, "mamba_d_conv": 4}, (112, 64, 64, 2)),
    ({**without(ZAMBA_7B, "mamba_headdim", "expansion_factor"), "n_mamba_heads": 56, "mamba_expand": 2},
     (56, 128, 64, 2)),
    ({**MAMBA_SSM, "ssm_cfg": {"layer": "Mamba2", "headdim": 128, "d_state": 64, "ngroups": 2}},
     (40, 128, 64, 2)),
    (MISTRAL, (128, 64, 128, 8)),
]


@pytest.mark.parametrize(("config", "geometry"), REWRITTEN)
def test_spellings(config: Json, geometry: tuple[int, ...]) -> None:
    g = read_config(config).geometry
    assert (g.nheads, g.headdim, g.dstate, g.ngroups) == geometry


NEEDED = [
    (NANO_30B, ["mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel",
                "hybrid_override_pattern"]),
    (GRANITE, ["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv",
               "layer_types", "mamba_expand"]),
    (BAMBA, ["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "num_hidden_layers",
             "attn_layer_indices"]),
    (without(FALCON, "mamba_d_head"), ["mamba_n_heads", "mamba_d_ssm", "mamba_d_state", "mamba_n_groups"]),
    (ZAMBA_7B, ["mamba_headdim", "expansion_factor", "state_size", "mamba_ngroups", "num_hidden_layers"]),
    (CODESTRAL, ["num_heads", "head_dim", "state_size", "n_groups", "num_hidden_layers"]),
    (MAMBA_SSM, ["d_model", "n_layer"]), (MISTRAL, ["dim", "n_groups", "n_layers"]),
    *((config, ["linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
                "linear_conv_kernel_dim", "num_hidden_layers", "full_attention_interval"])
      for config in (QWEN3_NEXT, {**QWEN3_5_27B["text_config"], "architectures": ["Qwen3_5ForConditionalGeneration"]})),
]


@pytest.mark.parametrize(("config", "key"), [(config, key) for config, keys in NEEDED for key in keys])
def test_a_missing_key_is_never_a_class_default(config: Json, key: str) -> None:
    with pytest.raises(ReplayError) as error:
        read_config(without(config, key))
    if config.get("architectures"):
        assert isinstance(error.value, ArgumentError) and key in str(error.value)


@pytest.mark.parametrize("value", [0, -8, "64", 64.0, True, [64]])
def test_bad_numbers(value: object) -> None:
    with pytest.raises(ArgumentError, match="mamba_num_heads"):
        read_config({**NANO_30B, "mamba_num_heads": value})


def test_groups_that_do_not_divide_the_heads() -> None:
    with pytest.raises(ArgumentError, match="ngroups"):
        read_config({**NANO_30B, "n_groups": 7})


def test_an_expanded_width_that_is_not_whole() -> None:
    with pytest.raises(ArgumentError, match="whole headdim"):
        read_config({**GRANITE, "hidden_size": 1537})


LAYERS = [
    ({**NANO_30B, "hybrid_override_pattern": "MM-*E---M"}, (3, 9)),
    # transformers renames the words on load, and the list outranks the pattern
    ({**NANO_30B, "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}, (1, 4)),
    ({**without(NANO_30B, "hybrid_override_pattern"), "layer_types": ["mamba", "attention"]}, (1, 2)),
    ({**without(BAMBA, "attn_layer_indices"), "layer_types": ["mamba", "mamba", "attention"]}, (2, 3)),
    ({**BAMBA, "attn_layer_indices": []}, (32, 32)),
    (FALCON, (72, 72)),
    ({**without(ZAMBA_7B, "num_hidden_layers"), "layers_block_type": ["mamba", "hybrid", "mamba"]}, (3, 3)),
    ({**without(ZAMBA_7B, "num_hidden_layers"), "layer_mapping": ["m", "g", "m", "m"]}, (4, 4)),
    ({**MAMBA_SSM, "attn_layer_idx": [9, 18]}, (62, 64)),
    (MISTRAL, (64, 64)), (QWEN3_NEXT, (36, 48)), ({**QWEN3_NEXT, "full_attention_interval": 5}, (39, 48)),
    ({**QWEN3_NEXT, "layer_types": ["linear_attention", "full_attention"]}, (1, 2)),  # the list outranks the interval
    ({**QWEN3_NEXT, "layer_types": ["mamba", "mamba", "attention"]}, (2, 3)),
]


@pytest.mark.parametrize(("config", "layers"), LAYERS)
def test_layers(config: Json, layers: tuple[int, int]) -> None:
    read = read_config(config)
    assert (read.recurrent_layers, read.layers) == layers


def test_a_strange_layer_word_is_not_counted_as_something_else() -> None:
    with pytest.raises(ArgumentError, match="mamba3"):
        read_config({**GRANITE, "layer_types": ["mamba", "mamba3", "attention"]})


def test_mamba_keys_without_mamba_layers() -> None:
    """Granite-4.0-Micro carries all the keys and 40 attention layers."""
    with pytest.raises(UnsupportedError, match="none of its 40 layers"):
        read_config({**GRANITE, "layer_types": ["attention"] * 40})


INFINITIES = [[0.0, INF], [0, 1e308], [0.0, "Infinity"], [0.0, "inf"], (0.0, INF),
              [0.0, {"__float__": "Infinity"}], [{"__float__": "0.0"}, 1e30], None]
LIMITED = [[0.0, 0.1], [0.001, INF], [0.0, 1e29], [0.0, {"__float__": "100.0"}]]


@pytest.mark.parametrize("limit", INFINITIES)
def test_no_upper_limit_in_any_spelling(limit: object) -> None:
    assert read_config({**NANO_30B, "time_step_limit": limit}).geometry.nheads == 64


@pytest.mark.parametrize("limit", LIMITED)
def test_a_finite_limit_is_refused_with_its_reason(limit: object) -> None:
    with pytest.raises(UnsupportedError, match=r"time_step_limit.*does not clamp"):
        read_config({**CODESTRAL, "time_step_limit": limit})


def test_a_finite_limit_in_the_mamba_ssm_format() -> None:
    config = {**MAMBA_SSM, "ssm_cfg": {"layer": "Mamba2", "dt_limit": [0.0, INF]}}
    assert read_config(config).model_type == "mamba2"
    config["ssm_cfg"]["dt_limit"] = [0.0, 0.5]
    with pytest.raises(UnsupportedError, match="time_step_limit"):
        read_config(config)


@pytest.mark.parametrize("limit", [0.1, [0.0], [0.0, "much"], [0.0, {}], "inf"])
def test_a_limit_that_cannot_be_read(limit: object) -> None:
    with pytest.raises(ArgumentError, match="time_step_limit"):
        read_config({**NANO_30B, "time_step_limit": limit})


@pytest.mark.parametrize(("changes", "state", "act"), [
    ({}, torch.float32, torch.bfloat16),
    ({"mamba_ssm_cache_dtype": "auto"}, None, torch.bfloat16),
    ({"mamba_ssm_cache_dtype": None}, None, torch.bfloat16),
    ({"mamba_ssm_cache_dtype": torch.float16, "dtype": torch.float16}, torch.float16, torch.float16),
    ({"mamba_ssm_cache_dtype": "torch.bfloat16", "torch_dtype": "float32"}, torch.bfloat16, torch.float32),
])
def test_dtypes(changes: Json, state: torch.dtype | None, act: torch.dtype) -> None:
    read = read_config({**NANO_30B, **changes})
    assert (read.state_dtype, read.act_dtype) == (state, act)


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(ArgumentError, match="mamba_ssm_cache_dtype"):
        read_config({**NANO_30B, "mamba_ssm_cache_dtype": "float33"})


def test_the_state_dtype_key_is_the_familys_own() -> None:
    """As vLLM reads them: one key of Nemotron, another of Qwen3.5, none of the others."""
    both = {"mamba_ssm_cache_dtype": "float32", "mamba_ssm_dtype": "float16"}
    assert read_config({**GRANITE, **both}).state_dtype is read_config({**QWEN3_NEXT, **both}).state_dtype is None
    assert read_config({**NANO_30B, **both}).state_dtype == torch.float32
    assert read_config({**QWEN3_8_FLAT, **both}).state_dtype == torch.float16


@pytest.mark.parametrize(("config", "key"), [(NANO_30B, "num_nextn_predict_layers"),
                                             (QWEN3_8_FLAT, "mtp_num_hidden_layers")])
def test_draft_layers(config: Json, key: str) -> None:
    found = [read_config({**config, key: value}).mtp_layers for value in (3, 0, None)]
    assert found == [3, 0, 0], "null counts as absent"


def test_geometry_of_gated_deltanet() -> None:
    g = read_config({**QWEN3_NEXT, "linear_num_key_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 96})
    assert g.geometry == GdnGeometry(8, 32, 64, 96)
    with pytest.raises(ArgumentError, match="num_v_heads"):
        read_config({**QWEN3_NEXT, "linear_num_value_heads": 40})
    with pytest.raises(ArgumentError, match="linear_key_head_dim"):
        read_config({**QWEN3_5_MOE, "text_config": without(QWEN3_5_MOE["text_config"], "linear_key_head_dim"),
                     "linear_key_head_dim": 128})  # not the outer one


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_an_inner_config_is_unwrapped(key: str) -> None:
    outer = {"architectures": ["SomeVisionWrapper"], "model_type": "wrapper", "hidden_size": 1,
             "torch_dtype": "float32", "mamba_num_heads": 1, key: without(NANO_30B, "architectures")}
    read = read_config(outer)
    assert read.geometry.nheads == 64 and read.hidden_size == 2688
    assert read.architecture == "SomeVisionWrapper" and read.act_dtype == torch.bfloat16
    outer[key] = without(outer[key], "torch_dtype")
    assert read_config(outer).act_dtype == torch.float32
    outer[key] = SimpleNamespace(**NANO_30B)
    assert read_config(outer).geometry.nheads == 64


def test_the_architecture_decides_before_the_model_type() -> None:
    assert read_config({**GRANITE, "model_type": "bamba"}).model_type == "granitemoehybrid"
    assert read_config(without(GRANITE, "architectures")).model_type == "granitemoehybrid"
    with pytest.raises(UnsupportedError, match="Mamba1"):
        read_config({**NANO_30B, "architectures": ["JambaForCausalLM"]})
    with pytest.raises(UnsupportedError, match="Mamba1"):
        read_config({"architectures": ["JambaForCausalLM"], "text_config": NANO_30B})


@pytest.mark.parametrize(("config", "reason"), [
    ({"architectures": ["JambaForCausalLM"], "model_type": "jamba"}, "Mamba1"),
    ({"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}, "Mamba1"),
    ({"architectures": ["HymbaForCausalLM"]}, "Mamba1"), ({"model_type": "phi4flash"}, "Mamba1"),
    ({"d_model": 768, "n_layer": 24, "ssm_cfg": {}}, "Mamba1"),
    ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "Mamba1"),
    ({"model_type": "qwen4_exp"}, "gated-delta-net"), ({**QWEN3_NEXT, "layer_types": ["attention"] * 4,
      "architectures": None}, "none of its 4 layers"),
    ({**QWEN3_NEXT, "architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid"}, "gated-delta-net"),
    ({"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}, "delta-attention"),
    ({"model_type": "bailing_hybrid"}, "delta-attention"),
    ({"architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h"}, "block_configs"),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM: not an arch"),
    ({}, "config: not an arch"),
])
def test_what_is_not_applicable_says_why(config: Json, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        read_config(config)


class HfConfig:
    model_type = "mamba2"

    def __init__(self, values: Json) -> None:
        self.__dict__.update(without(values, "model_type"))


class WithToDict:
    def to_dict(self) -> Json:
        return dict(CODESTRAL)


def test_every_form_a_config_comes_in(tmp_path: Path) -> None:
    text = json.dumps({**CODESTRAL, "_name_or_path": "mistralai/x"})
    assert "Infinity" in text  # bare, as in the published file
    (tmp_path / "config.json").write_text(text)
    forms = [CODESTRAL, text, tmp_path, str(tmp_path), tmp_path / "config.json", WithToDict(),
             HfConfig(CODESTRAL), HfConfig(without(CODESTRAL, "architectures")), SimpleNamespace(**CODESTRAL)]
    assert {read_config(form).geometry for form in forms} == {get("mamba-codestral-7b-v0.1").geometry}
    assert read_config(text).name_or_path == "mistralai/x"


@pytest.mark.parametrize("config", [None, 5, "{", "[1]", "/nowhere/config.json", HfConfig, [NANO_30B]])
def test_what_is_no_config(config: object) -> None:
    with pytest.raises(ArgumentError, match=r"^config: expected"):
        load_config(config)


def test_the_caller_keeps_his_dict() -> None:
    config = {**NANO_30B}
    read_config(config)
    assert config == NANO_30B
