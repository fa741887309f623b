"""``supports_replayssm``: every refusal with its reason, and what a positive answer says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm_cute import dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.errors import ArgumentError
from replayssm_cute.registry import tuned
from replayssm_cute.registry.models import get
from replayssm_cute.registry.support import ModelSupport, supports_replayssm
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem, Support
from tests.test_supports_gdn import QWEN3_5

Json = dict[str, Any]

NANO = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "mamba_num_heads": 64,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "hidden_size": 2688,
        "mamba_ssm_cache_dtype": "float32", "torch_dtype": "bfloat16",
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
LIGHTNING = {**NANO, "num_nextn_predict_layers": 1}
SUPER = {**NANO, "mamba_num_heads": 128, "hidden_size": 4096, "num_nextn_predict_layers": 1,
         "hybrid_override_pattern": "M" * 40 + "E" * 48}
FALCON_34B = {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "mamba_n_heads": 32,
              "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 2, "mamba_d_conv": 4,
              "hidden_size": 5120, "num_hidden_layers": 72, "torch_dtype": "bfloat16"}
H200 = Arch("cuda", (9, 0), "NVIDIA_H200", 132)
CPU = {"device": "cpu"}


@pytest.fixture(autouse=True)
def no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No tuned row exists unless the test writes one, and nothing of an earlier test is kept."""
    monkeypatch.setattr(tuned, "SHIPPED_FOLDER", tmp_path)
    monkeypatch.delenv("REPLAYSSM_TUNED_DIR", raising=False)

    candidates = dispatch.candidates  # a test may replace it

    def forget() -> None:
        tuned.clear_cache()
        candidates.cache_clear()

    forget()
    yield
    forget()


CONFIGS = {"cute": {"design": "bulk", "tile_p": 64, "threads": 128}, "triton": {}}


def write_row(folder: Path, device: str = "NVIDIA_H200", nheads: int = 64, ngroups: int = 8,
              buffer_len: int = 16, state_dtype: str = "float32", predicted: bool = False, **backends: float) -> None:
    entries = {name: {"config": CONFIGS[name], "us": us, "runner_up": None} for name, us in backends.items()}
    tuned.write_rows(
        folder / tuned.file_name(dispatch.OP, 64, 128, state_dtype, device),
        {"device": device, "capability": "10.0" if "B200" in device else "9.0", "sms": 132, "torch": "2.13.0",
         "triton": None, "cutlass_dsl": None, "package": "0.1.0", "date": "2026-11-30", "method": "test",
         "predicted": predicted},
        [{"nheads": nheads, "ngroups": ngroups, "buffer_len": buffer_len, "batch": 64, "backends": entries,
          "per_step_us": None, "copy_percent": None}])
    tuned.clear_cache()
    dispatch.candidates.cache_clear()


def test_a_model_on_a_cpu() -> None:
    answer = supports_replayssm(NANO, **CPU)
    assert answer and answer.reason == "" and answer.model == "nemotron-3-nano-30b-a3b"
    assert answer.geometry == Mamba2Geometry(64, 64, 128, 8) and answer.state_dtype == torch.float32
    assert answer.backend == "batch 1, 64, 512: torch (no GPU)"
    assert not answer.tuned and answer.tune_command is None and answer.warnings == ()
    assert isinstance(answer, Support) and isinstance(answer, ModelSupport)


def test_twins_are_told_apart() -> None:
    """Same geometry, layers and width: by the draft layers, else by the hub id."""
    assert supports_replayssm(LIGHTNING, **CPU).model == "nemotron-3.5-lightning-30b-a3b"
    named = {**NANO, "_name_or_path": get("nemotron-3.5-lightning-30b-a3b").hub_ids[0]}
    assert supports_replayssm(named, **CPU).model == "nemotron-3.5-lightning-30b-a3b"


@pytest.mark.parametrize(("options", "reason"), [
    ({"tp": 3}, "tp: expected a positive divisor of nheads=64, got 3"),
    ({"buffer_len": 0}, "buffer_len: expected an integer in 1..64, got 0"), ({"buffer_len": 65}, "1..64"),
    ({"speculative_tokens": 1}, "speculative_tokens: "), ({"kv_transfer": True}, "kv_transfer: "),
    ({"prefix_cache_mode": "all"}, "prefix_cache_mode: "),
    ({"stochastic_rounding": True}, "a float32 checkpoint is not rounded"),
])
def test_refused_options(options: Json, reason: str) -> None:
    answer = supports_replayssm(NANO, **CPU, **options)
    assert not answer and not answer.ok and reason in answer.reason
    assert answer.state_dtype is not None and answer.backend == ""


@pytest.mark.parametrize(("config", "reason"), [
    ({"architectures": ["JambaForCausalLM"]}, "Mamba1"),
    ({"model_type": "qwen4_exp"}, "does not serve"),
    ({**NANO, "time_step_limit": [0.0, 0.1]}, "does not clamp"),
    ({key: value for key, value in NANO.items() if key != "mamba_head_dim"}, "mamba_head_dim"),
    ({**NANO, "hybrid_override_pattern": "*-"}, "none of its 2 layers"),
])
def test_refused_models(config: Json, reason: str) -> None:
    answer = supports_replayssm(config, **CPU)
    assert not answer and reason in answer.reason and answer.model is None and answer.geometry is None


