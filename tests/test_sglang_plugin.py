"""The SGLang plugin against a stand-in of the engine, and against the installed package where there is one.

``sglang`` needs a GPU's packages to be imported as a whole; its source is enough for signatures and for its hook
registry.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_cute import dispatch
from replayssm_cute.integrations import sglang as plugin
from tests.cases import bits
from tests.gdn_cases import check, make_case
from tests.gdn_chain import NULL, Chain, Shape, acceptance, reference_reset

SPEC = f"{plugin.KERNELS}.gdn_replayssm_spec_decode"
LINEAR = f"{plugin.KERNELS}.fused_recurrent_linear_replayssm"


def signature(names: tuple[str, ...], calls: list[str], name: str) -> Any:
    """A function with these parameters that records its calls."""
    scope: dict[str, Any] = {"calls": calls}
    exec(f"def {name}({', '.join(f'{n}=None' for n in names)}, **more):\n    calls.append('{name}')", scope)
    return scope[name]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A stand-in for the engine: its modules, its hook registry, and the calls that reach its own functions."""
    calls: list[str] = []
    modules = {name: ModuleType(name) for name in (
        "sglang", "sglang.version", plugin.REGISTRY, SPEC, LINEAR)}
    modules["sglang.version"].__version__ = "0.5.23"  # type: ignore[attr-defined]
    for module, names in ((SPEC, {"gdn_replayssm_spec_decode": plugin.VERIFY,
                                  "commit_gdn_replayssm_spec": plugin.COMMIT,
                                  "commit_gdn_replayssm_circular": plugin.CIRCULAR}),
                          (LINEAR, {"fused_recurrent_linear_replayssm_decode": plugin.DECODE,
                                    "fused_recurrent_gdn_replayssm_decode": plugin.DECODE})):
        for name, parameters in names.items():
            setattr(modules[module], name, signature(parameters, calls, name))

    class HookRegistry:
        @staticmethod
        def register(target: str, hook: Any, kind: str) -> None:
            assert kind == "around"
            module, name = target.rsplit(".", 1)
            original = getattr(modules[module], name)
            setattr(modules[module], name, lambda *a, **k: hook(original, *a, **k))

    modules[plugin.REGISTRY].HookRegistry = HookRegistry  # type: ignore[attr-defined]
    modules[plugin.REGISTRY].HookType = type("HookType", (), {"AROUND": "around"})  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("_ours", "_betas"):
        monkeypatch.setattr(plugin, name, {})
    monkeypatch.setattr(plugin, "_registered", False)
    dispatch.warn_once.cache_clear()
    yield calls


def layers_of(chain: Chain) -> dict[str, Tensor | None]:
    """The chain's pools as the engine keeps them: layers in front, the second layer in use, no ring of beta."""
    for name in ("d_cache", "k_cache", "g_cache", "rawv_cache", "rawk_cache"):
        ring = chain.rings[name]
        if ring is not None:
            whole = torch.stack([ring, ring])
            chain.rings[name] = whole[1]
    chain.rings["beta_cache"] = None
    whole = torch.stack([chain.state, chain.state])
    chain.state = whole[1]
    return {name: None if r is None else r._base for name, r in chain.rings.items()} | {"state": whole}


def verify(chain: Chain, inputs: dict[str, Tensor]) -> None:
    sys.modules[SPEC].gdn_replayssm_spec_decode(
        **inputs, A_log=chain.A_log, dt_bias=chain.dt_bias, checkpoint_state=chain.state, **chain.rings,
        **chain.cursors, **chain.indices, max_cache_len=chain.shape.buffer_len, max_spec_len=chain.shape.tokens,
        scale=chain.shape.k_size ** -0.5, use_qk_l2norm_in_kernel=True, launch_mode="verify")


def commit(chain: Chain, accepted: Tensor) -> None:
    sys.modules[SPEC].commit_gdn_replayssm_spec(
        **chain.cursors, num_accepted=accepted, replay_indices=chain.indices["replay_indices"],
        max_cache_len=chain.shape.buffer_len, max_spec_len=chain.shape.tokens, fold_every_commit=False,
        null_block_id=NULL)


