"""What the command line understands: models, dimensions, lists, durations; and that its mistakes are named."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.types import Mamba2Geometry
from replayssm_tune import cli
from replayssm_tune.subject import find

CONFIG = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "mamba_n_heads": 96,
          "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
          "hidden_size": 3072, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]}


def test_a_model_is_a_name_a_config_or_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    for text in (str(path), str(tmp_path)):
        assert find(text).geometry == Mamba2Geometry(96, 64, 128, 1) and find(text).layers == 2
        assert find(text, 4).geometry == Mamba2Geometry(24, 64, 128, 1), "one group is replicated"
    assert find("granite-4.0-h-tiny").geometry == Mamba2Geometry(48, 64, 128, 1)
    assert find("granite-4.0-h-tiny", 2).geometry.nheads == 24 and find("granite-4.0-h-tiny").layers == 36
    assert find("64x64x128/8", 2).geometry == Mamba2Geometry(32, 64, 128, 4) and find("64x64x128/8").layers is None


def test_memory_is_that_of_all_layers() -> None:
    state, rings = find("granite-4.0-h-tiny").memory("float32", 16)
    assert (round(state / 2**20, 1), round(rings / 2**20, 1)) == (54.0, 3.6), "docs/models.md"
    alone = find("48x64x128/1").memory("float32", 16)
    assert (state, rings) == (36 * alone[0], 36 * alone[1])


def test_what_is_no_model_says_what_would_be(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"granite.*the path of a config.json, HxPxN/G or HV/HkxVxK, got 'gr"):
        find("granite-4-h")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match="the path of a JSON file"):
        find(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    with pytest.raises(UnsupportedError):
        find(str(tmp_path))
    with pytest.raises(ArgumentError, match="tp: expected"):
        find("granite-4.0-h-tiny", 5)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("1h30m", 5400.0),
                                               ("2.5s", 2.5)])
def test_durations(text: str, seconds: float) -> None:
    assert cli.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "five", "5x", "-3", "m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no duration such as"):
        cli.duration(text)


@pytest.mark.parametrize(("arguments", "reason"), [
    (["run", "granite-4.0-h-tiny", "--state-dtype", "float8"], "'float8' is none of float32, float16, bfloat16"),
    (["run", "granite-4.0-h-tiny", "--batch", "1,0"], "'0' is no positive integer"),
    (["run", "granite-4.0-h-tiny", "--backend", "torch"], "'torch' is none of cute, triton"),
    (["run", "granite-4.0-h-tiny", "--budget", "soon"], "'soon' is no duration"),
    (["run", "--geometry", "64x64"], "is not HxPxN/G"),
    (["explain", "granite-4.0-h-tiny", "--tp", "0"], "'0' is no positive integer")])
def test_arguments_that_are_none_are_named(capsys: pytest.CaptureFixture[str], arguments: list[str],
                                           reason: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "reason"), [
    (["explain"], "exactly one of MODEL, --model and --geometry, got none"),
    (["explain", "granite-4.0-h-tiny", "--geometry", "64x64x128/8"], "exactly one of"),
    (["run", "granite-4.0-h-tiny", "--dry-run", "--no-compile", "--buffer-len", "65", "--device", "H200"],
     "buffer_len: expected an integer in 1..64, got 65"),
    (["explain", "no-such-model"], "model: expected a registry name such as")])
def test_requests_that_make_no_sense_are_named(capsys: pytest.CaptureFixture[str], arguments: list[str],
                                               reason: str) -> None:
    assert cli.main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_explain_tells_memory_and_backend_on_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "granite-4.0-h-tiny", "--device", "NVIDIA_B200", "--batch", "64", "--state-dtype",
                     "float32", "--tp", "2"]) == 0
    said = capsys.readouterr().out
    assert "27.0 MiB of state and 1.9 of rings in 36 layers" in said
    assert "24x64x128/1, state float32" in said and "on NVIDIA_B200 (sm_100):\n-> cute" in said


def test_help_names_the_commands_in_the_order_of_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    places = [said.index(f"\n    {name} ") for name in ("list", "explain", "run", "show", "report", "check", "export")]
    assert places == sorted(places)
