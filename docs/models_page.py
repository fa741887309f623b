"""Writes docs/models.md from the model entries: python docs/models_page.py"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from replayssm_cute.gdn_layout import gdn_ring_bytes, gdn_state_bytes
from replayssm_cute.layout import mamba2_ring_bytes, mamba2_state_bytes
from replayssm_cute.registry.entries import GdnEntry, Mamba2Entry, ModelEntry, StateAdvice
from replayssm_cute.registry.models import all_models

_HEAD = """\
# Models

Generated from `replayssm_cute/models/*.json` by `python docs/models_page.py`; edit the JSON, not this page.

A number without a mark is verified: read in a published config, in a copy or a quote of one, or in the
vendor's own scripts. *i* marks an inferred number (derived, or a default), **?** an unknown one. The JSON
names the sources of every number. Activations are bf16 everywhere.

*Validated* means: the test suites of this package hold the replay of this geometry to the fp64
recurrence with these checkpoint dtypes and ring lengths, on the PyTorch backend in `make test` and on the
GPU backends in `make test-gpu`; speculative windows of Gated DeltaNet on the CPU to the fp32 recurrence, of which an
fp32 checkpoint has the bits. It says nothing about the quality of a model's answers; *state advice* is
what vendors and engines publish about that (SR: with stochastic rounding).

*TP* lists the sizes out of 1, 2, 4 and 8 that this package splits. vLLM 0.33 splits no group over ranks, so
it takes fewer where that is noted. For Gated DeltaNet it lists value heads / key heads of a rank; a rank holds whole
key heads, so the largest size is 16. *Memory* is per request, over all recurrent layers, at TP 1: the fp32
checkpoint, and what a bf16 ring of 16 rows adds; for Gated DeltaNet with the raw inputs of the exact fold, which
speculative verify needs (standard decode takes about half).
"""
_HEADS = {Mamba2Entry: "heads x headdim x dstate / groups", GdnEntry: "value heads x V x K / key heads"}
_COLUMNS = ("recurrent layers", "hidden", "conv", "state in config", "MTP layers", "TP", "state advice", "memory, MiB")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _marked(entry: ModelEntry, number: str, value: object) -> str:
    marks = {"verified": f"{value}", "inferred": f"{value} *i*", "unknown": "**?**"}
    return marks[entry.evidence[number].status]


def _advice(advice: StateAdvice) -> str:
    if not advice.stochastic_rounding:
        return _name(advice.state_dtype)
    rounds = "rounds **?**" if advice.philox_rounds is None else f"{advice.philox_rounds} rounds"
    return f"{_name(advice.state_dtype)} + SR, {rounds}"


def _mamba2(entry: Mamba2Entry) -> tuple[str, str, int, int]:
    """(heads, TP, bytes of the checkpoint in a layer, bytes of the rings)."""
    g = entry.geometry
    shape = " x ".join(_marked(entry, name, getattr(g, name)) for name in ("nheads", "headdim", "dstate"))
    tp = ", ".join(map(str, entry.tp_sizes))
    if entry.vllm_tp_sizes != entry.tp_sizes:
        tp += f" (vLLM: {', '.join(map(str, entry.vllm_tp_sizes))})"
    return (f"{shape} / {_marked(entry, 'ngroups', g.ngroups)}", tp, mamba2_state_bytes(g, torch.float32),
            mamba2_ring_bytes(g, 16, entry.act_dtype))


def _gdn(entry: GdnEntry) -> tuple[str, str, int, int]:
    """As ``_mamba2``."""
    g = entry.geometry
    shape = " x ".join(_marked(entry, name, getattr(g, name)) for name in ("num_v_heads", "head_v_dim", "head_k_dim"))
    ranks = ((tp, g.shard(tp)) for tp in entry.tp_sizes)
    tp = ", ".join(f"{tp}: {rank.num_v_heads}/{rank.num_k_heads}" for tp, rank in ranks)
    return (f"{shape} / {_marked(entry, 'num_k_heads', g.num_k_heads)}", tp, gdn_state_bytes(g),
            gdn_ring_bytes(g, 16, exact_fold=True))


def _row(entry: ModelEntry) -> tuple[str, ...]:
    state = "none" if entry.config_state_dtype is None else _name(entry.config_state_dtype)
    heads, tp, checkpoint, ring = _gdn(entry) if isinstance(entry, GdnEntry) else _mamba2(entry)
    recurrent, layers, hidden, conv, mtp = (_marked(entry, name, getattr(entry, name)) for name in (
        "recurrent_layers", "layers", "hidden_size", "conv_kernel", "mtp_layers"))
    memory = " + ".join(f"{entry.recurrent_layers * size / 2**20:.1f}" for size in (checkpoint, ring))
    return (f"`{entry.name}`", heads, f"{recurrent} of {layers}",
            hidden, conv, _marked(entry, "config_state_dtype", state), mtp, tp,
            "; ".join(map(_advice, entry.state_advice)) or "none found", memory)


def _validated(entries: list[ModelEntry]) -> str:
    dtypes = sorted({", ".join(map(_name, entry.validated_state_dtypes)) for entry in entries})
    lens = sorted({", ".join(map(str, entry.validated_buffer_lens)) for entry in entries})
    windows = sorted({", ".join(map(str, entry.validated_tokens)) for entry in entries if isinstance(entry, GdnEntry)})
    return f"Validated with checkpoints in {' or '.join(dtypes)} and rings of {' or '.join(lens)} rows" \
           + (f", in standard decode and in verify of {' or '.join(windows)} tokens." if windows else ".")


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |\n"


def render() -> str:
    """The text of docs/models.md."""
    page = _HEAD
    ordered = sorted(all_models(), key=lambda entry: entry.family)
    for family, group in itertools.groupby(ordered, key=lambda entry: entry.family):
        entries = list(group)
        columns = ("model", _HEADS[type(entries[0])], *_COLUMNS)
        page += f"\n## {family}\n\n`{entries[0].architecture}`, model type `{entries[0].model_type}`. " \
                f"{_validated(entries)}\n\n" + _line(columns) + _line(("---",) * len(columns))
        page += "".join(_line(_row(entry)) for entry in entries) + "\n"
        page += "".join(f"- `{entry.name}`: {', '.join(entry.hub_ids)}"
                        f"{f' ({entry.notes})' if entry.notes else ''}\n" for entry in entries)
    return page


if __name__ == "__main__":
    Path(__file__).with_name("models.md").write_text(render(), encoding="utf-8")
