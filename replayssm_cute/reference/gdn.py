"""Gated DeltaNet decode in plain PyTorch: the recurrence, and standard decode by replay.

* ``recurrent_step``  the gated delta rule, one token, the state stored every step. In float64 it is the
  oracle of the tests; in float32 its order of operations is the one that the exact fold repeats.
* ``replay_decode_naive``  the replay step as its specification states it: rebuild the state of a row, step.
* ``replay_decode``  the same from scores, vectorised over rows and heads: the backend of a machine without a GPU.

Letters: Hk key heads, HV value heads (a multiple of Hk), K and V head sizes, L ring rows. A state is (V, K), K
contiguous. The rule is that of "Gated Delta Networks" (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm_cute.reference import mamba2

SOFTPLUS_THRESHOLD = 20.0
NORM_EPSILON = 1e-6


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(g, beta): log decay ``-exp(A_log) softplus(a + dt_bias)`` and ``sigmoid(b)``, both (..., HV) in ``dtype``.

    They are computed in float64 and rounded once, as is ``exponential``: the vectorised and the scalar code of an fp32
    function differ in the last bit, and a token's bits would depend on its place in the batch.
    """
    raw = (a.to(dtype) + dt_bias.to(dtype)).double()
    g = -torch.exp(A_log.double()) * F.softplus(raw, threshold=SOFTPLUS_THRESHOLD)
    return g.to(dtype), torch.sigmoid(b.double()).to(dtype)


def exponential(t: Tensor) -> Tensor:
    """exp(t), rounded once to the dtype of ``t``."""
    return torch.exp(t.double()).to(t.dtype)


def tree_sum(t: Tensor) -> Tensor:
    """Sum over the last axis, the second half added to the first until one is left: an order that no shape changes."""
    while (n := t.shape[-1]) > 1:
        half = 1 << (n - 1).bit_length() - 1
        t = t[..., :half] + F.pad(t[..., half:], (0, 2 * half - n))
    return t[..., 0]