def test_a_geometry_without_an_entry_says_how_to_get_one() -> None:
    answer = supports_replayssm({**NANO, "mamba_num_heads": 40}, tp=2, state_dtype="float16", device=H200)
    command = "replayssm-tune run --geometry 20x64x128/4 --state-dtype float16 --buffer-len 16"
    assert not answer and answer.model is None and answer.geometry == Mamba2Geometry(20, 64, 128, 4)
    assert answer.tune_command == command
    assert all(word in answer.reason for word in ("no registry entry", "40x64x128/8", "make test-gpu", command))


def test_an_entry_of_another_architecture_does_not_count() -> None:
    codestral = {"architectures": ["Mamba2ForCausalLM"], "num_heads": 256, "head_dim": 64, "state_size": 128,
                 "n_groups": 8, "conv_kernel": 4, "hidden_size": 8192, "num_hidden_layers": 4}
    assert "no registry entry" in supports_replayssm(codestral, **CPU).reason


def test_a_state_dtype_that_was_not_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = get("nemotron-3-nano-30b-a3b")
    monkeypatch.setitem(entry.__dict__, "validated_state_dtypes", (torch.float32,))
    answer = supports_replayssm(NANO, state_dtype=torch.float16, **CPU)
    assert not answer and answer.reason == "nemotron-3-nano-30b-a3b: not validated with a float16 checkpoint"


@pytest.mark.parametrize(("config", "asked", "resolved"), [
    (NANO, None, torch.float32), (NANO, "auto", torch.float32), (NANO, "float16", torch.float16),
    (NANO, "torch.bfloat16", torch.bfloat16), (NANO, torch.float16, torch.float16),
    ({**NANO, "mamba_ssm_cache_dtype": "float16"}, None, torch.float16),
    ({**NANO, "mamba_ssm_cache_dtype": None}, None, torch.float32),
    (FALCON_34B, None, torch.bfloat16), ({**FALCON_34B, "torch_dtype": "float16"}, None, torch.float16),
    (FALCON_34B, torch.float32, torch.float32),
])
def test_state_dtype(config: Json, asked: torch.dtype | str | None, resolved: torch.dtype) -> None:
    assert supports_replayssm(config, state_dtype=asked, **CPU).state_dtype == resolved


@pytest.mark.parametrize(("config", "options", "warning"), [
    (NANO, {"buffer_len": 24}, "buffer_len 24 works"),
    (NANO, {"state_dtype": "bfloat16"}, "no source advises a bfloat16 checkpoint"),
    (SUPER, {"state_dtype": "float16"}, "stochastic rounding only"),
    (NANO, {"state_dtype": "int8"}, "int8 checkpoints are an option of this package's own operation"),
    (NANO, {"state_dtype": torch.float8_e4m3fn, "stochastic_rounding": True}, "no engine offers them"),
    ({**NANO, "hybrid_override_pattern": "MM"}, {}, "the layers or the width are not"),
    (FALCON_34B, {}, "bfloat16 as in vLLM, where SGLang takes float32"),
    (FALCON_34B, {"tp": 4, "state_dtype": "float32"}, "vLLM 0.33 does not split 2 groups over 4 ranks"),
])
def test_warnings(config: Json, options: Json, warning: str) -> None:
    answer = supports_replayssm(config, **CPU, **options)
    assert answer and [warning in text for text in answer.warnings] == [True]


@pytest.mark.parametrize(("config", "options"), [
    (NANO, {"state_dtype": "float16"}), (NANO, {"tp": 8}), (NANO, {"prefix_cache_mode": "align"}),
    (NANO, {"prefix_cache_mode": "none"}), (FALCON_34B, {"tp": 2, "state_dtype": "float32"}),
    (SUPER, {"state_dtype": "float16", "stochastic_rounding": True}),
])
def test_no_warning_without_a_cause(config: Json, options: Json) -> None:
    answer = supports_replayssm(config, **CPU, **options)
    assert answer and answer.warnings == ()


def test_groups_are_split_or_replicated_over_ranks() -> None:
    at = {tp: supports_replayssm(FALCON_34B, tp=tp, **CPU).geometry for tp in (1, 2, 4, 8)}
    assert [(g.nheads, g.ngroups) for g in at.values() if g] == [(32, 2), (16, 1), (8, 1), (4, 1)]


