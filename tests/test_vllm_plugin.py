"""The vLLM plugin against a stand-in for the engine: when and what it patches, and who serves.

``tests/engine`` runs it in the engine itself.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_cute import dispatch, mamba2
from replayssm_cute.errors import ArgumentError
from replayssm_cute.integrations import vllm as plugin
from replayssm_cute.layout import allocate_mamba2_pool
from replayssm_cute.reference.mamba2 import replay_step_naive
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem

UPDATE, INITIALIZE = "selective_state_update_replayssm_output_only", "initialize_mamba_ssu_backend"
UPDATE_PARAMETERS = (
    "state, x, dt, A, B, C, D=None, dt_bias=None, z=None, dt_softplus=False, x_cache=None, dt_cache=None, "
    "B_cache=None, bc_pre=None, write_pos=None, is_flush=None, max_cache_len=16, state_batch_indices=None, "
    "null_block_id=0, out=None, enable_stochastic_rounding=False, cache_philox_rounds=0")
INITIALIZE_PARAMETERS = "mamba_config, kv_cache_config, *, use_replayssm=False"


class Engine:
    """A package named vllm with the modules the plugin knows, written to a folder on sys.path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write()

    def write(self, version: str = "0.32.0", cpu: str = "True",
              update: str = f"def {UPDATE}({UPDATE_PARAMETERS})",
              initialize: str = f"def {INITIALIZE}({INITIALIZE_PARAMETERS})") -> None:
        parts = tuple(map(int, version.split(".")))
        record = ":\n    CALLS.append(dict(locals()))\n    return 'the engine'\n"
        files = {
            "vllm": f"__version__, __version_tuple__ = {version!r}, {parts}",
            "vllm.distributed": "get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size = "
                                "(lambda: 1), (lambda: 2)",
            "vllm.platforms": f"class current_platform:\n    is_cpu = staticmethod(lambda: {cpu})",
            plugin.MIXER: f"CALLS = []\n{update}{record}",
            plugin.DISPATCH: f"CALLS = []\n{initialize}{record}",
            plugin.RUNNER: f"from {plugin.DISPATCH} import *",
        }
        for name, source in files.items():
            path = self.root.joinpath(*name.split("."))
            for folder in (path, *path.parents):
                if folder.is_relative_to(self.root / "vllm"):
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / "__init__.py").touch()
            (path / "__init__.py").write_text(source)
        importlib.invalidate_caches()

    @property
    def mixer(self) -> Any:
        return importlib.import_module(plugin.MIXER)

    @property
    def dispatch(self) -> Any:
        return importlib.import_module(plugin.DISPATCH)

    @property
    def runner(self) -> Any:
        return importlib.import_module(plugin.RUNNER)

    def patched(self) -> tuple[bool, bool]:
        """Whether the layer's step and the runner's set-up are ours."""
        return (getattr(self.mixer, UPDATE).__module__ == plugin.__name__,
                getattr(self.runner, INITIALIZE).__module__ == plugin.__name__)


def forget_engine() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "vllm"}


