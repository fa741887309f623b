"""Gated DeltaNet, standard decode and speculative verify: the kernels that are compared and their arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.kernel import OURS, Bound, Kernel
from replayssm_cute.gdn_cursors import GdnCursors
from replayssm_cute.gdn_layout import RAW_NAMES, committed_records, gdn_ring_shapes, ring_dtypes
from replayssm_cute.reference.gdn import recurrent_step
from replayssm_tune.gdn_workload import GdnWorkload

DECODE, VERIFY = "gdn_decode", "gdn_verify"
ROUNDS = 15       # of verify: a multiple of the three in which a ring of 16 fills and of the five of FlashInfer's
FLASHINFER_RING, FLASHINFER_RECORDS = 32, 16  # rows of its verify ring, and most records that it replays
Function = Callable[..., Any]


def empty_rings(w: GdnWorkload, ring_dtype: torch.dtype, raw: bool = False) -> dict[str, Tensor]:
    """Rings of all layers, by name, whose rows change nothing, so that rows may stand anywhere."""
    dtypes, state = ring_dtypes(ring_dtype, w.inputs["v"].dtype), w.pool.state
    return {name: torch.zeros((*state.shape[:2], *shape), dtype=dtypes[name], device=state.device)
            for name, shape in gdn_ring_shapes(w.geometry, w.buffer_len, exact_fold=raw).items()}


def replay_decode(w: GdnWorkload, function: Function, **options: Any) -> Bound:
    """A function with SGLang's signature of the replay step, which is also ours; rings in the state's dtype, as the
    engine allocates them."""
    state, i, scale = w.pool.state, w.inputs, w.geometry.head_k_dim ** -0.5
    rings, tokens, out = empty_rings(w, state.dtype), (i["mixed"], i["a"], i["b"]), w.window(i["out"])

    def step(at: int, layer: int) -> Tensor:
        function(*tokens, i["A_log"], i["dt_bias"], scale, state[layer], rings["d_cache"][layer],
                 rings["k_cache"][layer], rings["g_cache"][layer], out, i["slots"], w.phases[at]["write_pos"],
                 use_qk_l2norm_in_kernel=True, **options)
        return i["out"]

    return Bound(w.buffer_len, len(state), step)


def sglang_step(w: GdnWorkload, function: Function) -> Bound:
    """SGLang's kernel of the plain recurrence, on packed inputs."""
    i, scale, out = w.inputs, w.geometry.head_k_dim ** -0.5, w.window(w.inputs["out"])

    def step(at: int, layer: int) -> Tensor:
        function(i["mixed"], i["a"], i["b"], i["A_log"], i["dt_bias"], scale, w.pool.state[layer], out, i["slots"],
                 use_qk_l2norm_in_kernel=True)
        return i["out"]

    return Bound(w.buffer_len, len(w.pool.state), step)


def flashinfer_step(w: GdnWorkload, function: Function) -> Bound:
    """FlashInfer's kernel of the plain recurrence."""
    i, (q, k, v, a, b, out) = w.inputs, _windows(w)

    def step(at: int, layer: int) -> Tensor:
        function(q, k, v, None, i["A_log"], a, i["dt_bias"], b, scale=w.geometry.head_k_dim ** -0.5, output=out,
                 use_qk_l2norm=True, initial_state=w.pool.state[layer], initial_state_indices=i["slots"])
        return i["out"]

    return Bound(w.buffer_len, len(w.pool.state), step)


def _windows(w: GdnWorkload) -> list[Tensor]:
    """q, k, v, a, b and out as (batch, T, ...), dense."""
    return [w.window(w.inputs[name]) for name in ("q", "k", "v", "a", "b", "out")]


def _verify_arguments(w: GdnWorkload, cursors: GdnCursors, rows: Tensor) -> dict[str, Any]:
    """What our verify step and SGLang's take by the same names and mean the same by, but state and rings."""
    q, k, v = w.packed()
    plain = {name: w.inputs[name] for name in ("a", "b", "A_log", "dt_bias", "out")}
    return {**plain, "q": q, "k": k, "v": v, "query_start_loc": w.inputs["starts"],
            "ssm_state_indices": w.inputs["slots"], "replay_indices": rows, "write_pos": cursors.write_pos,
            "cache_base": cursors.cache_base, "is_flush": cursors.is_flush, "max_cache_len": w.buffer_len,
            "max_spec_len": w.tokens, "scale": w.geometry.head_k_dim ** -0.5, "use_qk_l2norm_in_kernel": True,
            "null_block_id": -1}


