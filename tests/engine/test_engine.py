"""Replay decode in a real engine on the CPU, against the engine's own per-step path.

Every case runs twice, with replay (served by this package through its plugin) and without, in engines of
their own. Activations are fp32 where nothing else is said: in bf16 equal logits are common, and a greedy
token then says little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_nemotron_h
import torch

from replayssm_cute.cursors import decode_cursors

HERE = Path(__file__).parent
LAYERS = 3  # Mamba2 layers of the checkpoint
MIXER = "vllm.model_executor.layers.mamba.mamba_mixer2"


@dataclass(frozen=True)
class Case:
    """Attributes:
    tolerance: largest difference of a logprob against the per-step path, about five times what was measured.
    drift: the same for decode against prefill of the same tokens; None where the state is rounded.
    """

    name: str
    workload: str = "mixed"
    dtype: str = "float32"
    state: str = "float32"
    buffer_len: int = 16
    tp: int = 1
    tolerance: float = 3e-5
    drift: float | None = 3e-5
    options: dict[str, Any] = field(default_factory=dict)

    def engine_options(self, replay: bool) -> dict[str, Any]:
        options = {"dtype": self.dtype, "mamba_ssm_cache_dtype": self.state, "max_model_len": 512,
                   "max_num_batched_tokens": 64, "enable_prefix_caching": False}
        if replay:
            options |= {"use_replayssm": True, "replayssm_buffer_len": self.buffer_len}
        if self.tp > 1:
            options |= {"tensor_parallel_size": self.tp, "distributed_executor_backend": "mp"}
        return options | self.options


CASES = {case.name: case for case in [
    Case("plain"),
    Case("short ring", buffer_len=5),
    Case("bf16 model", dtype="bfloat16", tolerance=0.1, drift=0.1),
    Case("bf16 state", state="bfloat16", tolerance=0.02, drift=None),
    Case("fp16 state", state="float16", tolerance=0.004, drift=None),
    # Three requests take 4 blocks each, one block is the engine's own: room for one of three further blocks.
    Case("preempted", "crowded", options={"max_num_batched_tokens": 256, "max_model_len": 1024,
                                          "num_gpu_blocks_override": 14}),
    # Chunks shorter than a block: on a CPU the engine cannot save the state of a block inside of a chunk.
    # Retention None: by default it drops the state of a block that was completed while decoding.
    Case("prefix cache", "returning", options={"max_num_batched_tokens": 128, "max_model_len": 1024,
                                               "enable_prefix_caching": True,
                                               "prefix_cache_retention_interval": None}),
    Case("TP 2", tp=2),
]}
by_name = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@dataclass(frozen=True)
class Pair:
    replay: dict[str, Any]
    per_step: dict[str, Any]
    log: str


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, tiny_nemotron_h.__file__, str(folder)], check=True)
    return folder


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    # One thread a worker, bound to no core: with more, an engine is no faster here and slower on a busy machine.
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env=os.environ | threads | environment)


@pytest.fixture(scope="session")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory, table: list[list[str]]) -> Callable[[Case], Pair]:
    """The two runs of a case. Each is made once, the per-step run once for all ring lengths."""
    folder, runs, made = tmp_path_factory.mktemp("runs"), {}, {}

    def engine(case: Case, replay: bool) -> tuple[dict[str, Any], str]:
        request = {"model": str(model), "workload": case.workload, "options": case.engine_options(replay)}
        key = json.dumps(request)
        if key not in runs:
            out = folder / f"{len(runs)}.json"
            process = run([str(HERE / "run_engine.py"), json.dumps(request | {"out": str(out)})])
            assert process.returncode == 0, process.stdout[-5000:]
            runs[key] = json.loads(out.read_text()), process.stdout
        return runs[key]

    def get(case: Case) -> Pair:
        if case.name not in made:
            (replay, log), (per_step, _) = engine(case, True), engine(case, False)
            made[case.name] = Pair(replay, per_step, log)
            table.append(row(case, made[case.name]))
        return made[case.name]

    return get


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def logprob_differences(pair: Pair) -> list[float]:
    """Of every token with the same past in both runs."""
    found = []
    for name, a in pair.replay["requests"].items():
        b = pair.per_step["requests"][name]
        same = common_prefix(a["tokens"], b["tokens"])
        found += [abs(p[0] - q[0]) for p, q in zip(a["logprobs"][:same + 1], b["logprobs"], strict=False)]
    return found


def drift(run: dict[str, Any]) -> list[float]:
    """Decode against prefill of the same tokens, by logprob."""
    return [abs(p[0] - q) for name, r in run["requests"].items()
            for p, q in zip(r["logprobs"], run["prefill"][name], strict=True)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def flushes(run: dict[str, Any]) -> int:
    return sum(f for worker in run["workers"] for step in worker["steps"] for _, f in step)


def row(case: Case, pair: Pair) -> list[str]:
    requests = pair.replay["requests"]
    total = sum(len(r["tokens"]) for r in requests.values())
    same = sum(common_prefix(r["tokens"], pair.per_step["requests"][name]["tokens"]) for name, r in requests.items())
    served = {f"{backend} x{n}" for worker in pair.replay["workers"] for backend, n in worker["served"].items()}
    seen = [f"{pair.replay['preemptions']} preempted"] if pair.replay["preemptions"] else []
    hits = sum(r["cached"] for r in requests.values())
    return [case.name, f"{same} of {total}", f"{max(logprob_differences(pair)):.1e}",
            f"mean {mean(drift(pair.replay)):.1e} ({mean(drift(pair.per_step)):.1e}) "
            f"max {max(drift(pair.replay)):.1e} ({max(drift(pair.per_step)):.1e})",
            str(flushes(pair.replay)), ", ".join(sorted(served)),
            ", ".join(seen + ([f"{hits} tokens from the prefix cache"] if hits else []))]


@by_name
def test_same_tokens_and_logprobs_as_per_step(pair: Callable[[Case], Pair], case: Case) -> None:
    both = pair(case)
    for name, b in both.per_step["requests"].items():
        a = both.replay["requests"][name]
        assert a["prompt"] == b["prompt"] and len(a["tokens"]) >= 3 * case.buffer_len
        same = common_prefix(a["tokens"], b["tokens"])
        if same < len(b["tokens"]):
            best, second = b["logprobs"][same]
            assert best - second < 2 * case.tolerance, f"{name} differs at {same}, where it was no tie"
    assert max(logprob_differences(both)) < case.tolerance


@by_name
def test_decode_agrees_with_prefill(pair: Callable[[Case], Pair], case: Case) -> None:
    replay, per_step = drift(pair(case).replay), drift(pair(case).per_step)
    if case.drift is None:  # replay rounds the state once a ring cycle, the engine once a token
        assert mean(replay) < mean(per_step) and max(replay) < 1.5 * max(per_step)
    else:
        assert max(replay) < case.drift and mean(replay) < 1.5 * mean(per_step)


@by_name
def test_this_package_served_every_replay_step(pair: Callable[[Case], Pair], case: Case) -> None:
    both = pair(case)
    steps = LAYERS * sum(bool(rows) for rows in both.replay["schedule"])
    assert [w["served"] for w in both.replay["workers"]] == [{"torch": steps}] * case.tp
    assert [w["served"] for w in both.per_step["workers"]] == [{}] * case.tp
    assert both.log.count("replayssm_cute: patched vLLM's") == case.tp
    assert both.log.count("replayssm_cute: serving Mamba2") == case.tp
    assert f"state {case.state}, inputs {case.dtype}, L={case.buffer_len} on CPU with the torch" in both.log


@by_name
def test_every_cursor_and_flush_is_that_of_the_rules(pair: Callable[[Case], Pair], case: Case) -> None:
    """The engine's cursors, row by row, are those of ``decode_cursors`` on the scheduler's counts."""
    run = pair(case).replay
    block = run["block"] if run["cache_mode"] == "align" else None
    expected = []
    for rows in filter(None, run["schedule"]):
        counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
        cursors = decode_cursors(*counts, case.buffer_len, block_size=block)
        expected += LAYERS * [sorted(map(list, zip(*(c.tolist() for c in cursors), strict=True)))]
    assert [w["steps"] for w in run["workers"]] == [expected] * case.tp
    assert flushes(run) > 0


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.workload == "mixed"],
                         ids=lambda case: case.name)
def test_number_of_flushes(pair: Callable[[Case], Pair], case: Case) -> None:
    """Where no preemption and no block boundary intervenes: one every L tokens after the first, and one for
    every prompt that ends in a chunk of one token."""
    run = pair(case).replay
    tails = sum(computed < admitted for rows in run["schedule"] for computed, _, admitted in rows)
    full = sum((len(r["tokens"]) - 1) // case.buffer_len for r in run["requests"].values())
    assert tails > 0
    assert flushes(run) == case.tp * LAYERS * (full + tails)


def test_preemption_happened(pair: Callable[[Case], Pair]) -> None:
    run = pair(CASES["preempted"]).replay
    assert run["preemptions"] > 0
    # A resumed request is admitted again with the tokens it had generated.
    assert len({admitted for rows in run["schedule"] for _, _, admitted in rows}) > len(run["requests"])


def test_prefix_cache_hit_blocks_of_prefill_and_of_decode(pair: Callable[[Case], Pair]) -> None:
    run = pair(CASES["prefix cache"]).replay
    assert run["cache_mode"] == "align"
    block, cached = run["block"], {name: r["cached"] for name, r in run["requests"].items()}
    assert cached == {"a": 0, "b": 0, "c": block, "d": 2 * block}


def test_tp_2_writes_what_tp_1_does(pair: Callable[[Case], Pair]) -> None:
    plain, split = pair(CASES["plain"]).replay["requests"], pair(CASES["TP 2"]).replay["requests"]
    assert {name: r["tokens"] for name, r in plain.items()} == {name: r["tokens"] for name, r in split.items()}


def test_the_plugin_waits_for_the_engine_and_goes_without_trace() -> None:
    code = f"""
