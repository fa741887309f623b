"""The tuner on Gated DeltaNet: what is asked for, candidates, resources, and a run on a GPU that is only pretended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fallback_triton.gdn_config import GdnTritonConfig, default_config
from fallback_triton.gdn_config import validate as validate_triton
from replayssm_cute import gdn_dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_layout import gdn_ring_bytes, gdn_step_bytes
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.kernels.gdn_config import GdnConfig, heuristic, validate
from replayssm_cute.kernels.targets import for_capability
from replayssm_cute.registry import tuned
from replayssm_cute.registry.models import DTYPES, gdn_models
from replayssm_tune import cli, figures
from replayssm_tune.plan import Point, distinct, unit
from replayssm_tune.space import candidates
from replayssm_tune.subject import find, steps_of
from tests.tune_call import ROOT, Tune, tuning

H200, B200 = Arch("cuda", (9, 0), "NVIDIA_H200", 132), Arch("cuda", (10, 0), "NVIDIA_B200", 148)
QWEN3_NEXT, SMALL = GdnGeometry(16, 32), GdnGeometry(2, 4)
NAME = "op={},head_k_dim=128,head_v_dim=128,state_dtype=float32,device_name=NVIDIA_H200.json"


def points(batch: int, state: str = "float32", heads: GdnGeometry = SMALL) -> list[Point]:
    """Decode, and verify of several windows with either fold."""
    windows = [(tokens, length, fold) for tokens, length in ((1, 16), (4, 16), (8, 16), (16, 32))
               for fold in ("exact", "ring")]
    return [Point(heads, state, 16, batch, "gdn_decode"), *(
        Point(heads, state, length, batch, "gdn_verify", tokens=tokens, fold=fold) for tokens, length, fold in windows)]


@pytest.mark.parametrize("device", [H200, B200], ids=str)
@pytest.mark.parametrize("state", DTYPES)
def test_candidates_are_valid_and_begin_with_the_heuristic(device: Arch, state: str) -> None:
    target = for_capability(device.capability)
    assert target is not None
    for batch in (1, 64, 512):
        for point in points(batch, state):
            found = [GdnConfig.from_dict(c) for c in candidates("cute", point.problem, batch, device)]
            assert found[0] == heuristic(point.problem, batch, target) and len(set(found)) == len(found) > 4, point
            assert all(validate(point.problem, c, target) for c in found)
            assert {c.design for c in found} == {"register", "staged"}, "both have the same bits"
            triton = [GdnTritonConfig.from_dict(c) for c in candidates("triton", point.problem, batch, device)]
            assert triton[0] == default_config(point.problem) and all(validate_triton(point.problem, c) for c in triton)
            assert len({tuple(v for k, v in c.to_dict().items() if k != "max_registers") for c in triton}) == 1, \
                "another split would sum in another order"


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
def test_every_head_ratio_has_candidates(ratio: int) -> None:
    for device in (H200, B200):
        for point in points(64, heads=GdnGeometry(2, 2 * ratio)):
            assert len(candidates("cute", point.problem, 64, device)) > 4


def test_kernels_of_the_same_code_are_one_candidate() -> None:
    """CTAs only limit a register kernel's registers: where two limits leave all 255, the code is the same."""
    for point in points(1):
        found = [GdnConfig.from_dict(c) for c in candidates("cute", point.problem, 1, H200)]
        limits = [(c.rows, c.tile_v, min(255, 65536 // (32 * (c.warps + c.warps % 2) * c.min_ctas)))
                  for c in found if c.design == "register"]
        assert len(set(limits)) == len(limits) > 3


def test_head_sizes_that_cute_refuses_have_triton_alone() -> None:
    point = Point(GdnGeometry(2, 4, 64, 80), "float32", 16, 8, "gdn_decode")
    cute, triton = (unit(point, backend, H200) for backend in ("cute", "triton"))
    assert not cute.support and cute.configs == () and "K = V = 128" in cute.support.reason
    assert triton.support and len(triton.configs) > 1


def test_a_kernel_is_compiled_once_for_all_batches() -> None:
    found = find("qwen3-next-80b-a3b", 8).points(["float32"], [16], [64, 128, 256])
    units = [unit(point, "triton", H200) for point in found]
    assert sum(len(u.configs) for u in units) == 3 * len(distinct(units)) > 0


def test_models_dimensions_and_configs(tmp_path: Path) -> None:
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
             "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "torch_dtype": "bfloat16",
        "hidden_size": 2048, "num_hidden_layers": 48, **heads}))
    for text in ("qwen3-next-80b-a3b", str(tmp_path / "config.json"), "32/16x128x128"):
        assert find(text).geometry == QWEN3_NEXT and find(text, 4).geometry == GdnGeometry(4, 8)
        assert find(text).op == "gdn_decode" and find(text).layers == (None if "/16x" in text else 36)
    step = steps_of(QWEN3_NEXT, "gdn_verify")[0]
    assert step == {"op": "gdn_verify", "ring_dtype": "bfloat16", "tokens": 4, "fold": "exact"}
    state, rings = find("qwen3-next-80b-a3b").memory("float32", 16, step)
    assert (state, rings) == (36 * 2**21, 36 * gdn_ring_bytes(QWEN3_NEXT, 16, exact_fold=True))