class Lines(logging.Handler):
    """What the engine's logger prints."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def engine_log() -> Iterator[Lines]:
    logger, handler = logging.getLogger("vllm"), Lines()
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    yield handler
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_log: Lines) -> Iterator[Engine]:
    real = forget_engine()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("REPLAYSSM_DISABLE", raising=False)
    dispatch.warn_once.cache_clear()
    finders = list(sys.meta_path)
    yield Engine(tmp_path)
    plugin.unregister()
    assert sys.meta_path == finders
    forget_engine()
    sys.modules.update(real)


# When it patches

def test_patches_when_the_engine_imports_its_layer(engine: Engine, engine_log: Lines) -> None:
    plugin.register()
    assert not [m for m in sys.modules if m.startswith("vllm.")], "a plugin must not import the engine early"
    assert engine.patched() == (True, True)
    assert engine_log.lines == [f"replayssm_cute: patched vLLM's {UPDATE} and {INITIALIZE}"]
    assert "CALLS" in inspect.getsource(engine.mixer), "the module keeps a loader that knows its source"


@pytest.mark.parametrize("first", ["mixer", "runner"])
def test_patches_what_is_already_loaded(engine: Engine, first: str) -> None:
    assert getattr(engine, first)
    plugin.register()
    assert engine.patched() == (True, True)
    assert getattr(engine.dispatch, INITIALIZE) is getattr(engine.runner, INITIALIZE)


def test_on_a_gpu_only_the_step_is_patched(engine: Engine) -> None:
    engine.write(cpu="False")
    plugin.register()
    assert engine.patched() == (True, False)


def test_is_idempotent(engine: Engine, engine_log: Lines) -> None:
    plugin.register()
    plugin.register()
    assert sum(isinstance(f, plugin.OnImport) for f in sys.meta_path) == 1
    step = getattr(engine.mixer, UPDATE)
    plugin.register()
    assert getattr(engine.mixer, UPDATE) is step
    assert len(engine_log.lines) == 1


def test_is_reversible(engine: Engine) -> None:
    originals = getattr(engine.mixer, UPDATE), getattr(engine.dispatch, INITIALIZE)
    for _ in range(2):
        plugin.register()
        assert engine.patched() == (True, True)
        plugin.unregister()
        assert (getattr(engine.mixer, UPDATE), getattr(engine.runner, INITIALIZE)) == originals


def test_unregister_before_the_layer_is_imported(engine: Engine) -> None:
    plugin.register()
    plugin.unregister()
    assert engine.patched() == (False, False)


def test_a_later_patch_of_someone_else_is_kept(engine: Engine) -> None:
    plugin.register()
    theirs = object()
    setattr(engine.mixer, UPDATE, theirs)
    plugin.unregister()
    assert getattr(engine.mixer, UPDATE) is theirs


# When it does not

@pytest.mark.parametrize(("change", "reason"), [
    ({"update": "def other(x)"}, f"has no function {UPDATE}"),
    ({"update": f"def {UPDATE}({UPDATE_PARAMETERS}, pdl=False)"}, f"the signature of {UPDATE} differs"),
    ({"update": f"def {UPDATE}({UPDATE_PARAMETERS.replace('write_pos', 'cursor')})"}, "cursor"),
    ({"update": f"def {UPDATE}({UPDATE_PARAMETERS.replace('null_block_id=0', 'null_block_id=-1')})"},
     "null_block_id=-1"),
    ({"initialize": "def other(x)"}, f"has no function {INITIALIZE}"),
    ({"initialize": f"def {INITIALIZE}({INITIALIZE_PARAMETERS.replace('*, ', '')})"},
     f"the signature of {INITIALIZE} differs"),
    ({"cpu": "1 / 0"}, "ZeroDivisionError"),
    ({"version": "0.29.0"}, "version 0.29.0 is not one of those known (0.30, 0.31, 0.32, 0.33)"),
    ({"version": "0.34.0"}, "version 0.34.0"),
])
@pytest.mark.parametrize("loaded", [False, True])
def test_all_or_nothing(engine: Engine, engine_log: Lines, change: dict[str, str], reason: str,
                        loaded: bool) -> None:
    engine.write(**change)
    if loaded:
        assert engine.mixer
    plugin.register()
    assert all(getattr(module, name).__module__ != plugin.__name__
               for module in (engine.mixer, engine.dispatch, engine.runner)
               for name in (UPDATE, INITIALIZE) if hasattr(module, name))
    line, = engine_log.lines
    assert line.startswith("replayssm_cute: vLLM left alone: ") and reason in line
    plugin.register()
    assert len(engine_log.lines) == 1, "the engine calls it several times, one line is enough"


@pytest.mark.parametrize("source", ["raise ImportError('broken')", "import nothing_of_this_name", ""])
def test_never_raises_whatever_the_engine_is(engine: Engine, engine_log: Lines, source: str) -> None:
    (engine.root / "vllm" / "__init__.py").write_text(source)
    plugin.register()
    assert "left alone" in engine_log.lines[0]


def test_an_engine_that_fails_to_import_its_layer_says_so_itself(engine: Engine, engine_log: Lines) -> None:
    plugin.register()
    engine.write(update="raise KeyError('of the engine')\ndef f()")
    with pytest.raises(KeyError, match="of the engine"):
        _ = engine.mixer
    assert engine_log.lines == []
    engine.write()
    assert engine.patched() == (True, True)


@pytest.mark.parametrize(("value", "patched"), [("1", False), ("0", True), ("", True)])
def test_switch(engine: Engine, monkeypatch: pytest.MonkeyPatch, value: str, patched: bool) -> None:
    monkeypatch.setenv("REPLAYSSM_DISABLE", value)
    plugin.register()
    assert engine.patched() == (patched, patched)


# Its lines

def test_a_logger_the_user_set_up_is_left_alone(engine: Engine) -> None:
    handler = logging.NullHandler()
    plugin.log.addHandler(handler)
    try:
        plugin.register()
        assert plugin.log.handlers == [handler] and plugin.log.propagate
    finally:
        plugin.log.removeHandler(handler)


def test_the_logger_is_given_back(engine: Engine) -> None:
    plugin.register()
    plugin.unregister()
    assert (plugin.log.handlers, plugin.log.level, plugin.log.propagate) == ([], logging.NOTSET, True)


def test_lines_reach_an_engine_that_sets_up_its_log_later(engine: Engine, engine_log: Lines) -> None:
    logging.getLogger("vllm").handlers = []
    plugin.register()
    logging.getLogger("vllm").handlers = [engine_log]
    assert engine.patched() and engine_log.lines


def test_lines_obey_the_level_of_the_engine(engine: Engine, engine_log: Lines) -> None:
    logging.getLogger("vllm").setLevel(logging.WARNING)
    plugin.register()
    assert engine.patched() and not engine_log.lines


# Who serves

def step_arguments(device: str = "cpu", rows: int = 3, L: int = 4) -> dict[str, Any]:
    """A step as the engine's layer calls it."""
    g = Mamba2Geometry(4, 8, 16, 2)
    pool = allocate_mamba2_pool(rows + 1, g, L, torch.float32, device=device)

    def bf16(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def per_head(values: Tensor, *sizes: int) -> Tensor:
        return values[(..., *[None] * len(sizes))].expand(*values.shape, *sizes)

    x = bf16(rows, g.nheads, g.headdim)
    return {
        "state": pool.state, "x": x, "dt": per_head(bf16(rows, g.nheads), g.headdim),
        "A": per_head(-torch.rand(g.nheads, device=device), g.headdim, g.dstate),
        "B": bf16(rows, g.ngroups, g.dstate), "C": bf16(rows, g.ngroups, g.dstate),
        "D": per_head(bf16(g.nheads), g.headdim), "dt_bias": per_head(bf16(g.nheads), g.headdim),
        "dt_softplus": True,
        "x_cache": pool.x_cache, "dt_cache": pool.dt_cache, "B_cache": pool.B_cache, "bc_pre": None,
        "write_pos": torch.zeros(rows, dtype=torch.int32, device=device),
        "is_flush": torch.zeros(rows, dtype=torch.int8, device=device), "max_cache_len": L,
        "state_batch_indices": torch.arange(1, rows + 1, dtype=torch.int32, device=device)[:, None],
        "out": torch.empty_like(x)}


@pytest.fixture
def step(engine: Engine) -> Any:
    plugin.register()
    return getattr(engine.mixer, UPDATE)


def test_the_signature_is_ours_but_for_what_is_keyword_only(step: Any) -> None:
    ours = inspect.signature(mamba2.selective_state_update_replayssm_output_only).parameters.values()
    assert list(inspect.signature(step).parameters.values()) == [p for p in ours if p.kind != p.KEYWORD_ONLY]


def test_on_a_cpu_the_pytorch_backend_serves(engine: Engine, step: Any, engine_log: Lines) -> None:
    before = dispatch.served[dispatch.OP, "torch"]
    for write_pos, flush in ((0, 0), (1, 0), (2, 1)):
        arguments = step_arguments()
        arguments["write_pos"].fill_(write_pos)
        arguments["is_flush"].fill_(flush)
        expected = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        assert step(**arguments) is arguments["out"]
        del expected["bc_pre"], expected["max_cache_len"]
        replay_step_naive(**expected, z=None, null_block_id=0)
        for name in ("out", "state", "x_cache", "dt_cache", "B_cache"):
            torch.testing.assert_close(arguments[name], expected[name], rtol=1e-2, atol=1e-3)
    assert dispatch.served[dispatch.OP, "torch"] == before + 3
    assert engine.mixer.CALLS == []
    assert engine_log.lines[1:] == ["replayssm_cute: serving Mamba2 4x8x16/2, state float32, inputs "
                                    "bfloat16, L=4 on CPU with the torch backend"]


def test_on_a_cpu_bad_arguments_raise_here(engine: Engine, step: Any) -> None:
    with pytest.raises(ArgumentError, match="x_cache: expected shape"):
        step(**step_arguments() | {"max_cache_len": 5})
    assert engine.mixer.CALLS == []


class Gpu:
    """Stands for one: tensors that are not on the CPU, and the backend that would serve them."""

    def __init__(self) -> None:
        self.backend = "triton"
        self.asked: list[Mamba2Problem] = []

    def warmup(self, problem: Mamba2Problem, batches: list[int], device: object) -> list[str]:
        self.asked.append(problem)
        if self.backend == "broken":
            raise OSError("no such library")
        return [self.backend]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(mamba2, "warmup_mamba2", gpu.warmup)
    return gpu


@pytest.mark.parametrize(("backend", "change", "reason"), [
    ("torch", {}, "only the PyTorch backend"),
    ("broken", {}, "OSError: no such library"),
    ("triton", {"enable_stochastic_rounding": True, "cache_philox_rounds": 5}, "enable_stochastic_rounding"),
    ("triton", {"max_cache_len": 5}, "x_cache: expected shape"),
])
def test_what_is_not_ours_goes_to_the_engine(engine: Engine, step: Any, gpu: Gpu, engine_log: Lines,
                                             backend: str, change: dict[str, Any], reason: str) -> None:
    gpu.backend = backend
    arguments = step_arguments("meta") | change
    for _ in range(3):
        assert step(**arguments) == "the engine"
    assert len(gpu.asked) <= 1
    assert len(engine.mixer.CALLS) == 3
    assert all(engine.mixer.CALLS[0][name] is value for name, value in arguments.items())
    line, = engine_log.lines[1:]
    assert line.startswith("replayssm_cute: left to vLLM's own kernel") and reason in line


def test_the_decision_is_made_once_a_problem(engine: Engine, step: Any, gpu: Gpu, engine_log: Lines,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba2, UPDATE, lambda *args, rand_seed: "ours")
    arguments = step_arguments("meta", rows=7)
    for rows in (3, 3, 7):
        batch = {name: arguments[name][:rows] for name in ("x", "dt", "B", "C", "out")}
        assert step(**arguments | batch) == "ours"
    assert len(gpu.asked) == 1
    assert step(**step_arguments("meta", L=5)) == "ours"
    assert len(gpu.asked) == 2
    assert [line.partition("serving ")[2] for line in engine_log.lines[1:]] == [
        f"Mamba2 4x8x16/2, state float32, inputs bfloat16, L={L} on CPU with the triton backend"
        for L in (4, 5)]


def test_stochastic_rounding_is_passed_on(step: Any, gpu: Gpu, engine_log: Lines,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(mamba2, UPDATE, lambda *args, rand_seed: calls.append((*args, rand_seed)))
    monkeypatch.setattr(plugin, "seed_state", lambda seed, device, **layout: layout)
    plugin._seed.cache_clear()
    arguments = step_arguments("meta")
    arguments["state"] = arguments["state"].half()
    step(**arguments, enable_stochastic_rounding=True, cache_philox_rounds=5)
    step(**arguments)
    second_of_two = {"first_head": 4, "total_heads": 8}  # this rank's place among the heads of the layer
    assert [c[-3:] for c in calls] == [(True, 5, second_of_two), (False, 0, None)]
    plugin._seed.cache_clear()
    assert [p.philox_rounds for p in gpu.asked] == [5, 0]
    assert ["stochastic rounding (5 rounds)" in line for line in engine_log.lines[1:]] == [True, False]


@pytest.mark.parametrize(("backend", "refused"), [("triton", False), ("flashinfer", True)])
def test_the_engine_accepts_replay_on_a_cpu(engine: Engine, backend: str, refused: bool) -> None:
    plugin.register()
    assert engine.mixer

    class Config:
        class backend_:
            value = backend
        backend = backend_

    for replay in (True, False):
        getattr(engine.runner, INITIALIZE)(Config, "cache", use_replayssm=replay)
        call = engine.dispatch.CALLS.pop()
        assert call == {"mamba_config": Config, "kv_cache_config": "cache",
                        "use_replayssm": replay and refused}