@pytest.mark.parametrize("exact", [True, False], ids=["narrow rings", "fp32 rings"])
def test_serves_a_chain_of_windows_as_the_engine_poses_them(engine: list[str], exact: bool) -> None:
    """Verify, commit and fold with a tracked snapshot: the recurrence's bits, and none of the engine's functions."""
    plugin.register()
    chain = Chain(Shape(exact=exact), ring=torch.bfloat16 if exact else torch.float32)
    reference_reset(chain)
    whole, folds = layers_of(chain), 0
    for step in range(14):
        accepted = acceptance(chain.gen, 3, 4).clamp(min=1)
        chain.step(verify, commit, accepted)
        due = chain.cursors["is_flush"][chain.live_keys].bool()
        spare = next(s for s in range(len(chain.state)) if s not in chain.slots.tolist())
        steps = torch.tensor([int(accepted[0]) - 1 if step % 3 == 0 else -1, -1, -1, 2])
        sys.modules[SPEC].commit_gdn_replayssm_circular(
            checkpoint_state=whole["state"], d_cache=whole["d_cache"], k_cache=whole["k_cache"],
            g_cache=whole["g_cache"], d_residual_cache=whole["rawv_cache"], k_residual_cache=whole["rawk_cache"],
            state_batch_indices=chain.indices["ssm_state_indices"], **chain.cursors,
            replay_indices=chain.indices["replay_indices"].long(), accept_lens=torch.cat([accepted, accepted[:1]]),
            mamba_track_indices=torch.tensor([spare] * 4), mamba_steps_to_track=steps, null_block_id=NULL)
        got = torch.cat([chain.state[chain.live_slots[due]], chain.state[spare][None]][:1 + (step % 3 == 0)])
        want = torch.cat([chain.shadow[due], chain.shadow[:1]][:1 + (step % 3 == 0)])
        if exact:
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        folds += int(due.sum())
        assert not bool(chain.cursors["is_flush"][chain.live_keys].any())
    assert engine == [] and folds > 5 and chain.flushes == 0


def test_serves_standard_decode(engine: list[str]) -> None:
    plugin.register()
    case = make_case(packed=True, padded=(1,))
    before = case.clone()
    names = {n: case.get(n) for n in ("mixed_qkv", "a", "b", "A_log", "dt_bias", "d_cache", "k_cache", "g_cache", "out",
                                      "ssm_state_indices", "write_pos", "force_flush")}
    sys.modules[LINEAR].fused_recurrent_gdn_replayssm_decode(**names, scale=case.scale, initial_state=case["state"],
                                                             use_qk_l2norm_in_kernel=True)
    check(before, case)
    assert engine == []


