"""Mamba2 decode in plain PyTorch: what every kernel of this package must compute.

Three forms of the same step, from the most readable to the fastest:

* ``recurrent_step``  the textbook recurrence, one token, the state stored every step. Run in
  float64 it is the oracle of the tests.
* ``replay_step_naive``  the replay step row by row and head by head, as the specification
  states it.
* ``replay_step``  the replay step vectorised over rows and heads: the backend of a machine
  without a GPU.

Letters: H heads, P headdim, N dstate, G groups, L ring rows. The recurrence is that of
"Transformers are SSMs" (Dao and Gu, 2024, arXiv:2405.21060); replay writes its state as
checkpoint plus a ring of recent inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm_cute.rounding import LARGEST_CODE, dequantize, quantize, random_bits, round_stochastic

SOFTPLUS_THRESHOLD = 20.0


def discretize(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool,
               dtype: torch.dtype = torch.float32) -> Tensor:
    """Step size dt' of every head: bias, then softplus up to the threshold, identity above it.

    Args:
        dt: (..., H) raw step sizes.
        dt_bias: (H,) or None.
        dt_softplus: apply softplus.
        dtype: dtype of the arithmetic and of the result.
    """
    dt = dt.to(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dtype)
    return F.softplus(dt, threshold=SOFTPLUS_THRESHOLD) if dt_softplus else dt


def recurrent_step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
                   D: Tensor | None = None, dt_bias: Tensor | None = None,
                   z: Tensor | None = None, dt_softplus: bool = True) -> tuple[Tensor, Tensor]:
    """One token of ``S <- exp(A dt') S + dt' x B^T ; y = S C + D x ; y *= silu(z)``.

    Args:
        state: (batch, H, P, N); its dtype is the dtype of the arithmetic.
        x, z: (batch, H, P).
        dt: (batch, H).
        A, dt_bias: (H,).
        B, C: (batch, G, N).
        D: (H,) or (H, P).

    Returns:
        (y, new state), both in the dtype of ``state``; nothing is changed in place.
    """
    f = state.dtype
    ratio = x.shape[1] // B.shape[1]
    B, C = (t.to(f).repeat_interleave(ratio, 1) for t in (B, C))
    dt = discretize(dt, dt_bias, dt_softplus, f)
    state = state * torch.exp(A.to(f) * dt)[..., None, None] \
        + (dt[..., None] * x.to(f))[..., None] * B[:, :, None, :]
    y = torch.einsum("bhpn,bhn->bhp", state, C)
    return _skip_and_gate(y, x, D, z), state


def _skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """y + D x, times silu(z) where a gate is given, in the dtype of ``y``."""
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]).to(y.dtype) * x.to(y.dtype)
    if z is not None:
        y = y * F.silu(z.to(y.dtype))
    return y


def _slots(state_batch_indices: Tensor, batch: int) -> Tensor:
    return (state_batch_indices if state_batch_indices.dim() == 1
            else state_batch_indices[:, 0])[:batch].long()


def _suffix_sum(d: Tensor) -> Tensor:
    """Sum of all later entries along the last axis, without the cancellation of total - cumsum."""
    return F.pad(d[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))


def replay_step_naive(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
                      D: Tensor | None, dt_bias: Tensor | None, z: Tensor | None,
                      x_cache: Tensor, dt_cache: Tensor, B_cache: Tensor, write_pos: Tensor,
                      is_flush: Tensor, state_batch_indices: Tensor, null_block_id: int,
                      out: Tensor, rand_seed: Tensor | None = None, state_scale: Tensor | None = None, *,
                      dt_softplus: bool = True, philox_rounds: int = 0,
                      dtype: torch.dtype = torch.float64) -> Tensor:
    """The replay step as its specification states it; arguments as in ``replay_step``."""
    nheads, ratio = x.shape[1], x.shape[1] // B.shape[1]
    dts = discretize(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus, dtype)
    for b, s in enumerate(_slots(state_batch_indices, x.shape[0]).tolist()):
        if s == null_block_id or s < 0:
            continue
        w, flush = int(write_pos[b]), bool(is_flush[b])
        for h in range(nheads):
            g = h // ratio
            a = A[h, 0, 0].to(dtype)
            d = torch.cat([dt_cache[s, h, :w].to(dtype), dts[b, h, None]])
            xs = torch.cat([x_cache[s, h, :w], x[b, h, None]]).to(dtype)
            Bs = torch.cat([B_cache[s, g, :w], B[b, g, None]]).to(dtype)
            weight = d * torch.exp(a * _suffix_sum(d))
            folded = torch.exp(a * d.sum()) * loaded(state, state_scale, (s, h), dtype) \
                + (weight[:, None] * xs).T @ Bs
            y = _skip_and_gate((folded @ C[b, g].to(dtype))[None, None], x[b:b + 1, h:h + 1],
                               None if D is None else D[h:h + 1],
                               None if z is None else z[b:b + 1, h:h + 1])
            out[b, h] = y[0, 0].to(out.dtype)
            if flush:
                slot, head = (torch.tensor([i], device=state.device) for i in (s, h))
                store(folded[None, None], slot, head, state, state_scale, rand_seed, philox_rounds)
                continue
            x_cache[s, h, w], dt_cache[s, h, w] = x[b, h].to(x_cache.dtype), dts[b, h].to(dt_cache.dtype)
            if h % ratio == 0:
                B_cache[s, g, w] = B[b, g].to(B_cache.dtype)
    advance(rand_seed)
    return out


def replay_step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
                D: Tensor | None, dt_bias: Tensor | None, z: Tensor | None,
                x_cache: Tensor, dt_cache: Tensor, B_cache: Tensor, write_pos: Tensor,
                is_flush: Tensor, state_batch_indices: Tensor, null_block_id: int,
                out: Tensor, rand_seed: Tensor | None = None, state_scale: Tensor | None = None, *,
                dt_softplus: bool = True, philox_rounds: int = 0,
                dtype: torch.dtype = torch.float32) -> Tensor:
    """One token per row by replay, vectorised. Shapes and rules: ``replayssm_cute.mamba2``.

    ``state``, ``state_scale``, the rings, ``out`` and ``rand_seed`` are changed in place; ``dtype`` is
    that of the arithmetic. With ``philox_rounds`` the checkpoint is rounded stochastically; see
    ``rounding``. It allocates and copies the named states, so it is for machines without a GPU and for
    tests.
    """
    batch, nheads, headdim = x.shape
    ngroups, dstate, L = B.shape[1], B.shape[2], x_cache.shape[2]
    slots = _slots(state_batch_indices, batch)
    rows = ((slots != null_block_id) & (slots >= 0)).nonzero()[:, 0]
    slots, w = slots[rows], write_pos[:batch][rows].long()
    flush = is_flush[:batch][rows].bool()

    # The window of every row: ring rows below the cursor, the current token at it, zeros behind.
    pos = torch.arange(L, device=x.device)
    old, cur = pos < w[:, None], pos == w[:, None]                       # (rows, L)
    dt_cur = discretize(dt[rows, :, 0], None if dt_bias is None else dt_bias[:, 0],
                        dt_softplus, dtype)

    def window(ring: Tensor, current: Tensor) -> Tensor:
        shape = (-1, 1, L) + (1,) * (ring.dim() - 3)
        held = torch.where(old.view(shape), ring[slots].to(dtype), 0)
        return torch.where(cur.view(shape), current.to(dtype).unsqueeze(2), held)

    d, xs, Bs = window(dt_cache, dt_cur), window(x_cache, x[rows]), window(B_cache, B[rows])
    a = A[:, 0, 0].to(dtype)
    weight = d * torch.exp(a[:, None] * _suffix_sum(d))                  # (rows, H, L)
    decay = torch.exp(a * d.sum(-1))

    # Heads of a group share B and C, so every product is one matmul per (row, group).
    Cg, ratio = C[rows].to(dtype)[..., None], nheads // ngroups

    def by_group(t: Tensor) -> Tensor:
        return t.unflatten(1, (ngroups, ratio))

    y = x.new_empty((rows.numel(), nheads, headdim), dtype=dtype)
    read = ~flush
    if read.any():
        checkpoint = by_group(loaded(state, state_scale, slots[read], dtype)).flatten(2, 3)  # (rows, G, r P, N)
        scores = by_group(weight[read]) * (Bs[read] @ Cg[read]).transpose(-1, -2)
        y[read] = decay[read][..., None] * (checkpoint @ Cg[read]).view(-1, nheads, headdim) \
            + (scores.flatten(1, 2)[:, :, None] @ xs[read])[:, :, 0]
    if flush.any():
        scaled = by_group((weight[flush][..., None] * xs[flush]).transpose(-1, -2)).flatten(2, 3)
        folded = (scaled @ Bs[flush]).view(-1, nheads, headdim, dstate) \
            + decay[flush][..., None, None] * loaded(state, state_scale, slots[flush], dtype)
        y[flush] = (by_group(folded).flatten(2, 3) @ Cg[flush]).view(-1, nheads, headdim)
        store(folded, slots[flush], torch.arange(nheads, device=x.device), state, state_scale, rand_seed,
              philox_rounds)
    out[rows] = _skip_and_gate(y, x[rows], D, None if z is None else z[rows]).to(out.dtype)

    s, p, r = slots[read], w[read], rows[read]
    x_cache[s, :, p] = x[r].to(x_cache.dtype)
    dt_cache[s, :, p] = dt_cur[read].to(dt_cache.dtype)
    B_cache[s, :, p] = B[r].to(B_cache.dtype)
    advance(rand_seed)
    return out


def loaded(state: Tensor, state_scale: Tensor | None, at: Tensor | tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Checkpoints at an index of the pool, as values in ``dtype``."""
    if state_scale is None:
        return state[at].to(dtype)
    return dequantize(state[at], state_scale[at], dtype)


def store(folded: Tensor, slots: Tensor, heads: Tensor, state: Tensor, state_scale: Tensor | None,
          rand_seed: Tensor | None, philox_rounds: int) -> None:
    """Put folded states (rows, heads, P, N) into the pool: rounded to nearest, or stochastically."""
    at, bits = (slots[:, None], heads), None
    if philox_rounds:
        assert rand_seed is not None
        seed, step, _, first, total, *_ = rand_seed.tolist()
        _, H, P, N = state.shape
        inside = torch.arange(P * N, device=state.device).view(P, N)
        position = ((slots * (total or H))[:, None] + first + heads)[:, :, None, None] * (P * N) + inside
        bits = random_bits(position, seed, step, state.dtype, philox_rounds)
    if state.dtype in LARGEST_CODE:
        assert state_scale is not None
        state[at], state_scale[at] = quantize(folded.float(), state.dtype, bits)
    else:
        state[at] = folded.to(state.dtype) if bits is None else round_stochastic(folded.float(), bits, state.dtype)


def advance(rand_seed: Tensor | None) -> None:
    """Count the launch, so that the next one draws other words."""
    if rand_seed is not None:
        rand_seed[1] += 1
