"""What the speed model keeps from being measured, and what it must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replayssm_cute.arch import Arch
from replayssm_cute.types import SUPPORTED, Mamba2Geometry, Support
from replayssm_tune import cli, plan, prune, speed_model
from replayssm_tune.journal import Journal
from replayssm_tune.plan import Point, Unit
from replayssm_tune.search import Bench

H100 = Arch("cuda", (9, 0), "NVIDIA_H100_80GB_HBM3", 132)
UNSUPPORTED = Support(False, "not here")
B200 = Arch("cuda", (10, 0), "NVIDIA_B200", 148)
NANO = Mamba2Geometry(64, 64, 128, 8)
DRY = ["run", "--geometry", "64x64x128/8", "--dry-run", "--no-compile", "--device", "B200", "--batch", "512",
       "--state-dtype", "float16", "--buffer-len", "16"]


def unit(backend: str = "cute", arch: Arch = B200, buffer_len: int = 16) -> Unit:
    return plan.unit(Point(NANO, "float16", buffer_len, 512), backend, arch)


def tiles(unit: Unit) -> set[int]:
    return {config["tile_p"] for config in unit.configs}


def with_error(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Let the model have been off by this much."""
    found = {**speed_model.calibrated(), "error": {"small": error, "large": error}}
    monkeypatch.setattr(speed_model, "calibrated", lambda: found)


def test_what_is_pruned_is_slower_by_more_than_the_margin() -> None:
    whole = unit()
    [kept], pruned = prune.split([whole], B200)
    assert pruned and [c for c in whole.configs if c in kept.configs or c in [p.config for p in pruned]] == \
        [*whole.configs] and len(kept.configs) + len(pruned) == len(whole.configs)
    times = {json.dumps(c): prune.predicted_us(whole, c, B200) or 0.0 for c in whole.configs}
    best, margin = min(times.values()), speed_model.margin(512)
    assert all(times[json.dumps(p.config)] > (1 + margin) * best for p in pruned)
    assert all(times[json.dumps(c)] <= (1 + margin) * best for c in kept.configs)
    assert all(p.config["tile_p"] == 32 and p.config["min_ctas"] * p.config["stages"] == 4 for p in pruned), \
        "too few bytes in flight"


def test_an_exact_model_would_prune_more_and_a_poor_one_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = len(prune.split([unit()], B200)[1])
    with_error(monkeypatch, 0.0)
    [kept], pruned = prune.split([unit()], B200)
    assert len(pruned) > usual and kept.configs[0] == unit().configs[0]
    with_error(monkeypatch, 0.5)
    assert not prune.split([unit()], B200)[1]


def test_the_heuristics_choice_and_the_last_candidate_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with_error(monkeypatch, 0.0)
    whole = unit()
    slow = next(c for c in reversed(whole.configs) if c["tile_p"] == 32 and c["min_ctas"] * c["stages"] == 4)
    first = Unit(whole.point, "cute", SUPPORTED, (slow, *(c for c in whole.configs if c != slow)))
    [kept], _ = prune.split([first], B200)
    assert kept.configs[0] == slow and len(kept.configs) > 1
    alone = Unit(whole.point, "cute", SUPPORTED, (slow,))
    assert prune.split([alone], B200) == ([alone], [])


@pytest.mark.parametrize(("arch", "asked"), [(B200, {"backend": "triton"}), (H100, {}), (B200, {"buffer_len": 8})])
def test_what_the_model_does_not_know_stays(monkeypatch: pytest.MonkeyPatch, arch: Arch, asked: Any) -> None:
    with_error(monkeypatch, 0.0)
    known, kept = unit(arch=B200), unit(arch=arch, **asked)
    assert len(kept.configs) > 1 and prune.split([kept], arch) == ([kept], [])
    assert prune.split([known], B200)[1]


def test_a_backend_that_does_not_serve_has_nothing_to_prune() -> None:
    empty = Unit(unit().point, "cute", UNSUPPORTED, ())
    assert prune.split([empty], B200) == ([empty], [])


def test_a_tile_without_counts_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with_error(monkeypatch, 0.0)
    counts = {name: found for name, found in speed_model.issue_counts()["sm_100a"].items() if "tile=32" not in name}
    monkeypatch.setattr(speed_model, "issue_counts", lambda: {"sm_100a": counts})
    [kept], pruned = prune.split([unit()], B200)
    assert tiles(kept) == {32, 64} and all(p.config["tile_p"] == 64 for p in pruned)


def test_the_dry_run_lists_what_is_pruned_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(DRY) == 0
    said = capsys.readouterr().out
    pruned = prune.split([unit()], B200)[1]
    assert said.count("tile_p=32") == len(pruned) and f"{100 * pruned[0].slower:.0f}%" in said
    assert "predicted slower by" in said and f" {len(unit().configs) - len(pruned)} " in said
    assert cli.main([*DRY, "--no-prune"]) == 0
    said = capsys.readouterr().out
    assert "predicted slower by" not in said and f" {len(unit().configs)} " in said


def test_the_journal_holds_what_was_pruned_once(tmp_path: Path) -> None:
    pruned = prune.split([unit()], B200)[1]
    for _ in range(2):
        bench: Any = Bench(None, Journal(tmp_path), {"device": "NVIDIA_B200", "build": "b"}, 60.0)  # type: ignore[arg-type]
        prune.note(bench, pruned)
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["key"]["config"] for line in lines] == [p.config for p in pruned]
    assert all(line["key"]["do"] == "prune" and "slower than the best" in line["result"]["pruned"] for line in lines)