def test_what_is_not_served_goes_to_the_engine_for_good(engine: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Refused once, a pool stays the engine's: its rings hold what the engine has written."""
    plugin.register()
    case = make_case(packed=True)
    names = {n: case.get(n) for n in ("mixed_qkv", "a", "b", "A_log", "dt_bias", "d_cache", "k_cache", "g_cache", "out",
                                      "ssm_state_indices", "write_pos", "force_flush")}
    decode = sys.modules[LINEAR].fused_recurrent_linear_replayssm_decode
    before = case.clone()
    for is_kda in (True, False):
        decode(**names, scale=case.scale, initial_state=case["state"], use_qk_l2norm_in_kernel=True, is_kda=is_kda)
    assert engine == ["fused_recurrent_linear_replayssm_decode"] * 2 and "is_kda" in caplog.text
    assert all(torch.equal(bits(t), bits(before.buffers[n])) for n, t in case.buffers.items())


def test_rings_that_no_verify_step_decided_are_the_engines(engine: list[str]) -> None:
    plugin.register()
    sys.modules[SPEC].commit_gdn_replayssm_circular(d_cache=torch.zeros(1, 2, 1, 4, 8))
    assert engine == ["commit_gdn_replayssm_circular"]


def test_a_function_with_other_parameters_is_left_alone(engine: list[str], caplog: pytest.LogCaptureFixture) -> None:
    module = sys.modules[LINEAR]
    fewer = tuple(n for n in plugin.DECODE if n != "force_flush")
    module.fused_recurrent_linear_replayssm_decode = signature(fewer, engine, "older")  # type: ignore[attr-defined]
    plugin.register()
    module.fused_recurrent_linear_replayssm_decode(d_cache=torch.zeros(2, 1, 4, 8))
    assert engine == ["older"] and "no parameter force_flush" in caplog.text


@pytest.mark.parametrize(("environment", "version", "reason"), [
    ({"REPLAYSSM_DISABLE": "1"}, "0.5.23", "REPLAYSSM_DISABLE"), ({}, "0.6.0", "version 0.6.0"),
    ({"REPLAYSSM_DISABLE": "0"}, "0.5.23", "")])
def test_register(engine: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
                  environment: dict[str, str], version: str, reason: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sys.modules["sglang.version"].__version__ = version  # type: ignore[attr-defined]
    for _ in range(2):
        plugin.register()
    assert plugin._registered is not bool(reason)
    assert (f"left alone: {reason}" in caplog.text) if reason else not caplog.text


def test_the_package_offers_the_plugin() -> None:
    text = Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    group, entry = '[project.entry-points."sglang.srt.plugins"]', "replayssm_cute.integrations.sglang:register"
    assert f'{group}\nreplayssm_cute = "{entry}"' in text


def package() -> Path:
    """The folder of the installed engine; ``SGLANG_SOURCE`` may name one that is only unpacked."""
    if "SGLANG_SOURCE" in os.environ:
        return Path(os.environ["SGLANG_SOURCE"])
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        pytest.skip("sglang is not installed")
    return Path(found.origin).parent


@pytest.mark.parametrize(("target", "names"), [
    (f"{SPEC}.gdn_replayssm_spec_decode", plugin.VERIFY), (f"{SPEC}.commit_gdn_replayssm_spec", plugin.COMMIT),
    (f"{SPEC}.commit_gdn_replayssm_circular", plugin.CIRCULAR),
    (f"{LINEAR}.fused_recurrent_linear_replayssm_decode", plugin.DECODE)])
def test_signatures_of_the_engine(target: str, names: tuple[str, ...]) -> None:
    """The functions that are hooked exist and have the parameters that we read; ours have no others without default."""
    module, name = target.rsplit(".", 1)
    source = package().joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    function, = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    arguments = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
    assert [n for n in arguments if n in names] == [n for n in names if n in arguments]
    assert set(names) <= set(arguments), set(names) - set(arguments)


def test_the_engines_registry_takes_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks by the engine's own registry wrap its functions where they are imported, too."""
    source = package() / "srt/plugins/hook_registry.py"
    spec = importlib.util.spec_from_file_location("hook_registry_of_sglang", source)
    assert spec is not None and spec.loader is not None
    registry = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, registry)
    spec.loader.exec_module(registry)
    calls: list[str] = []
    home, importer = ModuleType("linear_of_sglang"), ModuleType("importer_of_sglang")
    home.decode = importer.decode = signature(plugin.DECODE, calls, "decode")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    monkeypatch.setitem(sys.modules, importer.__name__, importer)
    monkeypatch.setattr(plugin, "_ours", {})
    hook = plugin.HOOKS[f"{LINEAR}.fused_recurrent_linear_replayssm_decode"]
    registry.HookRegistry.register(f"{home.__name__}.decode", hook, registry.HookType.AROUND)
    registry.HookRegistry.apply_hooks()
    case = make_case(packed=True)
    before = case.clone()
    names = {n: case.get(n) for n in ("mixed_qkv", "a", "b", "A_log", "dt_bias", "d_cache", "k_cache", "g_cache", "out",
                                      "ssm_state_indices", "write_pos", "force_flush")}
    importer.decode(**names, scale=case.scale, initial_state=case["state"], use_qk_l2norm_in_kernel=True)  # type: ignore[attr-defined]
    check(before, case)
    assert calls == []
