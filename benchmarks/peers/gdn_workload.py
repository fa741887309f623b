"""Gated DeltaNet layers at one batch size: whole ring cycles, rows at different cursors, states cold in L2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm_cute.gdn_layout import gdn_state_bytes
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_tune.workload import COLD_BYTES

ACCEPTED = 3  # tokens of a window of four that every row keeps in every round, the bonus token included


@dataclass
class GdnWorkload:
    """Inputs and checkpoints; each kernel brings its own rings and cursors.

    Attributes:
        buffer_len: L, rows of the rings.
        tokens: T of a window; 1 in standard decode.
        state: (layers, batch + 1, HV, V, K) checkpoints of as many layers as exceed ``cold_bytes``.
        mixed: (batch * T, 2 Hk K + HV V) q, k and v of every token, packed.
        q, k, v: the same apart and dense, (batch * T, heads, width).
        a, b: (batch * T, HV).
        A_log, dt_bias: (HV,) fp32.
        out: (batch * T, HV, V).
        indices: (batch,) int32 slots, a random permutation of 1..batch.
        offset: (batch,) random stagger of the rows, 0..L-1 in equal shares.
        seed: of all noise.
    """

    geometry: GdnGeometry
    buffer_len: int
    batch: int
    tokens: int
    state: Tensor
    mixed: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    out: Tensor
    indices: Tensor
    offset: Tensor
    seed: int

    def restore(self) -> None:
        """The checkpoints and inputs that the workload began with."""
        gen = torch.Generator(self.state.device).manual_seed(self.seed + 1)
        for layer in self.state:
            layer.normal_(0, 0.05, generator=gen)
        self.draw(gen)

    def draw(self, gen: torch.Generator) -> None:
        """Other tokens."""
        for tensor in (self.mixed, self.a, self.b):
            tensor.normal_(generator=gen)
        for dense, view in zip((self.q, self.k, self.v), self.packed(), strict=True):
            dense.copy_(view)

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as views of ``mixed``, as an engine's convolution leaves them."""
        g = self.geometry
        widths = [g.num_k_heads * g.head_k_dim] * 2 + [g.num_v_heads * g.head_v_dim]
        q, k, v = self.mixed.split(widths, 1)
        return (q.unflatten(1, (g.num_k_heads, g.head_k_dim)), k.unflatten(1, (g.num_k_heads, g.head_k_dim)),
                v.unflatten(1, (g.num_v_heads, g.head_v_dim)))

    def window(self, tensor: Tensor) -> Tensor:
        """A tensor of tokens as (batch, T, ...)."""
        return tensor.unflatten(0, (self.batch, self.tokens))


def make_gdn_workload(geometry: GdnGeometry, batch: int, state_dtype: torch.dtype, tokens: int = 1,
                      buffer_len: int = 16, act_dtype: torch.dtype = torch.bfloat16, device: str = "cuda",
                      seed: int = 0, cold_bytes: float = COLD_BYTES) -> GdnWorkload:
    """Random tokens, checkpoints and decays as those of trained layers, a random stagger."""
    g, n = geometry, batch * tokens
    gen = torch.Generator(device).manual_seed(seed)
    layers = max(2, int(-(-cold_bytes // (batch * gdn_state_bytes(g, state_dtype)))))

    def empty(*shape: int, dtype: torch.dtype = act_dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def uniform(low: float, high: float) -> Tensor:
        return empty(g.num_v_heads, dtype=torch.float32).uniform_(low, high, generator=gen)

    width = 2 * g.num_k_heads * g.head_k_dim + g.num_v_heads * g.head_v_dim
    w = GdnWorkload(
        g, buffer_len, batch, tokens,
        state=empty(layers, batch + 1, g.num_v_heads, g.head_v_dim, g.head_k_dim, dtype=state_dtype),
        mixed=empty(n, width), q=empty(n, g.num_k_heads, g.head_k_dim), k=empty(n, g.num_k_heads, g.head_k_dim),
        v=empty(n, g.num_v_heads, g.head_v_dim), a=empty(n, g.num_v_heads), b=empty(n, g.num_v_heads),
        A_log=uniform(0.5, 4.0).log(), dt_bias=uniform(-3.0, -1.0), out=empty(n, g.num_v_heads, g.head_v_dim),
        indices=(torch.randperm(batch) + 1).to(device, torch.int32),
        offset=(torch.arange(batch)[torch.randperm(batch)] % buffer_len).to(device), seed=seed)
    w.restore()
    return w


def gdn_step_bytes(w: GdnWorkload, is_replay: bool) -> float:
    """Bytes that one step of one layer must move, the mean over a cycle.

    Standard decode: as ``mamba2_step_bytes``; a record is d, k and g, its vectors in the activations' dtype. A window:
    the checkpoint read, and written by the rounds that flush; the committed records read and T written; inputs and
    outputs once. The raw rings of an exact fold come on top and are not counted.
    """
    g, act, L, T = w.geometry, w.mixed.dtype.itemsize, w.buffer_len, w.tokens
    state = gdn_state_bytes(g, w.state.dtype)
    vectors = g.num_k_heads * g.head_k_dim + g.num_v_heads * g.head_v_dim
    io = 2 * T * act * (vectors + g.num_v_heads)
    if not is_replay:
        return w.batch * (2 * state + io)
    record = vectors * act + 4 * g.num_v_heads
    if T == 1:
        return w.batch * (state * (1 + 1 / L) + record * ((L - 1) / 2 + 1 - 1 / L) + io)
    held = committed(w)
    return w.batch * (state * (1 + 1 / len(held)) + record * (sum(held) / len(held) + T) + io)


def committed(w: GdnWorkload) -> list[int]:
    """Committed records of a row at the windows of one cycle; the last of them folds."""
    held = [ACCEPTED]
    while held[-1] + 2 * w.tokens <= w.buffer_len:
        held.append(held[-1] + ACCEPTED)
    return held