def test_tuned_rows_of_this_device(tmp_path: Path) -> None:
    command = "replayssm-tune run --model nemotron-3-nano-30b-a3b --tp 1 --state-dtype float32 --buffer-len 16"
    before = supports_replayssm(NANO, device=H200)
    assert before and not before.tuned and before.tune_command == command
    write_row(tmp_path, triton=20.0)
    after = supports_replayssm(NANO, device=H200)
    assert after.tuned and after.tune_command is None
    assert after.backend.startswith("batch 1, 64, 512: triton (measured as faster: NVIDIA_H200, batch 64")
    # Rows of another ring length, rank geometry, state dtype or device do not make this one tuned.
    for options in ({"buffer_len": 32}, {"tp": 2}, {"state_dtype": "float16"},
                    {"device": "NVIDIA_H100_80GB_HBM3"}):
        answer = supports_replayssm(NANO, **{"device": H200, **options})
        assert answer and not answer.tuned and answer.tune_command is not None


def test_predicted_rows_are_no_measurements(tmp_path: Path) -> None:
    write_row(tmp_path, device="NVIDIA_B200", predicted=True, cute=10.0)
    answer = supports_replayssm(NANO, device="NVIDIA_B200")
    assert answer.predicted and not answer.tuned and answer.tune_command is not None
    assert "predicted" in dispatch.explain(Mamba2Problem(
        answer.geometry, 16, torch.float32, *(torch.bfloat16,) * 3, torch.int8, torch.int32), 64,
        Arch("cuda", (10, 0), "NVIDIA_B200"))
    assert not supports_replayssm(NANO, device="NVIDIA_B200", tp=2).predicted, "other heads"
    write_row(tmp_path, device="NVIDIA_B200", cute=12.0)
    answer = supports_replayssm(NANO, device="NVIDIA_B200")
    assert answer.tuned and not answer.predicted and answer.tune_command is None


@pytest.mark.parametrize("device", ["NVIDIA_B200", "NVIDIA B200", "B200", Arch("cuda", (10, 0), "NVIDIA_B200")])
def test_a_device_by_name_asks_no_driver(device: str | Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a: pytest.fail("asked the driver"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("asked the driver"))
    answer = supports_replayssm(NANO, device=device, state_dtype="float16")
    assert answer and not answer.tuned
    assert answer.tune_command is not None and "--state-dtype float16" in answer.tune_command


def test_the_slow_backend_on_a_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dispatch.Candidate("torch", Support(True), None, "slow")
    monkeypatch.setattr(dispatch, "candidates", lambda *a: (
        dispatch.Candidate("cute", Support(False, "no"), None, ""), slow))
    answer = supports_replayssm(NANO, device=H200)
    assert answer and answer.backend == "batch 1, 64, 512: torch (slow)"
    assert answer.warnings == ("only the slow PyTorch backend can serve on this GPU",)
    assert supports_replayssm(NANO, **CPU).warnings == ()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_an_8_bit_checkpoint_is_served_and_not_tuned(dtype: str) -> None:
    answer = supports_replayssm(NANO, state_dtype=dtype, device="NVIDIA_B200")
    assert answer and answer.state_dtype is getattr(torch, dtype)
    assert answer.backend.startswith("batch 1, 64, 512: cute")
    assert answer.rounding == "to nearest" and not answer.tuned and answer.tune_command is None


def test_stochastic_rounding_needs_rows_of_whole_calls() -> None:
    narrow = {**NANO, "ssm_state_size": 12}
    answer = supports_replayssm(narrow, state_dtype="float16", stochastic_rounding=True, **CPU)
    assert not answer and "a multiple of 8 columns for stochastic rounding, got 12" in answer.reason


def test_backends_that_differ_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "candidates", lambda problem, batch, arch: (
        dispatch.Candidate("triton" if batch == 1 else "cute", Support(True), None, "because"),))
    assert supports_replayssm(NANO, device=H200).backend \
        == "batch 1: triton (because); batch 64, 512: cute (because)"


@pytest.mark.parametrize(("options", "name"), [
    ({"device": "NVIDIA_Z900"}, "device"), ({"device": "cuda:x"}, "device"),
    ({"tp": 0}, "tp"), ({"tp": 1.0}, "tp"), ({"tp": True}, "tp"), ({"speculative_tokens": -1}, "speculative_tokens"),
    ({"prefix_cache_mode": "some"}, "prefix_cache_mode"), ({"state_dtype": "int4"}, "state_dtype"),
    ({"state_dtype": torch.float64}, "state_dtype"),
])
def test_values_of_no_kind_raise(options: Json, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        supports_replayssm(NANO, **{**CPU, **options})


def test_what_is_no_config_raises() -> None:
    with pytest.raises(ArgumentError, match=r"^config: expected"):
        supports_replayssm(None)


def test_the_registry_touches_no_compiler_and_no_driver() -> None:
    code = ("import sys, torch\n"
            "from replayssm_cute.registry import devices, hf_config, models, support, tuned\n"
            "models.all_models(), tuned.clear_cache()\n"
            f"for config in ({NANO!r}, {QWEN3_5!r}):\n"
            "    for device in ('NVIDIA_A100', 'NVIDIA_B200'):\n"
            "        assert support.supports_replayssm(config, device=device)\n"
            "assert not torch.cuda.is_initialized()\n"
            "print([m for m in ('triton', 'cutlass', 'tvm_ffi') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parents[1])
    assert done.stdout.strip() == "[]"
