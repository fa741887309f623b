"""How far a stored checkpoint drifts: every format, per step and by replay, against float64.

    python -m benchmarks.accuracy --setting trained --out benchmarks/results/accuracy/trained.csv

A layer is decoded for thousands of tokens. For every format of the checkpoint and every ring length L
the same tokens are replayed in fp32, the checkpoint is rounded at each flush, and y (without the skip
D x, which would only dilute the error) and the state are compared with the recurrence in float64. L = 1
flushes at every token: it is the per-step baseline.

Two shortcuts make 8,192 tokens of 36 variants affordable, and tests/test_accuracy.py holds both to
``reference.mamba2.replay_step``: what does not depend on the format is computed once for all of them, and
the random bits come from torch's generator instead of Philox.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm_cute.reference.mamba2 import discretize
from replayssm_cute.rounding import LARGEST_CODE, RANDOM_BITS, dequantize, quantize, round_stochastic

COLUMNS = ("setting", "format", "buffer_len", "tokens", "y_median", "y_worst", "state_median", "state_worst")
BUFFER_LENS = (1, 8, 16, 32)
WINDOW = 32                      # tokens of the first window of errors; the later ones double

#: (dtype, token) -> random bits of a pool of shape (H, P, N).
Bits = Callable[[torch.dtype, int], Tensor]


@dataclass(frozen=True)
class Format:
    """How a checkpoint is stored.

    Attributes:
        name: of the rows it gives.
        dtype: dtype of the checkpoint.
        stochastic: rounded stochastically, else to nearest.
    """

    name: str
    dtype: torch.dtype
    stochastic: bool = False

    def stored(self, value: Tensor, bits: Bits, token: int) -> Tensor:
        """What a checkpoint of this format holds after ``value`` (H, P, N) has been stored, as fp32."""
        random = bits(self.dtype, token) if self.stochastic else None
        if self.dtype in LARGEST_CODE:
            return dequantize(*quantize(value, self.dtype, random))
        return (value.to(self.dtype) if random is None else round_stochastic(value, random, self.dtype)).float()


FORMATS = (Format("fp32", torch.float32), Format("fp16", torch.float16), Format("fp16+SR", torch.float16, True),
           Format("bf16", torch.bfloat16), Format("bf16+SR", torch.bfloat16, True), Format("int8", torch.int8),
           Format("int8+SR", torch.int8, True), Format("e4m3", torch.float8_e4m3fn),
           Format("e4m3+SR", torch.float8_e4m3fn, True))


@dataclass(frozen=True)
class Tokens:
    """The inputs of a layer over time, and its parameters.

    Attributes:
        x: (T, H, P) bf16.
        B, C: (T, H, N) bf16, a group's values repeated for its heads.
        dt: (T, H) bf16, raw.
        A, dt_bias: (H,) fp32.
    """

    x: Tensor
    B: Tensor
    C: Tensor
    dt: Tensor
    A: Tensor
    dt_bias: Tensor

    def steps(self, dtype: torch.dtype) -> Tensor:
        """(T, H) step sizes dt' in ``dtype``."""
        return discretize(self.dt, self.dt_bias, True, dtype)


@dataclass(frozen=True)
class Setting:
    """What a layer is like.

    Attributes:
        what: in words, for tables.
        nheads, ngroups: of the layer; P = 64 and N = 128 always.
        dt_scale: factor on the step sizes at which Mamba2 starts its training, log-uniform in [1e-3, 0.1];
            None draws every number at random instead.
    """

    what: str
    nheads: int
    ngroups: int
    dt_scale: float | None


SETTINGS = {
    "trained": Setting("decays as Mamba2 sets them up", 32, 4, 1.0),
    "long": Setting("the same with step sizes 30 times smaller", 16, 2, 1 / 30),
    "random": Setting("Gaussian inputs and steps, A uniform in [-4.25, -0.25]", 16, 2, None),
}


