"""``replayssm-tune run`` from the command line to the files, on a GPU that is only pretended."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from replayssm_cute import dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.registry import tuned
from replayssm_cute.types import Mamba2Geometry
from replayssm_tune import plan, run, speed_model
from replayssm_tune.search import ROUNDS
from tests.tune_call import FAKE, ROOT, Tune, tuning

NANO = ("--geometry", "64x64x128/8", "--state-dtype", "float16", "--jobs", "1")
FILE = "op=mamba2_decode,headdim=64,dstate=128,state_dtype=float16,device_name=NVIDIA_H200.json"


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    return tuning(tmp_path, monkeypatch, capsys, *NANO)


def started(out: Path, *arguments: str, **fake: Any) -> subprocess.Popen[str]:
    """The same as a process, which can be killed, and interrupted even where the tests run in the background."""
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return subprocess.Popen([*FAKE, "run", *NANO, "--out", str(out), *arguments], cwd=ROOT, text=True,
                            env={**os.environ, "PYTHONPATH": paths, "TUNE_FAKE": json.dumps(fake)},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL))


def rows(folder: Path) -> dict[int, tuned.TunedRow]:
    """By batch; the file is read strictly."""
    return {row.batch: row for row in tuned.load_file(folder / FILE).rows}


def requests(log: Path, do: str = "") -> list[str]:
    """What the pretended GPU was asked, without process and time."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.split(" ", 2)[2] for line in lines if f'"do": "{do}' in line]


def test_a_run_writes_the_best_of_every_backend(tune: Tune, tmp_path: Path) -> None:
    code, said = tune("--batch", "1,64", us=[['"stages": 3', 18.0], ['"max_registers": 96', 25.0], ["max_reg", 26.0]])
    assert code == 0
    row = rows(tmp_path)[64]
    assert row.backends["cute"].us == 18.0 and row.backends["cute"].config["stages"] == 3
    assert row.backends["triton"].us == 25.0 and (row.backends["triton"].runner_up or {})["us"] == 26.0
    assert row.per_step_us == 40.0 and rows(tmp_path).keys() == {1, 64}
    assert "cute 18.00 us (heuristic 20.00, runner-up +0.0%)" in said
    assert "triton 25.00 us (heuristic 26.00, runner-up +4.0%)" in said
    assert tuned.load_file(tmp_path / FILE).provenance.device == "NVIDIA_H200"


