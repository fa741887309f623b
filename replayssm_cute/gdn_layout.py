"""Shapes, bytes and allocation of a Gated DeltaNet layer's checkpoints and rings, and the memory account.

Speculative decoding without replay keeps a whole state for every token of a window, so that it can go back
(*snapshots*); the ring keeps a few vectors for each token instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm_cute.errors import ArgumentError
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.layout import MAX_BUFFER_LEN

MAX_TOKENS = 16
RING_NAMES = ("d_cache", "k_cache", "g_cache")
RAW_NAMES = ("rawv_cache", "rawk_cache", "beta_cache")
FP32_RINGS = ("g_cache", "beta_cache")


def check_buffer_len(buffer_len: object, tokens: int = 0, name: str = "max_cache_len") -> int:
    """L of a ring: 1 to 64; for windows of ``tokens`` a power of two of at least two windows.

    Raises:
        ArgumentError: naming ``name``.
    """
    if not isinstance(buffer_len, int) or isinstance(buffer_len, bool) or not 1 <= buffer_len <= MAX_BUFFER_LEN:
        raise ArgumentError(name, f"an integer in 1..{MAX_BUFFER_LEN}", buffer_len)
    if tokens and buffer_len & (buffer_len - 1):
        raise ArgumentError(name, "a power of two, for the ring is circular", buffer_len)
    if tokens and buffer_len < 2 * tokens:
        raise ArgumentError(name, f"at least two windows, 2 T = {2 * tokens}", buffer_len)
    return buffer_len


def check_tokens(tokens: object, name: str = "max_spec_len") -> int:
    """T, tokens of a window (1 + drafts). Raises ArgumentError unless it is in 1..16."""
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= MAX_TOKENS:
        raise ArgumentError(name, f"an integer in 1..{MAX_TOKENS}", tokens)
    return tokens


def gdn_ring_shapes(geometry: GdnGeometry, buffer_len: int, *, exact_fold: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes per slot of ``d_cache``, ``k_cache``, ``g_cache`` and, for the exact fold, of the raw rings."""
    g, L = geometry, check_buffer_len(buffer_len, name="buffer_len")
    shapes = {"d_cache": (g.num_v_heads, L, g.head_v_dim), "k_cache": (g.num_k_heads, L, g.head_k_dim),
              "g_cache": (g.num_v_heads, L)}
    if exact_fold:
        shapes |= {"rawv_cache": shapes["d_cache"], "rawk_cache": shapes["k_cache"], "beta_cache": shapes["g_cache"]}
    return shapes