def test_steps_are_every_combination() -> None:
    found = steps_of(QWEN3_NEXT, "gdn_verify", [2, 4], ["exact", "ring"], ["bfloat16", "float32"])
    assert len(found) == 8 == len({tuple(sorted(step.items())) for step in found})
    assert [step["ring_dtype"] for step in steps_of(QWEN3_NEXT, None, None, None, ["float16"])] == ["float16"]


@pytest.mark.parametrize(("arguments", "reason"), [
    (["explain", "qwen3-next-80b-a3b", "--op", "mamba2_decode"], "op: expected gdn_decode or gdn_verify"),
    (["explain", "granite-4.0-h-tiny", "--op", "gdn_decode"], "op: expected mamba2_decode"),
    (["explain", "granite-4.0-h-tiny", "--ring-dtype", "float16"], "--ring-dtype: expected --op gdn_decode or gdn_v"),
    (["explain", "qwen3-next-80b-a3b", "--spec-tokens", "4"], "--spec-tokens: expected --op gdn_verify"),
    (["explain", "qwen3-next-80b-a3b", "--op", "gdn_decode", "--fold", "ring"], "--fold: expected --op gdn_verify"),
    (["explain", "qwen3-next-80b-a3b", "--tp", "3"], "tp: expected a positive divisor of num_k_heads=16"),
    (["run", "--dry-run", "--no-compile", "--device", "H200", "--geometry", "4/2x128x128", "--op", "gdn_verify",
      "--spec-tokens", "16"], "buffer_len: expected at least two windows, 2 T = 32, got 16")])
def test_requests_that_make_no_sense_are_named(capsys: pytest.CaptureFixture[str], arguments: list[str],
                                               reason: str) -> None:
    assert cli.main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_explain_tells_memory_backend_and_what_would_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "qwen3-next-80b-a3b", "--op", "gdn_verify", "--fold", "ring", "--device", "NVIDIA_L40S",
                     "--batch", "64", "--state-dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert "verify T=4 ring fold, state float32, L=16: a request takes 72.0 MiB of state and 6.8 of rings in" in said
    assert "batch 64, on NVIDIA_L40S (sm_89):\n-> triton" in said
    assert "run --geometry 32/16x128x128 --op gdn_verify --spec-tokens 4 --fold ring --ring-dtype bfloat16" in said


