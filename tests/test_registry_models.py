"""Model entries: the data is sound, says where it comes from, and is held to what it claims."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm_cute.errors import ArgumentError, RegistryError
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.reference.mamba2 import recurrent_step, replay_step
from replayssm_cute.registry import models
from replayssm_cute.registry.models import (
    GdnEntry,
    ModelEntry,
    all_models,
    find_by_geometry,
    gdn_models,
    get,
    get_gdn,
    get_mamba2,
    load_family,
    mamba2_models,
)
from replayssm_cute.types import Mamba2Geometry

ROOT = Path(__file__).parents[1]
ENTRIES = mamba2_models()


def test_the_promised_models_are_there() -> None:
    names = {entry.name for entry in ENTRIES}
    assert {"nemotron-h-4b", "nemotron-h-8b", "nemotron-h-47b", "nemotron-h-56b", "nemotron-nano-9b-v2",
            "nemotron-nano-12b-v2", "nemotron-3-nano-4b", "nemotron-3-nano-30b-a3b",
            "nemotron-3.5-lightning-30b-a3b", "nemotron-3-super-120b-a12b",
            "nemotron-3-ultra-550b-a55b"} <= names
    assert {entry.model_type for entry in ENTRIES} == {
        "nemotron_h", "granitemoehybrid", "falcon_h1", "zamba2", "bamba", "mamba2"}
    assert {entry.name for entry in gdn_models()} >= {
        "qwen3-next-80b-a3b", "qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b",
        "qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b"}
    assert {entry.model_type for entry in gdn_models()} == {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
    assert len(all_models()) == len(ENTRIES) + len(gdn_models())
    ids = [hub_id for entry in all_models() for hub_id in entry.hub_ids]
    assert len(ids) == len(set(ids)) and all(hub_id.count("/") == 1 for hub_id in ids)


@pytest.mark.parametrize(("name", "geometry", "layers"), [
    ("nemotron-3-nano-30b-a3b", (64, 64, 128, 8), (23, 52)),
    ("nemotron-3-nano-4b", (96, 80, 128, 8), (21, 42)),
    ("nemotron-3-super-120b-a12b", (128, 64, 128, 8), (40, 88)),
    ("nemotron-3-ultra-550b-a55b", (256, 64, 128, 8), (48, 108)),
    ("falcon-h1-34b", (32, 128, 256, 2), (72, 72)), ("zamba2-7b", (112, 64, 64, 2), (81, 81)),
])
def test_numbers_that_everything_rests_on(name: str, geometry: tuple[int, int, int, int],
                                          layers: tuple[int, int]) -> None:
    entry = get_mamba2(name)
    assert entry.geometry == Mamba2Geometry(*geometry)
    assert (entry.recurrent_layers, entry.layers) == layers


@pytest.mark.parametrize(("name", "value_heads", "layers", "channels"), [
    ("qwen3-next-80b-a3b", 32, (36, 48), 8192), ("qwen3.5-0.8b", 16, (18, 24), 6144),
    ("qwen3.5-9b", 32, (24, 32), 8192), ("qwen3.5-27b", 48, (48, 64), 10240), ("qwen3.5-35b-a3b", 32, (30, 40), 8192),
    ("qwen3.5-122b-a10b", 64, (36, 48), 12288), ("qwen3.5-397b-a17b", 64, (45, 60), 12288),
    ("qwen3.8-2.4t-a95b", 128, (69, 92), 20480)])
def test_numbers_of_gated_deltanet(name: str, value_heads: int, layers: tuple[int, int], channels: int) -> None:
    """``channels`` are those of the convolution over q, k and v, which the sources state on their own."""
    entry = get_gdn(name)
    g = entry.geometry
    assert g == GdnGeometry(16, value_heads, 128, 128) and (entry.recurrent_layers, entry.layers) == layers
    assert 2 * g.num_k_heads * g.head_k_dim + g.num_v_heads * g.head_v_dim == channels


@pytest.mark.parametrize("entry", all_models(), ids=lambda entry: entry.name)
def test_every_entry_is_plausible_and_sourced(entry: ModelEntry) -> None:
    g = entry.geometry
    width = g.nheads * g.headdim if isinstance(g, Mamba2Geometry) else g.num_v_heads * g.head_v_dim
    # The inner width is once to 2.67 times the residual width in every published model.
    assert entry.hidden_size / 2 < width < 2.7 * entry.hidden_size
    assert entry.conv_kernel == 4 and entry.act_dtype == torch.bfloat16
    assert entry.evidence.keys() == {*vars(g), "recurrent_layers", "layers", "hidden_size", "conv_kernel", "act_dtype",
                                     "config_state_dtype", "mtp_layers"}
    for number, evidence in entry.evidence.items():
        assert bool(evidence.sources) == (evidence.status != "unknown"), number
    assert all(advice.sources for advice in entry.state_advice)
    assert {advice.state_dtype for advice in entry.state_advice} <= set(entry.validated_state_dtypes)
    assert entry.config_state_dtype in (None, *entry.validated_state_dtypes)
    assert 16 in entry.validated_buffer_lens
    if isinstance(entry, GdnEntry):
        assert 4 * entry.recurrent_layers == 3 * entry.layers, "every fourth layer is attention"
        assert {2, 4} <= set(entry.validated_tokens), "one draft, as an MTP layer makes it, and three"


def test_which_models_need_stochastic_rounding() -> None:
    """Those whose fp16 checkpoint is published with it only; fp32 never is."""
    needing = {entry.name for entry in ENTRIES if entry.needs_stochastic_rounding(torch.float16)}
    assert needing == {"nemotron-3-super-120b-a12b", "nemotron-3-ultra-550b-a55b", "nemotron-3.5-lightning-30b-a3b"}
    nano = get("nemotron-3-nano-30b-a3b")  # published with fp16 to nearest, so it does not need it
    assert torch.float16 in {advice.state_dtype for advice in nano.state_advice}
    assert not any(entry.needs_stochastic_rounding(torch.float32) for entry in ENTRIES)
    assert not get("bamba-9b-v1").needs_stochastic_rounding(torch.float16), "no advice is no need"


def test_tensor_parallel_sizes_are_computed() -> None:
    assert get("nemotron-3-nano-30b-a3b").tp_sizes == (1, 2, 4, 8)
    # Two groups on four ranks: each rank's heads lie in one group, which vLLM does not do.
    assert get("falcon-h1-34b").tp_sizes == (1, 2, 4, 8) and get("falcon-h1-34b").vllm_tp_sizes == (1, 2)
    assert get("granite-4.0-h-small").vllm_tp_sizes == (1, 2, 4, 8)
    assert get("falcon-h1-34b").geometry.shard(4) == Mamba2Geometry(8, 128, 256, 1)
    qwen = get_gdn("qwen3.5-27b")
    assert qwen.tp_sizes == (1, 2, 4, 8) and qwen.geometry.shard(8) == GdnGeometry(2, 6)


def test_get_names_the_nearest() -> None:
    with pytest.raises(ArgumentError, match="nemotron-3-nano-30b-a3b"):
        get("nemotron-3-nano-30b")
    with pytest.raises(ArgumentError):
        get("")
    assert get("qwen3.5-9b") is get_gdn("qwen3.5-9b")
    with pytest.raises(ArgumentError, match="registry name"):
        get_mamba2("qwen3.5-9b")
    with pytest.raises(ArgumentError, match="qwen3-next-80b-a3b"):
        get_gdn("qwen3-next")


def test_find_by_geometry() -> None:
    found = find_by_geometry(Mamba2Geometry(64, 64, 128, 8))
    assert [e.name for e in found] == ["nemotron-3-nano-30b-a3b", "nemotron-3.5-lightning-30b-a3b"]
    both = Mamba2Geometry(128, 64, 128, 8)
    assert {e.model_type for e in find_by_geometry(both)} == {"nemotron_h", "mamba2"}
    assert [e.name for e in find_by_geometry(both, "mamba2")] == ["mamba-codestral-7b-v0.1"]
    assert find_by_geometry(Mamba2Geometry(65, 64, 128, 1)) == ()
    assert {e.name for e in find_by_geometry(GdnGeometry(16, 32), "qwen3_5_moe")} == {"qwen3.5-35b-a3b",
                                                                                    "qwen3.6-35b-a3b"}
    assert find_by_geometry(Mamba2Geometry(16, 32, 128, 16)) == ()


# ---- validated: the replay of these geometries, dtypes and lengths against the fp64 recurrence ----

# Distinct (heads a group, headdim, dstate) of the entries; three heads a group stand for more.
SHAPES = sorted({(min(entry.geometry.heads_per_group, 3), entry.geometry.headdim, entry.geometry.dstate)
                 for entry in ENTRIES})
LENGTHS = sorted({length for entry in ENTRIES for length in entry.validated_buffer_lens})
DTYPES = sorted({dtype for entry in ENTRIES for dtype in entry.validated_state_dtypes}, key=str)
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_validated_means_that_replay_meets_the_recurrence(shape: tuple[int, int, int], length: int,
                                                          state_dtype: torch.dtype) -> None:
    """Two ring cycles of two groups. The fp64 recurrence sees the same bf16 inputs, so what
    differs is fp32 arithmetic and the rounding of the checkpoint, once a cycle."""
    heads, headdim, dstate = 2 * shape[0], shape[1], shape[2]
    generator = torch.Generator().manual_seed(length)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).bfloat16()

    A = -torch.rand(heads, generator=generator) - 0.5
    state = torch.zeros(1, heads, headdim, dstate, dtype=state_dtype)
    exact, nan = state.double(), float("nan")
    rings = (torch.full((1, heads, length, headdim), nan).bfloat16(), torch.full((1, heads, length), nan),
             torch.full((1, 2, length, dstate), nan).bfloat16())
    slot = torch.zeros(1, dtype=torch.int32)
    for step in range(2 * length):
        x, B, C, dt = draw(1, heads, headdim), draw(1, 2, dstate), draw(1, 2, dstate), draw(1, heads)
        out, flush = torch.empty(1, heads, headdim), step % length == length - 1
        replay_step(state, x, dt[..., None].expand(1, heads, headdim),
                    A[:, None, None].expand(heads, headdim, dstate), B, C, None, None, None, *rings,
                    torch.tensor([step % length]), torch.tensor([flush]), slot, -1, out)
        y, exact = recurrent_step(exact, x, dt, A, B, C)
        tolerance = 4 * ROUNDING[state_dtype]
        assert (out - y).abs().max() <= tolerance * max(1.0, float(y.abs().max())), f"step {step}"
    assert (state.double() - exact).abs().max() <= tolerance * exact.abs().max()


# ---- malformed files ---------------------------------------------------------------------------

FAMILIES = {name: json.loads((models.MODELS_FOLDER / f"{name}.json").read_text()) for name in ("nemotron", "qwen3_5")}
BROKEN = [
    ("schema", 2, "schema"), ("kind", "kda", "one of mamba2, gdn"),
    ("kind", "gdn", "unknown dstate, headdim, ngroups, nheads"),
    ("extra", 1, "unknown extra"), ("sources", {"a": 1}, "sources"),
    ("models.0", 5, "models"), ("models.0.name", "Nano 30B", "kebab"), ("models.0.hub_ids", "x", "hub_ids"),
    ("models.0.numbers.nheads", "64", "nheads"), ("models.0.numbers.ngroups", 9, "ngroups"),
    ("models.0.numbers.dstate", None, "dstate"), ("models.0.numbers.width", 1, "unknown width"),
    ("models.0.numbers.recurrent_layers", 99, "at most layers"),
    ("models.0.numbers.act_dtype", "int8", "act_dtype"),
    ("models.0.evidence.*.status", "sure", "status"), ("models.0.evidence.*.sources", ["nobody"], "nobody"),
    ("models.0.evidence.*.sources", [], "expected sources"),
    ("models.0.evidence.nheads", {"status": "unknown", "sources": []}, "the value null"),
    ("models.0.evidence.width", {"status": "verified", "sources": ["bridge"]}, "expected some of"),
    ("models.0.state_advice.0.state_dtype", "int8", "state_dtype"),
    ("models.0.state_advice.0.sources", ["nobody"], "nobody"),
    ("models.0.validated.buffer_lens", [0], "buffer_lens"),
    ("models.0.validated.state_dtypes", ["int8"], "state_dtypes"),
    ("models.0.validated.tokens", [4], "unknown tokens"),
]
BROKEN_GDN = [
    ("kind", "mamba2", "unknown head_k_dim, head_v_dim, num_k_heads, num_v_heads"),
    ("models.0.numbers.num_k_heads", 5, "a multiple of num_k_heads=5"),
    ("models.0.numbers.head_k_dim", None, "head_k_dim"), ("models.0.validated.tokens", [17], "1..16"),
    ("models.0.validated", {"state_dtypes": [], "buffer_lens": []}, "missing tokens"),
]


@pytest.mark.parametrize(("family", "path", "value", "complaint"), [
    *(("nemotron", *broken) for broken in BROKEN), *(("qwen3_5", *broken) for broken in BROKEN_GDN)])
def test_malformed_entries_are_refused(tmp_path: Path, family: str, path: str, value: Any, complaint: str) -> None:
    content = copy.deepcopy(FAMILIES[family])
    *parents, last = path.split(".")
    at: Any = content
    for key in parents:
        at = at[int(key) if key.isdigit() else key]
    at[int(last) if last.isdigit() else last] = value
    file = tmp_path / "family.json"
    file.write_text(json.dumps(content))
    with pytest.raises(RegistryError) as error:
        load_family(file)
    assert str(file) in str(error.value) and complaint in str(error.value)


def test_two_entries_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(FAMILIES["nemotron"]))
    monkeypatch.setattr(models, "MODELS_FOLDER", tmp_path)
    all_models.cache_clear()
    try:
        with pytest.raises(RegistryError, match="two entries are named"):
            all_models()
    finally:
        all_models.cache_clear()


def test_the_page_is_the_data() -> None:
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "docs" / "models_page.py")
    assert spec is not None and spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert (ROOT / "docs" / "models.md").read_text() == page.render(), "run python docs/models_page.py"
