"""One token of the gated delta rule in NumPy, in the operations and the order of the Triton kernels on an NVIDIA GPU.

What the exact fold of every kernel must repeat bit for bit. Sums over the 128 columns of an fp32 state: first over
tiles of 32 columns, by multiply-add; then over the 4 columns that a thread holds, in their order; then over the 8
threads of a row, the farthest first. Approximate instructions are those of the executor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx import numerics

Array = NDArray[np.float32]
TILE, HELD = 32, 4
f32 = np.float32


def exp(x: Array) -> Array:
    return numerics.ex2(x * f32(1.4426950408889634))


def gates(a: Array, b: Array, A_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """(g, beta) of tokens and heads."""
    raw = a + dt_bias
    u = exp(f32(0) - np.abs(raw))
    t = u / (u + f32(2))
    square, series = t * t, np.full_like(t, f32(1 / 15))
    for k in (13, 11, 9, 7, 5, 3, 1):
        series = numerics.fma(square, series, np.full_like(t, f32(1 / k)))
    g = (f32(0) - exp(A_log)) * numerics.fma(t + t, series, np.maximum(raw, f32(0)))
    return g, f32(1) / (exp(f32(0) - b) + f32(1))


def halved(t: Array) -> Array:
    """Sum over the last axis, one half added to the other until one is left."""
    while t.shape[-1] > 1:
        half = t.shape[-1] // 2
        t = t[..., :half] + t[..., half:]
    return t[..., 0]


def over_tiles(x: Array, y: Array) -> Array:
    """(..., TILE): products of two rows, summed over tiles."""
    x, y = (t.reshape(*t.shape[:-1], -1, TILE) for t in np.broadcast_arrays(x, y))
    total = x[..., 0, :] * y[..., 0, :]
    for i in range(1, x.shape[-2]):
        total = numerics.fma(x[..., i, :], y[..., i, :], total)
    return total


def normalised(k: Array) -> Array:
    return k * numerics.rsqrt(halved(over_tiles(k, k)) + f32(1e-6))[..., None]


def step(state: Array, k: Array, v: Array, a: Array, b: Array, A_log: Array, dt_bias: Array) -> Any:
    """The states (rows, HV, V, K) after a token; k (rows, Hk, K) raw, HV = Hk."""
    g, beta = gates(a, b, A_log, dt_bias)
    k = normalised(k)[:, :, None, :]
    decayed = exp(g)[..., None, None] * state
    parts = over_tiles(decayed, k).reshape(*state.shape[:-1], TILE // HELD, HELD)
    held = parts[..., 0]
    for i in range(1, HELD):
        held = parts[..., i] + held
    d = beta[..., None] * (v - halved(held))
    return numerics.fma(*np.broadcast_arrays(d[..., None], k, decayed))
