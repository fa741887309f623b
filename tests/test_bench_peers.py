"""The comparison with other packages' kernels, on stand-ins that compute what the real functions do."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import gdn, mamba2, report
from benchmarks.peers.kernel import Bound, Kernel, version
from benchmarks.peers.operations import OPERATIONS
from tests import fake_peers
from tests.interpreter import interpreted_import

main = interpreted_import("benchmarks.peers.__main__")  # imports Triton, whose kernels other tests interpret
measure = interpreted_import("benchmarks.peers.measure")

LAYERS = {mamba2.OP: "4x8x16/2", gdn.DECODE: "4/2x16x16", gdn.VERIFY: "4/2x16x16"}
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host's part of the timing: the cycle is played twice, as for a capture. The tensors are too small for
    threads, which only wait for each other."""

    def time_graph(play: Any, steps: int) -> dict[str, float]:
        play()
        play()
        return {"us": 10.0, "us_min": 9.0, "us_max": 11.0}

    monkeypatch.setattr(measure, "time_graph", time_graph)
    fake_peers.calls.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def found_rows(name: str, dtype: torch.dtype = F32, batches: tuple[int, ...] = (3,), philox_rounds: int = 0,
               kernels: tuple[Kernel, ...] | None = None, **options: Any) -> dict[str, dict[str, Any]]:
    """Rows of the last batch, by kernel."""
    op = OPERATIONS[name] if kernels is None else dataclasses.replace(OPERATIONS[name], kernels=kernels)
    found = list(measure.rows(op, LAYERS[name], dtype, philox_rounds, batches, 1e12, device="cpu", cold_bytes=0,
                              **options))
    assert len(found) == len(batches) * len(op.kernels), "no kernel is silently absent"
    return {row["kernel"]: row for row in found}


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_kernel_gets_what_it_computes_right_with(name: str, dtype: torch.dtype,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a cycle in which every row flushes, with other tokens in each step, against the recurrence in float64."""
    fake_peers.install(monkeypatch, "vllm", "flashinfer", "sglang")
    found = found_rows(name, dtype)
    for kernel, row in found.items():
        if (name, kernel) == (gdn.VERIFY, "flashinfer replay") and dtype != BF16:
            assert row["reason"].startswith("AssertionError: initial_state_source must be torch.bfloat16")
            continue
        assert row["error"] < measure.LIMIT / 4, kernel
        assert row["times_ours"] == 1.0 and row["bytes"] > 0
    for kernel, row in found.items():
        if "us" in row:
            assert row["served"].startswith("torch" if kernel.startswith("ours") else kernel.split()[0])


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_check_sees_wrong_cursors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step has the cursors of the one before, and acceptance moves none."""
    fake_peers.install(monkeypatch, "vllm", "flashinfer", "sglang")

    def stuck(kernel: Kernel) -> Kernel:
        def bind(w: Any, *functions: Any) -> Bound:
            bound = kernel.bind(w, *functions)
            return Bound(bound.rounds, bound.layers, lambda i, layer: bound.step(i - i % 2, layer))
        return dataclasses.replace(kernel, bind=bind)

    replaying = tuple(stuck(kernel) for kernel in OPERATIONS[name].kernels if kernel.replay)
    for kernel, row in found_rows(name, BF16, kernels=replaying).items():
        assert float(re.match(r"ValueError: relative error (\S+)", row["reason"]).group(1)) > 10 * measure.LIMIT, kernel


def test_a_refusal_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.install(monkeypatch, "vllm", "flashinfer", "sglang")
    found = found_rows(mamba2.OP, F16, philox_rounds=10)
    for kernel in ("vllm per-step", "vllm replay"):
        assert found[kernel]["reason"] == "RuntimeError: cvt.rs needs sm_100a" and "us" not in found[kernel]
    assert found["ours"]["us"] == found["flashinfer per-step"]["us"] == 10.0
    assert {row["reason"] for row in found_rows(gdn.DECODE, F16, philox_rounds=10).values()} == {
        "ValueError: stochastic rounding is compared for Mamba2 only"}


def test_a_function_that_a_version_lacks_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.install(monkeypatch, "vllm", "flashinfer", "sglang")
    sglang, = (k for k in OPERATIONS[gdn.VERIFY].kernels if k.name == "sglang replay")
    module, name = sglang.entries[2].split(":")
    monkeypatch.delattr(sys.modules[module], name)
    reason = found_rows(gdn.VERIFY)["sglang replay"]["reason"]
    assert reason.startswith("AttributeError") and name in reason


def test_what_does_not_fit_is_a_row_for_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.install(monkeypatch, "vllm", "flashinfer", "sglang")
    op = OPERATIONS[mamba2.OP]

    def make(layer: str, *, batch: int, **rest: Any) -> Any:
        if batch == 5:
            raise torch.OutOfMemoryError("no memory")
        return op.make(layer, batch=batch, **rest)

    found = list(measure.rows(dataclasses.replace(op, make=make), LAYERS[op.name], F32, 0, (5, 3), 1e12, device="cpu",
                              cold_bytes=0))
    assert [row["batch"] for row in found] == [5] * len(op.kernels) + [3] * len(op.kernels)
    assert all(("no memory" in row.get("reason", "")) == (row["batch"] == 5) for row in found)


def test_time_that_is_spent_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.install(monkeypatch, "vllm", "flashinfer", "sglang")
    found = found_rows(gdn.DECODE, deadline=-math.inf)
    assert {row["reason"] for row in found.values()} == {"not begun: the time is spent"} and not fake_peers.calls


def test_what_served_is_read_from_the_counters() -> None:
    op = OPERATIONS[mamba2.OP]
    ours, vllm = op.kernels[0], op.kernels[1]
    bound = Bound(16, 2, lambda i, layer: torch.empty(0))
    assert measure.served(op, ours, bound, {(op.name, "cute"): 64}) == "cute"
    assert measure.served(op, vllm, bound, {}) == vllm.entries[0]
    for kernel, calls in ((ours, {}), (ours, {(op.name, "cute"): 63}), (ours, {("gdn_decode", "cute"): 64}),
                          (ours, {(op.name, "cute"): 32, (op.name, "triton"): 32}), (vllm, {(op.name, "cute"): 1})):
        with pytest.raises(RuntimeError):
            measure.served(op, kernel, bound, calls)


def test_a_kernel_that_another_served_is_not_timed_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where our plugin has taken over an engine's function."""
    fake_peers.install(monkeypatch, "vllm")
    ours, _, vllm = OPERATIONS[mamba2.OP].kernels[:3]
    taken = dataclasses.replace(vllm, entries=ours.entries)
    assert "was served by" in found_rows(mamba2.OP, kernels=(ours, taken))["vllm replay"]["reason"]


@pytest.mark.parametrize("in_check", [True, False])
def test_a_lost_device_ends_the_run_behind_its_row(in_check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.install(monkeypatch, "vllm", "flashinfer", "sglang")
    op, alive = OPERATIONS[mamba2.OP], [True]

    def bind(w: Any, *functions: Any) -> Bound:
        if in_check or w.batch != measure.CHECK_ROWS:
            alive[0] = False
            raise RuntimeError("CUDA error: an illegal memory access")
        return op.kernels[1].bind(w, *functions)

    def release(device: str) -> None:
        if not alive[0]:
            raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(measure, "release", release)
    kernels = (op.kernels[0], dataclasses.replace(op.kernels[1], bind=bind), op.kernels[2])
    seen = []
    with pytest.raises(measure.DeviceLostError, match="vllm per-step"):
        for row in measure.rows(dataclasses.replace(op, kernels=kernels), LAYERS[op.name], F32, 0, (3,), 1e12,
                                device="cpu", cold_bytes=0):
            seen.append(row)
    assert "illegal memory" in seen[-1]["reason"] and len(seen) == (1 if in_check else 2)


def test_ours_by_a_backend_that_was_asked_for() -> None:
    op = OPERATIONS[gdn.DECODE].served_by(["auto", "torch"])
    assert [k.name for k in op.kernels[:3]] == ["ours", "ours, torch", "sglang per-step"]
    found = found_rows(gdn.DECODE, kernels=op.kernels[:2])
    assert found["ours, torch"]["served"] == "torch"
    refused = found_rows(gdn.DECODE, kernels=OPERATIONS[gdn.DECODE].served_by(["none"]).kernels[:1])
    assert "backend" in refused["ours, none"]["reason"]


def test_rounds_and_layers_are_played_in_order() -> None:
    played: list[Any] = []
    bound = Bound(2, 3, lambda i, layer: played.append((i, layer)), lambda: played.append("commit"))  # type: ignore
    bound.play()
    assert played == [(0, 0), (0, 1), (0, 2), "commit", (1, 0), (1, 1), (1, 2), "commit"] and bound.steps == 6


def test_bytes_of_a_window() -> None:
    """32 value and 16 key heads of 128, T = 4, L = 16, three kept: rows hold 3, 6 and 9 records, the last folds."""
    op = OPERATIONS[gdn.VERIFY]
    w = op.make("32/16x128x128", batch=2, dtype=F32, philox_rounds=0, device="cpu", cold_bytes=0)
    state, vectors = 32 * 128 * 128 * 4, (16 + 32) * 128
    io = 4 * 2 * (16 * 128 * 2 + 32 * 128 * 2 + 2 * 32)
    assert op.step_bytes(w, True) == pytest.approx(2 * (state * 4 / 3 + (2 * vectors + 128) * (6 + 4) + io))
    assert op.step_bytes(w, False) == 2 * (2 * state + io)


@pytest.fixture
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real, where = measure.rows, {"device": "cpu", "cold_bytes": 0}
    monkeypatch.setattr(main, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(main, "provenance", lambda bandwidth: PROVENANCE)
    monkeypatch.setattr(main, "rows", lambda *args: real(*args, **where))


PROVENANCE = {"device": "NVIDIA_TEST", "sms": 132, "torch": "2.0", "triton": "3.0", "cutlass_dsl": None,
              "date": "2026-11-30T00:00:00Z", "copy_gbps": 4000.0}


@pytest.mark.usefixtures("_on_cpu")
def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    fake_peers.install(monkeypatch, "flashinfer")
    out = tmp_path / "peers.json"
    monkeypatch.setattr(sys, "argv", ["peers", "--out", str(out), "--op", "mamba2_decode", "--layer", "4x8x16/2",
                                      "--dtype", "float32", "--batch", "1,2"])
    assert main.main() == 0
    assert "vllm: not installed, left out" in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert results["packages"]["vllm"] is None and results["packages"]["flashinfer"] == "0.0"
    assert Counter(row["kernel"] for row in results["rows"]) == {
        "ours": 2, "flashinfer per-step": 2, "flashinfer replay": 2, "flashinfer replay, one kernel": 2}
    table = out.with_suffix(".md").read_text()
    assert "Not installed: vllm, sglang." in table and table.count("| mamba2_decode |") == 8
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.install(monkeypatch, "vllm")
    assert (version("vllm"), version("sglang")) == ("0.0", None)


CANNED = {"provenance": PROVENANCE, "packages": {"replayssm_cute": "1", "vllm": "0.33.0", "sglang": None}, "rows": [
    {"op": "mamba2_decode", "layer": "64x64x128/8", "state_dtype": "float16", "philox_rounds": 5, "batch": batch,
     "kernel": kernel, "replay": kernel != "vllm per-step", **found}
    for batch in (1, 64) for kernel, found in {
        "ours": {"us": 2.5, "us_min": 2.4, "us_max": 2.6, "bytes": 1, "copy_percent": 12.3, "times_ours": 1.0,
                 "error": 2e-3, "served": "cute"},
        "vllm per-step": {"us": 5.0, "us_min": 4.9, "us_max": 5.1, "bytes": 1, "copy_percent": 20.0,
                          "times_ours": 2.0, "error": 2e-3, "served": "vllm.ops:f"},
        "vllm replay": {"reason": "RuntimeError: a | b"}}.items()]}


def test_table_of_a_canned_result(tmp_path: Path) -> None:
    lines = report.table(CANNED).splitlines()
    assert lines[0].endswith("Compared: replayssm_cute 1, vllm 0.33.0. Not installed: sglang.")
    assert lines[4] == ("| mamba2_decode | 64x64x128/8 | float16, 5 Philox rounds | 1 | ours | 2.50 | 1.00x | 12% | "
                        "2.0e-03 | cute |")
    assert "| 5.00 | 2.00x | 20% |" in lines[5] and lines[6].endswith("| - | - | - | - | RuntimeError: a \\| b |")
    assert {line.replace("\\|", "").count("|") for line in lines[2:]} == {len(report.COLUMNS) + 1}
    assert [report.line(row) for row in CANNED["rows"]][2].endswith("RuntimeError: a | b")
    report.plot(CANNED, tmp_path / "canned.png")
    report.plot({**CANNED, "rows": []}, tmp_path / "empty.png")
    assert (tmp_path / "canned.png").stat().st_size > (tmp_path / "empty.png").stat().st_size > 0
