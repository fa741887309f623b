"""Device functions that the Gated DeltaNet kernels share.

Tiles of columns are those of ``fallback_triton.device``. What enters a checkpoint by the exact fold is computed by
``normalised`` and ``advance`` alone, in every kernel: their sums have one order, and their multiply-adds are spelled
out, so that the compiler has no choice of rounding left.
"""

import triton
import triton.language as tl

from fallback_triton.device import LOG2E, softplus

#: Ring rows that a fold requests at once, to wait for the cache once and not for every row.
FOLD_ROWS = tl.constexpr(4)
NORM_EPSILON = tl.constexpr(1e-6)


@triton.jit
def gates(a, b, A_log, dt_bias):
    """(g, beta) in fp32: log decay and sigmoid(b)."""
    g = -tl.exp(A_log.to(tl.float32)) * softplus(a.to(tl.float32) + dt_bias.to(tl.float32))
    return g, 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def ring_row(base, j, L: tl.constexpr):
    """Physical row of record ``j``, 0 <= base < L, j < L."""
    return tl.where(base + j >= L, base + j - L, base + j)


@triton.jit
def load_tiles(matrix, rows, valid, pitch, K: tl.constexpr, STEP: tl.constexpr):
    """``rows`` of a matrix, ``pitch`` elements from row to row, as (ROWS, STEP) tiles; zero where not ``valid``."""
    tiles = ()
    for k0 in tl.static_range(0, K, STEP):
        k = k0 + tl.arange(0, STEP)
        at = matrix + rows[:, None] * pitch + k[None, :]
        tiles += (tl.load(at, mask=valid[:, None] & (k < K)[None, :], other=0.0),)  # type: ignore[assignment]
    return tiles


@triton.jit
def store_tile(matrix, tile, rows, valid, k, pitch, K: tl.constexpr):
    """Store a (ROWS, COLUMNS) tile at columns k, in the dtype of ``matrix``."""
    at = matrix + rows[:, None] * pitch + k[None, :]
    tl.store(at, tile.to(matrix.dtype.element_ty), mask=valid[:, None] & (k < K)[None, :])


@triton.jit
def store_tiles(matrix, tiles, rows, valid, pitch, K: tl.constexpr, STEP: tl.constexpr):
    """The reverse of ``load_tiles``, in the dtype of ``matrix``."""
    for i in tl.static_range(len(tiles)):
        store_tile(matrix, tiles[i], rows, valid, i * STEP + tl.arange(0, STEP), pitch, K)


@triton.jit
def widened(tiles):
    """The tiles in fp32."""
    wide = ()
    for i in tl.static_range(len(tiles)):
        wide += (tiles[i].to(tl.float32),)  # type: ignore[assignment]
    return wide


@triton.jit
def scaled(tiles, factor):
    """Tiles times a factor that broadcasts to each."""
    out = ()
    for i in tl.static_range(len(tiles)):
        out += (tiles[i].to(tl.float32) * factor,)  # type: ignore[assignment]
    return out


@triton.jit
def rounded(tiles, DTYPE: tl.constexpr):
    """fp32 tiles as a pool of this dtype would give them back."""
    out = ()
    for i in tl.static_range(len(tiles)):
        out += (tiles[i].to(DTYPE).to(tl.float32),)  # type: ignore[assignment]
    return out


@triton.jit
def dot(x, y):
    """fp32 product of two vectors given as tuples of tiles."""
    total = x[0].to(tl.float32) * y[0].to(tl.float32)
    for i in tl.static_range(1, len(x)):
        total += x[i].to(tl.float32) * y[i].to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def row_squares(tiles):
    """(ROWS,) sums of squares of a tile's rows."""
    total = tiles[0].to(tl.float32) * tiles[0].to(tl.float32)
    for i in tl.static_range(1, len(tiles)):
        total += tiles[i].to(tl.float32) * tiles[i].to(tl.float32)
    return tl.sum(total, 1)


@triton.jit
def inverse_norm(squares, L2NORM: tl.constexpr):
    """1 / sqrt(squares + 1e-6), or 1 where vectors come normalised."""
    if L2NORM:
        return tl.rsqrt(squares + NORM_EPSILON)
    return squares * 0.0 + 1.0


@triton.jit
def tree_sum(vector, LENGTH: tl.constexpr):
    """Sum of a vector of LENGTH <= 256, one half added to the other until one is left.

    The order in which ``tl.sum`` adds depends on the layout that the vector was loaded in; this one does not.
    """
    for i in tl.static_range(1, 9):
        if LENGTH >> i:
            vector = tl.sum(tl.reshape(vector, (2, LENGTH >> i)), 0)
    return tl.sum(vector, 0)


@triton.jit
def normalised(k, STEP: tl.constexpr, L2NORM: tl.constexpr):
    """A vector in fp32, divided by its norm: what enters a checkpoint by the exact fold."""
    wide = widened(k)
    if L2NORM:
        total = wide[0] * wide[0]
        for i in tl.static_range(1, len(k)):
            total = tl.fma(wide[i], wide[i], total)
        wide = scaled(wide, tl.rsqrt(tree_sum(total, STEP) + NORM_EPSILON))
    return wide