def unit(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of ``t`` (..., K) divided by sqrt(sum of squares + 1e-6), in ``dtype``."""
    t = t.to(dtype)
    return t * torch.rsqrt(tree_sum(t * t) + NORM_EPSILON)[..., None]


def query_and_key(q: Tensor, k: Tensor, ratio: int, scale: float, l2norm: bool,
                  dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q (scaled) and k of every value head: (..., Hk, K) each becomes (..., HV, K)."""
    q, k = (unit(q, dtype), unit(k, dtype)) if l2norm else (q.to(dtype), k.to(dtype))
    return (q * scale).repeat_interleave(ratio, -2), k.repeat_interleave(ratio, -2)


def advance(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """``S <- exp(g) S ; d = beta (v - S k) ; S <- S + d k^T``: one token, in the dtype of ``state``.

    Args:
        state: (..., V, K).
        k: (..., K), normalised.
        v: (..., V).
        g, beta: (...).

    Returns:
        (new state, d (..., V)).
    """
    f = state.dtype
    state = exponential(g.to(f))[..., None, None] * state
    d = beta.to(f)[..., None] * (v.to(f) - tree_sum(state * k.to(f)[..., None, :]))
    return state + d[..., None] * k.to(f)[..., None, :], d


def recurrent_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor,
                   dt_bias: Tensor, scale: float | None = None, l2norm: bool = True) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule.

    Args:
        state: (batch, HV, V, K); its dtype is the dtype of the arithmetic.
        q, k: (batch, Hk, K).
        v: (batch, HV, V).
        a, b: (batch, HV).
        A_log, dt_bias: (HV,).
        scale: of q; None means K^-0.5.
        l2norm: divide q and k by their 2-norms.

    Returns:
        (o (batch, HV, V), new state), both in the dtype of ``state``; nothing is changed in place.
    """
    f, ratio = state.dtype, v.shape[1] // k.shape[1]
    g, beta = gates(a, b, A_log, dt_bias, f)
    q, k = query_and_key(q, k, ratio, k.shape[-1] ** -0.5 if scale is None else scale, l2norm, f)
    state, _ = advance(state, k, v, g, beta)
    return tree_sum(state * q[..., None, :]), state


def materialise(state: Tensor, d: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """The state after m ring records: ``exp(G_m) S0 + sum_j exp(G_m - cum_j) d_j k_j^T``.

    Args:
        state: (..., V, K) checkpoint.
        d: (..., m, V).
        k: (..., m, K).
        g: (..., m).
    """
    weight = torch.exp(later_sum(g))
    decay = torch.exp(g.sum(-1))[..., None, None]
    return decay * state + (weight[..., None] * d).transpose(-1, -2) @ k


def later_sum(g: Tensor) -> Tensor:
    """Sum of all later entries along the last axis, without the cancellation of total - cumsum."""
    return F.pad(g[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))


def live_rows(indices: Tensor, batch: int, null_block_id: int) -> Tensor:
    """Batch rows that are not padding; a padded row's slot is ``null_block_id`` or negative."""
    slots = indices[:batch]
    return ((slots != null_block_id) & (slots >= 0)).nonzero()[:, 0]


def replay_decode_naive(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor,
                        dt_bias: Tensor, d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, write_pos: Tensor,
                        force_flush: Tensor | None, ssm_state_indices: Tensor, null_block_id: int, out: Tensor, *,
                        scale: float, l2norm: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """The replay step as its specification states it; arguments as in ``replay_decode``."""
    batch, ratio, L = v.shape[0], v.shape[1] // k.shape[1], d_cache.shape[2]
    out.zero_()
    for row in live_rows(ssm_state_indices, batch, null_block_id).tolist():
        slot, w = int(ssm_state_indices[row]), int(write_pos[row])
        heads_k = k_cache[slot, :, :w].to(dtype).repeat_interleave(ratio, 0)
        S = materialise(state[slot].to(dtype), d_cache[slot, :, :w].to(dtype), heads_k, g_cache[slot, :, :w].to(dtype))
        g, beta = gates(a[row], b[row], A_log, dt_bias, dtype)
        q_row, k_row = query_and_key(q[row], k[row], ratio, scale, l2norm, dtype)
        S, d = advance(S, k_row, v[row], g, beta)
        out[row] = tree_sum(S * q_row[:, None, :]).to(out.dtype)
        if w == L - 1 or (force_flush is not None and bool(force_flush[row])):
            state[slot] = S.to(state.dtype)
            continue
        d_cache[slot, :, w], g_cache[slot, :, w] = d.to(d_cache.dtype), g.to(g_cache.dtype)
        k_cache[slot, :, w] = k_row[::ratio].to(k_cache.dtype)
    return out


def replay_decode(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor,
                  dt_bias: Tensor, d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, write_pos: Tensor,
                  force_flush: Tensor | None, ssm_state_indices: Tensor, null_block_id: int, out: Tensor,
                  rand_seed: Tensor | None = None, *, scale: float, l2norm: bool = True, philox_rounds: int = 0,
                  dtype: torch.dtype = torch.float32) -> Tensor:
    """One token per row by replay, vectorised. Shapes and rules: ``replayssm_cute.gdn``.

    ``state``, the rings, ``out`` and ``rand_seed`` are changed in place; ``dtype`` is that of the arithmetic. With
    ``philox_rounds`` the checkpoint is rounded stochastically; see ``rounding``. It allocates and copies the named
    states, so it is for machines without a GPU and for tests.
    """
    batch, ratio, L = v.shape[0], v.shape[1] // k.shape[1], d_cache.shape[2]
    rows = live_rows(ssm_state_indices, batch, null_block_id)
    slots, w = ssm_state_indices[rows].long(), write_pos[rows].long()
    flush = w == L - 1
    if force_flush is not None:
        flush = flush | (force_flush[rows] != 0)
    d_old, k_old, g_old = ring_window(d_cache, k_cache, g_cache, slots, w, torch.zeros_like(w), dtype)
    weight, decay = torch.exp(later_sum(g_old)), torch.exp(g_old.sum(-1))
    g, beta = gates(a[rows], b[rows], A_log, dt_bias, dtype)
    q_row, k_row = query_and_key(q[rows], k[rows], ratio, scale, l2norm, dtype)
    checkpoint = state[slots].to(dtype)
    z = torch.stack((q_row, k_row), -1)                                              # (rows, HV, K, 2)
    scores = weight[..., None] * (k_old.repeat_interleave(ratio, 1) @ z)             # (rows, HV, L, 2)
    before = decay[..., None, None] * (checkpoint @ z) + d_old.transpose(-1, -2) @ scores
    step = torch.exp(g)[..., None]
    d = beta[..., None] * (v[rows].to(dtype) - step * before[..., 1])
    o = step * before[..., 0] + (q_row * k_row).sum(-1, keepdim=True) * d
    out[:batch] = 0
    out[rows] = o.to(out.dtype)

    if flush.any():
        folded = materialise(checkpoint[flush], d_old[flush], k_old[flush].repeat_interleave(ratio, 1), g_old[flush])
        folded = step[flush][..., None] * folded + d[flush][..., None] * k_row[flush][..., None, :]
        mamba2.store(folded, slots[flush], torch.arange(state.shape[1], device=state.device), state, None, rand_seed,
                     philox_rounds)
    s, p = slots[~flush], w[~flush]
    d_cache[s, :, p] = d[~flush].to(d_cache.dtype)
    g_cache[s, :, p] = g[~flush].to(g_cache.dtype)
    k_cache[s, :, p] = k_row[~flush][:, ::ratio].to(k_cache.dtype)
    mamba2.advance(rand_seed)
    return out


def ring_rows(base: Tensor, first: Tensor, count: int, L: int) -> Tensor:
    """(rows, count) physical ring rows of the records ``first``, ``first`` + 1, ... behind ``base``."""
    return (base[:, None] + first[:, None] + torch.arange(count, device=base.device)) % L


def ring_window(d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, slots: Tensor, valid: Tensor, base: Tensor,
                dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """d (rows, HV, L, V), k (rows, Hk, L, K), g (rows, HV, L) in record order; zero from record ``valid`` on."""
    L = d_cache.shape[2]
    at = ring_rows(base, torch.zeros_like(base), L, L)
    used = (torch.arange(L, device=base.device) < valid[:, None])[:, None]           # (rows, 1, L)

    def window(ring: Tensor) -> Tensor:
        held = ring[slots[:, None], :, at].transpose(1, 2).to(dtype)                 # (rows, heads, L, ...)
        return torch.where(used if ring.dim() == 3 else used[..., None], held, 0)

    return window(d_cache), window(k_cache), window(g_cache)