def _cursors(w: GdnWorkload) -> tuple[GdnCursors, Tensor]:
    """Cursors of rows staggered over the windows between two folds, and the rows' ring indices."""
    device, held = w.offset.device, committed_records(w.buffer_len, w.tokens, w.accepted)
    cursors = GdnCursors.allocate(w.batch + 1, device)
    cursors.write_pos[:w.batch] = w.offset % len(held) * w.accepted
    return cursors, torch.arange(w.batch, dtype=torch.int32, device=device)


def our_verify(w: GdnWorkload, function: Function, commit_cursors: Function, exact: bool = True,
               **options: Any) -> Bound:
    """Ours: the rows that are due fold in the verify step, exactly, from the raw inputs in the ring, or its records."""
    rings, (cursors, rows) = empty_rings(w, w.inputs["v"].dtype, raw=exact), _cursors(w)
    named, accepted = _verify_arguments(w, cursors, rows), torch.full_like(rows, w.accepted)

    def step(at: int, layer: int) -> Tensor:
        held = dict.fromkeys(RAW_NAMES) | {name: ring[layer] for name, ring in rings.items()}
        function(checkpoint_state=w.pool.state[layer], **held, **named, **options)
        return w.inputs["out"]

    def commit() -> None:
        commit_cursors(cursors.write_pos, cursors.cache_base, cursors.is_flush, accepted, rows, w.buffer_len, w.tokens,
                       null_block_id=-1)

    return Bound(ROUNDS, len(w.pool.state), step, commit)


def sglang_verify(w: GdnWorkload, function: Function, commit_cursors: Function, fold: Function) -> Bound:
    """SGLang's serving path: verify, then cursors and the folds that are due, of all layers at once.

    Beside d and k its ring holds their low parts, in tensors of the shape of our raw ones. With a checkpoint narrower
    than fp32 it folds in every commit.
    """
    rings, (cursors, rows) = empty_rings(w, w.inputs["v"].dtype, raw=True), _cursors(w)
    state, narrow = w.pool.state, w.pool.state.dtype != torch.float32
    if narrow:
        cursors.write_pos.zero_()
    named, accepted = _verify_arguments(w, cursors, rows), torch.full_like(rows, w.accepted)
    d, k, g, low_d, low_k = (rings[f"{name}_cache"] for name in ("d", "k", "g", "rawv", "rawk"))

    def step(at: int, layer: int) -> Tensor:
        function(checkpoint_state=state[layer], d_cache=d[layer], k_cache=k[layer], g_cache=g[layer],
                 rawv_cache=low_d[layer], rawk_cache=low_k[layer], beta_cache=None, launch_mode="verify", **named)
        return w.inputs["out"]

    def commit() -> None:
        moved = {"write_pos": cursors.write_pos, "cache_base": cursors.cache_base, "is_flush": cursors.is_flush,
                 "replay_indices": rows, "null_block_id": -1}
        commit_cursors(num_accepted=accepted, max_cache_len=w.buffer_len, max_spec_len=w.tokens,
                       fold_every_commit=narrow, **moved)
        fold(checkpoint_state=state, d_cache=d, k_cache=k, g_cache=g, d_residual_cache=low_d, k_residual_cache=low_k,
             state_batch_indices=w.inputs["slots"], accept_lens=accepted, **moved)

    return Bound(ROUNDS, len(w.pool.state), step, commit)


