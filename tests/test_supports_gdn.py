"""``supports_replayssm`` of Gated DeltaNet models: refusals, who serves decode and verify, what to be warned of."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm_cute import gdn_dispatch
from replayssm_cute.backends import gdn_cute
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.registry import tuned
from replayssm_cute.registry.models import find_by_geometry, get_gdn
from replayssm_cute.registry.support import ModelSupport, supports_replayssm
from replayssm_cute.types import Support
from tests.test_registry_tuned import provenance

Json = dict[str, Any]

HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
QWEN3_NEXT = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "torch_dtype": "bfloat16",
              "hidden_size": 2048, "num_hidden_layers": 48, **HEADS}
MOE_TEXT = {"model_type": "qwen3_5_moe_text", "dtype": "bfloat16", "hidden_size": 2048, "num_hidden_layers": 40,
            "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, **HEADS}
QWEN3_5 = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
           "text_config": MOE_TEXT}
QWEN3_5_27B = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": {
    **MOE_TEXT, "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64,
    "linear_num_value_heads": 48}}
CPU: Json = {"device": "cpu"}
DSL = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in the place of the shipped rows."""
    monkeypatch.setattr(tuned, "SHIPPED_FOLDER", tmp_path)
    monkeypatch.delenv(tuned.USER_FOLDER_VARIABLE, raising=False)
    tuned.clear_cache()
    yield tmp_path
    tuned.clear_cache()


@pytest.mark.parametrize(("config", "name", "heads"), [
    (QWEN3_NEXT, "qwen3-next-80b-a3b", (16, 32)), (QWEN3_5, "qwen3.5-35b-a3b", (16, 32)),
    (QWEN3_5_27B, "qwen3.5-27b", (16, 48))])
def test_models_on_a_cpu(config: Json, name: str, heads: tuple[int, int]) -> None:
    answer = supports_replayssm(config, state_dtype="float32", **CPU)
    assert answer and answer.model == name and answer.geometry == GdnGeometry(*heads)
    assert answer.backend == "decode: torch (no GPU)" and answer.rounding == "to nearest"
    assert answer.warnings == () and not answer.tuned and answer.tune_command is None


