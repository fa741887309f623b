"""Stand-ins for the packages that benchmarks/peers compares with: their parameter lists, and what they compute.

Parameters are those of vLLM 0.33.0, FlashInfer 0.7.4 and SGLang 0.5.23, names and order, so that a call that the real
function refuses is refused here; the arithmetic is the project's reference. Where a package has its own notion of
rings and cursors, it is spelled out.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_cute.reference import gdn, gdn_spec, mamba2

#: Calls of each stand-in.
calls: Counter[str] = Counter()

VLLM = "vllm.model_executor.layers.mamba.ops"
SGLANG = "sglang.kernels.ops.attention"


# ---- vLLM
def vllm_step(state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None,  # type: ignore
              dst_state_batch_indices=None, null_block_id=0, out=None, num_accepted_tokens=None, cu_seqlens=None,
              is_blackwell=False, enable_stochastic_rounding=False, cache_philox_rounds=0):
    if enable_stochastic_rounding:
        raise RuntimeError("cvt.rs needs sm_100a")
    _advance(state, x, dt, A, B, C, D, dt_bias, dt_softplus, state_batch_indices, out)


def vllm_replay(state, x, dt, A, B, C, D=None, dt_bias=None, z=None, dt_softplus=False, x_cache=None,  # type: ignore
                dt_cache=None, B_cache=None, bc_pre=None, write_pos=None, is_flush=None, max_cache_len=16,
                state_batch_indices=None, null_block_id=0, out=None, enable_stochastic_rounding=False,
                cache_philox_rounds=0):
    assert bc_pre.shape == (len(x), B.shape[1], max_cache_len) and bc_pre.dtype == torch.float32
    assert x_cache.shape[2] == max_cache_len
    if enable_stochastic_rounding:
        raise RuntimeError("cvt.rs needs sm_100a")
    return mamba2.replay_step(state, x, dt, A, B, C, D, dt_bias, z, x_cache, dt_cache, B_cache, write_pos, is_flush,
                              state_batch_indices, null_block_id, out, dt_softplus=dt_softplus)


def _advance(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
             dt_softplus: bool, slots: Tensor, out: Tensor) -> None:
    y, new = mamba2.recurrent_step(state[slots.long()].float(), x, dt[..., 0], A[:, 0, 0], B, C, D[:, 0],
                                   dt_bias[:, 0], dt_softplus=dt_softplus)
    state[slots.long()] = new.to(state.dtype)
    out.copy_(y)


# ---- FlashInfer
def flashinfer_step(state, x, dt, A, B, C, D, z=None, dt_bias=None, dt_softplus=False,  # type: ignore
                    state_batch_indices=None, pad_slot_id=-1, state_scale=None, out=None, disable_state_update=False,
                    intermediate_states_buffer=None, intermediate_state_indices=None, intermediate_state_scales=None,
                    rand_seed=None, philox_rounds=10, cache_steps=0, algorithm="auto", dst_state_batch_indices=None,
                    cu_seqlens=None, num_accepted_tokens=None, backend="auto"):
    assert rand_seed is None or (rand_seed.shape == (1,) and rand_seed.dtype == torch.int64)
    _advance(state, x, dt, A, B, C, D, dt_bias, dt_softplus, state_batch_indices, out)
    return out


def checkpointing_ssu(state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B,  # type: ignore
                      C, out, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, pad_slot_id=-1,
                      state_scale=None, rand_seed=None, philox_rounds=10, d_split=None, cu_seqlens=None,
                      max_seqlen=None, enable_pdl=False, cb_scaled=None, cumAdt_vec=None, cb_old=None,
                      precompute_heads_per_cta=0, algorithm="auto"):
    """Windows of one token. Old tokens lie in ring rows start, start + 1, ...; the new one goes behind them, always."""
    assert x.shape[1] == 1 and algorithm in ("auto", "monolith", "two-kernel")
    assert (cb_scaled, cumAdt_vec, cb_old) == ("scaled", "cumulative", "old")
    assert ring_start.dtype == prev_num_accepted_tokens.dtype == torch.int32
    assert len(ring_start) == len(prev_num_accepted_tokens) == len(state)
    rows, ratio = x_cache.shape[2], x.shape[2] // B.shape[2]
    for b, slot in enumerate(state_batch_indices.tolist()):
        start, old = int(ring_start[slot]), int(prev_num_accepted_tokens[slot])
        S = state[slot].float()
        for j in range(old):
            at = (start + j) % rows
            S = _update(S, x_cache[slot, :, at], dt_cache[slot, :, at], A[:, 0, 0],
                        B_cache[slot, :, at].repeat_interleave(ratio, 0))
        if old + 2 > rows:
            state[slot] = S.to(state.dtype)
        step = mamba2.discretize(dt[b, 0, :, 0], dt_bias[:, 0], dt_softplus)
        S = _update(S, x[b, 0], step, A[:, 0, 0], B[b, 0].repeat_interleave(ratio, 0))
        y = (S @ C[b, 0].float().repeat_interleave(ratio, 0)[..., None])[..., 0]
        out[b, 0] = (y + D[:, :1].float() * x[b, 0].float()).to(out.dtype)
        new = (start + old) % rows
        x_cache[slot, :, new], B_cache[slot, :, new], dt_cache[slot, :, new] = x[b, 0], B[b, 0], step
    return out


def _update(S: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    return S * torch.exp(A * dt)[:, None, None] + (dt[:, None] * x.float())[..., None] * B.float()[:, None]


def allocate_scratch(batch_size, num_heads, num_predicted_tokens, max_window, dtype, device):  # type: ignore
    assert num_predicted_tokens == 1
    return "scaled", "cumulative", "old"


def flashinfer_gdn_step(q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True,  # type: ignore
                        initial_state=None, initial_state_indices=None, output_state_indices=None,
                        intermediate_states_buffer=None, disable_state_update=False, backend="auto"):
    assert state is None and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert A_log.dtype == torch.float32
    o = _gdn_advance(initial_state, initial_state_indices, (t[:, 0] for t in (q, k, v, a, b)), A_log, dt_bias, scale,
                     use_qk_l2norm)
    output[:, 0] = o.to(output.dtype)
    return output, initial_state


def ucache_flush(A_log, a, dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=None, k=None, v=None, b=None,  # type: ignore
                 initial_state_source=None, initial_state_indices=None, output_state_indices=None,
                 intermediate_states_buffer=None, accepted_steps=None, ssm_state_indices=None,
                 disable_state_update=False, use_qk_l2norm_in_kernel=True, scale=None, output=None,
                 disable_output=False, recovery_steps=0, k_cache=None, u_cache=None, g_cache=None, hist_len=None,
                 cache_base=None, flush_min=None, restart_hist_on_flush=True, pdl_trigger=False, backend="auto",
                 stochastic_rounding=None, rand_seed=None, philox_rounds=10):
    """A ring of 32 rows, at most 16 of them replayed; rows with ``flush_min`` of them fold them, the caller commits."""
    if initial_state_source.dtype != torch.bfloat16:
        raise AssertionError(f"initial_state_source must be torch.bfloat16; got {initial_state_source.dtype}.")
    assert not restart_hist_on_flush and k_cache.shape[2] == 32 and int(hist_len.max()) <= 16
    ratio = v.shape[2] // k.shape[2]
    for row, slot in enumerate(initial_state_indices.tolist()):
        held, base = int(hist_len[row]), int(cache_base[row])
        at = (base + torch.arange(held)) % 32
        S = gdn.materialise(initial_state_source[slot].float(), u_cache[slot][:, at].float(),
                            k_cache[slot][:, at].float().repeat_interleave(ratio, 0), g_cache[slot][:, at])
        if held >= flush_min:
            initial_state_source[slot] = S.to(initial_state_source.dtype)
        for t in range(q.shape[1]):
            g, beta = gdn.gates(a[row, t], b[row, t], A_log, dt_bias, torch.float32)
            q_t, k_t = gdn.query_and_key(q[row, t], k[row, t], ratio, scale, True, torch.float32)
            S, u = gdn.advance(S, k_t, v[row, t], g, beta)
            output[row, t] = (S @ q_t[..., None])[..., 0].to(output.dtype)
            new = (base + held + t) % 32
            k_cache[slot, :, new], u_cache[slot, :, new], g_cache[slot, :, new] = k_t[::ratio], u, g
    return output


# ---- SGLang
def packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices,  # type: ignore
                  use_qk_l2norm_in_kernel=False):
    q, k, v = _apart(mixed_qkv, initial_state)
    out[:, 0] = _gdn_advance(initial_state, ssm_state_indices, (q, k, v, a, b), A_log, dt_bias, scale,
                             use_qk_l2norm_in_kernel).to(out.dtype)
    return out, initial_state


def replay_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out,  # type: ignore
                  ssm_state_indices, write_pos, force_flush=None, use_qk_l2norm_in_kernel=False, is_kda=False,
                  block_v=None, num_warps=1, num_stages=3, nk=2):
    assert d_cache.dtype == k_cache.dtype == initial_state.dtype and g_cache.dtype == torch.float32
    gdn.replay_decode(initial_state, *_apart(mixed_qkv, initial_state), a, b, A_log, dt_bias, d_cache, k_cache,
                      g_cache, write_pos, force_flush, ssm_state_indices, -1, out[:, 0], scale=scale,
                      l2norm=use_qk_l2norm_in_kernel)
    return out, initial_state


def spec_decode(q, k, v, a, b, A_log, dt_bias, checkpoint_state, d_cache, k_cache, g_cache, rawv_cache,  # type: ignore
                rawk_cache, beta_cache, out, query_start_loc, ssm_state_indices, replay_indices, write_pos, cache_base,
                is_flush, max_cache_len, max_spec_len, scale=None, use_qk_l2norm_in_kernel=True, null_block_id=0,
                block_v=64, num_warps=1, num_stages=2, nk=2, bs_min=4, block_v_flush=64, num_warps_flush=1,
                num_stages_flush=2, nk_flush=2, launch_mode="both", dot_precision="tf32"):
    """The low parts of d and k, in ``rawv_cache`` and ``rawk_cache``, are not modelled."""
    assert rawv_cache.shape == d_cache.shape and rawk_cache.shape == k_cache.shape and beta_cache is None
    rings = {"d_cache": d_cache, "k_cache": k_cache, "g_cache": g_cache,
             "rawv_cache": None, "rawk_cache": None, "beta_cache": None}
    gdn_spec.verify(checkpoint_state, q, k, v, a, b, A_log, dt_bias, rings, out, query_start_loc, ssm_state_indices,
                    replay_indices, write_pos, cache_base, is_flush, null_block_id, scale=scale,
                    l2norm=use_qk_l2norm_in_kernel, launch_mode=launch_mode)


def commit_spec(write_pos, cache_base, is_flush, num_accepted, replay_indices, max_cache_len, max_spec_len,  # type: ignore
                fold_every_commit=False, cache_buf_len=None, null_block_id=0):
    gdn_spec.commit(write_pos, cache_base, is_flush, num_accepted, replay_indices, null_block_id,
                    ring_len=max_cache_len, max_cache_len=max_cache_len, max_spec_len=max_spec_len,
                    fold_every_commit=fold_every_commit)


def commit_circular(*, checkpoint_state, d_cache, k_cache, g_cache, d_residual_cache, k_residual_cache,  # type: ignore
                    state_batch_indices, replay_indices, write_pos, cache_base, is_flush, accept_lens,
                    mamba_track_indices=None, mamba_steps_to_track=None, null_block_id=-1):
    """Fold the rows that are due, in all layers, and empty their rings."""
    due = is_flush[replay_indices.long()] != 0
    slots, keys = state_batch_indices[due].long(), replay_indices[due].long()
    for layer, state in enumerate(checkpoint_state):
        rings = {"d_cache": d_cache[layer], "k_cache": k_cache[layer], "g_cache": g_cache[layer],
                 "rawv_cache": None, "rawk_cache": None, "beta_cache": None}
        gdn_spec.fold(state, rings, slots, slots, keys, write_pos[keys].long(), cache_base[keys].long())
    for cursor in (write_pos, cache_base, is_flush):
        cursor[keys] = 0


def _apart(mixed: Tensor, state: Tensor) -> list[Tensor]:
    _, HV, V, K = state.shape
    heads = (mixed.shape[1] - HV * V) // (2 * K)
    q, k, v = mixed.split([heads * K, heads * K, HV * V], 1)
    return [q.unflatten(1, (heads, K)), k.unflatten(1, (heads, K)), v.unflatten(1, (HV, V))]


def _gdn_advance(state: Tensor, slots: Tensor, inputs: Any, A_log: Tensor, dt_bias: Tensor, scale: float,
                 l2norm: bool) -> Tensor:
    o, new = gdn.recurrent_step(state[slots.long()].float(), *inputs, A_log, dt_bias, scale, l2norm)
    state[slots.long()] = new.to(state.dtype)
    return o


FUNCTIONS = {
    "vllm": {f"{VLLM}.mamba_ssm:selective_state_update": vllm_step,
             f"{VLLM}.selective_state_update_replayssm_output_only:selective_state_update_replayssm_output_only":
                 vllm_replay},
    "flashinfer": {
        "flashinfer.mamba.selective_state_update:selective_state_update": flashinfer_step,
        "flashinfer.mamba.checkpointing_ssu:checkpointing_ssu": checkpointing_ssu,
        "flashinfer.mamba.checkpointing_ssu:allocate_checkpointing_ssu_scratch": allocate_scratch,
        "flashinfer.gdn_decode:gated_delta_rule_decode_pretranspose": flashinfer_gdn_step,
        "flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush:gated_delta_rule_mtp_ucache_flush": ucache_flush},
    "sglang": {
        f"{SGLANG}.fla.fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode": packed_decode,
        f"{SGLANG}.linear.fused_recurrent_linear_replayssm:fused_recurrent_linear_replayssm_decode": replay_decode,
        f"{SGLANG}.linear.gdn_replayssm_spec_decode:gdn_replayssm_spec_decode": spec_decode,
        f"{SGLANG}.linear.gdn_replayssm_spec_decode:commit_gdn_replayssm_spec": commit_spec,
        f"{SGLANG}.linear.gdn_replayssm_spec_decode:commit_gdn_replayssm_circular": commit_circular}}


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make ``import`` find the stand-ins of these packages, and none of the others'."""
    for package, functions in FUNCTIONS.items():
        if package not in packages:
            monkeypatch.setitem(sys.modules, package, None)
            continue
        for entry, function in functions.items():
            module, name = entry.split(":")
            parts = module.split(".")
            for n in range(1, len(parts) + 1):
                if not isinstance(sys.modules.get(at := ".".join(parts[:n])), Stand):
                    monkeypatch.setitem(sys.modules, at, Stand(at))
            setattr(sys.modules[module], name, counting(entry, function))


class Stand(ModuleType):
    """A module of a stand-in package."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0.0"


def counting(entry: str, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[entry] += 1
        return function(*args, **kwargs)

    return call