def flashinfer_verify(w: GdnWorkload, function: Function) -> Bound:
    """FlashInfer's fused verify and flush; the host moves the cursors, here ahead of time for all rounds."""
    g, act, state = w.geometry, w.inputs["v"].dtype, w.pool.state
    u_ring, k_ring, g_ring = (
        torch.zeros((*state.shape[:2], heads, FLASHINFER_RING, *width), dtype=dtype, device=state.device)
        for heads, width, dtype in ((g.num_v_heads, (g.head_v_dim,), act), (g.num_k_heads, (g.head_k_dim,), act),
                                    (g.num_v_heads, (), torch.float32)))
    least = FLASHINFER_RECORDS - w.tokens + 1  # records from which on a window folds
    windows = math.ceil(least / w.accepted)    # between two folds
    held, base, cursors = w.offset % windows * w.accepted, torch.zeros_like(w.offset), []
    for _ in range(ROUNDS):
        cursors.append((held.int(), base.int()))
        base = torch.where(held >= least, (base + held) % FLASHINFER_RING, base)
        held = torch.where(held >= least, 0, held) + w.accepted
    i, (q, k, v, a, b, out) = w.inputs, _windows(w)

    def step(at: int, layer: int) -> Tensor:
        hist_len, cache_base = cursors[at]
        function(i["A_log"], a, i["dt_bias"], q=q, k=k, v=v, b=b, initial_state_source=state[layer],
                 initial_state_indices=i["slots"], scale=g.head_k_dim ** -0.5, output=out, k_cache=k_ring[layer],
                 u_cache=u_ring[layer], g_cache=g_ring[layer], hist_len=hist_len, cache_base=cache_base,
                 flush_min=least, restart_hist_on_flush=False)
        return w.inputs["out"]

    return Bound(ROUNDS, len(w.pool.state), step)


_SGLANG = "sglang.kernels.ops.attention"
_DECODE, _SPEC = "fused_recurrent_linear_replayssm", "gdn_replayssm_spec_decode"
_COMMIT = "commit_gdn_replayssm_spec"

DECODE_KERNELS = (
    Kernel("ours", OURS, (f"replayssm_cute.gdn:{_DECODE}_decode",), True, replay_decode),
    Kernel("sglang per-step", "sglang",
           (f"{_SGLANG}.fla.fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode",), False, sglang_step),
    Kernel("sglang replay", "sglang", (f"{_SGLANG}.linear.{_DECODE}:{_DECODE}_decode",), True, replay_decode),
    Kernel("flashinfer per-step", "flashinfer", ("flashinfer.gdn_decode:gated_delta_rule_decode_pretranspose",), False,
           flashinfer_step),
)
_OUR_VERIFY = (f"replayssm_cute.gdn:{_SPEC}", f"replayssm_cute.gdn_cursors:{_COMMIT}")
VERIFY_KERNELS = (
    Kernel("ours", OURS, _OUR_VERIFY, True, our_verify),
    Kernel("ours, ring fold", OURS, _OUR_VERIFY, True, functools.partial(our_verify, exact=False)),
    Kernel("sglang replay", "sglang", tuple(f"{_SGLANG}.linear.{_SPEC}:{name}" for name in (
        _SPEC, _COMMIT, "commit_gdn_replayssm_circular")), True, sglang_verify),
    Kernel("flashinfer replay", "flashinfer", (
        "flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush:gated_delta_rule_mtp_ucache_flush",), True,
        flashinfer_verify),
)


def error(w: GdnWorkload, bind: Callable[[], Bound]) -> float:
    """Relative error of the outputs of one cycle against the recurrence in float64, of the worst step.

    Every step has other tokens; of a window the first ``w.accepted`` are kept.
    """
    w.restore()
    bound = bind()
    gen, worst, inputs = torch.Generator(w.offset.device).manual_seed(w.seed + 2), [], w.inputs
    state = w.pool.state[0, inputs["slots"].long()].double()
    for i in range(bound.rounds):
        w.draw(gen)
        q, k, v, a, b, _ = _windows(w)
        exact, kept = [], state
        for t in range(q.shape[1]):
            o, state = recurrent_step(state, q[:, t], k[:, t], v[:, t], a[:, t], b[:, t], inputs["A_log"],
                                      inputs["dt_bias"])
            exact.append(o)
            kept = state if t < max(1, w.accepted) else kept
        got, want, state = w.window(bound.step(i, 0)).double(), torch.stack(exact, 1), kept
        if bound.commit is not None:
            bound.commit()
        worst.append((got - want).norm() / want.norm())
    return float(torch.stack(worst).max())  # NaN where any is
