"""The boundary of the Gated DeltaNet operations: arguments become the problem they pose, or an error.

Nothing is changed and no device memory is read. What an engine may configure is checked by ``check_serving``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from replayssm_cute.dispatch import warn_once
from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.gdn_layout import FP32_RINGS, RAW_NAMES, RING_NAMES, check_buffer_len, check_tokens, gdn_ring_shapes
from replayssm_cute.gdn_types import GdnFoldProblem, GdnGeometry, GdnProblem
from replayssm_cute.validate import FLOAT_DTYPES, _alignment, _dense_inside, _row_vector, _seed, _tensor

STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
FLAG_DTYPES = (torch.int32, torch.int8, torch.bool)
LAUNCH_MODES = ("both", "verify", "flush")

#: Relative error of the checkpoint after 14 verify steps of 4 tokens with the exact fold, measured on an H200.
MEASURED_DRIFT = {torch.float32: 4e-7, torch.float16: 2.2e-4, torch.bfloat16: 1.8e-3}


def _state(name: str, state: object, device: torch.device | None = None) -> tuple[Tensor, int, int, int]:
    if not isinstance(state, Tensor):
        raise ArgumentError(name, "a tensor", type(state).__name__)
    _tensor(name, state, (None,) * 4, STATE_DTYPES, device or state.device)
    _dense_inside(name, state)
    return state, state.shape[1], state.shape[2], state.shape[3]


def _activations(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
                 out: Tensor, rows: int | None) -> GdnGeometry:
    """Check the inputs of a step against the state; the geometry that they share."""
    device, (_, HV, V, K) = state.device, state.shape
    _tensor("v", v, (rows, HV, V), FLOAT_DTYPES, device)
    n, act = v.shape[0], (v.dtype,)
    _tensor("k", k, (n, None, K), act, device)
    Hk = k.shape[1]
    if Hk == 0 or HV % Hk:
        raise ArgumentError("k", f"a head count that divides the {HV} value heads", Hk)
    _tensor("q", q, (n, Hk, K), act, device)
    _tensor("out", out, (n, HV, V), act, device)
    for name, t in (("q", q), ("k", k), ("v", v), ("out", out)):
        _dense_inside(name, t)
    for name, t in (("a", a), ("b", b)):
        _dense_inside(name, _tensor(name, t, (n, HV), FLOAT_DTYPES, device))
    for name, t in (("A_log", A_log), ("dt_bias", dt_bias)):
        _row_vector(name, _tensor(name, t, (HV,), FLOAT_DTYPES, device), HV, FLOAT_DTYPES, device)
    return GdnGeometry(Hk, HV, K, V)


def _rings(geometry: GdnGeometry, buffer_len: int, rings: Mapping[str, Tensor | None], device: torch.device,
           rows: int | None, act: torch.dtype | None) -> list[Tensor]:
    """Check shapes and dtypes of all rings that are there; all raw rings or none."""
    present = [name for name in RAW_NAMES if rings.get(name) is not None]
    if present and len(present) != len(RAW_NAMES):
        missing = next(n for n in RAW_NAMES if n not in present)
        raise ArgumentError(missing, f"a tensor, because {present[0]} is one (the exact fold needs all three)", None)
    checked, inner = [], gdn_ring_shapes(geometry, buffer_len, exact_fold=bool(present))
    for name, shape in inner.items():
        dtypes = (torch.float32,) if name in FP32_RINGS else FLOAT_DTYPES
        if name in RAW_NAMES and name not in FP32_RINGS and act is not None:
            dtypes = (act,)  # lossless: the exact fold replays these very values
        ring = _tensor(name, rings[name], (rows, *shape), dtypes, device)
        _dense_inside(name, ring)
        rows = ring.shape[0]
        checked.append(ring)
    if checked[1].dtype != checked[0].dtype:
        raise ArgumentError("k_cache", f"dtype {checked[0].dtype} of d_cache", checked[1].dtype)
    return checked


def _null(null_block_id: object) -> None:
    if not isinstance(null_block_id, int) or isinstance(null_block_id, bool):
        raise ArgumentError("null_block_id", "an int", type(null_block_id).__name__)


def decode_problem(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
                   d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, write_pos: Tensor, force_flush: Tensor | None,
                   ssm_state_indices: Tensor, null_block_id: int, out: Tensor, rand_seed: Tensor | None = None, *,
                   scale: float, l2norm: bool, philox_rounds: int = 0) -> GdnProblem:
    """The problem that the arguments of a standard decode step pose. Shapes: ``replayssm_cute.gdn``.

    Raises:
        ArgumentError: naming the argument, what was expected and what came.
    """
    state, *_ = _state("initial_state", state)
    geometry = _activations(state, q, k, v, a, b, A_log, dt_bias, out, None)
    device, batch = state.device, v.shape[0]
    if not isinstance(d_cache, Tensor) or d_cache.dim() != 4:
        raise ArgumentError("d_cache", "shape (slots, HV, L, V)", getattr(d_cache, "shape", type(d_cache).__name__))
    buffer_len = check_buffer_len(d_cache.shape[2], name="d_cache.shape[2]")
    named = dict(zip(RING_NAMES, (d_cache, k_cache, g_cache), strict=True))
    rings = _rings(geometry, buffer_len, named, device, state.shape[0], None)
    _row_vector("write_pos", write_pos, batch, (torch.int32,), device)
    if force_flush is not None:
        _row_vector("force_flush", force_flush, batch, FLAG_DTYPES, device)
    indices = _row_vector("ssm_state_indices", ssm_state_indices, batch, INDEX_DTYPES, device)
    _null(null_block_id)
    if philox_rounds:
        _seed(rand_seed, state, philox_rounds)
    return GdnProblem(
        geometry, buffer_len, state.dtype, v.dtype, d_cache.dtype, (a.dtype, b.dtype, A_log.dtype, dt_bias.dtype),
        indices.dtype, torch.int32, None if force_flush is None else force_flush.dtype, scale, l2norm=bool(l2norm),
        philox_rounds=philox_rounds, state_align=_alignment([state], 16),
        row_align=_alignment([q, k, v, out, *rings[:2]], 16))


def verify_problem(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
                   rings: Mapping[str, Tensor | None], out: Tensor, query_start_loc: Tensor, ssm_state_indices: Tensor,
                   replay_indices: Tensor, write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, null_block_id: int,
                   *, max_cache_len: int, max_spec_len: int, scale: float, l2norm: bool,
                   launch_mode: str) -> GdnProblem:
    """The problem that the arguments of a verify step pose. Shapes: ``replayssm_cute.gdn``.

    Raises:
        ArgumentError: naming the argument, what was expected and what came.
    """
    check_buffer_len(max_cache_len, check_tokens(max_spec_len))
    if launch_mode not in LAUNCH_MODES:
        raise ArgumentError("launch_mode", " or ".join(map(repr, LAUNCH_MODES)), repr(launch_mode))
    state, *_ = _state("checkpoint_state", state)
    device = state.device
    geometry = _activations(state, q, k, v, a, b, A_log, dt_bias, out, None)
    checked = _rings(geometry, max_cache_len, rings, device, None, v.dtype)
    starts = _row_vector("query_start_loc", query_start_loc, 1, INDEX_DTYPES, device)
    if starts.dtype != torch.int32:
        raise ArgumentError("query_start_loc", "dtype int32", starts.dtype)
    batch = starts.shape[0] - 1
    indices = _row_vector("ssm_state_indices", ssm_state_indices, batch, INDEX_DTYPES, device)
    keys = _row_vector("replay_indices", replay_indices, batch, INDEX_DTYPES, device)
    flag_dtype = _cursors(write_pos, cache_base, is_flush, checked[0].shape[0], device)
    _null(null_block_id)
    warn_about_drift(state.dtype)
    exact = len(checked) > len(RING_NAMES)
    rows = [q, k, v, out, *checked[:2], *(checked[3:5] if exact else ())]
    return GdnProblem(
        geometry, max_cache_len, state.dtype, v.dtype, checked[0].dtype,
        (a.dtype, b.dtype, A_log.dtype, dt_bias.dtype), indices.dtype, keys.dtype, flag_dtype, scale, max_spec_len,
        exact, launch_mode, bool(l2norm), 0, _alignment([state], 16), _alignment(rows, 16))


def _cursors(write_pos: Tensor, cache_base: Tensor, is_flush: Tensor | None, rows: int,
             device: torch.device) -> torch.dtype | None:
    """Check the cursors of ``rows`` rings; the dtype of the flags, None where there are none."""
    _row_vector("write_pos", write_pos, rows, (torch.int32,), device)
    _row_vector("cache_base", cache_base, rows, (torch.int32,), device)
    return None if is_flush is None else _row_vector("is_flush", is_flush, rows, (torch.int8, torch.bool), device).dtype


def cursor_rows(write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, replay_indices: Tensor,
                num_accepted: Tensor | None, null_block_id: int) -> None:
    """Check the arguments of a cursor operation. Raises ArgumentError."""
    if not isinstance(write_pos, Tensor):
        raise ArgumentError("write_pos", "a tensor", type(write_pos).__name__)
    device, rows = write_pos.device, write_pos.shape[0] if write_pos.dim() else 0
    _cursors(write_pos, cache_base, is_flush, rows, device)
    keys = _row_vector("replay_indices", replay_indices, 0, INDEX_DTYPES, device)
    if num_accepted is not None:
        _row_vector("num_accepted", num_accepted, keys.shape[0], INDEX_DTYPES, device)
    _null(null_block_id)


def fold_problem(state: Tensor, rings: Mapping[str, Tensor | None], sources: Tensor, targets: Tensor, keys: Tensor,
                 write_pos: Tensor, cache_base: Tensor, is_flush: Tensor | None, counts: Tensor | None,
                 null_block_id: int, *, l2norm: bool) -> GdnFoldProblem:
    """The problem of a fold outside of a step; ``state`` and ``rings`` have a leading axis of layers.

    Raises:
        ArgumentError: naming the argument, what was expected and what came.
    """
    if not isinstance(state, Tensor) or state.dim() != 5:
        raise ArgumentError("checkpoint_state", "shape (layers, slots, HV, V, K)",
                            getattr(state, "shape", type(state).__name__))
    layer, HV, V, K = _state("checkpoint_state", state[0])
    device, d_cache, k_cache = state.device, rings["d_cache"], rings["k_cache"]
    for name, ring in rings.items():
        if ring is not None and (ring.dim() < 4 or ring.shape[0] != state.shape[0]):
            raise ArgumentError(name, f"{state.shape[0]} layers in front", tuple(ring.shape))
    if d_cache is None or k_cache is None:
        raise ArgumentError("d_cache", "d_cache and k_cache", None)
    geometry = GdnGeometry(k_cache.shape[2], HV, K, V)
    L = check_buffer_len(d_cache.shape[3], 1, "d_cache.shape[3]")
    first = {name: None if ring is None else ring[0] for name, ring in rings.items()}
    checked = _rings(geometry, L, first, device, None, None)
    flag_dtype = _cursors(write_pos, cache_base, is_flush, checked[0].shape[0], device)
    batch = keys.shape[0] if isinstance(keys, Tensor) and keys.dim() == 1 else 0
    for name, t in (("replay_indices", keys), ("ssm_state_indices", sources), ("target_indices", targets)):
        _row_vector(name, t, batch, INDEX_DTYPES, device)
    if counts is not None:
        _row_vector("num_records", counts, batch, (torch.int32,), device)
    _null(null_block_id)
    raw = checked[3].dtype if len(checked) > len(RING_NAMES) else None
    rows = [*checked[:2], *(checked[3:5] if raw is not None else ())]
    layered = [state, *(r for n, r in rings.items() if r is not None and n not in FP32_RINGS)]
    return GdnFoldProblem(
        geometry, L, layer.dtype, checked[0].dtype, raw,
        (sources.dtype, targets.dtype, keys.dtype), flag_dtype,
        counts is not None, bool(l2norm), _alignment([state], 16), _alignment([*rows, *layered], 16))


def warn_about_drift(state_dtype: torch.dtype) -> None:
    """Say once that a checkpoint narrower than fp32 is rounded at every flush."""
    if state_dtype != torch.float32:
        name = str(state_dtype).removeprefix("torch.")
        warn_once(f"checkpoint_state is {name}: every flush rounds it. State error measured after 14 verify steps: "
                  f"{MEASURED_DRIFT[state_dtype]:.1e}, against {MEASURED_DRIFT[torch.float32]:.0e} with float32.")


def check_serving(*, speculative: bool, buffer_len: int, tokens: int = 1, topk: int = 1, linear_chain: bool = True,
                  standard_ring: bool = False, disaggregated: bool = False, prefix_cache_mode: str = "none") -> None:
    """Refuse what an engine may ask for and a ring cannot do.

    Args:
        speculative: windows of ``tokens`` tokens are verified; otherwise one token a step.
        topk: branches of the draft; linear_chain: every draft extends the one before (n-gram drafts need not).
        standard_ring: the ring of standard decode was asked for.
        disaggregated: state is transferred between prefill and decode instances.
        prefix_cache_mode: the engine's; ``"all"`` wants the state at every token.

    Raises:
        UnsupportedError: the option, and why.
        ArgumentError: L or T do not fit.
    """
    if disaggregated:
        raise UnsupportedError("disaggregated serving", "a transferred checkpoint would lack the records of its ring")
    if prefix_cache_mode == "all":
        raise UnsupportedError("prefix cache mode 'all'", "states between flushes are not materialised")
    if not speculative:
        check_buffer_len(buffer_len, name="buffer_len")
        return
    if standard_ring:
        raise UnsupportedError("speculative decoding with the ring of standard decode",
                               "its records cannot be rolled back; use the speculative ring")
    if topk != 1:
        raise UnsupportedError(f"topk={topk}", "a window must be a linear chain; trees are not verified")
    if not linear_chain:
        raise UnsupportedError("drafts that are no linear chain", "a window's tokens must each extend the one before")
    check_buffer_len(buffer_len, check_tokens(tokens, "tokens"), "buffer_len")