def test_generations_of_one_geometry_are_told_apart_by_their_name() -> None:
    twins = find_by_geometry(GdnGeometry(16, 48), "qwen3_5")
    assert len(twins) == 3
    for twin in twins:
        assert supports_replayssm({**QWEN3_5_27B, "_name_or_path": twin.hub_ids[0]}, **CPU).model == twin.name


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_a_rank_holds_whole_key_heads(tp: int) -> None:
    answer = supports_replayssm(QWEN3_5_27B, tp=tp, **CPU)
    assert answer and answer.geometry == GdnGeometry(16 // tp, 48 // tp) and answer.warnings == ()


@pytest.mark.parametrize(("options", "reason"), [
    ({"tp": 3}, "tp: expected a positive divisor of num_k_heads=16, got 3"), ({"tp": 32}, "num_k_heads=16, got 32"),
    ({"buffer_len": 0}, "buffer_len: expected an integer in 1..64, got 0"), ({"buffer_len": 65}, "1..64"),
    ({"speculative_tokens": 16}, "speculative_tokens: expected at most 15 drafts, a window of 16, got 16"),
    ({"speculative_tokens": 8}, "buffer_len: expected at least two windows, 2 T = 18, got 16"),
    ({"speculative_tokens": 3, "buffer_len": 24}, "buffer_len: expected a power of two"),
    ({"kv_transfer": True}, "disaggregated serving"), ({"prefix_cache_mode": "all"}, "prefix cache mode 'all'"),
    ({"state_dtype": "int8"}, "state_dtype: a Gated DeltaNet checkpoint cannot be int8"),
    ({"stochastic_rounding": True}, "a float32 checkpoint is not rounded"),
    ({"state_dtype": "bfloat16", "stochastic_rounding": True, "speculative_tokens": 1},
     "stochastic_rounding: a verify step rounds its checkpoint to nearest"),
])
def test_refused_options(options: Json, reason: str) -> None:
    answer = supports_replayssm(QWEN3_5, **CPU, **options)
    assert not answer and reason in answer.reason and answer.backend == ""
    assert (answer.geometry is None) == ("tp" in options)


def test_a_geometry_without_an_entry() -> None:
    answer = supports_replayssm({**QWEN3_NEXT, "linear_num_value_heads": 64}, tp=2, **CPU)
    assert not answer and answer.model is None and answer.geometry == GdnGeometry(8, 32)
    assert answer.reason.startswith("qwen3_next 64/16x128x128: no registry entry has this geometry")
    assert answer.reason.endswith("to tune it, run replayssm-tune run --geometry 32/8x128x128 --op gdn_decode "
                                  "--state-dtype bfloat16 --buffer-len 16")


def test_a_state_dtype_that_was_not_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(get_gdn("qwen3-next-80b-a3b").__dict__, "validated_state_dtypes", (torch.float32,))
    assert supports_replayssm(QWEN3_NEXT, **CPU).reason \
        == "qwen3-next-80b-a3b: not validated with a bfloat16 checkpoint"


@pytest.mark.parametrize(("config", "asked", "resolved"), [
    (QWEN3_NEXT, None, torch.bfloat16), (QWEN3_NEXT, "float32", torch.float32),
    ({**QWEN3_NEXT, "mamba_ssm_dtype": "float32"}, None, torch.bfloat16),  # a key that vLLM reads of Qwen3.5 only
    (QWEN3_5, "auto", torch.float32), (QWEN3_5, torch.float16, torch.float16),
    ({**QWEN3_5, "text_config": {**MOE_TEXT, "mamba_ssm_dtype": "bfloat16"}}, None, torch.bfloat16),
    ({**QWEN3_5, "text_config": {**MOE_TEXT, "mamba_ssm_dtype": None}}, None, torch.bfloat16),
])
def test_state_dtype(config: Json, asked: torch.dtype | str | None, resolved: torch.dtype) -> None:
    assert supports_replayssm(config, state_dtype=asked, **CPU).state_dtype == resolved


def warned(config: Json, **options: Any) -> list[str]:
    answer = supports_replayssm(config, **CPU, **options)
    assert answer, answer.reason
    return [text.split(":")[0] for text in answer.warnings]


def test_warnings() -> None:
    assert warned(QWEN3_5) == warned(QWEN3_5, speculative_tokens=3) == warned(QWEN3_5, prefix_cache_mode="align") == []
    assert warned(QWEN3_NEXT) == ["the config names no state dtype", "every flush rounds a bfloat16 checkpoint"]
    narrow = ["no source advises a float16 checkpoint for qwen3.5-35b-a3b"]
    assert warned(QWEN3_5, state_dtype="float16") == [*narrow, "every flush rounds a float16 checkpoint"]
    assert warned(QWEN3_5, state_dtype="float16", stochastic_rounding=True) == narrow
    assert warned(QWEN3_5, speculative_tokens=4) == [
        "4 drafts work, but qwen3.5-35b-a3b was validated with windows of 2, 3, 4, 8, 16 tokens (1 + drafts)"]
    assert warned(QWEN3_5, buffer_len=24) == [
        "buffer_len 24 works, but qwen3.5-35b-a3b was validated with 8, 16, 32, 64"]
    other = {**QWEN3_5, "text_config": {**MOE_TEXT, "num_hidden_layers": 8}}
    assert warned(other) == ["the geometry is that of qwen3.5-35b-a3b, the layers or the width are not"]


def backend(**options: Any) -> str:
    answer = supports_replayssm(QWEN3_5, **options)
    assert answer, answer.reason
    return answer.backend


FIRST = "cute (the first choice on this architecture)"
FOLDS = "; folds outside of it: triton (cute: there is no kernel for folds outside of a step)"


@DSL
@pytest.mark.parametrize("device", ["NVIDIA_H200", "NVIDIA_B200", "NVIDIA_B300"])
def test_where_the_cute_kernels_serve(device: str) -> None:
    assert backend(device=device) == backend(device=device, state_dtype="bfloat16") == f"decode: {FIRST}"
    assert backend(device=device, speculative_tokens=3) == f"verify of 4 tokens: {FIRST}{FOLDS}"
    page = (Path(__file__).parents[1] / "docs" / "registry.md").read_text()
    assert backend(device=device) in page and backend(device=device, speculative_tokens=3) in page
    assert backend(device=device, speculative_tokens=15, buffer_len=64) \
        == f"verify of 16 tokens: triton (cute: L=64 is not in 2..32){FOLDS}"


def test_rings_in_the_dtype_of_the_checkpoint_are_named_where_they_change_who_serves(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn_cute, "supports", lambda problem, arch: Support(
        problem.ring_dtype == torch.bfloat16, "bf16 rings only"))
    assert backend(device="NVIDIA_B200") == f"decode: {FIRST}; with float32 rings: triton (cute: bf16 rings only)"
    assert backend(device="NVIDIA_B200", state_dtype="bfloat16") == f"decode: {FIRST}"


@DSL
@pytest.mark.parametrize(("device", "rounding"), [
    ("NVIDIA_H200", "stochastic, in software"), ("NVIDIA_B200", "stochastic, in hardware (cvt.rs)"),
    ("NVIDIA_A100", "stochastic, in software")])
def test_how_the_checkpoint_is_rounded(device: str, rounding: str) -> None:
    answer = supports_replayssm(QWEN3_5, device=device, state_dtype="bfloat16", stochastic_rounding=True)
    assert answer.rounding == rounding
    assert supports_replayssm(QWEN3_5, device=device, speculative_tokens=3).rounding == "to nearest"


@DSL
def test_measured_rows_choose_and_what_is_missing_would_be_measured(folder: Path) -> None:
    """Rows of standard decode say nothing about windows."""
    entries = {"cute": {"config": {}, "us": 30.0, "runner_up": None},
               "triton": {"config": {}, "us": 20.0, "runner_up": None}}
    tuned.write_rows(folder / tuned.file_name("gdn_decode", 128, 128, "float32", "NVIDIA_H200"), provenance(), [
        {"num_v_heads": 32, "num_k_heads": 16, "ring_dtype": "bfloat16", "buffer_len": 16, "batch": 64,
         "backends": entries, "per_step_us": None, "copy_percent": None}])
    tuned.clear_cache()
    decode, verify, rank = (supports_replayssm(QWEN3_5, device="NVIDIA_H200", **options) for options in (
        {}, {"speculative_tokens": 3}, {"tp": 2}))
    assert decode.tuned and decode.tune_command is None
    assert decode.backend.startswith("decode: triton (measured as faster: NVIDIA_H200, batch 64, 2026-11-30")
    assert not verify.tuned and verify.backend.startswith("verify of 4 tokens: cute (the first choice")
    assert verify.tune_command == "replayssm-tune run --model qwen3.5-35b-a3b --tp 1 --op gdn_verify --spec-tokens 4 " \
        "--state-dtype float32 --buffer-len 16"
    assert not rank.tuned and "--tp 2 --op gdn_decode" in (rank.tune_command or "")


def test_other_gpus_are_served_by_triton() -> None:
    why = "cute: the kernels are built for 9.0, 10.0 and 10.3, not for NVIDIA_A100 (sm_80)"
    assert backend(device="NVIDIA_A100") == f"decode: triton ({why})"
    assert backend(device="NVIDIA_A100", speculative_tokens=1) \
        == f"verify of 2 tokens: triton ({why}); folds outside of it: triton ({why})"


def test_the_reason_is_what_keeps_the_faster_backends_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn_cute, "supports", lambda problem, arch: Support(False, "not today"))
    assert backend(device="NVIDIA_B200") == "decode: triton (cute: not today)"
    module = gdn_dispatch.backend_module("triton")
    monkeypatch.setattr(module, "supports", lambda problem, arch: Support(False, "nor this"))
    answer = supports_replayssm(QWEN3_5, device="NVIDIA_B200")
    assert isinstance(answer, ModelSupport)
    assert answer.backend == "decode: torch (cute: not today; triton: nor this)"
    assert answer.warnings == ("only the slow PyTorch backend can serve on this GPU",)
