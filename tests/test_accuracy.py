"""The accuracy study: its shortcuts compute what the reference computes, and its page is its data."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import accuracy
from benchmarks.accuracy import FORMATS, Bits, Format, Replay, Setting, Tokens, make_tokens, study, torch_bits
from replayssm_cute.layout import allocate_mamba2_pool
from replayssm_cute.reference.mamba2 import replay_step
from replayssm_cute.rounding import dequantize, random_bits, seed_state
from replayssm_cute.types import Mamba2Geometry

H, G, P, N, TOKENS, SEED = 4, 2, 8, 32, 24, 5
SMALL = Setting("a layer for the tests", H, G, 1.0)
F32 = torch.float32


def philox_bits(rounds: int = 5) -> Bits:
    """The random bits that the reference draws for slot 0 when it decodes one token a launch."""
    position = torch.arange(H * P * N).view(H, P, N)
    return lambda dtype, token: random_bits(position, SEED, token, dtype, rounds)


def decode(tokens: Tokens, form: Format, buffer_len: int) -> tuple[Tensor, Tensor]:
    """y of every token and the last checkpoint, by ``replay_step``."""
    pool = allocate_mamba2_pool(1, Mamba2Geometry(H, P, N, G), buffer_len, form.dtype, F32)
    seed = seed_state(SEED, "cpu")
    y = torch.empty(TOKENS, 1, H, P)
    for t in range(TOKENS):
        w = t % buffer_len
        args = (pool.state, tokens.x[t:t + 1].float(), tokens.dt[t, :, None].expand(1, -1, P),
                tokens.A[:, None, None].expand(-1, P, N), *(m[t:t + 1, ::H // G].float() for m in (tokens.B, tokens.C)))
        replay_step(*args, None, tokens.dt_bias[:, None].expand(-1, P), None, pool.x_cache, pool.dt_cache, pool.B_cache,
                    torch.tensor([w]), torch.tensor([w == buffer_len - 1]), torch.tensor([0]), -1, y[t], seed,
                    pool.state_scale, philox_rounds=5 if form.stochastic else 0)
    state = pool.state if pool.state_scale is None else dequantize(pool.state, pool.state_scale)
    return y[:, 0], state[0].float()


@pytest.mark.parametrize("buffer_len", [1, 6])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_study_replays_as_the_reference_does(form: Format, buffer_len: int) -> None:
    """With the same random bits: the same checkpoint, but for elements that an fp32 sum's last bit pushed over."""
    tokens = make_tokens(SMALL, TOKENS, headdim=P, dstate=N)
    replay = Replay(tokens, FORMATS, buffer_len, philox_bits())
    got = torch.stack([replay.step(t) for t in range(TOKENS)])[:, FORMATS.index(form)]
    y, state = decode(tokens, form, buffer_len)
    checkpoint = replay.checkpoints[FORMATS.index(form)]
    close = (checkpoint - state).abs() <= 1e-5 * state.abs() + 1e-7 * state.abs().max()
    assert float(close.float().mean()) > 0.995
    torch.testing.assert_close(got, y, rtol=0, atol=1e-3 * float(y.abs().max()))
    assert float((got - y).norm() / y.norm()) < 1e-4
    assert float(state.norm()) > 0


def test_errors_are_those_of_the_formats() -> None:
    """One row a format, ring length and window; a coarser format has a larger error, fp32 that of fp32."""
    rows = study(make_tokens(SMALL, 64, headdim=P, dstate=N), FORMATS, (1, 8), torch_bits((H, P, N)), lambda line: None)
    assert len(rows) == len(FORMATS) * 2 * 2
    state = {(name, L): median for name, L, tokens, _, _, median, _ in rows if tokens == 64}
    for L in (1, 8):
        exact, fp16, bf16, e4m3 = (state[name, L] for name in ("fp32", "fp16", "bf16", "e4m3"))
        assert exact < 1e-6 < fp16 < bf16 / 4 and bf16 < e4m3 / 4
    assert state["fp16", 8] < state["fp16", 1], "fewer roundings"


def test_the_settings_are_what_they_say() -> None:
    memory = {name: accuracy.memories(make_tokens(setting, 256)) for name, setting in accuracy.SETTINGS.items()}
    assert memory["trained"][0] < 2 and 200 < memory["trained"][2] < 1000
    assert memory["long"][1] > 500 and memory["random"][2] < 10


DATA = Path(accuracy.__file__).parent / "results" / "accuracy"


@pytest.mark.parametrize("setting", accuracy.SETTINGS)
def test_the_data_covers_every_variant(setting: str) -> None:
    with (DATA / f"{setting}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == accuracy.COLUMNS
    variants = {(r["setting"], r["format"], int(r["buffer_len"]), int(r["tokens"])) for r in rows}
    windows = [32 * 2 ** i for i in range(9)]
    assert variants == {(setting, form.name, L, t) for form in FORMATS for L in accuracy.BUFFER_LENS for t in windows}
    assert len(rows) == len(variants)


def test_the_page_is_the_data() -> None:
    from benchmarks import accuracy_report

    assert accuracy_report.PAGE.read_text() == accuracy_report.render(), "run python -m benchmarks.accuracy_report"
