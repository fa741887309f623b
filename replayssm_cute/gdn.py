"""Gated DeltaNet by replay: standard decode and speculative verify, the public operations.

The rule, for a value head with its key head (arXiv:2412.06464); S is (V, K):

    g = -exp(A_log) softplus(a + dt_bias)     beta = sigmoid(b)     q, k divided by sqrt(sum of squares + 1e-6)
    S <- exp(g) S ;  d = beta (v - S k) ;  S <- S + d k^T ;  o = scale * S q

Replay keeps S as a checkpoint and a ring of records (d, k, g). Cursors of the speculative ring are moved by
``replayssm_cute.gdn_cursors``, checkpoints outside of a step by ``replayssm_cute.gdn_fold``.

Letters: Hk key heads, HV value heads (a multiple of Hk), K and V head sizes, L ring rows, T tokens of a window.
"""

from __future__ import annotations

from torch import Tensor

from replayssm_cute import gdn_dispatch
from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.gdn_validate import decode_problem, verify_problem
from replayssm_cute.rounding import check_rounds, default_seed_state


def gdn_replayssm_decode(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, initial_state: Tensor,
    d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, out: Tensor, ssm_state_indices: Tensor, write_pos: Tensor,
    force_flush: Tensor | None = None, scale: float | None = None, use_qk_l2norm_in_kernel: bool = True,
    null_block_id: int = -1, *, enable_stochastic_rounding: bool = False, cache_philox_rounds: int = 0,
    rand_seed: Tensor | None = None, backend: str | None = None,
) -> Tensor:
    """One decode token per batch row.

    A row with slot s and w = ``write_pos`` replays ring rows 0..w-1 of the slot on top of its checkpoint. It flushes
    where w = L - 1 or ``force_flush`` says so: then the state with this token replaces the checkpoint, nothing is
    appended, and the caller's next cursor is 0. Otherwise (d, k, g) of the token is appended at ring row w.

    Args:
        q, k: (batch, Hk, K), bf16, fp16 or fp32; rows may be padded (views of a packed tensor).
        v: (batch, HV, V) in the dtype of ``q``; rows may be padded.
        a, b: (batch, HV), any float dtype.
        A_log, dt_bias: (HV,), any float dtype.
        initial_state: (slots, HV, V, K) checkpoints, fp32, fp16 or bf16. Caller's; changed in place on a flush. The
            slot stride may exceed HV*V*K, inner strides are dense.
        d_cache: (slots, HV, L, V) ring, any float dtype. Caller's; row w is written in place.
        k_cache: (slots, Hk, L, K) ring of normalised k in the dtype of ``d_cache``. Same.
        g_cache: (slots, HV, L) fp32 ring of log decays. Same.
        out: (batch, HV, V) in the dtype of ``q``. Caller's; written.
        ssm_state_indices: (>= batch,) int32 or int64 slots of the rows. A row whose slot is ``null_block_id`` or
            negative is padding: its ``out`` becomes zero, nothing else changes. Live rows never share a slot.
        write_pos: (>= batch,) int32, 0 <= w < L. Ring rows >= w may hold anything.
        force_flush: (>= batch,) int32, int8 or bool; optional.
        scale: of q; None means K^-0.5.
        use_qk_l2norm_in_kernel: normalise q and k; else they come normalised.
        enable_stochastic_rounding: round the stored checkpoint stochastically (``rounding``); fp16 and bf16 only.
        cache_philox_rounds: rounds of its random generator, 1 to 16; 0 means 10.
        rand_seed: (8,) int64 of ``rounding.seed_state``. Caller's; every launch, also of a captured graph, advances
            its step. None takes a state of this package, one a device.
        backend: ``"cute"``, ``"triton"`` or ``"torch"`` to insist on one; None chooses.

    Returns:
        ``out``.

    Raises:
        ArgumentError: an argument breaks the contract; nothing was changed.
        UnsupportedError: the named backend cannot serve this problem, or none can; or an fp32 checkpoint is to be
            rounded stochastically.
    """
    if isinstance(v, Tensor) and v.dim() == 3 and v.shape[0] == 0:
        return out
    _check_tensor("initial_state", initial_state)
    rounds = check_rounds(cache_philox_rounds) if enable_stochastic_rounding else 0
    if rounds and rand_seed is None:
        rand_seed = default_seed_state(initial_state.device)
    args = (initial_state, q, k, v, a, b, A_log, dt_bias, d_cache, k_cache, g_cache, write_pos, force_flush,
            ssm_state_indices, null_block_id, out, rand_seed if rounds else None)
    factor, l2norm = _scale(scale, initial_state), use_qk_l2norm_in_kernel
    gdn_dispatch.serve(args, ("gdn_decode", l2norm, factor, rounds),
                       lambda: decode_problem(*args, scale=factor, l2norm=l2norm, philox_rounds=rounds),
                       initial_state.device, backend)
    return out