def test_a_dry_run_counts_the_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--dry-run", "--no-compile", "--geometry", "4/2x128x128", "--device", "NVIDIA_B200", "--op",
                     "gdn_verify", "--spec-tokens", "2,4", "--batch", "8,64", "--state-dtype", "float16"]) == 0
    said = capsys.readouterr().out
    assert "4/2x128x128 on NVIDIA_B200 (sm_100): 4 points" in said
    assert len(re.findall(r"verify T=[24] exact fold float16 +16 +(cute|triton) +2 ", said)) == 4


#: In a process of its own: other tests interpret Triton's kernels.
RESOURCES = """
import json, sys
from replayssm_cute.arch import Arch
from replayssm_tune import resources
from replayssm_tune.point import Point
from replayssm_tune.space import candidates
point, backend = json.loads(sys.argv[1])
problem, arch = Point.from_dict(point).problem, Arch("cuda", (9, 0), "NVIDIA_H200", 132)
found = resources.of(backend, problem, candidates(backend, problem, 8, arch)[0], arch)
print(json.dumps([found.registers, found.spilled, found.threads, found.shared]))
"""


@pytest.mark.parametrize(("backend", "point"), [("triton", points(8)[2]), ("cute", points(8)[0])], ids=str)
def test_resources_of_a_kernel(backend: str, point: Point) -> None:
    if backend == "cute":
        pytest.importorskip("cutlass")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    environment.pop("TRITON_INTERPRET", None)
    run_of = subprocess.run([sys.executable, "-c", RESOURCES, json.dumps([point.to_dict(), backend])], check=True,
                            env=environment, cwd=ROOT, capture_output=True, text=True)
    registers, spilled, threads, shared = json.loads(run_of.stdout.splitlines()[-1])
    assert 32 <= registers <= 255 and spilled >= 0 and threads % 32 == 0 and shared > 0


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    return tuning(tmp_path, monkeypatch, capsys, "--geometry", "4/2x128x128", "--state-dtype", "float32", "--jobs", "1")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The dispatcher reads what the run wrote."""
    monkeypatch.setenv(tuned.USER_FOLDER_VARIABLE, str(tmp_path))
    for forget in (tuned.clear_cache, gdn_dispatch.candidates.cache_clear):
        forget()
    yield
    for forget in (tuned.clear_cache, gdn_dispatch.candidates.cache_clear):
        forget()


@pytest.mark.usefixtures("served")
def test_a_run_writes_rows_that_the_dispatcher_takes(tune: Tune, tmp_path: Path) -> None:
    code, said = tune("--op", "gdn_decode", "--batch", "1,64,256",
                      us=[['"stages": 3', 18.0], ['"max_registers": 96', 25.0], ["max_reg", 26.0]])
    assert code == 0 and "decode 4/2x128x128 float32 L=16 batch 64: per step 40.00 us, cute 18.00 us" in said
    rows = {row.batch: row for row in tuned.load_file(tmp_path / NAME.format("gdn_decode")).rows}
    assert rows.keys() == {1, 64, 256} and rows[64].key == (4, 2, "bfloat16", 16, 64)
    cute, triton = rows[64].backends["cute"], rows[64].backends["triton"]
    assert cute.us == 18.0 and cute.config["stages"] == 3 and triton.config["max_registers"] == 96
    share = gdn_step_bytes(SMALL, 16, DTYPES["float32"]) * 64 / 18e-6 / 4e12
    assert rows[64].copy_percent == pytest.approx(100 * share, abs=0.06)
    problem = Point(SMALL, "float32", 16, 64, "gdn_decode").problem
    found = {c.backend: c.config for c in gdn_dispatch.candidates(problem, 64, H200)}
    assert found["cute"] == cute.config and found["triton"] == triton.config
    assert gdn_dispatch.tuned_plan(problem, H200, "cute")[-1] == (129, rows[256].backends["cute"].config)


def test_a_run_of_windows_is_resumed_and_has_no_baseline(tune: Tune, tmp_path: Path) -> None:
    arguments = ("--op", "gdn_verify", "--spec-tokens", "2,4", "--fold", "exact,ring", "--batch", "8")
    log = tmp_path / "log"
    code, said = tune(*arguments, "--backend", "triton", log=str(log))
    assert code == 0 and "verify T=2 ring fold 4/2x128x128 float32 L=16 batch 8" in said
    path = tmp_path / NAME.format("gdn_verify")
    assert [row.key for row in tuned.load_file(path).rows] == [
        (4, 2, "bfloat16", fold, tokens, 16, 8) for fold in ("exact", "ring") for tokens in (2, 4)]
    before, asked = path.read_bytes(), log.read_text().count('"do": "sample"')
    assert tune(*arguments, "--backend", "triton", log=str(log))[0] == 0
    assert path.read_bytes() == before and log.read_text().count('"do": "sample"') == asked > 0


def test_a_wrong_candidate_is_left_out_and_named(tune: Tune, tmp_path: Path) -> None:
    code, said = tune("--op", "gdn_decode", "--batch", "64", "--backend", "cute", error=[['"stages": 3', 0.5]],
                      us=[['"stages": 3', 1.0]])
    assert code == 0 and "decode float32 L=16: cute" in said and "left out: wrong by 5.0e-01" in said
    row, = tuned.load_file(tmp_path / NAME.format("gdn_decode")).rows
    assert row.backends["cute"].config["stages"] != 3


@pytest.fixture
def rows(tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with rows of windows of four tokens, at two ring lengths and two batches."""
    tune("--op", "gdn_verify", "--batch", "8,64", "--buffer-len", "16,32", "--backend", "triton")
    return tmp_path


