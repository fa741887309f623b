"""Device functions that the Triton kernels share.

A row of N columns is held as a tuple of tiles of ``STEP`` columns, ``STEP`` being 128 bytes of it:
a load then gives 8 lanes one row and 4 rows to a warp, so that a sum over the columns costs three
shuffles for four rows, and not five for every row as when a warp spans 128 fp32 columns. It also
keeps each vector load (B, C) smaller than the block's threads, where the compiler loads it straight
into the layout in which it is used, with neither shared memory nor a barrier.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until the launch before has ended, where this one may begin earlier.

    Where few programs are resident the next launch may begin at once; its programs would otherwise take the room of
    some of this one's, which costs an H200 2 us at 1024 programs.
    """
    if PDL:
        gdc_wait()
        if tl.num_programs(0) <= 256:
            gdc_launch_dependents()


@triton.jit
def let_successor_begin(PDL: tl.constexpr):
    """Let the next launch begin when all programs have come here or ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def softplus(v):
    """log(1 + exp(v)) for any fp32 ``v``: no overflow, full relative accuracy for very negative ones.

    max(v, 0) + log1p(e) with e = exp(-|v|) in [0, 1], and log1p(e) = 2 atanh(e / (2 + e)) by its
    series, whose next term is below 2e-9 of the sum. Above 20, where the reference switches to the
    identity, log1p(e) < 3e-9 vanishes in fp32 by itself.
    """
    e = tl.exp(-tl.abs(v))
    t = e / (2.0 + e)
    q = t * t
    series = q * (1 / 15) + 1 / 13
    series = series * q + 1 / 11
    series = series * q + 1 / 9
    series = series * q + 1 / 7
    series = series * q + 1 / 5
    series = series * q + 1 / 3
    series = series * q + 1.0
    return tl.maximum(v, 0.0) + 2.0 * t * series


@triton.jit
def load_dt(dt_ptr, dt_bias_ptr, dt_offset, dt_bias_offset):
    """The raw step size of one head plus its bias, fp32."""
    dt = tl.load(dt_ptr + dt_offset).to(tl.float32)
    if dt_bias_ptr is not None:
        dt += tl.load(dt_bias_ptr + dt_bias_offset).to(tl.float32)
    return dt


@triton.jit
def load_vector(row, N: tl.constexpr, STEP: tl.constexpr):
    """Columns 0..N-1 at pointer ``row`` as a tuple of (STEP,) tiles, zero behind N."""
    tiles = ()
    for n0 in tl.static_range(0, N, STEP):
        n = n0 + tl.arange(0, STEP)
        tiles += (tl.load(row + n, mask=n < N, other=0.0),)  # type: ignore[assignment]
    return tiles


@triton.jit
def store_vector(row, tiles, N: tl.constexpr, STEP: tl.constexpr):
    """The reverse of ``load_vector``, in the dtype of ``row``."""
    for i in tl.static_range(len(tiles)):
        n = i * STEP + tl.arange(0, STEP)
        tl.store(row + n, tiles[i].to(row.dtype.element_ty), mask=n < N)


@triton.jit
def load_rows(matrix, rows, valid, N: tl.constexpr, STEP: tl.constexpr):
    """``rows`` of a dense (., N) matrix as a tuple of (ROWS, STEP) tiles, zero where not ``valid``."""
    tiles = ()
    for n0 in tl.static_range(0, N, STEP):
        n = n0 + tl.arange(0, STEP)
        at = matrix + rows[:, None] * N + n[None, :]
        mask = valid[:, None] & (n < N)[None, :]
        tiles += (tl.load(at, mask=mask, other=0.0),)  # type: ignore[assignment]
    return tiles


@triton.jit
def row_dots(matrix, vector):
    """(ROWS,) fp32 products of every row of ``matrix`` with ``vector``, both tuples of tiles."""
    total = matrix[0].to(tl.float32) * vector[0].to(tl.float32)[None, :]
    for i in tl.static_range(1, len(matrix)):
        total += matrix[i].to(tl.float32) * vector[i].to(tl.float32)[None, :]
    return tl.sum(total, 1)


@triton.jit
def load_skip_and_gate(D_ptr, z_ptr, D_offset, z_offset, p, HEADDIM: tl.constexpr, D_TIED: tl.constexpr):
    """D and z of rows ``p``, fp32; 0 where the tensor is absent."""
    D = 0.0
    z = 0.0
    if D_ptr is not None:
        if D_TIED:
            D = tl.load(D_ptr + D_offset).to(tl.float32)
        else:
            D = tl.load(D_ptr + D_offset + p, mask=p < HEADDIM, other=0.0).to(tl.float32)
    if z_ptr is not None:
        z = tl.load(z_ptr + z_offset + p, mask=p < HEADDIM, other=0.0).to(tl.float32)
    return D, z


@triton.jit
def store_out(out_row, y, x, D, z, p, HEADDIM: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr):
    """Store y + D x, times silu(z) where there is a gate, for rows ``p``."""
    if HAS_D:
        y += D * x.to(tl.float32)
    if HAS_Z:
        y *= z / (1.0 + tl.exp(-z))
    tl.store(out_row + p, y.to(out_row.dtype.element_ty), mask=p < HEADDIM)
