"""Mamba2 replay step, bulk design: persistent CTAs whose warps have three roles.

For larger batches, where bandwidth rules. Items (row, head, tile) are dealt round robin, which
spreads flushing rows over CTAs and over time; each passes through a ring of stages in shared memory.

* The producer (one thread) issues the copies. A tile's state is ONE bulk copy and the valid rows of
  a ring are ONE bulk copy, so that exactly the needed bytes move, stale ring rows are never touched,
  and the bytes in flight do not depend on registers.
* The scorer (one warp) turns dt and B . C into one weight per ring entry, and appends the current
  token to the rings straight from shared memory.
* The consumers own 16 state rows a warp and need no barrier among themselves: checkpoint . C and
  x^T . weights leave complete sums in their registers.

Products of 2-byte operands run on the tensor cores, exact to fp32 (``mma.py``): they take a tenth
of the instructions of FFMA, and a 2-byte state at full bandwidth leaves no room for more. The fold
of a flush stays in FFMA: it runs on 1 / L of the items, hidden behind the copies of the others.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from replayssm_cute.kernels import device, mma
from replayssm_cute.kernels.compat import SmemAllocator
from replayssm_cute.kernels.mamba2_tile import LANE_BITS, ReplayTile, load_scalars, load_slot

EVICT_FIRST = 0x12F0000000000000  # L2 policy word: evict_first for the whole access
WARP_ROWS = 16                    # state rows of a consumer warp: the rows of one product
SLOT, POS, FLUSH, ROW, HEAD, TILE = range(6)   # an item's integers
DT, A, D = range(3)                            # its floats: dt' and A, D where it is tied
DECAY, C_SCALE, W_SCALE = range(3)             # the scorer's floats


class Mamba2BulkKernel(ReplayTile):
    """``min_ctas`` CTAs a multiprocessor, of ``threads`` consumers and two more warps."""

    def __init__(self, problem, config, target, sms: int) -> None:
        super().__init__(problem, config, target)
        self.stages, self.ctas = config.stages, config.min_ctas * sms
        self.input_bytes = self.act_dtype.width // 8
        self.state_bytes = self.tile_p * self.N * self.state_dtype.width // 8
        self.entries = -(-self.L // 16) * 16                       # ring rows that products take
        self.half_state = self.state_dtype.width == 16
        # Parts that carry C exactly in the state's type, and a weight to fp32 in the inputs' type.
        self.c_parts = 2 if self.half_state and self.state_dtype is not self.act_dtype else 1
        self.w_parts = 3 if self.act_dtype is cutlass.BFloat16 else 2

    @cute.jit
    def __call__(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                 mIndices, null_block_id: Int32, mOut, stream):
        items = mX.shape[0] * (self.H * self.tiles)
        self.kernel(mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                    mIndices, null_block_id, mOut, items).launch(
            grid=(cutlass.min(items, self.ctas), 1, 1), block=(self.threads + 64, 1, 1),
            stream=stream, min_blocks_per_mp=self.config.min_ctas, preferred_smem_carveout=100)

    @cute.kernel
    def kernel(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
               mIndices, null_block_id, mOut, items):
        tid, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        count = (items - first + step - 1) // step
        s = self.allocate()
        ahead = (Int32(0),) * 6 + (Float32(0.0),) * 3
        if tid == self.threads:  # its latency overlaps the set-up of the barriers
            ahead = self.load_item(mDt, mDtBias, mA, mD, mPos, mFlush, mIndices, null_block_id, first)
        if tid == 0:
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(s.full + i, 1)
                cute.arch.mbarrier_init(s.scored + i, 1)
                cute.arch.mbarrier_init(s.empty + i, self.warps + 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < self.warps:
            self.consume(s, mState, mD, mZ, mOut, count, tid % 32, warp)
        if warp == self.warps + 1:
            self.score(s, mXc, mDtc, mBc, count, tid % 32)
        if tid == self.threads:
            self.produce(s, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mXc, mDtc, mBc, mPos, mFlush,
                         mIndices, null_block_id, first, step, count, ahead)

    def allocate(self):
        """Shared memory: the stages with what the scorer adds to them, and the barriers."""
        smem, ST, E = SmemAllocator(), self.stages, self.entries

        def tensor(dtype, *shape, align=16):
            return smem.allocate_tensor(dtype, cute.make_ordered_layout(shape, tuple(range(len(shape)))),
                                        byte_alignment=align)

        class Shared:
            state = tensor(self.state_dtype, self.N, self.tile_p, ST, align=128)
            x = tensor(self.act_dtype, self.P, E, ST, align=128)
            B = tensor(self.act_dtype, self.N, E, ST, align=128)
            C = tensor(self.act_dtype, self.N, ST, align=128)
            dt = tensor(Float32, self.L, ST)
            ints = tensor(Int32, 8, ST)
            floats = tensor(Float32, 4, ST)
            # Written by the scorer. A C part starts 64 bytes past a 128-byte line, so that the two
            # parts that a load fetches together lie in different banks.
            c_part = tensor(self.state_dtype, self.N + mma.K_BLOCK, self.c_parts, ST, align=128) \
                if self.c_parts > 1 else None
            w_part = tensor(self.act_dtype, E, self.w_parts, ST)
            weight = tensor(Float32, E, ST)
            scales = tensor(Float32, 4, ST)
            scaled = tensor(Float32, WARP_ROWS, E, self.warps)    # s_j x_j of a flush, a warp's own
            full = smem.allocate_array(Int64, ST)
            scored = smem.allocate_array(Int64, ST)
            empty = smem.allocate_array(Int64, ST)

        return Shared

    # ---- producer: one thread ---------------------------------------------------------------------

    @cute.jit
    def load_item(self, mDt, mDtBias, mA, mD, mPos, mFlush, mIndices, null_block_id, item):
        """An item's integers and floats; slot -1 stands for a padded row."""
        b, h, tile = item // (self.H * self.tiles), item // self.tiles % self.H, item % self.tiles
        slot = Int32(load_slot(mIndices, b))
        if slot == null_block_id:
            slot = Int32(-1)
        raw, rate = load_scalars(mDt, mDtBias, mA, b, h)
        skip = Float32(0.0)
        if const_expr(mD is not None and self.problem.D_tied):
            skip = mD[h, 0].to(Float32)
        return slot, Int32(mPos[b]), Int32(mFlush[b]), b, h, tile, raw, rate, skip

    @cute.jit
    def produce(self, s, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mXc, mDtc, mBc, mPos, mFlush,
                mIndices, null_block_id, first, step, count, ahead):
        slot, pos, flush, b, h, tile, raw, rate, skip = ahead
        ints, floats = s.ints, s.floats
        for k in cutlass.range(count, unroll=1):
            following = (slot, pos, flush, b, h, tile, raw, rate, skip)
            if k + 1 < count:  # in flight while this item waits for its stage
                following = self.load_item(mDt, mDtBias, mA, mD, mPos, mFlush, mIndices, null_block_id,
                                           first + (k + 1) * step)
            dt_now = self.discretize(raw)
            stage = k % self.stages
            if k >= self.stages:
                cute.arch.mbarrier_wait(s.empty + stage, ((k // self.stages) & 1) ^ 1)
            ints[SLOT, stage], ints[POS, stage], ints[FLUSH, stage] = slot, pos, flush
            ints[ROW, stage], ints[HEAD, stage], ints[TILE, stage] = b, h, tile
            floats[DT, stage], floats[A, stage], floats[D, stage] = dt_now, rate, skip
            if slot >= 0:
                self.copy_item(s, mState, mX, mB, mC, mXc, mDtc, mBc, b, h, tile, stage, Int64(slot), pos)
            else:
                cute.arch.mbarrier_arrive(s.full + stage)
            slot, pos, flush, b, h, tile, raw, rate, skip = following

    @cute.jit
    def copy_item(self, s, mState, mX, mB, mC, mXc, mDtc, mBc, b, h, tile, stage, slot, pos):
        """Issue the bulk copies of one item; the current token lands right behind the ring rows."""
        g, bar = h // self.ratio, s.full + stage
        policy = None
        if const_expr(self.config.evict_first):
            policy = Int64(EVICT_FIRST)
        x_row, b_row = self.P * self.input_bytes, self.N * self.input_bytes
        cute.arch.mbarrier_arrive_and_expect_tx(
            bar, self.state_bytes + (pos + 1) * (x_row + b_row) + b_row + self.L * 4)
        bulk_load(s.state[None, None, stage], mState[slot, h, tile * self.tile_p, None],
                  Int32(self.state_bytes), bar, policy)
        bulk_load(s.dt[None, stage], mDtc[slot, h, None], Int32(self.L * 4), bar)
        if pos > 0:  # a bulk copy of no bytes is invalid
            bulk_load(s.B[None, None, stage], mBc[slot, g, None, None], pos * b_row, bar)
            bulk_load(s.x[None, None, stage], mXc[slot, h, None, None], pos * x_row, bar)
        bulk_load(s.B[None, pos, stage], mB[b, g, None], Int32(b_row), bar)
        bulk_load(s.x[None, pos, stage], mX[b, h, None], Int32(x_row), bar)
        bulk_load(s.C[None, stage], mC[b, g, None], Int32(b_row), bar)

    # ---- scorer: one warp -------------------------------------------------------------------------

    @cute.jit
    def score(self, s, mXc, mDtc, mBc, count, lane):
        weight, scales = s.weight, s.scales
        for k in cutlass.range(count, unroll=1):
            stage, phase = k % self.stages, (k // self.stages) & 1
            cute.arch.mbarrier_wait(s.full + stage, phase)
            if s.ints[SLOT, stage] >= 0:
                pos, flush = s.ints[POS, stage], s.ints[FLUSH, stage]
                if flush == 0:
                    self.append(s, mXc, mDtc, mBc, stage, pos, lane)
                dt_ring = [s.dt[cutlass.min(lane + 32 * i, self.L - 1), stage] for i in range(self.dt_parts)]
                w, decay = self.window_weights(dt_ring, s.floats[DT, stage], s.floats[A, stage], pos, lane)
                scales[DECAY, stage] = decay
                if flush == 0:
                    if const_expr(self.c_parts > 1):
                        self.split_c(s, stage, lane)
                    self.score_entries(s, stage, w, pos, lane)
                else:
                    for i in cutlass.range_constexpr(self.dt_parts):
                        if lane + 32 * i < self.entries:
                            weight[lane + 32 * i, stage] = w[i]
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(s.scored + stage)
                # The appends must have left the stage before it is filled again.
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(s.empty + stage)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def append(self, s, mXc, mDtc, mBc, stage, pos, lane):
        """Current token -> ring row ``pos``, copied out of the stage; one thread."""
        slot, h = Int64(s.ints[SLOT, stage]), s.ints[HEAD, stage]
        if lane == 0 and s.ints[TILE, stage] == 0:
            bulk_store(mXc[slot, h, pos, None], s.x[None, pos, stage], self.P * self.input_bytes)
            if h % self.ratio == 0:
                bulk_store(mBc[slot, h // self.ratio, pos, None], s.B[None, pos, stage],
                           self.N * self.input_bytes)
            cute.arch.cp_async_bulk_commit_group()
            mDtc[slot, h, pos] = s.floats[DT, stage]

    @cute.jit
    def split_c(self, s, stage, lane):
        """C in two parts of the state's type, scaled by a power of two where that type is fp16."""
        c_part, scales = s.c_part, s.scales
        n = self.N // 32
        values = device.load_f32(cute.local_tile(s.C[None, stage], (n,), (lane,)), n, self.act_dtype)
        scale, inverse, shift = Float32(1.0), Float32(1.0), 0
        if const_expr(self.state_dtype is cutlass.Float16):
            scale, inverse = self.shared_scale(values)
            shift = mma.LOW_SHIFT
        high = cute.make_rmem_tensor((n,), self.state_dtype)
        low = cute.make_rmem_tensor((n,), self.state_dtype)
        for i in cutlass.range_constexpr(n):
            v = values[i] * inverse
            high[i] = v.to(self.state_dtype)
            low[i] = ((v - high[i].to(Float32)) * float(2 ** shift)).to(self.state_dtype)
        cute.autovec_copy(high, cute.local_tile(c_part[None, 0, stage], (n,), (lane,)))
        cute.autovec_copy(low, cute.local_tile(c_part[None, 1, stage], (n,), (lane,)))
        scales[C_SCALE, stage] = scale

    def shared_scale(self, values):
        """(power of two near the warp's largest magnitude, its inverse)."""
        largest = device.absolute(values[0])
        for v in values[1:]:
            largest = cute.arch.fmax(largest, device.absolute(v))
        for stride in (1, 2, 4, 8, 16):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, stride))
        return mma.power_of_two(largest)

    @cute.jit
    def score_entries(self, s, stage, weights, pos, lane):
        """w_j = s_j (B_j . C), split into parts of the inputs' type -> s.w_part."""
        w_part, scales = s.w_part, s.scales
        g, q = lane // 4, lane % 4
        # Lanes 2 and 3 of four take row g + 8; a lane whose columns do not fit its row takes none.
        mine, row = (q % 2) == (g % 2), g + 8 * (q // 2)
        products = []
        for t in cutlass.range_constexpr(self.entries // 16):
            # Rows past the window are read as the current token's: finite whenever that is, weight 0.
            low, high = cutlass.min(16 * t + g, pos), cutlass.min(16 * t + g + 8, pos)
            sums = mma.rows_times_vector(s.B[None, low, stage], s.B[None, high, stage],
                                         s.C[None, stage], self.N, lane)
            dot = device.select(q < 2, sums[0], sums[2])
            products.append(self.weight_of(weights, 16 * t + row) * dot)
        scale, inverse, shift = Float32(1.0), Float32(1.0), 0
        if const_expr(self.act_dtype is cutlass.Float16):
            kept = [device.select(mine, w, Float32(0.0)) for w in products]
            scale, inverse = self.shared_scale(kept)
            shift = mma.LOW_SHIFT
        scales[W_SCALE, stage] = scale
        for t in cutlass.range_constexpr(self.entries // 16):
            rest = products[t] * inverse
            for i in cutlass.range_constexpr(self.w_parts):
                part = rest.to(self.act_dtype)
                rest = (rest - part.to(Float32)) * float(2 ** shift)
                if mine:
                    w_part[16 * t + row, i, stage] = part

    # ---- consumers: 16 state rows a warp ----------------------------------------------------------

    @cute.jit
    def consume(self, s, mState, mD, mZ, mOut, count, lane, warp):
        for k in cutlass.range(count, unroll=1):
            stage, phase = k % self.stages, (k // self.stages) & 1
            cute.arch.mbarrier_wait(s.full + stage, phase)
            if s.ints[SLOT, stage] >= 0:
                pos = s.ints[POS, stage]
                y, row, mine = Float32(0.0), Int32(0), cutlass.Boolean(False)
                if s.ints[FLUSH, stage] == 0:
                    if const_expr(self.half_state):
                        y, row, mine = self.replay_half(s, stage, phase, pos, lane, warp)
                    else:
                        y, row, mine = self.replay_full(s, stage, phase, pos, lane, warp)
                else:
                    cute.arch.mbarrier_wait(s.scored + stage, phase)
                    y, row, mine = self.flush(s, mState, stage, pos, lane, warp)
                if mine:
                    self.store_output(s, mD, mZ, mOut, stage, pos, y, warp * WARP_ROWS + row)
            cute.arch.sync_warp()  # the whole warp has read its part of the stage
            if lane == 0:
                cute.arch.mbarrier_arrive(s.empty + stage)

    @cute.jit
    def store_output(self, s, mD, mZ, mOut, stage, pos, y, row):
        """Skip connection, gate, and the store of one output element."""
        b, h = s.ints[ROW, stage], s.ints[HEAD, stage]
        p = s.ints[TILE, stage] * self.tile_p + row
        skip = gate = None
        if const_expr(mD is not None):
            skip = s.floats[D, stage] if const_expr(self.problem.D_tied) else mD[h, p].to(Float32)
        if const_expr(mZ is not None):
            gate = mZ[b, h, p].to(Float32)
        y = self.finish(y, s.x[p, pos, stage].to(Float32), skip, gate)
        mOut[b, h, p] = y.to(self.act_dtype)

    @cute.jit
    def replay_half(self, s, stage, phase, pos, lane, warp):
        """Output rows of a 2-byte state; (y, row of the warp, this lane holds it)."""
        g, q = lane // 4, lane % 4
        first = warp * WARP_ROWS + g
        vector = s.C[None, stage]
        if const_expr(self.c_parts > 1):
            cute.arch.mbarrier_wait(s.scored + stage, phase)
            vector = s.c_part[None, g % 2, stage]
        sums = mma.rows_times_vector(s.state[None, first, stage], s.state[None, first + 8, stage],
                                     vector, self.N, lane)
        if const_expr(self.c_parts == 1):
            cute.arch.mbarrier_wait(s.scored + stage, phase)
        checkpoint = device.select(q < 2, sums[0], sums[2])
        if const_expr(self.c_parts > 1):
            low = device.select(q < 2, sums[1], sums[3])
            shift = mma.LOW_SHIFT if const_expr(self.state_dtype is cutlass.Float16) else 0
            checkpoint = (checkpoint + low * float(2.0 ** -shift)) * s.scales[C_SCALE, stage]
        ring = self.ring_rows(s, stage, pos, lane, warp)
        y = checkpoint * s.scales[DECAY, stage] + device.select(q < 2, ring[0], ring[1])
        return y, g + 8 * (q // 2), (q % 2) == (g % 2)

    @cute.jit
    def replay_full(self, s, stage, phase, pos, lane, warp):
        """Output rows of an fp32 state; (y, row of the warp, this lane holds it)."""
        r, group = lane % 8, lane // 8
        C = self.row_values(s.C[None, stage], r, self.act_dtype)
        dots = []
        for i in cutlass.range_constexpr(self.rows):
            row = warp * WARP_ROWS + group * self.rows + i
            dots.append(device.dot(self.row_values(s.state[None, row, stage], r, self.state_dtype), C,
                                   self.packed))
        sums, offset, owner = device.reduce_scatter(dots, r, LANE_BITS)
        cute.arch.mbarrier_wait(s.scored + stage, phase)
        ring = self.ring_rows(s, stage, pos, lane, warp)
        row = group * self.rows + offset
        holder = (row % 8) * 4
        ring = device.select(row < 8, cute.arch.shuffle_sync(ring[0], holder),
                             cute.arch.shuffle_sync(ring[1], holder))
        return sums[0] * s.scales[DECAY, stage] + ring, row, owner

    def ring_rows(self, s, stage, pos, lane, warp):
        """sum_j w_j x_j of rows g and g + 8 of the warp, in every lane of g."""
        g, q = lane // 4, lane % 4
        tile = s.ints[TILE, stage]
        column = tile * self.tile_p + warp * WARP_ROWS + lane // 8 % 2 * 8
        first, second = [Float32(0.0)] * 4, [Float32(0.0)] * 4
        for t in range(self.entries // 16):
            # Rows past the window have weight 0; they are read as the current token's.
            j = cutlass.min(16 * t + lane // 16 * 8 + lane % 8, pos)
            x = mma.load_transposed(s.x[None, j, stage].iterator + column)
            first = mma.mma(self.act_dtype, x, self.weight_pair(s, stage, g % 2, t, q), first)
            if self.w_parts == 3:
                low = [Uint32(cutlass.select_(g % 2 == 0, w, Uint32(0)))
                       for w in self.weight_pair(s, stage, 2, t, q)]
                first = mma.mma(self.act_dtype, x, low, first)
        if self.w_parts == 3:
            return first[0] + first[1], first[2] + first[3]
        scale, shift = s.scales[W_SCALE, stage], 2.0 ** -mma.LOW_SHIFT
        return (first[0] + first[1] * shift) * scale, (first[2] + first[3] * shift) * scale

    def weight_pair(self, s, stage, part, t, q):
        """Weights of entries 2q, 2q+1 and 2q+8, 2q+9 of block t, packed."""
        pairs = []
        for half in range(2):
            fragment = cute.make_rmem_tensor((2,), self.act_dtype)
            cute.autovec_copy(cute.local_tile(s.w_part[None, part, stage], (2,), (8 * t + 4 * half + q,)),
                              fragment)
            pairs.append(cute.recast_tensor(fragment, Uint32)[0])
        return pairs

    @cute.jit
    def flush(self, s, mState, stage, pos, lane, warp):
        """Fold the window into the checkpoint; (y, row of the warp, this lane holds it)."""
        r, group = lane % 8, lane // 8
        first = warp * WARP_ROWS + group * self.rows
        tile = s.ints[TILE, stage]
        self.scale_window(s, stage, pos, lane, warp)
        gState = cute.local_tile(mState[Int64(s.ints[SLOT, stage]), s.ints[HEAD, stage], None, None],
                                 (self.tile_p, self.N), (tile, 0))
        dots = self.fold(
            lambda i, c: device.load_f32(self.chunk(s.state[None, first + i, stage], c, r), self.vec,
                                         self.state_dtype),
            lambda j, f: device.load_f32(
                cute.local_tile(s.scaled[None, j, warp], (self.fold_rows,),
                                (group * (self.rows // self.fold_rows) + f,)), self.fold_rows, Float32),
            lambda j, c: self.chunk(s.B[None, j, stage], c, r), self.act_dtype,
            lambda i: gState[first + i, None], self.row_values(s.C[None, stage], r, self.act_dtype),
            s.scales[DECAY, stage], pos, r)
        sums, offset, owner = device.reduce_scatter(dots, r, LANE_BITS)
        return sums[0], group * self.rows + offset, owner

    @cute.jit
    def scale_window(self, s, stage, pos, lane, warp):
        """s.scaled[row, j] = s_j x_j for this warp's rows: two lanes an entry, eight rows each."""
        scaled = s.scaled
        cute.arch.sync_warp()  # an earlier flush of this warp has been read
        for t in cutlass.range_constexpr(self.entries // 16):
            j, half = 16 * t + lane // 2, lane % 2
            if j <= pos:
                column = s.ints[TILE, stage] * (self.tile_p // 8) + warp * 2 + half
                x = device.load_f32(cute.local_tile(s.x[None, j, stage], (8,), (column,)), 8, self.act_dtype)
                values = cute.make_rmem_tensor((8,), Float32)
                for i in cutlass.range_constexpr(8):
                    values[i] = x[i] * s.weight[j, stage]
                cute.autovec_copy(values, cute.local_tile(scaled[None, j, warp], (8,), (half,)))
        cute.arch.sync_warp()


def bulk_load(dst, src, nbytes, barrier, policy=None):
    """Global -> shared bulk copy of ``nbytes`` (16-byte multiples); completes on ``barrier``.

    Inline PTX because the DSL's copy atoms take static sizes only.
    """
    ptx = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    args = [dst.iterator, src.iterator, nbytes, barrier]
    if policy is None:
        cute.arch.inline_ptx(ptx + " [{$r0}], [{$r1}], {$r2}, [{$r3}];", read_only_args=args)
    else:
        cute.arch.inline_ptx(ptx + ".L2::cache_hint [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
                             read_only_args=[*args, policy])


def bulk_store(dst, src, nbytes):
    """Shared -> global bulk copy of ``nbytes`` (16-byte multiples), in the thread's current group."""
    cute.arch.inline_ptx("cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
                         read_only_args=[dst.iterator, src.iterator, Int32(nbytes)])