def test_show_names_the_step(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(rows), "--op", "gdn_verify"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"verify T=4 exact fold 4/2x128x128 +float32 +16 +64 +40\.00 +20\.00 ", said)
    assert "rings MiB" in said, "two ring lengths are a comparison"
    assert cli.main(["show", str(rows), "--op", "gdn_decode"]) == 2
    figure = figures.read([str(rows)])[0]
    assert figure.point == Point(SMALL, "float32", 16, 8, "gdn_verify", tokens=4, fold="exact")
    assert figure.nbytes == 8 * gdn_step_bytes(SMALL, 16, DTYPES["float32"], tokens=4, accepted=3, exact_fold=True)


def test_list_has_the_models_of_an_operation(rows: Path, capsys: pytest.CaptureFixture[str],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "SHIPPED_FOLDER", rows)
    tuned.clear_cache()
    try:
        assert cli.main(["list", "--op", "gdn_verify"]) == 0
    finally:
        tuned.clear_cache()
    said = capsys.readouterr().out
    assert all(m.name in said for m in gdn_models()) and "granite" not in said and "NVIDIA_H200" in said
    assert "rows of Gated DeltaNet verify T=4 exact fold at L=16" in said


def test_export_check_and_report_take_them(rows: Path, capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    (rows / "shipped").mkdir()
    monkeypatch.setattr(tuned, "SHIPPED_FOLDER", rows / "shipped")       # whose provenance is another
    archive = ["--to", str(rows / "rows.zip")]
    assert cli.main(["export", str(rows), "--op", "gdn_decode", *archive]) == 2
    assert cli.main(["export", str(rows), "--op", "gdn_verify", *archive]) == 0
    assert cli.main(["check", str(rows / NAME.format("gdn_verify"))]) == 0
    assert "4 rows" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert cli.main(["report", str(rows), "--out", str(rows / "report")]) == 0
    page = (rows / "report" / "report.html").read_text()
    assert "verify T=4 exact fold 4/2x128x128, L=32" in page and "qwen3-next-80b-a3b" in page


def test_steps_need_their_heads() -> None:
    with pytest.raises(ArgumentError, match="op"):
        steps_of(QWEN3_NEXT, "mamba2_decode")