@triton.jit
def advance(S, k, v, g, beta):
    """S <- exp(g) S ;  S <- S + beta (v - S k) k^T: one token, all fp32; S tiles of rows, k tiles of a vector."""
    decay = tl.exp(g)
    decayed = ()
    for i in tl.static_range(len(S)):
        decayed += (S[i] * decay,)  # type: ignore[assignment]
    total = decayed[0] * k[0][None, :]  # type: ignore[misc]
    for i in tl.static_range(1, len(S)):
        total = tl.fma(decayed[i], tl.broadcast_to(k[i][None, :], total.shape), total)
    d = beta * (v - tl.sum(total, 1))
    new = ()
    for i in tl.static_range(len(S)):
        new += (tl.fma(tl.broadcast_to(d[:, None], total.shape),  # type: ignore[assignment]
                       tl.broadcast_to(k[i][None, :], total.shape), decayed[i]),)
    return new


@triton.jit
def load_raw_record(rawv, rawk, g_ring, beta_ring, p, v, inside, K: tl.constexpr, V: tl.constexpr,
                    STEP: tl.constexpr):
    """(k tiles, v rows, g, beta) of ring row ``p``; nothing is read unless ``inside``."""
    k_end, v_end = tl.where(inside, K, 0), tl.where(inside, V, 0)
    k = ()
    for k0 in tl.static_range(0, K, STEP):
        at = k0 + tl.arange(0, STEP)
        k += (tl.load(rawk + p * K + at, mask=at < k_end, other=0.0),)  # type: ignore[assignment]
    return (k, tl.load(rawv + p * V + v, mask=v < v_end, other=0.0).to(tl.float32),
            tl.load(g_ring + p, mask=inside, other=0.0), tl.load(beta_ring + p, mask=inside, other=0.0))


@triton.jit
def fold_exact(S, rawv, rawk, g_ring, beta_ring, v, count, base, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
               STEP: tl.constexpr, L2NORM: tl.constexpr):
    """fp32 tiles ``S`` of rows v after the first ``count`` records, replayed from the raw inputs one token at a time.

    A record is requested while the one before it is replayed.
    """
    k, now, g, beta = load_raw_record(rawv, rawk, g_ring, beta_ring, base, v, count > 0, K, V, STEP)
    for j in range(count):
        next_k, next_now, next_g, next_beta = load_raw_record(
            rawv, rawk, g_ring, beta_ring, ring_row(base, j + 1, L), v, j + 1 < count, K, V, STEP)
        S = advance(S, normalised(k, STEP, L2NORM), now, g, beta)
        k, now, g, beta = next_k, next_now, next_g, next_beta
    return S


@triton.jit
def load_gates(g_ring, count, base, L: tl.constexpr, BLOCK_L: tl.constexpr):
    """(weight (BLOCK_L,), decay): exp of the sum of g behind each record, and of all of them; 0 past the last record.

    The later g are summed as such, from the ring shifted by one record: total minus prefix would cancel.
    """
    j = tl.arange(0, BLOCK_L)
    here = tl.load(g_ring + ring_row(base, j, L), mask=j < count, other=0.0)
    after = tl.load(g_ring + ring_row(base, j + 1, L), mask=j + 1 < count, other=0.0)
    later = tl.cumsum(after, reverse=True)
    return tl.where(j < count, tl.exp2(later * LOG2E), 0.0), tl.exp2(tl.sum(here) * LOG2E)


@triton.jit
def add_records(tile, d_ring, k_ring, g_ring, v, k, count, base, later, K: tl.constexpr, V: tl.constexpr,
                L: tl.constexpr):
    """``tile`` + sum_j exp(later + the g behind record j) d_j k_j^T over the first ``count`` records.

    ``tile`` is fp32, rows v and columns k of a state. The records are walked from the newest backwards, which gives the
    sum of the later g as it goes.
    """
    j = count - 1
    while j >= 0:
        g, d, key = (), (), ()
        for i in tl.static_range(FOLD_ROWS):
            # Before record 0 nothing is loaded. Said by a bound: the interpreter of some Triton versions
            # makes an integer of a block mask combined with a scalar one.
            p = ring_row(base, j - i, L)
            v_end, k_end = tl.where(j >= i, V, 0), tl.where(j >= i, K, 0)
            g += (tl.load(g_ring + p, mask=j >= i, other=0.0),)  # type: ignore[assignment]
            d += (tl.load(d_ring + p * V + v, mask=v < v_end, other=0.0),)  # type: ignore[assignment]
            key += (tl.load(k_ring + p * K + k, mask=k < k_end, other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(FOLD_ROWS):
            tile += (d[i].to(tl.float32) * tl.exp2(later * LOG2E))[:, None] * key[i].to(tl.float32)[None, :]
            later += g[i]
        j -= FOLD_ROWS
    return tile


@triton.jit
def fold_ring(S, d_ring, k_ring, g_ring, v, count, base, decay, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
              STEP: tl.constexpr):
    """fp32 tiles of rows v after the first ``count`` records, from the ring's d; ``decay`` is exp of all their g."""
    out = ()
    for i in tl.static_range(len(S)):
        k = i * STEP + tl.arange(0, STEP)
        out += (add_records(S[i].to(tl.float32) * decay, d_ring, k_ring, g_ring, v, k, count, base,  # type: ignore[assignment]
                            tl.full((), 0.0, tl.float32), K, V, L),)
    return out
