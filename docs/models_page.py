"""Writes docs/models.md from the model entries: python docs/models_page.py"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from replayssm_cute.layout import mamba2_ring_bytes, mamba2_state_bytes
from replayssm_cute.registry.models import ModelEntry, StateAdvice, all_models

_HEAD = """\
# Models

Generated from `replayssm_cute/models/*.json` by `python docs/models_page.py`; edit the JSON, not this page.

A number without a mark is verified: read in a published config, in a copy or a quote of one, or in the
vendor's own scripts. *i* marks an inferred number (derived, or a default), **?** an unknown one. The JSON
names the sources of every number. Activations are bf16 everywhere.

*Validated* means: the test suites of this package hold the replay of this geometry to the fp64
recurrence with these checkpoint dtypes and ring lengths, on the PyTorch backend in `make test` and on the
GPU backends in `make test-gpu`. It says nothing about the quality of a model's answers; *state advice* is
what vendors and engines publish about that (SR: with stochastic rounding).

*TP* lists the sizes out of 1, 2, 4 and 8 that this package splits. vLLM 0.33 splits no group over ranks, so
it takes fewer where that is noted. *Memory* is per request, over all Mamba2 layers, at TP 1: the fp32
checkpoint, and what a bf16 ring of 16 rows adds.
"""
_COLUMNS = ("model", "heads x headdim x dstate / groups", "Mamba2 layers", "hidden", "conv",
            "state in config", "MTP layers", "TP", "state advice", "memory, MiB")


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


def _row(entry: ModelEntry) -> tuple[str, ...]:
    g = entry.geometry
    shape = " x ".join(_marked(entry, name, getattr(g, name)) for name in ("nheads", "headdim", "dstate"))
    state = "none" if entry.config_state_dtype is None else _name(entry.config_state_dtype)
    tp = ", ".join(map(str, entry.tp_sizes))
    if entry.vllm_tp_sizes != entry.tp_sizes:
        tp += f" (vLLM: {', '.join(map(str, entry.vllm_tp_sizes))})"
    checkpoint = entry.mamba_layers * mamba2_state_bytes(g, torch.float32) / 2**20
    ring = entry.mamba_layers * mamba2_ring_bytes(g, 16, entry.act_dtype) / 2**20
    mamba, layers, hidden, conv, mtp = (_marked(entry, name, getattr(entry, name)) for name in (
        "mamba_layers", "layers", "hidden_size", "conv_kernel", "mtp_layers"))
    return (f"`{entry.name}`", f"{shape} / {_marked(entry, 'ngroups', g.ngroups)}", f"{mamba} of {layers}",
            hidden, conv, _marked(entry, "config_state_dtype", state), mtp, tp,
            "; ".join(map(_advice, entry.state_advice)) or "none found",
            f"{checkpoint:.1f} + {ring:.1f}")


def _validated(entries: list[ModelEntry]) -> str:
    dtypes = sorted({", ".join(map(_name, entry.validated_state_dtypes)) for entry in entries})
    lens = sorted({", ".join(map(str, entry.validated_buffer_lens)) for entry in entries})
    return f"Validated with checkpoints in {' or '.join(dtypes)} and rings of {' or '.join(lens)} rows."


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |\n"


def render() -> str:
    """The text of docs/models.md."""
    page = _HEAD
    ordered = sorted(all_models(), key=lambda entry: entry.family)
    for family, group in itertools.groupby(ordered, key=lambda entry: entry.family):
        entries = list(group)
        page += f"\n## {family}\n\n`{entries[0].architecture}`, model type `{entries[0].model_type}`. " \
                f"{_validated(entries)}\n\n" + _line(_COLUMNS) + _line(("---",) * len(_COLUMNS))
        page += "".join(_line(_row(entry)) for entry in entries) + "\n"
        page += "".join(f"- `{entry.name}`: {', '.join(entry.hub_ids)}"
                        f"{f' ({entry.notes})' if entry.notes else ''}\n" for entry in entries)
    return page


if __name__ == "__main__":
    Path(__file__).with_name("models.md").write_text(render(), encoding="utf-8")