def fused_recurrent_linear_replayssm_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float | None, initial_state: Tensor,
    d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, out: Tensor, ssm_state_indices: Tensor, write_pos: Tensor,
    force_flush: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, is_kda: bool = False,
    block_v: int | None = None, num_warps: int = 1, num_stages: int = 3, nk: int = 2, *, null_block_id: int = -1,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``gdn_replayssm_decode`` on packed inputs: the signature of the function of this name in SGLang 0.5.23.

    Args:
        mixed_qkv: (batch, 2 Hk K + HV V): the heads of q, of k, of v. Rows may be padded.
        out: (batch, 1, HV, V) or (batch, HV, V).
        is_kda: a gate for every channel of K; not served.
        block_v, num_warps, num_stages, nk: launch parameters of another implementation, ignored.

    Returns:
        (out, initial_state).

    Raises:
        UnsupportedError: ``is_kda``; and as in ``gdn_replayssm_decode``.
    """
    if is_kda:
        raise UnsupportedError("is_kda", "a gate for every channel of K is not served")
    for name, t, dims in (("initial_state", initial_state, 4), ("k_cache", k_cache, 4), ("mixed_qkv", mixed_qkv, 2)):
        _check_tensor(name, t, dims)
    (_, HV, V, K), Hk = initial_state.shape, k_cache.shape[1]
    if mixed_qkv.shape[1] != 2 * Hk * K + HV * V or mixed_qkv.stride(1) != 1:
        raise ArgumentError("mixed_qkv", f"shape (batch, {2 * Hk * K + HV * V}) with dense rows",
                            f"{tuple(mixed_qkv.shape)}, strides {mixed_qkv.stride()}")
    q, k, v = mixed_qkv.split([Hk * K, Hk * K, HV * V], 1)
    gdn_replayssm_decode(q.unflatten(1, (Hk, K)), k.unflatten(1, (Hk, K)), v.unflatten(1, (HV, V)), a, b, A_log,
                         dt_bias, initial_state, d_cache, k_cache, g_cache, out[:, 0] if out.dim() == 4 else out,
                         ssm_state_indices, write_pos, force_flush, scale, use_qk_l2norm_in_kernel, null_block_id,
                         backend=backend)
    return out, initial_state


def gdn_replayssm_spec_decode(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, checkpoint_state: Tensor,
    d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, rawv_cache: Tensor | None, rawk_cache: Tensor | None,
    beta_cache: Tensor | None, out: Tensor, query_start_loc: Tensor, ssm_state_indices: Tensor, replay_indices: Tensor,
    write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, max_cache_len: int, max_spec_len: int,
    scale: float | None = None, use_qk_l2norm_in_kernel: bool = True, null_block_id: int = 0, *,
    launch_mode: str = "both", backend: str | None = None, **launch_parameters: object,
) -> Tensor:
    """Verify a window of up to T tokens per batch row, as if each draft were accepted.

    Record j of ring row r = ``replay_indices`` lies at ``(cache_base[r] + j) mod L``; the first ``write_pos[r]`` are
    committed. A row whose ``is_flush[r]`` is set first folds them into its checkpoint. With the raw rings that is the
    *exact fold*: the inputs go through the recurrence one token at a time, so that an fp32 checkpoint has the bits of
    the recurrence; without, the ring's d are folded at once. Then every token's output is read from checkpoint and
    records, and the window's own records are written behind the committed ones. The cursors stay: the caller moves
    them with ``commit_gdn_replayssm_spec`` once it knows what was accepted. A flush row with a 2-byte checkpoint reads
    the checkpoint as it was stored. Argument names are those of SGLang 0.5.23.

    Args:
        q, k: (tokens, Hk, K), bf16, fp16 or fp32; the rows' windows one behind the other; rows may be padded.
        v: (tokens, HV, V) in the dtype of ``q``.
        a, b: (tokens, HV), any float dtype.
        A_log, dt_bias: (HV,), any float dtype.
        checkpoint_state: (slots, HV, V, K), fp32, fp16 or bf16 (warns). Caller's; changed on a flush.
        d_cache, k_cache, g_cache: (rings, HV, L, V), (rings, Hk, L, K), (rings, HV, L) as in standard decode.
        rawv_cache, rawk_cache: (rings, HV, L, V), (rings, Hk, L, K) raw inputs in the dtype of ``v``; or None.
        beta_cache: (rings, HV, L) fp32; or None. All three or none.
        out: (tokens, HV, V) in the dtype of ``q``. Caller's; written.
        query_start_loc: (batch + 1,) int32, first token of each row; a row has 0 to T tokens.
        ssm_state_indices: (>= batch,) int32 or int64, slot of each row's checkpoint.
        replay_indices: (>= batch,) int32 or int64, each row's ring and cursors. A row either of whose indices is
            ``null_block_id`` or negative is padding: its ``out`` becomes zero, nothing else changes.
        write_pos, cache_base: (>= rings,) int32, ``write_pos`` + T <= L.
        is_flush: (>= rings,) int8 or bool.
        max_cache_len: L, a power of two, at least 2 T.
        max_spec_len: T, 1 to 16.
        scale: of q; None means K^-0.5.
        launch_mode: "both" serves every row, "verify" those whose flag is not set, "flush" the others.
        backend: as in ``gdn_replayssm_decode``.
        launch_parameters: ``block_v``, ``num_warps`` and such of another implementation, ignored.

    Returns:
        ``out``.

    Raises:
        ArgumentError, UnsupportedError: as in ``gdn_replayssm_decode``.
    """
    rings = {"d_cache": d_cache, "k_cache": k_cache, "g_cache": g_cache, "rawv_cache": rawv_cache,
             "rawk_cache": rawk_cache, "beta_cache": beta_cache}
    first = (checkpoint_state, q, k, v, a, b, A_log, dt_bias)
    last = (out, query_start_loc, ssm_state_indices, replay_indices, write_pos, cache_base, is_flush, null_block_id)
    if isinstance(v, Tensor) and v.dim() == 3 and v.shape[0] == 0:
        return out
    _check_tensor("checkpoint_state", checkpoint_state)
    factor = _scale(scale, checkpoint_state)
    gdn_dispatch.serve(
        (*first, *rings.values(), *last),
        ("gdn_verify", max_cache_len, max_spec_len, use_qk_l2norm_in_kernel, launch_mode, factor),
        lambda: verify_problem(*first, rings, *last, max_cache_len=max_cache_len, max_spec_len=max_spec_len,
                               scale=factor, l2norm=use_qk_l2norm_in_kernel, launch_mode=launch_mode),
        checkpoint_state.device, backend)
    return out


def _check_tensor(name: str, value: object, dims: int = 4) -> None:
    if not isinstance(value, Tensor) or value.dim() != dims:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(name, f"a tensor of {dims} dimensions", got)


def _scale(scale: float | None, state: Tensor) -> float:
    return float(state.shape[-1] ** -0.5 if scale is None else scale)
