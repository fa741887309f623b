"""What the two Mamba2 replay kernels share: how a tile is split over threads, and its arithmetic.

Work split of the compute threads, in groups of eight lanes:

* Lane group q owns ring entries q, q + groups, ...: its lanes compute B_j . C together, then hold
  w_j = s_j (B_j . C) in a register while they multiply the x values they own of that entry. No
  barrier and no shared memory lie between the two.
* The same lanes own state rows q, q + groups, ... of the tile, as chunks c * 8 + lane of one
  vector load each, so that a group reads whole 128-byte lines.
* Partial sums meet in shared memory once per tile: one row per warp for the ring, one dot per
  state row for the checkpoint.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, const_expr

from replayssm_cute.kernels import device
from replayssm_cute.kernels.mamba2_config import LANES, Mamba2Config, state_vector
from replayssm_cute.kernels.targets import Target
from replayssm_cute.types import Mamba2Problem

CUTE_DTYPES = {torch.float32: cutlass.Float32, torch.float16: cutlass.Float16,
               torch.bfloat16: cutlass.BFloat16, torch.int32: cutlass.Int32,
               torch.int64: cutlass.Int64, torch.int8: cutlass.Int8, torch.bool: cutlass.Boolean}
LANE_BITS = (1, 2, 4)           # lanes of a group
GROUP_BITS = (8, 16)            # groups of a warp
FOLD_REGISTERS = 64             # fp32 accumulators a thread keeps while it folds


class ReplayTile:
    """Static layout of a tile and the arithmetic on it; base of both kernels."""

    def __init__(self, problem: Mamba2Problem, config: Mamba2Config, target: Target) -> None:
        g = problem.geometry
        self.problem, self.config = problem, config
        self.H, self.P, self.N, self.G = g.nheads, g.headdim, g.dstate, g.ngroups
        self.L, self.ratio = problem.buffer_len, g.heads_per_group
        self.state_dtype = CUTE_DTYPES[problem.state_dtype]
        self.act_dtype = CUTE_DTYPES[problem.act_dtype]
        self.packed = target.packed_fma
        self.tile_p, self.threads = config.tile_p, config.threads
        self.tiles = self.P // self.tile_p
        self.warps, self.groups = self.threads // 32, self.threads // LANES
        self.rows = self.tile_p // self.groups                     # state rows of a thread
        self.vec = state_vector(problem, config)
        self.chunks = self.N // (LANES * self.vec)
        self.passes = -(-self.L // self.groups)                    # ring entries of a lane group
        self.dt_parts = -(-self.L // 32)                           # dt ring entries of a lane
        self.x_lane = self.tile_p // LANES                         # x values of a lane
        self.fold_rows = next(r for r in range(self.rows, 0, -1)
                              if self.rows % r == 0 and r * self.chunks * self.vec <= FOLD_REGISTERS)

    def entry(self, p, group):
        """Ring entry that a lane group owns in pass p."""
        return p * self.groups + group

    def row(self, i, group):
        """State row of the tile that is row i of a thread."""
        return i * self.groups + group

    def chunk(self, row_tensor, c, lane_in_group):
        """Chunk c of a row of N elements: what one lane loads at once."""
        return cute.local_tile(row_tensor, (self.vec,), (c * LANES + lane_in_group,))

    def x_part(self, row_tensor, lane_in_group):
        """The x values of a tile that one lane owns."""
        return cute.local_tile(row_tensor, (self.x_lane,), (lane_in_group,))

    def discretize(self, raw):
        """dt' of the current token from dt + dt_bias."""
        return device.softplus(raw) if self.problem.dt_softplus else raw

    def replay_weights(self, dt_ring, dt_now, A, pos, lane, group):
        """Weights of the window: s_j = dt'_j exp(A sum of later dt').

        Args:
            dt_ring: dt' of ring entries 32 k + lane; what lies at or past ``pos`` is ignored.
            dt_now: dt' of the current token, entry ``pos``.

        Returns:
            ([s_j of the entries this lane group owns], decay of the checkpoint)
        """
        parts = []
        for k, held in enumerate(dt_ring):
            j = lane + 32 * k
            value = device.select(j < pos, held, Float32(0.0))
            parts.append(device.select(j == pos, dt_now, value))
        later, total = device.suffix_sums(parts, lane, self.L)
        rate = A * device.LOG2E
        s = [d * cute.math.exp2(rate * t, fastmath=True) for d, t in zip(parts, later)]
        decay = cute.math.exp2(rate * total, fastmath=True)
        owned = []
        for p in range(self.passes):
            j = self.entry(p, group)
            value = cute.arch.shuffle_sync(s[0], j % 32)
            for k in range(1, self.dt_parts):
                value = device.select(j < 32 * k, value, cute.arch.shuffle_sync(s[k], j % 32))
            owned.append(value)
        return owned, decay

    @cute.jit
    def store_ring_sums(self, sums, lane, lane_in_group, warp, sRing):
        """Sum the lanes' partial outputs over the groups of the warp -> sRing[p, warp]."""
        sums, offset, owner = device.reduce_scatter(sums, lane, GROUP_BITS)
        if owner:
            for i in cutlass.range_constexpr(len(sums)):
                sRing[lane_in_group * self.x_lane + offset + i, warp] = sums[i]

    @cute.jit
    def store_row_sums(self, sums, scale, lane_in_group, group, first_row, sRow):
        """Sum the rows' dots over the lanes of the group -> sRow[row] = scale * sum."""
        sums, offset, owner = device.reduce_scatter(sums, lane_in_group, LANE_BITS)
        if owner:
            for i in cutlass.range_constexpr(len(sums)):
                sRow[(first_row + offset + i) * self.groups + group] = sums[i] * scale

    @cute.jit
    def stage_fold(self, x, weight, p, lane_in_group, group, sScaled):
        """sScaled[.., j] = s_j x_j, a thread's rows side by side so that one load fetches them."""
        values = device.to_f32(x, self.x_lane)
        for i in cutlass.range_constexpr(self.x_lane):
            row = lane_in_group * self.x_lane + i
            sScaled[(row % self.groups) * self.rows + row // self.groups, self.entry(p, group)] = \
                values[i] * weight

    @cute.jit
    def fold(self, load_state, ring_chunk, ring_dtype, gState, sScaled, C, decay, pos,
             lane_in_group, group, sRow):
        """Fold the window into the checkpoint, store it, and leave S C in sRow.

        Register tile of fold_rows x (chunks * vec): every B value that is loaded serves fold_rows
        FMAs. y comes from the fp32 accumulators, before they are rounded.

        Args:
            load_state: (row i, chunk c) -> state values as Float32.
            ring_chunk: (entry j, chunk c) -> shared-memory tile of B_j, of ``ring_dtype``.
            gState: (tile_p, N) global tile that is overwritten.
            C: this lane's C values, in the order of the chunks.
        """
        R, width = self.fold_rows, self.chunks * self.vec
        for f in cutlass.range_constexpr(self.rows // R):
            acc = cute.make_rmem_tensor((width, R), Float32)
            for i in cutlass.range_constexpr(R):
                for c in cutlass.range_constexpr(self.chunks):
                    values = load_state(f * R + i, c)
                    for v in cutlass.range_constexpr(self.vec):
                        acc[c * self.vec + v, i] = values[v] * decay
            for j in cutlass.range(pos + 1, unroll=1):
                scaled = cute.make_rmem_tensor((R,), Float32)
                cute.autovec_copy(cute.local_tile(sScaled[None, j], (R,), (group * (self.rows // R) + f,)),
                                  scaled)
                for c in cutlass.range_constexpr(self.chunks):
                    b = device.load_f32(ring_chunk(j, c), self.vec, ring_dtype)
                    for i in cutlass.range_constexpr(R):
                        old = [acc[c * self.vec + v, i] for v in range(self.vec)]
                        new = device.fma(b, [scaled[i]] * self.vec, old, self.packed)
                        for v in cutlass.range_constexpr(self.vec):
                            acc[c * self.vec + v, i] = new[v]
            for i in cutlass.range_constexpr(R):
                self.store_state(acc[None, i], gState[self.row(f * R + i, group), None], lane_in_group)
            dots = [device.dot([acc[v, i] for v in range(width)], C, self.packed) for i in range(R)]
            self.store_row_sums(dots, Float32(1.0), lane_in_group, group, f * R, sRow)

    def store_state(self, values, gRow, lane_in_group):
        """Round one row's fp32 values to the state dtype, to nearest, and store them."""
        for c in range(self.chunks):
            rounded = cute.make_rmem_tensor((self.vec,), self.state_dtype)
            exact = cute.local_tile(values, (self.vec,), (c,))
            rounded.store(exact.load().to(self.state_dtype))
            cute.autovec_copy(rounded, self.chunk(gRow, c, lane_in_group))

    def finish(self, y, x, D, z):
        """y + D x, times silu(z); Nones are left out."""
        if D is not None:
            y = D * x + y
        if z is not None:
            y = y * device.silu(z)
        return y


def fake_arguments(problem: Mamba2Problem) -> list[object]:
    """Fake tensors for the canonical arguments of a step, in order; no GPU is needed.

    Batch, slots and every first stride are symbolic; inner strides, dtypes and alignments are
    compiled in, and the compiled function checks them on every call.
    """
    from cutlass.cute.runtime import make_fake_tensor as fake

    g, L = problem.geometry, problem.buffer_len
    H, P, N, G = g.nheads, g.headdim, g.dstate, g.ngroups
    batch, slots = cute.sym_int(), cute.sym_int()
    state, act = CUTE_DTYPES[problem.state_dtype], CUTE_DTYPES[problem.act_dtype]

    def rows(dtype, *shape, first, align):
        dense, size = [], 1
        for n in reversed(shape):
            dense.insert(0, size)
            size *= n
        step = cute.sym_int64(divisibility=max(1, align * 8 // dtype.width))
        return fake(dtype, (first, *shape), (step, *dense), assumed_align=align)

    def tied(dtype, *shape, first=None):
        head = () if first is None else (first,)
        strides = tuple(cute.sym_int64() for _ in (*head, 0)) + (0,) * (len(shape) - 1)
        return fake(CUTE_DTYPES[dtype], (*head, *shape), strides)

    D = None
    if problem.D_dtype is not None:
        D = tied(problem.D_dtype, H, P) if problem.D_tied else \
            fake(CUTE_DTYPES[problem.D_dtype], (H, P), (cute.sym_int64(), 1))
    x = rows(act, H, P, first=batch, align=16)
    index = CUTE_DTYPES[problem.index_dtype]
    indices = fake(index, tuple(cute.sym_int() for _ in range(problem.index_ndim)),
                   tuple(cute.sym_int64() for _ in range(problem.index_ndim)))
    return [
        rows(state, H, P, N, first=slots, align=problem.state_align), x,
        tied(problem.dt_dtype, H, P, first=batch), tied(torch.float32, H, P, N),
        rows(act, G, N, first=batch, align=16), rows(act, G, N, first=batch, align=16), D,
        None if problem.dt_bias_dtype is None else tied(problem.dt_bias_dtype, H, P),
        rows(act, H, P, first=batch, align=16) if problem.has_z else None,
        rows(act, H, L, P, first=slots, align=16),
        rows(cutlass.Float32, H, L, first=slots, align=max(4, problem.dt_align)),
        rows(act, G, L, N, first=slots, align=16),
        fake(cutlass.Int32, (cute.sym_int(),), (1,)),
        fake(CUTE_DTYPES[problem.flush_dtype], (cute.sym_int(),), (1,)),
        indices, cutlass.Int32(0), rows(act, H, P, first=batch, align=16)]


def load_scalars(mDt, mDtBias, mA, b, h):
    """(dt + dt_bias, A) of one row and head, as Float32."""
    raw = mDt[b, h, 0].to(Float32)
    if const_expr(mDtBias is not None):
        raw = raw + mDtBias[h, 0].to(Float32)
    return raw, mA[h, 0, 0]


def load_slot(mIndices, b):
    """Slot of a batch row: the index, or column 0 of it."""
    return mIndices[b, 0] if const_expr(cute.rank(mIndices) == 2) else mIndices[b]