def test_the_runtime_serves_with_what_was_measured(tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune("--batch", "64", us=[['"stages": 3', 18.0]])
    best = rows(tmp_path)[64].backends
    problem = plan.Point(Mamba2Geometry(64, 64, 128, 8), "float16", 16, 64).problem
    monkeypatch.setenv(tuned.USER_FOLDER_VARIABLE, str(tmp_path))
    for forget in (tuned.clear_cache, dispatch.candidates.cache_clear):
        forget()
    try:
        found = dispatch.candidates(problem, 64, Arch("cuda", (9, 0), "NVIDIA_H200", 132))
    finally:
        for forget in (tuned.clear_cache, dispatch.candidates.cache_clear):
            forget()
    assert {c.backend: c.config for c in found if c.backend != "torch"} == {n: e.config for n, e in best.items()}
    assert best["cute"].config["stages"] == 3


def test_a_second_run_measures_nothing_again_and_a_fresh_one_everything(tune: Tune, tmp_path: Path) -> None:
    log = tmp_path / "log"
    tune("--batch", "8", log=str(log))
    first = requests(log, "sample")
    assert len(first) == ROUNDS * len(set(first)) > 50 and len(requests(log, "check")) == len(set(first))
    content = (tmp_path / FILE).read_bytes()
    log.unlink()
    assert tune("--batch", "8", log=str(log))[0] == 0
    assert not requests(log, "check") + requests(log, "sample") + requests(log, "per_step")
    assert (tmp_path / FILE).read_bytes() == content
    tune("--batch", "8", "--fresh", log=str(log))
    assert requests(log, "sample") == first


def test_a_bad_candidate_costs_itself(tune: Tune, tmp_path: Path) -> None:
    code, said = tune("--batch", "8", "--timeout", "1", crash=['"max_registers": 168'], hang=['"max_registers": 128'],
                      no_compile=['"stages": 4'], error=[['"stages": 3', 0.5]], us=[['"stages": [34]', 1.0]],
                      **{"raise": ['"max_registers": 96']})
    assert code == 0
    for reason in ("was killed by signal 11", "no answer in 1 s", "RuntimeError: does not compile",
                   "wrong by 5.0e-01", "RuntimeError: an illegal memory access"):
        assert f"left out: {reason}" in said or f"left out: its process {reason}" in said, reason
    row = rows(tmp_path)[8]
    assert row.backends["triton"].config["max_registers"] == 0 and row.backends["triton"].runner_up is None
    assert row.backends["cute"].config["stages"] == 2


def test_what_the_speed_model_prunes_is_noted_and_not_measured(tune: Tune, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model that is never wrong, so that it prunes on an H200, too."""
    exact = {**speed_model.calibrated(), "error": {"small": 0.0, "large": 0.0}}
    monkeypatch.setattr(speed_model, "calibrated", lambda: exact)
    log = tmp_path / "log"
    code, said = tune("--batch", "512", log=str(log))
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    pruned = [line["key"]["config"] for line in lines if line["key"]["do"] == "prune"]
    measured = [json.loads(request) for request in requests(log, "sample")]
    assert code == 0 and pruned and f"{len(pruned)} candidates pruned by the speed model" in said
    assert not [request for request in measured if request["config"] in pruned]
    assert len({json.dumps(r["config"]) for r in measured if r["backend"] == "triton"}) == 4, "not modelled"
    log.unlink()
    tune("--batch", "512", "--no-prune", log=str(log))
    measured = [json.loads(request) for request in requests(log, "sample")]
    assert {json.dumps(r["config"]) for r in measured} == set(map(json.dumps, pruned)), "the rest was known"


def test_several_ring_lengths_are_set_against_their_memory(tune: Tune, tmp_path: Path) -> None:
    code, said = tune("--batch", "8", "--backend", "triton", "--buffer-len", "8,16,32",
                      us=[['"buffer_len": 16', 17.0], ['"buffer_len": 32', 17.5]])
    assert code == 0 and "memory of one request in 1 layer" in said
    for line in (r"8 +20\.00 +triton +1\.0 +0\.1 +\+17\.6%", r"16 +17\.00 +triton +1\.0 +0\.2 +fastest",
                 r"32 +17\.50 +triton +1\.0 +0\.3 +\+2\.9%"):
        assert re.search(rf"64x64x128/8 +float16 +8 +{line}", said), said


def test_no_backend_no_row(tune: Tune, tmp_path: Path) -> None:
    code, said = tune("--batch", "8", "--backend", "triton", crash=['"backend": "triton"'])
    assert code == 0 and "no backend has a right candidate; no row" in said and not (tmp_path / FILE).exists()


def test_killed_at_any_moment_it_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    whole, log = tmp_path / "whole", tmp_path / "log"
    fake: dict[str, Any] = {"delay": 0.004, "us": [['"stages": 3', 18.0]], "log": str(log)}
    assert started(whole, "--batch", "1,2", **fake).wait(60) == 0
    needed = requests(log)
    log.unlink()
    broken, kills, known = tmp_path / "broken", 0, 0
    while True:
        process = started(broken, "--batch", "1,2", **fake)
        limit = len(needed) * (kills + 1) // 4
        while process.poll() is None and (kills == 3 or len(requests(log)) < limit):
            time.sleep(0.003)
        process.kill()
        if process.wait() == 0:
            break
        kills += 1
        lines = (broken / "journal.jsonl").read_bytes().count(b"\n")
        assert lines >= known and len(requests(log)) - lines <= 4 * kills, "no finished measurement was lost"
        known = lines
        if (broken / FILE).exists():
            tuned.load_file(broken / FILE)
    assert kills == 3
    assert (broken / FILE).read_bytes() == (whole / FILE).read_bytes()
    again = [r for r in requests(log) if '"config"' in r]
    extra = len(again) - len([r for r in needed if '"config"' in r])
    assert 0 <= extra <= kills, "at most the measurement under way is done again"
    assert not list(broken.glob("*.tmp"))


def test_interrupted_it_says_so_and_takes_its_processes_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = started(tmp_path, "--batch", "1", hang=['"stages": 3'], log=str(log))
    while '"stages": 3' not in (log.read_text() if log.exists() else ""):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[0]
    assert process.returncode == 130 and "interrupted; what was measured is kept" in said
    lab = int(log.read_text().splitlines()[-1].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(lab, 0)


def test_two_tuners_on_one_gpu_take_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fake: dict[str, Any] = {"id": f"shared-{os.getpid()}", "log": str(log), "delay": 0.02}
    both = [started(tmp_path, "--backend", "triton", "--batch", batch, **fake) for batch in ("1", "2")]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("another replayssm-tune measures on this GPU" in text for text in said) == 1
    order = [line.split()[0] for line in log.read_text().splitlines() if '"config"' in line]
    assert len(set(order)) == 2 and order == sorted(order, key=order.index), "one measures, then the other"
    assert rows(tmp_path).keys() == {1, 2}


def test_two_tuners_on_two_gpus_share_a_folder(tmp_path: Path) -> None:
    log = tmp_path / "log"
    batches = ("1,2", "4,8")
    both = [started(tmp_path, "--backend", "triton", "--batch", batch, log=str(log), delay=0.05) for batch in batches]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    order = [line.split()[0] for line in log.read_text().splitlines() if '"config"' in line]
    assert order != sorted(order, key=order.index), "they ran at the same time"
    assert rows(tmp_path).keys() == {1, 2, 4, 8}
    log.unlink()
    assert started(tmp_path, "--backend", "triton", "--batch", ",".join(batches), log=str(log)).wait(60) == 0
    assert not [r for r in requests(log) if '"config"' in r], "the journal holds the measurements of both"


def test_the_budget_ends_the_run_and_the_next_one_goes_on(tune: Tune, tmp_path: Path) -> None:
    begun = time.monotonic()
    code, said = tune("--batch", "1,2,4,8,16,32,64,128", "--backend", "triton", "--budget", "3s", delay=0.25)
    assert time.monotonic() - begun < 6
    left = re.search(r"(\d) of 8 points were not begun; the same command goes on", said)
    assert code == 0 and left and 1 <= int(left[1]) <= 7 and len(rows(tmp_path)) == 8 - int(left[1])
    assert tune("--batch", "1,2,4,8,16,32,64,128", "--backend", "triton")[0] == 0 and len(rows(tmp_path)) == 8


def test_a_better_row_stays_unless_it_is_forced(tune: Tune, tmp_path: Path) -> None:
    tune("--batch", "8")
    code, said = tune("--batch", "8", "--fresh", us=[["config", 21.0]])
    assert code == 0 and "kept 64 heads in 8 groups, L=16, batch 8: the row in the file is faster" in said
    assert rows(tmp_path)[8].backends["cute"].us == 20.0
    assert "the row in the file also holds triton" in tune("--batch", "8", "--backend", "cute")[1]
    assert "kept" not in tune("--batch", "8", "--force")[1]
    assert rows(tmp_path)[8].backends["cute"].us == 21.0


def test_rows_of_other_versions_are_not_mixed(tune: Tune, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tune("--batch", "8", "--backend", "triton")
    code, said = tune("--batch", "16", "--backend", "triton", info={"triton": "3.7.0"})
    assert code == 2 and "measured with triton 3.6.0" in said and "--force" in said and rows(tmp_path).keys() == {8}
    assert tune("--batch", "16", "--backend", "triton", "--force", info={"triton": "3.7.0"})[0] == 0
    assert caplog.text.count("begun anew; its 1 rows were measured with triton 3.6.0") == 1
    assert rows(tmp_path).keys() == {16} and tuned.load_file(tmp_path / FILE).provenance.triton == "3.7.0"


@pytest.mark.parametrize(("content", "reason"), [
    ("{", "Expecting property name"), ('{"schema": 2, "provenance": {}, "rows": []}', "schema: expected 1, got 2")])
def test_a_file_that_is_broken_is_named_before_anything_is_measured(tune: Tune, tmp_path: Path, content: str,
                                                                    reason: str) -> None:
    (tmp_path / FILE).write_text(content)
    code, said = tune("--batch", "8", log=str(tmp_path / "log"))
    assert code == 2 and FILE in said and reason in said and not requests(tmp_path / "log", "check")
    assert (tmp_path / FILE).read_text() == content


def test_a_folder_that_cannot_be_written_is_named(tune: Tune, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "tuned", Path("/sys/tuned")):
        code, said = tune("--out", str(folder), log=str(tmp_path / "log"))
        assert code == 2 and re.search(rf"replayssm-tune: \[Errno \d+\] .*{folder}", said)
    assert not requests(tmp_path / "log")


def test_a_process_that_does_not_start_is_an_error_at_once(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LAB", [sys.executable, "-c", "raise SystemExit('torch is broken')"])
    code, said = tune("--batch", "8")
    assert code == 2 and "does not start: its process ended with exit code 1: torch is broken" in said