def make_tokens(setting: Setting, count: int, seed: int = 0, headdim: int = 64, dstate: int = 128) -> Tokens:
    """Draw the tokens of a setting.

    Trained-like: A log-uniform in [1, 16] and dt_bias the inverse softplus of log-uniform steps, as in
    Mamba2's initialisation, spread evenly over the heads; x, B and C are Gaussian sequences behind a
    causal convolution of width 4 and SiLU, as in its blocks; dt varies with the token by e^0.5 or so.
    """
    gen = torch.Generator().manual_seed(seed)
    H, G = setting.nheads, setting.ngroups

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    def channels(n: int) -> Tensor:
        kernel = torch.rand((n, 1, 4), generator=gen) - 0.5
        signal = F.conv1d(normal(n, count + 3), kernel, groups=n).T
        return F.silu(signal / signal.std(0))

    if setting.dt_scale is None:
        x, B, C = normal(count, H, headdim), normal(count, G, dstate), normal(count, G, dstate)
        A, dt_bias, dt = -4 * torch.rand(H, generator=gen) - 0.25, torch.zeros(H), normal(count, H)
    else:
        x = channels(H * headdim).view(count, H, headdim)
        B, C = (channels(G * dstate).view(count, G, dstate) for _ in range(2))
        even = (torch.arange(H) + 0.5) / H
        A = -torch.exp(even[torch.randperm(H, generator=gen)] * math.log(16))
        start = setting.dt_scale * torch.exp(math.log(1e-3) + even * math.log(100))
        dt_bias, dt = start + torch.log(-torch.expm1(-start)), 0.5 * normal(count, H)
    B, C = (t.bfloat16().repeat_interleave(H // G, 1) for t in (B, C))
    return Tokens(x.bfloat16(), B, C, dt.bfloat16(), A, dt_bias)


def memories(tokens: Tokens) -> tuple[float, float, float]:
    """Tokens that the heads remember, shortest, median and longest: 1 / (|A| mean dt')."""
    memory = 1 / (-tokens.A * tokens.steps(torch.float32).mean(0))
    return float(memory.min()), float(memory.median()), float(memory.max())


class Replay:
    """One layer decoded by replay with rings of L rows, once for every format."""

    def __init__(self, tokens: Tokens, formats: tuple[Format, ...], buffer_len: int, bits: Bits) -> None:
        (_, nheads, headdim), dstate = tokens.x.shape, tokens.B.shape[2]
        self.tokens, self.formats, self.buffer_len, self.bits = tokens, formats, buffer_len, bits
        self.dt = tokens.steps(torch.float32)
        self.checkpoints = torch.zeros(len(formats), nheads, headdim, dstate)

    def step(self, t: int) -> Tensor:
        """y of token t, (formats, H, P) fp32, from the unrounded state; every L-th token flushes."""
        first, C = t - t % self.buffer_len, self.tokens.C[t].float()
        d = self.dt[first:t + 1].T                                                       # (H, w + 1)
        x, B = (ring[first:t + 1].transpose(0, 1).float() for ring in (self.tokens.x, self.tokens.B))
        later = F.pad(d[:, 1:].flip(1).cumsum(1).flip(1), (0, 1))
        weight = d * torch.exp(self.tokens.A[:, None] * later)
        decay = torch.exp(self.tokens.A * d.sum(1))
        if (t + 1) % self.buffer_len:
            scores = weight * (B @ C[:, :, None])[:, :, 0]
            ring = (scores[:, None] @ x)[:, 0]
            return decay[:, None] * (self.checkpoints @ C[None, :, :, None])[..., 0] + ring
        folded = (weight[:, :, None] * x).transpose(1, 2) @ B + decay[:, None, None] * self.checkpoints
        for i, form in enumerate(self.formats):
            self.checkpoints[i] = form.stored(folded[i], self.bits, t)
        return (folded @ C[None, :, :, None])[..., 0]


class Errors:
    """Errors of y over the tokens of a window, relative to the root mean square of the exact ones."""

    def __init__(self) -> None:
        self.error: Tensor | float = 0.0
        self.exact: Tensor | float = 0.0

    def add(self, y: Tensor, exact: Tensor) -> None:
        self.error = self.error + ((y - exact) ** 2).sum(-1)
        self.exact = self.exact + (exact ** 2).sum(-1)

    def relative(self) -> Tensor:
        """(formats, H) relative errors of the window, which ends here."""
        relative = torch.as_tensor(self.error / self.exact).sqrt()
        self.error, self.exact = 0.0, 0.0
        return relative


def study(tokens: Tokens, formats: tuple[Format, ...], buffer_lens: tuple[int, ...], bits: Bits,
          say: Callable[[str], None]) -> list[tuple[str, int, int, float, float, float, float]]:
    """Decode all tokens in every variant; the rows hold ``COLUMNS`` from ``format`` on.

    Windows end after 32, 64, 128 ... tokens, where every variant has just flushed. Each has the errors
    of its own tokens' y and of the state at its end, the median and the worst of the heads.
    """
    runs = {L: (Replay(tokens, formats, L, bits), Errors()) for L in buffer_lens}
    count = len(tokens.dt)
    exact = torch.zeros(runs[buffer_lens[0]][0].checkpoints.shape[1:], dtype=torch.float64)
    A, dt = tokens.A.double(), tokens.steps(torch.float64)
    rows, started = [], time.perf_counter()
    for t in range(count):
        update = (dt[t, :, None] * tokens.x[t].double())[:, :, None] * tokens.B[t].double()[:, None]
        exact = exact * torch.exp(A * dt[t])[:, None, None] + update
        y = (exact @ tokens.C[t].double()[:, :, None])[..., 0]
        for replay, errors in runs.values():
            errors.add(replay.step(t).double(), y)
        tokens_done = t + 1
        if tokens_done < WINDOW or tokens_done & (tokens_done - 1):
            continue
        say(f"{tokens_done} tokens, {time.perf_counter() - started:.0f} s")
        for L, (replay, errors) in runs.items():
            of_y = errors.relative()
            of_state = (replay.checkpoints.double() - exact).flatten(2).norm(dim=2) / exact.flatten(1).norm(dim=1)
            for i, form in enumerate(formats):
                rows.append((form.name, L, tokens_done, float(of_y[i].median()), float(of_y[i].max()),
                             float(of_state[i].median()), float(of_state[i].max())))
    return rows


def torch_bits(shape: tuple[int, ...], seed: int = 1) -> Bits:
    """Random bits of torch's generator for pools of this shape."""
    gen = torch.Generator().manual_seed(seed)
    return lambda dtype, token: torch.randint(0, 1 << RANDOM_BITS[dtype], shape, generator=gen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, required=True)
    parser.add_argument("--tokens", type=int, default=8192, help="a power of two (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokens = make_tokens(SETTINGS[args.setting], args.tokens)
    shape = (*tokens.x.shape[1:], tokens.B.shape[2])
    rows = study(tokens, FORMATS, BUFFER_LENS, torch_bits(shape), lambda line: print(line, flush=True))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((args.setting, *row[:3], *(f"{v:.3e}" for v in row[3:])) for row in rows)


if __name__ == "__main__":
    main()
