"""Speculative verify of Gated DeltaNet in plain PyTorch: verify, folds and cursors on a circular ring.

Record j of a row lies in ring row ``(cache_base + j) mod L``; the first ``write_pos`` records are committed. A
window of up to T tokens is verified from checkpoint and records, and its own records are written behind
them, whatever will be accepted. Letters as in ``reference.gdn``.

* ``verify_naive``  rebuilds the state and runs the recurrence over the window: the oracle.
* ``verify``  the window solved at once, vectorised: the backend of a machine without a GPU.
* ``fold``  the first records of rows folded into their checkpoint or into another slot.
* ``commit``, ``reset``  the cursors, which are all that acceptance and rollback change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm_cute.reference.gdn import (
    advance,
    gates,
    later_sum,
    live_rows,
    materialise,
    query_and_key,
    ring_rows,
    ring_window,
    tree_sum,
    unit,
)


def folded(state: Tensor, rings: dict[str, Tensor | None], keys: Tensor, counts: Tensor, base: Tensor, l2norm: bool,
           dtype: torch.dtype) -> Tensor:
    """States (rows, HV, V, K) after the first ``counts`` records of the rings' rows ``keys``.

    With raw inputs in the ring (``rawv_cache`` and its fellows) they go through the recurrence one token at a time,
    with the very operations of ``reference.gdn.advance``; otherwise the solved d of the ring are folded at once.
    """
    state, L = state.to(dtype), rings["g_cache"].shape[2]  # type: ignore[union-attr]
    if rings["rawv_cache"] is None:
        d, k, g = ring_window(rings["d_cache"], rings["k_cache"], rings["g_cache"], keys, counts, base,  # type: ignore[arg-type]
                              dtype)
        return materialise(state, d, k.repeat_interleave(d.shape[1] // k.shape[1], 1), g)
    rawv, rawk, gate, beta = (rings[n] for n in ("rawv_cache", "rawk_cache", "g_cache", "beta_cache"))
    ratio = rawv.shape[1] // rawk.shape[1]  # type: ignore[union-attr]
    for j in range(int(counts.max()) if len(counts) else 0):
        at = (base + j) % L
        k = rawk[keys, :, at]  # type: ignore[index]
        k = (unit(k, dtype) if l2norm else k.to(dtype)).repeat_interleave(ratio, 1)
        new, _ = advance(state, k, rawv[keys, :, at], gate[keys, :, at], beta[keys, :, at])  # type: ignore[index]
        state = torch.where((j < counts)[:, None, None, None], new, state)
    return state


def fold(state: Tensor, rings: dict[str, Tensor | None], sources: Tensor, targets: Tensor, keys: Tensor,
         counts: Tensor, base: Tensor, *, l2norm: bool = True, dtype: torch.dtype = torch.float32) -> None:
    """Fold each row's first ``counts`` records on its checkpoint ``sources`` and store the result in ``targets``.

    ``state`` is (slots, HV, V, K) and is changed at ``targets``; index tensors are (rows,), live rows only.
    """
    result = folded(state[sources], rings, keys, counts, base, l2norm, dtype)
    state[targets] = result.to(state.dtype)


def verify_naive(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
                 rings: dict[str, Tensor | None], out: Tensor, query_start_loc: Tensor, ssm_state_indices: Tensor,
                 replay_indices: Tensor, write_pos: Tensor, cache_base: Tensor, is_flush: Tensor,
                 null_block_id: int, *, scale: float, l2norm: bool = True, launch_mode: str = "both",
                 dtype: torch.dtype = torch.float64) -> Tensor:
    """The verify step row by row and token by token; arguments as in ``verify``."""
    batch, ratio, starts = len(query_start_loc) - 1, v.shape[1] // k.shape[1], query_start_loc.tolist()
    for row in set(range(batch)) - set(_live(ssm_state_indices, replay_indices, batch, null_block_id).tolist()):
        out[starts[row]:starts[row + 1]] = 0
    for row in _live(ssm_state_indices, replay_indices, batch, null_block_id).tolist():
        slot, key = ssm_state_indices[row:row + 1].long(), replay_indices[row:row + 1].long()
        m, base, flush = (t[key].long() for t in (write_pos, cache_base, is_flush))
        if not _takes_part(flush, launch_mode):
            continue
        if flush:
            fold(state, rings, slot, slot, key, m, base, l2norm=l2norm, dtype=dtype)
        d_old, k_old, g_old = ring_window(rings["d_cache"], rings["k_cache"], rings["g_cache"], key,  # type: ignore[arg-type]
                                          m * (flush == 0), base, dtype)
        S = materialise(state[slot].to(dtype), d_old, k_old.repeat_interleave(ratio, 1), g_old)
        for s, token in enumerate(range(starts[row], starts[row + 1])):
            at = int(base + m + s) % rings["g_cache"].shape[2]  # type: ignore[union-attr]
            g, beta = gates(a[token], b[token], A_log, dt_bias, dtype)
            q_row, k_row = query_and_key(q[token], k[token], ratio, scale, l2norm, dtype)
            S, d = advance(S, k_row, v[token], g, beta)
            out[token] = tree_sum(S * q_row[:, None, :])[0].to(out.dtype)
            record = {"d_cache": d, "k_cache": k_row[::ratio], "g_cache": g, "rawv_cache": v[token],
                      "rawk_cache": k[token], "beta_cache": beta}
            _append(rings, record, key, torch.tensor([at]))
    return out


def verify(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
           rings: dict[str, Tensor | None], out: Tensor, query_start_loc: Tensor, ssm_state_indices: Tensor,
           replay_indices: Tensor, write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, null_block_id: int, *,
           scale: float, l2norm: bool = True, launch_mode: str = "both",
           dtype: torch.dtype = torch.float32) -> Tensor:
    """Verify every row's window, vectorised over rows. Shapes and rules: ``replayssm_cute.gdn``.

    ``rings`` maps the names of the six rings to tensors, the last three None without the exact fold. ``state``, the
    rings and ``out`` are changed in place; ``dtype`` is that of the arithmetic.
    """
    batch, ratio, L = len(query_start_loc) - 1, v.shape[1] // k.shape[1], rings["g_cache"].shape[2]  # type: ignore[union-attr]
    starts, lengths = query_start_loc[:-1].long(), query_start_loc.diff().long()
    rows = _live(ssm_state_indices, replay_indices, batch, null_block_id)
    padded = torch.ones(batch, dtype=torch.bool, device=v.device).index_fill_(0, rows, False)
    out[:int(query_start_loc[-1])][padded.repeat_interleave(lengths)] = 0
    rows = rows[_takes_part(is_flush[replay_indices[rows].long()], launch_mode)]
    slots, keys = ssm_state_indices[rows].long(), replay_indices[rows].long()
    starts, lengths = starts[rows], lengths[rows]
    m, base, flush = write_pos[keys].long(), cache_base[keys].long(), is_flush[keys] != 0
    at = flush.nonzero()[:, 0]
    fold(state, rings, slots[at], slots[at], keys[at], m[at], base[at], l2norm=l2norm, dtype=dtype)
    if not int(lengths.sum()):
        return out

    # The window of every row, zeros behind its end: a token with k, v and g zero changes nothing.
    T = int(lengths.max())
    inside = torch.arange(T, device=v.device) < lengths[:, None]
    token = torch.where(inside, starts[:, None] + torch.arange(T, device=v.device), starts[:, None])

    def window(t: Tensor) -> Tensor:
        held = t[token]
        return torch.where(inside.view(*inside.shape, *[1] * (held.dim() - 2)), held, 0)

    g, beta = (window(t).transpose(1, 2) for t in gates(a, b, A_log, dt_bias, dtype))   # (rows, HV, T)
    qs, ks = (t.transpose(1, 2) for t in query_and_key(window(q), window(k), ratio, scale, l2norm, dtype))
    vs = window(v).to(dtype).transpose(1, 2)                                            # (rows, HV, T, V)
    history = ring_window(rings["d_cache"], rings["k_cache"], rings["g_cache"], keys, m * ~flush, base, dtype)  # type: ignore[arg-type]
    d, o = solve_window(state[slots].to(dtype), history, qs, ks, vs, g, beta)
    out[token[inside]] = o.transpose(1, 2)[inside].to(out.dtype)
    at = ring_rows(base, m, T, L)
    record = {"d_cache": d, "k_cache": ks[:, ::ratio], "g_cache": g, "rawv_cache": vs,
              "rawk_cache": window(k).transpose(1, 2), "beta_cache": beta}
    _append(rings, {name: t.transpose(1, 2)[inside] for name, t in record.items()},
            keys[:, None].expand_as(at)[inside], at[inside])
    return out


def solve_window(state: Tensor, history: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor,
                 beta: Tensor) -> tuple[Tensor, Tensor]:
    """(d, o), each (rows, HV, T, V), of windows of T tokens behind checkpoint and history.

    ``(I + A) D = R`` with A_ij = beta_i exp(G_i - G_j) (k_i . k_j) for i > j and R_s = beta_s (v_s - exp(G_s) P k_s),
    P the state before the window; ``o_s = exp(G_s) P q_s + sum_{j <= s} exp(G_s - G_j) (k_j . q_s) d_j``.
    """
    d_old, k_old, g_old = history
    k_old = k_old.repeat_interleave(d_old.shape[1] // k_old.shape[1], 1)
    weight, decay = torch.exp(later_sum(g_old)), torch.exp(g_old.sum(-1))
    z = torch.cat((q, k), 2).transpose(-1, -2)                                          # (rows, HV, K, 2 T)
    scores = weight[..., None] * (k_old @ z)
    before = (decay[..., None, None] * (state @ z) + d_old.transpose(-1, -2) @ scores).transpose(-1, -2)
    before_q, before_k = before.chunk(2, 2)                                             # (rows, HV, T, V)
    T = g.shape[-1]
    i, j = torch.arange(T, device=g.device)[:, None], torch.arange(T, device=g.device)
    between = torch.where(i > j, g[..., :, None], 0).cumsum(-2)                         # g after j, up to i
    lower = torch.where(i > j, torch.exp(between), 0)
    since = torch.exp(g.cumsum(-1))[..., None]
    right = beta[..., None] * (v - since * before_k)
    matrix = beta[..., None] * lower * (k @ k.transpose(-1, -2))
    d = torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
    seen = torch.where(i >= j, torch.exp(between), 0) * (q @ k.transpose(-1, -2))
    return d, since * before_q + seen @ d


def _append(rings: dict[str, Tensor | None], record: dict[str, Tensor], keys: Tensor, at: Tensor) -> None:
    """Write records, one per entry of ``keys``, at the ring rows ``at``."""
    for name, ring in rings.items():
        if ring is not None:
            ring[keys, :, at] = record[name].to(ring.dtype)


def _live(ssm_state_indices: Tensor, replay_indices: Tensor, batch: int, null_block_id: int) -> Tensor:
    """Rows that are padding neither as a checkpoint slot nor as a ring row."""
    rows = live_rows(ssm_state_indices, batch, null_block_id)
    keys = replay_indices[rows]
    return rows[(keys != null_block_id) & (keys >= 0)]


def _takes_part(flush: Tensor, launch_mode: str) -> Tensor:
    """Whether rows with these flags belong to a launch: "verify" the ones that do not flush, "flush" the others."""
    if launch_mode == "both":
        return torch.ones_like(flush, dtype=torch.bool)
    return (flush != 0) == (launch_mode == "flush")


def commit(write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, num_accepted: Tensor | None,
           replay_indices: Tensor, null_block_id: int, *, ring_len: int, max_cache_len: int, max_spec_len: int,
           fold_every_commit: bool) -> None:
    """Move the cursors of the named rings past the accepted tokens; rules: ``replayssm_cute.gdn_cursors``."""
    rows = live_rows(replay_indices, len(replay_indices), null_block_id)
    keys = replay_indices[rows].long()
    w, folded_now = write_pos[keys], is_flush[keys] != 0
    accepted = torch.zeros_like(w) if num_accepted is None else num_accepted[rows].to(torch.int32).clamp(min=0)
    cache_base[keys] = torch.where(folded_now, (cache_base[keys] + w) % ring_len, cache_base[keys])
    w = torch.where(folded_now, 0, w) + accepted
    write_pos[keys] = w
    full = w + 2 * max_spec_len > max_cache_len
    is_flush[keys] = ((w > 0) if fold_every_commit else full).to(is_flush.dtype)


def reset(write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, replay_indices: Tensor, null_block_id: int) -> None:
    """Empty the named rings: cursors 0, no flush, for a ring holds two windows."""
    keys = replay_indices[live_rows(replay_indices, len(replay_indices), null_block_id)].long()
    for cursor in (write_pos, cache_base, is_flush):
        cursor[keys] = 0
