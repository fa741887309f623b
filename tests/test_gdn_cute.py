"""The Gated DeltaNet CuTe backend without a compiler: what it takes, how it chooses, and when it is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm_cute import gdn_dispatch
from replayssm_cute.arch import CPU, Arch
from replayssm_cute.backends import cute, gdn_cute
from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_types import GdnFoldProblem, GdnGeometry, GdnProblem
from replayssm_cute.kernels.gdn_config import GdnConfig, heuristic, smem_bytes, validate
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.types import SUPPORTED

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DECODE = GdnProblem(GdnGeometry(16, 32), 16, F32, BF16, BF16, (BF16, BF16, F32, F32))
FOLD = GdnFoldProblem(GdnGeometry(16, 32), 16, F32, BF16, BF16, (torch.int32,) * 3, torch.int8, False, True)


def verify(tokens: int = 4, exact: bool = True, **changes: Any) -> GdnProblem:
    return replace(DECODE, tokens=tokens, exact_fold=exact, flag_dtype=torch.int8, **changes)


def gpu(major: int, minor: int) -> Arch:
    return Arch("cuda", (major, minor), "Some_GPU", 100)


@pytest.mark.parametrize(("arch", "order"), [
    (gpu(10, 0), ("cute", "triton", "torch")), (gpu(10, 3), ("cute", "triton", "torch")),
    (gpu(9, 0), ("cute", "triton", "torch")), (gpu(8, 0), ("triton", "cute", "torch")),
    (gpu(12, 0), ("triton", "cute", "torch")), (Arch("hip", name="MI300X"), ("triton", "cute", "torch")),
    (CPU, ("torch", "triton", "cute"))], ids=str)
def test_order_of_preference(arch: Arch, order: tuple[str, ...]) -> None:
    assert tuple(name for name, _ in gdn_dispatch.preference(DECODE, arch)) == order


def test_what_cute_refuses_is_served_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def supports(self, problem: Any, arch: Any) -> Any:
            return SUPPORTED

        def prepare(self, problem: Any, arch: Any, tuned: Any) -> Any:
            return print

    module = gdn_dispatch.backend_module
    monkeypatch.setattr(gdn_dispatch, "backend_module", lambda n: module(n) if n == "cute" else Fake())
    monkeypatch.setattr(gdn_dispatch.archs, "of", lambda device: gpu(9, 0))
    monkeypatch.setattr(gdn_cute, "prepare", Fake().prepare)
    monkeypatch.setattr(gdn_cute, "installed", lambda: SUPPORTED)
    assert gdn_dispatch.prepare(DECODE, "cpu").backend == "cute"
    assert gdn_dispatch.prepare(replace(DECODE, act_dtype=F16), "cpu").backend == "triton"
    assert gdn_dispatch.prepare(FOLD, "cpu").backend == "triton"


@pytest.mark.parametrize(("problem", "reason"), [
    (replace(DECODE, geometry=GdnGeometry(2, 4, 64, 128)), "K = V = 128"),
    (replace(DECODE, act_dtype=F32), "bf16 inputs"), (replace(DECODE, row_align=8), "aligned"),
    (replace(DECODE, state_align=4), "aligned"), (replace(DECODE, buffer_len=64), "L=64"),
    (replace(DECODE, buffer_len=1), "L=1"), (FOLD, "no kernel for folds")], ids=str)
def test_refusals_say_why(problem: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn_cute, "installed", lambda: SUPPORTED)
    assert reason in gdn_cute.supports(problem, gpu(9, 0)).reason
    assert "9.0, 10.0 and 10.3" in gdn_cute.supports(problem, gpu(8, 0)).reason


def test_without_the_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute.importlib.util, "find_spec", lambda name: None)
    cute.installed.cache_clear()
    try:
        assert "not installed" in gdn_cute.supports(DECODE, gpu(10, 0)).reason
    finally:
        cute.installed.cache_clear()


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_the_heuristic_covers_what_is_taken(target: Any) -> None:
    problems = [replace(DECODE, state_dtype=s, ring_dtype=ring, buffer_len=L, philox_rounds=r)
                for s in (F32, F16, BF16) for ring in (F32, F16, BF16) for L in (2, 5, 8, 16, 32)
                for r in ((0, 10) if s != F32 else (0,))]
    problems += [verify(T, exact, state_dtype=s, ring_dtype=ring, buffer_len=L)
                 for T, L in ((1, 8), (2, 16), (4, 16), (8, 32), (16, 32))
                 for exact in (True, False) for s in (F32, F16, BF16) for ring in (s, BF16)]
    for problem in problems:
        few = 4
        if problem.exact_fold and problem.tokens <= 8:
            few = 1 if problem.state_dtype == F32 else 0
        for batch in (1, 2, 4, 16, 64, 512):
            config = heuristic(problem, batch, target)
            assert config is not None and validate(problem, config, target)
            assert (config.design == "register") == (batch <= few), (problem, batch)
            assert config.min_ctas * (smem_bytes(problem, config) + 1024) <= target.smem_per_sm


def test_the_plan_covers_every_batch() -> None:
    target = TARGETS["sm_90a"]
    for problem in (DECODE, verify(), verify(exact=False), replace(DECODE, geometry=GdnGeometry(4, 8))):
        plan = gdn_cute.plan(problem, target)
        assert [batch for batch, _ in plan] == sorted(batch for batch, _ in plan)
        assert 2 <= len({config for _, config in plan}) == len(plan) <= 3
        for limit, config in plan[:-1]:
            assert heuristic(problem, limit, target) == config != heuristic(problem, 2 * limit, target)


@pytest.mark.parametrize(("change", "reason"), [
    ({"design": "bulk"}, "unknown design"), ({"rows": 3}, "neither 2 nor 4"), ({"tile_v": 48}, "does not split"),
    ({"stages": 0}, "stages=0"), ({"design": "register"}, "do not fit the register design"),
    ({"stages": 8}, "bytes of shared memory"), ({"min_ctas": 3}, "shared memory"),
    ({"min_ctas": 5, "stages": 1}, "registers a thread")])
def test_invalid_configs_say_why(change: dict[str, Any], reason: str) -> None:
    config = GdnConfig("staged", 2, 64, 2, 2)
    assert validate(DECODE, config, TARGETS["sm_90a"])
    assert reason in validate(DECODE, replace(config, **change), TARGETS["sm_90a"]).reason


def test_configs_are_read_back() -> None:
    config = GdnConfig("staged", 4, 128, 2, 2, True, True)
    assert GdnConfig.from_dict(config.to_dict()) == config
    for bad in ({"rows": "4"}, {"depth": 1}):
        with pytest.raises(ArgumentError, match="config"):
            GdnConfig.from_dict({**config.to_dict(), **bad})
