"""Tuned rows of Gated DeltaNet: their format, which row serves a problem, and that the dispatcher takes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fallback_triton.gdn_config import default_config
from replayssm_cute import dispatch, gdn_dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.backends import gdn_cute, gdn_triton
from replayssm_cute.errors import RegistryError
from replayssm_cute.gdn_types import GdnFoldProblem, GdnGeometry, GdnProblem
from replayssm_cute.kernels.gdn_config import GdnConfig, heuristic, validate
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.registry import tuned
from replayssm_cute.registry.tuned_sizes import SIZES
from tests.test_registry_tuned import Folders, Json, provenance

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
H200 = Arch("cuda", (9, 0), "NVIDIA_H200", 132)
DECODE = GdnProblem(GdnGeometry(16, 32), 16, F32, BF16, BF16, (BF16, BF16, F32, F32))
VERIFY = replace(DECODE, tokens=4, exact_fold=True, flag_dtype=torch.int8)
TARGET = TARGETS["sm_90a"]


def staged(**changes: Any) -> Json:
    return replace(GdnConfig("staged", 2, 64, 1, 2, pdl=True), **changes).to_dict()


def row(batch: int = 64, config: Json | None = None, us: float = 20.0, **changes: Any) -> Json:
    backends = {"cute": {"config": config or staged(), "us": us, "runner_up": None},
                "triton": {"config": default_config(DECODE).to_dict(), "us": us + 10, "runner_up": None}}
    return {"num_v_heads": 32, "num_k_heads": 16, "ring_dtype": "bfloat16", "buffer_len": 16, "batch": batch,
            "backends": backends, "per_step_us": 30.0, "copy_percent": 90.0, **changes}


def window(batch: int = 64, tokens: int = 4, fold: str = "exact", **changes: Any) -> Json:
    return row(batch, tokens=tokens, fold=fold, **changes)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = Folders(tmp_path)
    monkeypatch.setattr(tuned, "SHIPPED_FOLDER", made.shipped)
    monkeypatch.setenv("REPLAYSSM_TUNED_DIR", str(made.user))
    for forget in (tuned.clear_cache, gdn_dispatch.candidates.cache_clear):
        forget()
    yield made
    for forget in (tuned.clear_cache, gdn_dispatch.candidates.cache_clear):
        forget()


def write(folders: Folders, *rows: Json, op: str = "gdn_decode", state: str = "float32", **changes: Any) -> Path:
    path = folders.user / tuned.file_name(op, 128, 128, state, "NVIDIA_H200")
    tuned.write_rows(path, provenance(**changes), rows)
    tuned.clear_cache()
    gdn_dispatch.candidates.cache_clear()
    return path


def key(problem: GdnProblem, batch: int) -> tuple[Any, ...] | None:
    hit = tuned.lookup(problem.op, problem, batch, H200)
    return None if hit is None else hit.key


def test_files_are_canonical_and_named_for_their_heads(folders: Folders) -> None:
    path = write(folders, window(64), window(1, fold="ring"), window(1), op="gdn_verify")
    assert path.name == "op=gdn_verify,head_k_dim=128,head_v_dim=128,state_dtype=float32,device_name=NVIDIA_H200.json"
    before = path.read_bytes()
    assert write(folders, *json.loads(before)["rows"][::-1], op="gdn_verify").read_bytes() == before
    assert [r.key for r in tuned.load_file(path).rows] == [
        (32, 16, "bfloat16", fold, 4, 16, batch) for fold, batch in (("exact", 1), ("exact", 64), ("ring", 1))]
    assert [(r["fold"], r["batch"]) for r in json.loads(before)["rows"]] == [("exact", 1), ("exact", 64), ("ring", 1)]


def test_the_page_has_the_names_and_fields() -> None:
    page = (Path(__file__).parents[1] / "docs" / "registry.md").read_text()
    for op in ("gdn_decode", "gdn_verify"):
        assert f"    {tuned.file_name(op, 128, 128, 'float32', 'NVIDIA_H200')}\n" in page
        assert all(f"`{name}`" in page for name in SIZES[op].CHECKS)


@pytest.mark.parametrize(("op", "changes", "reason"), [
    ("gdn_decode", {"num_k_heads": 5}, "num_k_heads: expected a divisor of num_v_heads=32, got 5"),
    ("gdn_decode", {"ring_dtype": "int8"}, "ring_dtype: expected one of float32, float16, bfloat16"),
    ("gdn_decode", {"tokens": 4}, "unknown tokens"), ("gdn_decode", {"buffer_len": 65}, "1..64"),
    ("gdn_verify", {"tokens": 17}, "1..16"), ("gdn_verify", {"fold": "both"}, "fold: expected one of exact, ring"),
    ("gdn_verify", {"tokens": 16}, "buffer_len: expected at least two windows, 2 T = 32, got 16"),
    ("gdn_verify", {"buffer_len": 24}, "buffer_len: expected a power of two")])
def test_broken_rows_are_refused_and_skipped_with_one_warning(folders: Folders, caplog: pytest.LogCaptureFixture,
                                                              op: str, changes: Json, reason: str) -> None:
    good = window() if op == "gdn_verify" else row()
    path = write(folders, good, op=op)
    content = json.loads(path.read_text())
    content["rows"][0] |= changes
    path.write_text(json.dumps(content))
    tuned.clear_cache()
    with pytest.raises(RegistryError) as error:
        tuned.load_file(path)
    assert reason in str(error.value)
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        problem = VERIFY if op == "gdn_verify" else DECODE
        assert key(problem, 64) is None and gdn_dispatch.tuned_plan(problem, H200, "cute") == ()
    assert [str(path) in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.parametrize("name", [
    "op=gdn_decode,headdim=128,dstate=128,state_dtype=float32,device_name=NVIDIA_H200.json",
    "op=gdn_fold,head_k_dim=128,head_v_dim=128,state_dtype=float32,device_name=NVIDIA_H200.json"])
def test_foreign_names(folders: Folders, name: str) -> None:
    good = write(folders, row())
    (folders.user / name).write_text(good.read_text())
    with pytest.raises(RegistryError, match="expected a file name"):
        tuned.load_file(folders.user / name)
    tuned.clear_cache()
    assert key(DECODE, 64) == (32, 16, "bfloat16", 16, 64)


def test_decode_rows_are_found_by_ratio_length_and_work(folders: Folders) -> None:
    write(folders, row(1), row(64), row(256, num_v_heads=16), row(64, num_v_heads=48), row(64, buffer_len=8),
          row(8, ring_dtype="float32"))
    assert key(DECODE, 3) == (32, 16, "bfloat16", 16, 1) and key(DECODE, 60) == (32, 16, "bfloat16", 16, 64)
    assert key(replace(DECODE, geometry=GdnGeometry(4, 8)), 512) == (32, 16, "bfloat16", 16, 64), "a TP rank, same work"
    assert key(replace(DECODE, geometry=GdnGeometry(16, 48)), 1) == (48, 16, "bfloat16", 16, 64)
    assert key(replace(DECODE, buffer_len=8), 1) == (32, 16, "bfloat16", 8, 64)
    assert key(replace(DECODE, ring_dtype=F32), 64) == (32, 16, "float32", 16, 8)
    for other in (replace(DECODE, ring_dtype=F16), replace(DECODE, state_dtype=F16), VERIFY,
                  replace(DECODE, geometry=GdnGeometry(16, 32, 64, 64))):
        assert key(other, 64) is None


def test_verify_rows_serve_their_fold_and_windows_of_their_tiles(folders: Folders) -> None:
    write(folders, window(64), window(64, tokens=2), window(8, fold="ring"), window(64, tokens=8), op="gdn_verify")
    assert key(VERIFY, 1) == key(replace(VERIFY, tokens=3), 1) == (32, 16, "bfloat16", "exact", 4, 16, 64)
    assert key(replace(VERIFY, tokens=1), 1) == (32, 16, "bfloat16", "exact", 2, 16, 64)
    assert key(replace(VERIFY, tokens=6), 1) == (32, 16, "bfloat16", "exact", 8, 16, 64)
    assert key(replace(VERIFY, exact_fold=False), 512) == (32, 16, "bfloat16", "ring", 4, 16, 8)
    assert key(replace(VERIFY, tokens=12), 64) is None and key(replace(VERIFY, exact_fold=False, tokens=8), 1) is None


@pytest.mark.parametrize("heads", [(16, 32), (2, 4), (16, 128)])
def test_the_plan_of_a_step_is_the_lookup_of_every_batch(folders: Folders, heads: tuple[int, int]) -> None:
    write(folders, *(row(batch) for batch in (1, 3, 8, 64, 512)), row(7, num_v_heads=64, num_k_heads=32),
          row(64, buffer_len=32))
    problem = replace(DECODE, geometry=GdnGeometry(*heads))
    ends = tuned.by_batch("gdn_decode", problem, H200)
    assert len(ends) > 1 and [batch for batch, _ in ends] == sorted({batch for batch, _ in ends})
    for batch in (*range(1, 300), 511, 512, 10_000):
        serving = next((r for limit, r in ends if batch <= limit), ends[-1][1])
        assert serving == tuned.lookup("gdn_decode", problem, batch, H200), batch


def test_cute_takes_what_is_valid_and_else_the_heuristic(folders: Folders) -> None:
    write(folders, row(8, staged(stages=3)), row(64, staged(min_ctas=2, stages=8)), row(512, {"design": "staged"}))
    plan = gdn_cute.plan(DECODE, TARGET, gdn_dispatch.tuned_plan(DECODE, H200, "cute"))
    limits = [limit for limit, _ in plan]
    assert limits == sorted(limits)

    def at(batch: int) -> GdnConfig:
        return next(config for limit, config in plan if batch <= limit)

    assert at(1) == at(8) == at(22) == GdnConfig.from_dict(staged(stages=3)), "to sqrt(8 * 64)"
    assert at(64) == heuristic(DECODE, 64, TARGET), "eight stages do not fit"
    assert at(512) == heuristic(DECODE, 512, TARGET), "not a config"
    assert all(validate(DECODE, config, TARGET) for _, config in plan)


def test_what_is_no_config_warns_once(folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    dispatch.warn_once.cache_clear()
    write(folders, row(64, {"design": "staged", "depth": 3}))
    for _ in range(2):
        plan = gdn_cute.plan(DECODE, TARGET, gdn_dispatch.tuned_plan(DECODE, H200, "cute"))
    assert plan == gdn_cute.plan(DECODE, TARGET)
    assert [r.getMessage().split(" skipped")[0] for r in caplog.records] == [
        "tuned config {'depth': 3, 'design': 'staged'}"]


def test_triton_takes_limits_of_registers_and_no_other_split(folders: Folders) -> None:
    default = default_config(DECODE)

    def tuned_by(**changes: Any) -> list[tuple[int, Any]]:
        entry = {"config": replace(default, **changes).to_dict(), "us": 9.0, "runner_up": None}
        write(folders, row(1, backends={"triton": entry}), row(64))
        return [(limit, c) for limit, c in gdn_triton.plan(DECODE, 32, gdn_dispatch.tuned_plan(DECODE, H200, "triton"))]

    assert [c for _, c in tuned_by(max_registers=96)] == [replace(default, max_registers=96), default]
    assert tuned_by(max_registers=96)[0][0] == 8, "to sqrt(1 * 64)"
    assert [c for _, c in tuned_by(num_warps=8)] == [c for _, c in tuned_by(max_registers=999)] == [default]


def test_stochastic_rounding_and_folds_stay_with_the_heuristic(folders: Folders) -> None:
    write(folders, row(64, staged(stages=3)), state="bfloat16")
    narrow = replace(DECODE, state_dtype=BF16)
    assert gdn_dispatch.tuned_plan(narrow, H200, "cute")[0][1] == staged(stages=3)
    assert gdn_dispatch.tuned_plan(replace(narrow, philox_rounds=10), H200, "cute") == ()
    fold = GdnFoldProblem(GdnGeometry(16, 32), 16, BF16, BF16, BF16, (torch.int32,) * 3, torch.int8, False, True)
    assert gdn_dispatch.tuned_plan(fold, H200, "triton") == ()


def test_measured_rows_rank_the_backends_on_hopper(folders: Folders) -> None:
    first = gdn_dispatch.preference(DECODE, H200)[0]
    assert first[0] == "cute" and "docs/gdn.md" in first[1]
    entries = {name: {"config": config, "us": us, "runner_up": None} for name, config, us in
               (("cute", staged(), 30.0), ("triton", default_config(DECODE).to_dict(), 20.0))}
    write(folders, row(1, backends=entries), row(64, backends=entries))
    name, why = gdn_dispatch.preference(DECODE, H200)[0]
    assert name == "triton" and why.startswith("measured as faster: NVIDIA_H200, batch 1 to 64, 2026-11-30: cute 30.0")
    assert gdn_dispatch.preference(VERIFY, H200)[0][0] == "cute", "another operation"
    assert gdn_dispatch.preference(DECODE, Arch("cuda", (10, 0), "NVIDIA_B200", 148))[0][0] == "cute"
    write(folders, row(1, backends=entries), predicted=True)
    assert gdn_dispatch.preference(DECODE, H200)[0] == first, "a prediction ranks nothing"


def test_explain_quotes_the_row(folders: Folders) -> None:
    write(folders, row(64, staged(stages=3)))
    said = gdn_dispatch.explain(DECODE, 64, H200).splitlines()
    assert said[0] == f"{DECODE}, batch 64, on NVIDIA_H200 (sm_90):"
    assert "'stages': 3" in said[1] and "NVIDIA_H200, batch 64, 2026-11-30: cute 20.0 us, triton 30.0 us" in said[1]


def test_a_step_takes_the_launch_of_its_batch(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the dispatcher, with a compiler that is only pretended."""
    import replayssm_cute.kernels.gdn as kernels
    write(folders, row(1, staged(stages=3)), row(64, staged(stages=1)))
    taken: list[Any] = []

    def compile_gdn(problem: Any, config: Any, target: str, sms: int) -> Any:
        return lambda *args: taken.append(config.stages)

    monkeypatch.setattr(kernels, "compile_gdn", compile_gdn)
    step = gdn_cute.prepare(DECODE, H200, gdn_dispatch.tuned_plan(DECODE, H200, "cute"))
    for batch in (1, 8, 9, 700):
        tensors = [torch.empty(batch, 1)] * 16
        step(*tensors, None)
    assert taken == [3, 3, 1, 1]
