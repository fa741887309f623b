"""Shapes, bytes and allocation of a Mamba2 layer's checkpoint pool and rings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from replayssm_cute.errors import ArgumentError
from replayssm_cute.rounding import LARGEST_CODE
from replayssm_cute.types import Mamba2Geometry

MAX_BUFFER_LEN = 64


@dataclass(frozen=True)
class Mamba2Pool:
    """One layer's checkpoint pool and rings; owned by the caller, changed in place by the step.

    Attributes:
        state: (slots, H, P, N) checkpoint.
        x_cache: (slots, H, L, P) ring of x.
        dt_cache: (slots, H, L) ring of dt', float32, after bias and softplus.
        B_cache: (slots, G, L, N) ring of B.
        state_scale: (slots, H, P) float32 scales of an 8-bit checkpoint, None beside any other.
    """

    state: torch.Tensor
    x_cache: torch.Tensor
    dt_cache: torch.Tensor
    B_cache: torch.Tensor
    state_scale: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size()
                   for t in (self.state, self.x_cache, self.dt_cache, self.B_cache, self.state_scale)
                   if t is not None)


def mamba2_ring_shapes(geometry: Mamba2Geometry, buffer_len: int) -> dict[str, tuple[int, ...]]:
    """Shapes per slot of ``x_cache``, ``dt_cache`` and ``B_cache``.

    Raises:
        ArgumentError: ``buffer_len`` is not in 1..64.
    """
    if not isinstance(buffer_len, int) or not 1 <= buffer_len <= MAX_BUFFER_LEN:
        raise ArgumentError("buffer_len", f"an integer in 1..{MAX_BUFFER_LEN}", buffer_len)
    g = geometry
    return {"x_cache": (g.nheads, buffer_len, g.headdim), "dt_cache": (g.nheads, buffer_len),
            "B_cache": (g.ngroups, buffer_len, g.dstate)}


def mamba2_ring_bytes(geometry: Mamba2Geometry, buffer_len: int,
                      ring_dtype: torch.dtype = torch.bfloat16) -> int:
    """Exact bytes of one request's rings in one layer."""
    shapes = mamba2_ring_shapes(geometry, buffer_len)
    return sum(math.prod(shape) * (4 if name == "dt_cache" else ring_dtype.itemsize)
               for name, shape in shapes.items())


def mamba2_state_bytes(geometry: Mamba2Geometry, state_dtype: torch.dtype) -> int:
    """Exact bytes of one request's checkpoint in one layer, the scales of 8-bit codes included."""
    scales = 4 * geometry.nheads * geometry.headdim if state_dtype in LARGEST_CODE else 0
    return geometry.state_elements * state_dtype.itemsize + scales


def mamba2_step_bytes(geometry: Mamba2Geometry, buffer_len: int, state_dtype: torch.dtype,
                      act_dtype: torch.dtype = torch.bfloat16, *, replay: bool = True,
                      ring_rows: float | None = None, flush_share: float | None = None) -> float:
    """Bytes one row must move in one step, the mean over a ring cycle unless said otherwise.

    Replay: state read, state written on flushes, ``ring_rows`` ring rows read, one row appended
    on the other steps, x, dt, B, C and out once. Per-step baseline (``replay=False``): state read
    and written, the inputs and the output once. Rings count in ``act_dtype``.

    Args:
        ring_rows: valid ring rows at the step; default the mean over a cycle, (L - 1) / 2.
        flush_share: share of steps that flush; default 1 / L.
    """
    g, a = geometry, act_dtype.itemsize
    state = mamba2_state_bytes(g, state_dtype)
    io = (2 * g.nheads * g.headdim + 2 * g.ngroups * g.dstate + g.nheads) * a
    if not replay:
        return 2 * state + io
    row = (g.nheads * g.headdim + g.ngroups * g.dstate) * a + 4 * g.nheads
    rows = (buffer_len - 1) / 2 if ring_rows is None else ring_rows
    flush = 1 / buffer_len if flush_share is None else flush_share
    return state * (1 + flush) + row * (rows + 1 - flush) + io


def allocate_mamba2_pool(slots: int, geometry: Mamba2Geometry, buffer_len: int,
                         state_dtype: torch.dtype, ring_dtype: torch.dtype = torch.bfloat16,
                         device: torch.device | str = "cpu") -> Mamba2Pool:
    """Zeroed pool of ``slots`` slots, with scales where the checkpoint is an 8-bit one.

    Slot 0 is an ordinary slot unless the caller makes it null.
    """
    g = geometry
    rings = {name: torch.zeros((slots, *shape), device=device,
                               dtype=torch.float32 if name == "dt_cache" else ring_dtype)
             for name, shape in mamba2_ring_shapes(g, buffer_len).items()}
    state = torch.zeros((slots, g.nheads, g.headdim, g.dstate), dtype=state_dtype, device=device)
    scale = torch.zeros(state.shape[:3], device=device) if state_dtype in LARGEST_CODE else None
    return Mamba2Pool(state, **rings, state_scale=scale)
