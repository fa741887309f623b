"""The boundary: every argument of a step is checked here once per distinct signature.

``mamba2_problem`` turns the arguments into the ``Mamba2Problem`` they pose, or raises an
``ArgumentError`` that names the argument, what was expected and what came. Nothing is changed
and no device memory is read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from replayssm_cute.errors import ArgumentError
from replayssm_cute.layout import MAX_BUFFER_LEN, mamba2_ring_shapes
from replayssm_cute.rounding import LARGEST_CODE, check_columns, check_rounds, check_state_dtype
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem

STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *LARGEST_CODE)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _tensor(name: str, value: object, shape: tuple[int | None, ...],
            dtypes: tuple[torch.dtype, ...], device: torch.device) -> Tensor:
    """Check that ``value`` is a tensor on ``device`` with this dtype and shape (None: any size)."""
    if not isinstance(value, Tensor):
        raise ArgumentError(name, "a tensor", type(value).__name__)
    if value.dim() != len(shape) or any(s is not None and s != v
                                        for s, v in zip(shape, value.shape, strict=True)):
        want = ", ".join("*" if s is None else str(s) for s in shape)
        raise ArgumentError(name, f"shape ({want})", tuple(value.shape))
    if value.dtype not in dtypes:
        raise ArgumentError(name, f"dtype {_names(dtypes)}", value.dtype)
    if value.device != device:
        raise ArgumentError(name, f"device {device}, where state is", value.device)
    return value


def _dense_inside(name: str, t: Tensor) -> None:
    """Every stride but the first is that of a dense tensor and the first does not overlap."""
    expect = 1
    for size, stride in reversed(list(zip(t.shape[1:], t.stride()[1:], strict=True))):
        if size > 1 and stride != expect:
            raise ArgumentError(name, "dense strides inside a row (only the first may be padded)",
                                f"strides {t.stride()}")
        expect *= size
    if t.shape[0] > 1 and t.stride(0) < expect:
        raise ArgumentError(name, f"a first stride of at least {expect}", t.stride(0))


def _tied(name: str, t: Tensor, axes: tuple[int, ...]) -> None:
    if any(t.shape[a] > 1 and t.stride(a) != 0 for a in axes):
        raise ArgumentError(name, "one value per head: an expanded view with stride 0 on "
                            f"axis {', '.join(map(str, axes))}", f"strides {t.stride()}")


def _row_vector(name: str, value: object, batch: int, dtypes: tuple[torch.dtype, ...],
                device: torch.device) -> Tensor:
    t = _tensor(name, value, (None,), dtypes, device)
    if t.shape[0] < batch:
        raise ArgumentError(name, f"at least {batch} entries, one a batch row", t.shape[0])
    if t.shape[0] > 1 and t.stride(0) != 1:
        raise ArgumentError(name, "stride 1", t.stride(0))
    return t


def _alignment(tensors: Iterable[Tensor], limit: int) -> int:
    """Greatest power of two up to ``limit`` that divides all row addresses of the tensors."""
    align = limit
    for t in tensors:
        strides = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
        for number in (t.data_ptr(), *(s * t.element_size() for s in strides)):
            while number % align:
                align //= 2
    return align


def mamba2_problem(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
                   D: Tensor | None, dt_bias: Tensor | None, z: Tensor | None,
                   x_cache: Tensor | None, dt_cache: Tensor | None, B_cache: Tensor | None,
                   write_pos: Tensor | None, is_flush: Tensor | None,
                   state_batch_indices: Tensor | None, null_block_id: int, out: Tensor | None,
                   rand_seed: Tensor | None = None, state_scale: Tensor | None = None, *,
                   dt_softplus: bool, max_cache_len: int, philox_rounds: int = 0) -> Mamba2Problem:
    """The problem that the arguments of a Mamba2 step pose. Shapes: ``replayssm_cute.mamba2``.

    Raises:
        ArgumentError: naming the argument, what was expected and what came.
    """
    if not isinstance(state, Tensor):
        raise ArgumentError("state", "a tensor", type(state).__name__)
    device = state.device
    _tensor("state", state, (None,) * 4, STATE_DTYPES, device)
    _, nheads, headdim, dstate = state.shape
    _tensor("x", x, (None, nheads, headdim), FLOAT_DTYPES, device)
    batch, act = x.shape[0], (x.dtype,)
    _tensor("B", B, (batch, None, dstate), act, device)
    ngroups = B.shape[1]
    if ngroups == 0 or nheads % ngroups:
        raise ArgumentError("B", f"a group count that divides {nheads} heads", ngroups)
    _tensor("C", C, (batch, ngroups, dstate), act, device)
    _tensor("dt", dt, (batch, nheads, headdim), FLOAT_DTYPES, device)
    _tensor("A", A, (nheads, headdim, dstate), (torch.float32,), device)
    _tensor("out", out, (batch, nheads, headdim), act, device)
    assert out is not None
    for name, t in (("x", x), ("B", B), ("C", C), ("out", out)):
        _dense_inside(name, t)
    _dense_inside("state", state)
    _scale(state_scale, state)
    _tied("dt", dt, (2,))
    _tied("A", A, (1, 2))
    optional = []
    if D is not None:
        _tensor("D", D, (nheads, headdim), FLOAT_DTYPES, device)
        if headdim > 1 and D.stride(1) not in (0, 1):
            raise ArgumentError("D", "stride 0 or 1 on axis 1", f"strides {D.stride()}")
    if dt_bias is not None:
        _tied("dt_bias", _tensor("dt_bias", dt_bias, (nheads, headdim), FLOAT_DTYPES, device), (1,))
    if z is not None:
        _dense_inside("z", _tensor("z", z, (batch, nheads, headdim), act, device))
        optional.append(z)
    rings = _rings(Mamba2Geometry(nheads, headdim, dstate, ngroups), state.shape[0],
                   max_cache_len, device, x_cache=x_cache, dt_cache=dt_cache, B_cache=B_cache)
    _row_vector("write_pos", write_pos, batch, (torch.int32,), device)
    flush = _row_vector("is_flush", is_flush, batch, (torch.int8, torch.bool), device)
    indices = _indices(state_batch_indices, batch, device)
    if philox_rounds:
        _seed(rand_seed, state, philox_rounds)
    if not isinstance(null_block_id, int):
        raise ArgumentError("null_block_id", "an int", type(null_block_id).__name__)
    return Mamba2Problem(
        Mamba2Geometry(nheads, headdim, dstate, ngroups), max_cache_len,
        state.dtype, x.dtype, rings[0].dtype, dt.dtype, flush.dtype, indices.dtype, indices.dim(),
        None if dt_bias is None else dt_bias.dtype, None if D is None else D.dtype,
        D is None or headdim == 1 or D.stride(1) == 0, z is not None, bool(dt_softplus),
        philox_rounds, _alignment([state], 32), _alignment([x, B, C, out, rings[0], rings[2], *optional], 16),
        _alignment([rings[1]] if state_scale is None else [rings[1], state_scale], 16))


def _seed(value: Tensor | None, state: Tensor, philox_rounds: int) -> None:
    check_state_dtype(state.dtype)
    check_rounds(philox_rounds)
    check_columns(state.dtype, state.shape[3])
    _tensor("rand_seed", value, (8,), (torch.int64,), state.device)


def _scale(value: Tensor | None, state: Tensor) -> None:
    """Scales come with an 8-bit checkpoint, and with no other."""
    kind = str(state.dtype).removeprefix("torch.")
    if state.dtype not in LARGEST_CODE:
        if value is not None:
            raise ArgumentError("state_scale", f"None, the checkpoint being {kind}", type(value).__name__)
    elif value is None:
        shape = tuple(state.shape[:3])
        raise ArgumentError("state_scale", f"the scales of the {kind} checkpoint, {shape} float32", None)
    else:
        _dense_inside("state_scale", _tensor("state_scale", value, tuple(state.shape[:3]), (torch.float32,),
                                             state.device))


def _rings(geometry: Mamba2Geometry, slots: int, max_cache_len: int, device: torch.device,
           **rings: Tensor | None) -> list[Tensor]:
    if not isinstance(max_cache_len, int) or not 1 <= max_cache_len <= MAX_BUFFER_LEN:
        raise ArgumentError("max_cache_len", f"an integer in 1..{MAX_BUFFER_LEN}", max_cache_len)
    checked = []
    for name, shape in mamba2_ring_shapes(geometry, max_cache_len).items():
        dtypes = (torch.float32,) if name == "dt_cache" else FLOAT_DTYPES
        checked.append(_tensor(name, rings[name], (slots, *shape), dtypes, device))
        _dense_inside(name, checked[-1])
    if checked[2].dtype != checked[0].dtype:
        raise ArgumentError("B_cache", f"dtype {checked[0].dtype} of x_cache", checked[2].dtype)
    return checked


def _indices(value: Tensor | None, batch: int, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() not in (1, 2):
        got = type(value).__name__ if not isinstance(value, Tensor) else tuple(value.shape)
        raise ArgumentError("state_batch_indices", f"a ({batch},) or ({batch}, k) tensor", got)
    shape = (None,) * value.dim()
    _tensor("state_batch_indices", value, shape, (torch.int32, torch.int64), device)
    if value.shape[0] < batch or (value.dim() == 2 and value.shape[1] < 1):
        raise ArgumentError("state_batch_indices", f"at least {batch} rows and one column",
                            tuple(value.shape))
    return value