import importlib, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
assert not [m for m in sys.modules if "mamba_mixer" in m or "v1.worker" in m]
mixer, runner = importlib.import_module("{MIXER}"), importlib.import_module("vllm.v1.worker.gpu_model_runner")
functions = [(mixer, "selective_state_update_replayssm_output_only"), (runner, "initialize_mamba_ssu_backend")]
print(*(getattr(*f).__module__ for f in functions))
from replayssm_cute.integrations.vllm import unregister
unregister()
print(*(getattr(*f).__module__ for f in functions))
"""
    process = run(["-c", code])
    assert process.stdout.splitlines()[-2:] == [
        "replayssm_cute.integrations.vllm replayssm_cute.integrations.vllm",
        "vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_output_only "
        "vllm.model_executor.layers.mamba.ops.ssu_dispatch"], process.stdout


def test_switched_off_the_engine_refuses_replay_as_ever(model: Path, tmp_path: Path) -> None:
    process = run([str(HERE / "run_engine.py"), json.dumps({
        "model": str(model), "workload": "mixed", "out": str(tmp_path / "out"),
        "options": CASES["bf16 model"].engine_options(replay=True)})], REPLAYSSM_DISABLE="1")
    assert process.returncode != 0
    assert "replayssm_cute: vLLM left alone: REPLAYSSM_DISABLE is set" in process.stdout
    assert "ReplaySSM does not support mamba backend 'cpu'" in process.stdout