def ring_dtypes(ring_dtype: torch.dtype, act_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Dtype of every ring: gates fp32, d and k as asked, the raw inputs as they come."""
    return {name: torch.float32 if name in FP32_RINGS else act_dtype if name in RAW_NAMES else ring_dtype
            for name in RING_NAMES + RAW_NAMES}


def gdn_ring_bytes(geometry: GdnGeometry, buffer_len: int, *, exact_fold: bool = False,
                   ring_dtype: torch.dtype = torch.bfloat16, act_dtype: torch.dtype = torch.bfloat16) -> int:
    """Exact bytes of one request's rings in one layer."""
    dtypes = ring_dtypes(ring_dtype, act_dtype)
    return sum(math.prod(shape) * dtypes[name].itemsize
               for name, shape in gdn_ring_shapes(geometry, buffer_len, exact_fold=exact_fold).items())


def gdn_state_bytes(geometry: GdnGeometry, state_dtype: torch.dtype = torch.float32) -> int:
    """Exact bytes of one request's checkpoint in one layer."""
    return geometry.state_elements * state_dtype.itemsize


def gdn_snapshot_bytes(geometry: GdnGeometry, tokens: int, state_dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the snapshots that verifying ``tokens`` tokens without replay keeps, a request and layer."""
    return check_tokens(tokens, "tokens") * gdn_state_bytes(geometry, state_dtype)


def committed_records(buffer_len: int, tokens: int, accepted: int) -> list[int]:
    """Committed records of a row at its verify steps between two folds, the last of which folds.

    Args:
        tokens: T of every window.
        accepted: of them, 1 to T.
    """
    held = [accepted]
    while held[-1] + 2 * tokens <= buffer_len:
        held.append(held[-1] + accepted)
    return held


def gdn_step_bytes(geometry: GdnGeometry, buffer_len: int, state_dtype: torch.dtype,
                   act_dtype: torch.dtype = torch.bfloat16, ring_dtype: torch.dtype = torch.bfloat16, *,
                   tokens: int = 0, accepted: int = 0, exact_fold: bool = False, replay: bool = True) -> float:
    """Bytes one row must move in one step, the mean over the steps between two folds.

    Replay: the checkpoint read, and written by the step that folds; the committed records read, by an exact fold the
    raw inputs instead; the step's own records written, but not by standard decode where it folds; inputs and outputs
    once. Per-step baseline (``replay=False``): the state read and written, inputs and outputs once.

    Args:
        tokens: T of a verify step, 0 for standard decode.
        accepted: tokens of every window that are kept.
    """
    g, n = geometry, tokens or 1
    state, vectors = gdn_state_bytes(g, state_dtype), g.num_k_heads * g.head_k_dim + g.num_v_heads * g.head_v_dim
    io = 2 * n * act_dtype.itemsize * (vectors + g.num_v_heads)
    if not replay:
        return 2 * state + io
    record = vectors * ring_dtype.itemsize + 4 * g.num_v_heads
    held = committed_records(buffer_len, tokens, accepted) if tokens else list(range(buffer_len))
    if not tokens:
        return state * (1 + 1 / buffer_len) + record * (sum(held) + buffer_len - 1) / buffer_len + io
    raw = vectors * act_dtype.itemsize + 4 * g.num_v_heads if exact_fold else 0
    folded = held[-1] * (raw + 4 * g.num_v_heads if exact_fold else record)
    return state * (1 + 1 / len(held)) + (sum(held[:-1]) * record + folded) / len(held) + tokens * (record + raw) + io


@dataclass(frozen=True)
class GdnMemory:
    """What speculative decoding keeps for a whole model besides the checkpoints, all in bytes.

    Attributes:
        slots: requests at once plus one slot for padded rows, as the engines allocate.
        ring_request_layer, snapshot_request_layer: one request, one layer.
        ring, snapshot: ``layers`` layers and ``slots`` slots.
    """

    layers: int
    slots: int
    ring_request_layer: int
    snapshot_request_layer: int

    @property
    def ring(self) -> int:
        return self.layers * self.slots * self.ring_request_layer

    @property
    def snapshot(self) -> int:
        return self.layers * self.slots * self.snapshot_request_layer


def gdn_memory(geometry: GdnGeometry, layers: int, requests: int, tokens: int, buffer_len: int, *,
               exact_fold: bool = True, state_dtype: torch.dtype = torch.float32,
               ring_dtype: torch.dtype = torch.bfloat16, act_dtype: torch.dtype = torch.bfloat16) -> GdnMemory:
    """The account of a model's rank: rings of ``buffer_len`` rows against snapshots of ``tokens`` tokens."""
    check_buffer_len(buffer_len, check_tokens(tokens, "tokens"), "buffer_len")
    ring = gdn_ring_bytes(geometry, buffer_len, exact_fold=exact_fold, ring_dtype=ring_dtype, act_dtype=act_dtype)
    return GdnMemory(layers, requests + 1, ring, gdn_snapshot_bytes(geometry, tokens, state_dtype))


@dataclass(frozen=True)
class GdnPool:
    """Checkpoints and rings, of one layer or with a leading axis of layers; the caller's, changed by the steps.

    Attributes:
        state: (slots, HV, V, K) checkpoints.
        rings: ``d_cache`` (slots, HV, L, V), ``k_cache`` (slots, Hk, L, K), ``g_cache`` (slots, HV, L) float32, and for
            the exact fold ``rawv_cache``, ``rawk_cache``, ``beta_cache`` of the same shapes.
    """

    state: Tensor
    rings: dict[str, Tensor]

    @property
    def ring_nbytes(self) -> int:
        return sum(t.nbytes for t in self.rings.values())


def allocate_gdn_pool(slots: int, geometry: GdnGeometry, buffer_len: int, *, layers: int | None = None,
                      exact_fold: bool = False, state_dtype: torch.dtype = torch.float32,
                      ring_dtype: torch.dtype = torch.bfloat16, act_dtype: torch.dtype = torch.bfloat16,
                      device: torch.device | str = "cpu") -> GdnPool:
    """Zeroed pool of ``slots`` slots; with ``layers`` all tensors have a leading axis of that size."""
    g, lead = geometry, (slots,) if layers is None else (layers, slots)
    dtypes = ring_dtypes(ring_dtype, act_dtype)
    rings = {name: torch.zeros((*lead, *shape), dtype=dtypes[name], device=device)
             for name, shape in gdn_ring_shapes(g, buffer_len, exact_fold=exact_fold).items()}
    state = torch.zeros((*lead, g.num_v_heads, g.head_v_dim, g.head_k_dim), dtype=state_dtype, device=device)
    return GdnPool(state, rings)
