"""The dispatcher: which backend serves where, and what happens when one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.arch import CPU, Arch
from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.registry import tuned
from replayssm_cute.types import SUPPORTED, Mamba2Geometry, Mamba2Problem, Support

BF16 = torch.bfloat16
PROBLEM = Mamba2Problem(Mamba2Geometry(64, 64, 128, 8), 16, torch.float32, BF16, BF16, BF16, torch.int8, torch.int32)


def gpu(major: int, minor: int, name: str = "Some_GPU") -> Arch:
    return Arch("cuda", (major, minor), name, 100)


class Fake:
    """Backends whose support, preparation and call are set by the test."""

    def __init__(self) -> None:
        self.support: dict[str, Support] = {}
        self.fail_prepare: set[str] = set()
        self.fail_call: set[str] = set()
        self.configs: dict[str, Any] = {}
        self.calls: list[str] = []
        self.other_choice: set[str] = set()      # backends for which no row's config is valid

    def module(self, name: str) -> SimpleNamespace:
        if name not in dispatch.BACKENDS:
            raise ArgumentError("backend", "a known one", name)

        def prepare(problem: Mamba2Problem, arch: Arch, batch: int, config: Any) -> Callable[..., object]:
            self.configs[name] = config
            if name in self.fail_prepare:
                raise RuntimeError(f"{name} does not compile")

            def call(*args: object) -> None:
                if name in self.fail_call:
                    raise RuntimeError(f"{name} does not launch")
                self.calls.append(name)
            return call

        def choose(problem: Mamba2Problem, arch: Arch, batch: int, config: Any) -> SimpleNamespace:
            return SimpleNamespace(to_dict=lambda: {"own": 1} if name in self.other_choice else config)

        return SimpleNamespace(SELF_CHECKING=name == "cute", prepare=prepare, choose=choose,
                               supports=lambda problem, arch: self.support.get(name, SUPPORTED))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    fake = Fake()
    monkeypatch.setattr(dispatch, "backend_module", fake.module)
    monkeypatch.setattr(tuned, "lookup", lambda *args: None)
    monkeypatch.setattr(tuned, "fastest", lambda *args: None)
    dispatch.candidates.cache_clear()
    dispatch.warn_once.cache_clear()
    yield fake
    dispatch.candidates.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, arch: Arch) -> torch.device:
    monkeypatch.setattr(archs, "of", lambda device: arch)
    return torch.device("cpu")


def order(arch: Arch) -> list[str]:
    return [c.backend for c in dispatch.candidates(PROBLEM, 64, arch) if c.support]


@pytest.mark.parametrize(("arch", "first"), [
    (gpu(10, 0), "cute"), (gpu(10, 3), "cute"), (gpu(9, 0), "triton"), (gpu(8, 0), "triton"), (gpu(8, 6), "triton"),
    (gpu(8, 9), "triton"), (gpu(11, 0), "triton"), (gpu(12, 0), "triton"), (gpu(12, 1), "triton"),
    (Arch("hip", name="MI300X"), "triton"), (CPU, "torch")], ids=str)
def test_first_choice(fake: Fake, arch: Arch, first: str) -> None:
    assert order(arch)[0] == first


@pytest.mark.parametrize("first", ["cute", "triton"])
def test_hopper_takes_what_was_measured_as_faster(fake: Fake, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    entries = {"cute": SimpleNamespace(config={"a": 1}), "triton": SimpleNamespace(config={"b": 2})}
    row = SimpleNamespace(backends=entries, describe=lambda: "in its words")
    monkeypatch.setattr(tuned, "lookup", lambda *args: row)
    monkeypatch.setattr(tuned, "fastest", lambda *args: (first, "a row"))
    assert order(gpu(9, 0))[0] == first
    assert order(gpu(10, 0))[0] == "cute", "on Blackwell the choice is fixed"
    dispatch.prepare(PROBLEM, 64, on(monkeypatch, gpu(9, 0)))
    assert fake.configs[first] == entries[first].config, "the tuned config reaches the backend"
    chosen = next(line for line in dispatch.explain(PROBLEM, 64, "cpu").splitlines() if line.startswith("->"))
    assert first in chosen and "a row" in chosen and "in its words" in chosen
    fake.other_choice.add(first)
    dispatch.candidates.cache_clear()
    dispatch.prepare(PROBLEM, 64, on(monkeypatch, gpu(9, 0)))
    assert fake.configs[first] is None, "a row whose config is not valid for this problem"
    assert "in its words" not in next(x for x in dispatch.explain(PROBLEM, 64, "cpu").splitlines() if x[:2] == "->")


def test_automatic_choice_falls_through_with_one_warning(fake: Fake, monkeypatch: pytest.MonkeyPatch,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    device = on(monkeypatch, gpu(10, 0))
    fake.fail_prepare.add("cute")
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        for _ in range(3):
            assert dispatch.prepare(PROBLEM, 64, device).backend == "triton"
    assert [r.message for r in caplog.records if "falling through" in r.message and "does not compile" in r.message]
    assert len(caplog.records) == 1


def test_failure_of_the_first_call_falls_through(fake: Fake, monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    device = on(monkeypatch, gpu(10, 0))
    fake.fail_call.update({"cute", "triton"})
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        assert dispatch.run(PROBLEM, 64, device, None, ()).backend == "torch"
    assert fake.calls == ["torch"] and len(caplog.records) == 2


def test_named_backend_raises_instead(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    device = on(monkeypatch, gpu(10, 0))
    fake.support["cute"] = Support(False, "because of the test")
    with pytest.raises(UnsupportedError, match=r"'cute'.*because of the test"):
        dispatch.prepare(PROBLEM, 64, device, "cute")
    assert dispatch.prepare(PROBLEM, 64, device).backend == "triton"
    fake.fail_prepare.add("triton")
    with pytest.raises(RuntimeError, match="does not compile"):
        dispatch.prepare(PROBLEM, 64, device, "triton")
    fake.fail_call.add("torch")
    with pytest.raises(RuntimeError, match="does not launch"):
        dispatch.run(PROBLEM, 64, device, "torch", ())


def test_nothing_can_serve(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    device = on(monkeypatch, gpu(8, 0))
    fake.support.update({b: Support(False, f"{b} is out") for b in dispatch.BACKENDS})
    with pytest.raises(UnsupportedError, match=r"cute is out.*torch is out|triton is out.*torch is out"):
        dispatch.prepare(PROBLEM, 64, device)


def test_explain_shows_the_decision(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.support["cute"] = Support(False, "no such luck")
    on(monkeypatch, gpu(10, 0, "NVIDIA_B200"))
    text = dispatch.explain(PROBLEM, 64, "cpu")
    lines = text.splitlines()
    assert "64x64x128/8" in lines[0] and "NVIDIA_B200 (sm_100)" in lines[0] and "batch 64" in lines[0]
    assert any("cute" in line and "cannot: no such luck" in line for line in lines)
    assert [line for line in lines if line.startswith("->")] == [next(li for li in lines if " triton" in li)]


def test_decision_is_made_once_per_problem(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(tuned, "lookup", lambda *args: asked.append(args))
    for _ in range(5):
        dispatch.candidates(PROBLEM, 64, gpu(9, 0))
    assert len(asked) == 1
