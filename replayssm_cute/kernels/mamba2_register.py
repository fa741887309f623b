"""Mamba2 replay step, register design: one CTA per (row, head, tile), the state in registers.

For small batches, where latency rules: every load that depends on the slot is issued before
anything is used, and nothing waits for a barrier before the one that ends the step.

Lane group q of the CTA owns ring entries q, q + groups, ...: its lanes compute B_j . C together,
then hold s_j (B_j . C) in a register while they multiply the x values they own of that entry; no
barrier and no shared memory lie between the two. The same lanes own state rows q, q + groups, ...
Partial sums meet in shared memory once: one row per warp for the ring, one dot per state row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from replayssm_cute.kernels import device, rounding
from replayssm_cute.kernels.compat import SmemAllocator
from replayssm_cute.kernels.mamba2_config import LANES
from replayssm_cute.kernels.mamba2_tile import LANE_BITS, ReplayTile, load_scalars, load_slot

GROUP_BITS = (8, 16)            # lane groups of a warp
FOLD_REGISTERS = 64             # fp32 accumulators a thread keeps while it folds


class Mamba2RegisterKernel(ReplayTile):
    """grid (H * tiles, batch), ``config.threads`` threads."""

    def __init__(self, problem, config, target) -> None:
        super().__init__(problem, config, target)
        self.passes = -(-self.L // self.groups)                    # ring entries of a lane group
        self.x_lane = self.tile_p // LANES                         # x values of a lane
        self.fold_rows = next(r for r in range(self.rows, 0, -1)
                              if self.rows % r == 0 and r * self.chunks * self.vec <= FOLD_REGISTERS)

    @cute.jit
    def __call__(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                 mIndices, null_block_id: Int32, mOut, mSeed, stream):
        # A carveout must be named with min_blocks_per_mp: the DSL would ask the local GPU for it.
        self.kernel(mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                    mIndices, null_block_id, mOut, mSeed).launch(
            grid=(self.H * self.tiles, mX.shape[0], 1), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.config.min_ctas, preferred_smem_carveout=50, use_pdl=self.config.pdl)

    @cute.kernel
    def kernel(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
               mIndices, null_block_id, mOut, mSeed):
        if const_expr(self.config.pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tid, _, _ = cute.arch.thread_idx()
        bx, b, _ = cute.arch.block_idx()
        h = bx // self.tiles
        g = h // self.ratio
        tile = bx % self.tiles
        lane, warp = tid % 32, tid // 32
        r, group = tid % 8, tid // 8
        smem = SmemAllocator()
        sRing = smem.allocate_tensor(
            Float32, cute.make_layout((self.tile_p, self.warps), stride=(1, self.tile_p)), byte_alignment=16)
        sRow = smem.allocate_tensor(Float32, cute.make_layout((self.tile_p,)), byte_alignment=16)
        # Used by a flush only: the window's B in fp32, and its x scaled by the weights.
        sB = smem.allocate_tensor(
            Float32, cute.make_layout((self.N, self.L), stride=(1, self.N)), byte_alignment=16)
        sScaled = smem.allocate_tensor(
            Float32, cute.make_layout((self.tile_p, self.L), stride=(1, self.tile_p)), byte_alignment=16)

        dice = self.throw_dice(mSeed)
        slot = Int64(load_slot(mIndices, b))  # 64-bit: slots * H * P * N passes 2^31
        pos = Int32(mPos[b])
        flush = Int32(mFlush[b])
        raw, A = load_scalars(mDt, mDtBias, mA, b, h)
        rC = self.load_rows([mC[b, g, None]], r)
        if const_expr(self.stochastic):
            cute.arch.sync_threads()  # all threads have read the step
            ctas, rows, _ = cute.arch.grid_dim()
            if tid == 0:
                rounding.advance(mSeed, ctas * rows)
        if slot != Int64(null_block_id) and slot >= 0:
            gState = cute.local_tile(mState[slot, h, None, None], (self.tile_p, self.N), (tile, 0))
            dt_ring, rB, rX = self.load_window(mDtc[slot, h, None], mBc[slot, g, None, None],
                                               mXc[slot, h, None, None], mB[b, g, None],
                                               mX[b, h, None], tile, pos, lane, r, group)
            rState = self.load_state(gState, r, group)
            x, D, z = self.load_epilogue(mX[b, h, None], mD, mZ, b, h, tile, tid)

            dt_now = self.discretize(raw)
            s, decay = self.window_weights(dt_ring, dt_now, A, pos, lane)
            weights = [self.weight_of(s, self.entry(p, group)) for p in range(self.passes)]
            C = []
            for c in cutlass.range_constexpr(self.chunks):
                C = C + device.to_f32(rC[None, c, 0], self.vec)
            y = Float32(0.0)
            if flush == 0:
                self.append(rB, rX, dt_now, mDtc[slot, h, None], mBc[slot, g, None, None],
                            mXc[slot, h, None, None], h, tile, pos, r, group)
                self.replay(rState, rB, rX, C, weights, decay, lane, r, group, warp, sRing, sRow)
                cute.arch.sync_threads()
                if tid < self.tile_p:
                    y = sRow[tid]
                    for w in cutlass.range_constexpr(self.warps):
                        y = y + sRing[tid, w]
            else:
                self.stage_window(rB, rX, weights, pos, r, group, sB, sScaled)
                cute.arch.sync_threads()
                dots = self.fold(
                    lambda i, c: device.to_f32(rState[None, c, i], self.vec),
                    lambda j, f: self.scaled_rows(sScaled[None, j], f, group),
                    lambda j, c: self.chunk(sB[None, j], c, r),
                    lambda i, values: self.store_row(values, gState, dice, slot, h, tile, self.row(i, group), r),
                    C, decay, pos)
                self.store_row_sums(dots, Float32(1.0), r, group, sRow)
                cute.arch.sync_threads()
                if tid < self.tile_p:
                    y = sRow[tid]
            if tid < self.tile_p:
                mOut[b, h, tile * self.tile_p + tid] = self.finish(y, x, D, z).to(self.act_dtype)

    def entry(self, p, group):
        """Ring entry that a lane group owns in pass p."""
        return p * self.groups + group

    def row(self, i, group):
        """State row of the tile that is row i of a thread."""
        return i * self.groups + group

    def x_part(self, row_tensor, lane_in_group):
        """The x values of a tile that one lane owns."""
        return cute.local_tile(row_tensor, (self.x_lane,), (lane_in_group,))

    def load_rows(self, rows, r):
        """Chunks of several rows of N inputs -> fragment (vec, chunks, rows)."""
        fragment = cute.make_rmem_tensor((self.vec, self.chunks, len(rows)), self.act_dtype)
        for i, row in enumerate(rows):
            for c in range(self.chunks):
                cute.autovec_copy(self.chunk(row, c, r), fragment[None, c, i])
        return fragment

    @cute.jit
    def load_window(self, gDtc, gBc, gXc, gB, gX, tile, pos, lane, r, group):
        """This thread's part of the valid ring rows and the current token; zeros past them."""
        dt_ring = []
        for k in cutlass.range_constexpr(self.dt_parts):
            value = Float32(0.0)
            if lane + 32 * k < pos:
                value = gDtc[lane + 32 * k]
            dt_ring.append(value)
        rB = cute.make_rmem_tensor((self.vec, self.chunks, self.passes), self.act_dtype)
        rX = cute.make_rmem_tensor((self.x_lane, self.passes), self.act_dtype)
        rB.fill(0.0)
        rX.fill(0.0)
        for p in cutlass.range_constexpr(self.passes):
            j = self.entry(p, group)
            if j < pos:
                self.load_entry(gBc[j, None], gXc[j, None], tile, r, rB[None, None, p], rX[None, p])
            if j == pos:
                self.load_entry(gB, gX, tile, r, rB[None, None, p], rX[None, p])
        return dt_ring, rB, rX

    def load_entry(self, gBrow, gXrow, tile, r, rBrow, rXrow):
        for c in range(self.chunks):
            cute.autovec_copy(self.chunk(gBrow, c, r), rBrow[None, c])
        cute.autovec_copy(self.x_part(cute.local_tile(gXrow, (self.tile_p,), (tile,)), r), rXrow)

    def load_state(self, gState, r, group):
        """The thread's rows of the state, past L1: they are used once."""
        atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), self.state_dtype,
                                   num_bits_per_copy=self.config.vec_bits,
                                   l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE)
        fragment = cute.make_rmem_tensor((self.vec, self.chunks, self.rows), self.state_dtype)
        for i in range(self.rows):
            for c in range(self.chunks):
                cute.copy(atom, self.chunk(gState[self.row(i, group), None], c, r), fragment[None, c, i])
        return fragment

    @cute.jit
    def load_epilogue(self, gX, mD, mZ, b, h, tile, tid):
        """x, D and z of the output row that this thread finishes; None for what is absent."""
        x = D = z = None
        p = tile * self.tile_p + cutlass.min(tid, self.tile_p - 1)
        if const_expr(mD is not None):
            x = gX[p].to(Float32)
            D = mD[h, p].to(Float32)
        if const_expr(mZ is not None):
            z = mZ[b, h, p].to(Float32)
        return x, D, z

    @cute.jit
    def append(self, rB, rX, dt_now, gDtc, gBc, gXc, h, tile, pos, r, group):
        """Write the current token into ring row ``pos`` from the registers that hold it."""
        for p in cutlass.range_constexpr(self.passes):
            if self.entry(p, group) == pos:
                row = cute.local_tile(gXc[pos, None], (self.tile_p,), (tile,))
                cute.autovec_copy(rX[None, p], self.x_part(row, r))
                if tile == 0:
                    if h % self.ratio == 0:
                        for c in cutlass.range_constexpr(self.chunks):
                            cute.autovec_copy(rB[None, c, p], self.chunk(gBc[pos, None], c, r))
                    if r == 0:
                        gDtc[pos] = dt_now

    @cute.jit
    def replay(self, rState, rB, rX, C, weights, decay, lane, r, group, warp, sRing, sRow):
        """Output without a flush: ring partials per warp in sRing, decay * (S C) in sRow."""
        sums = [Float32(0.0)] * self.x_lane
        for p in cutlass.range_constexpr(self.passes):
            B = []
            for c in cutlass.range_constexpr(self.chunks):
                B = B + device.to_f32(rB[None, c, p], self.vec)
            score = device.lane_sum(device.dot(B, C, self.packed), LANE_BITS) * weights[p]
            x = device.to_f32(rX[None, p], self.x_lane)
            sums = device.fma(x, [score] * self.x_lane, sums, self.packed)
        self.store_ring_sums(sums, lane, r, warp, sRing)
        dots = []
        for i in cutlass.range_constexpr(self.rows):
            values = []
            for c in cutlass.range_constexpr(self.chunks):
                values = values + device.to_f32(rState[None, c, i], self.vec)
            dots.append(device.dot(values, C, self.packed))
        self.store_row_sums(dots, decay, r, group, sRow)

    @cute.jit
    def stage_window(self, rB, rX, weights, pos, r, group, sB, sScaled):
        """Put the window where every thread of the fold can read it."""
        for p in cutlass.range_constexpr(self.passes):
            j = self.entry(p, group)
            if j <= pos:
                for c in cutlass.range_constexpr(self.chunks):
                    exact = cute.make_rmem_tensor((self.vec,), Float32)
                    exact.store(rB[None, c, p].load().to(Float32))
                    cute.autovec_copy(exact, self.chunk(sB[None, j], c, r))
                self.stage_fold(rX[None, p], weights[p], p, r, group, sScaled)

    @cute.jit
    def stage_fold(self, x, weight, p, r, group, sScaled):
        """sScaled[.., j] = s_j x_j, a thread's rows side by side so that one load fetches them."""
        values = device.to_f32(x, self.x_lane)
        for i in cutlass.range_constexpr(self.x_lane):
            row = r * self.x_lane + i
            sScaled[(row % self.groups) * self.rows + row // self.groups, self.entry(p, group)] = \
                values[i] * weight

    def scaled_rows(self, sEntry, f, group):
        """s_j x_j of the rows that a thread folds together."""
        blocks = self.rows // self.fold_rows
        return device.load_f32(cute.local_tile(sEntry, (self.fold_rows,), (group * blocks + f,)),
                               self.fold_rows, Float32)

    @cute.jit
    def store_ring_sums(self, sums, lane, r, warp, sRing):
        """Sum the lanes' partial outputs over the groups of the warp -> sRing[p, warp]."""
        sums, offset, owner = device.reduce_scatter(sums, lane, GROUP_BITS)
        if owner:
            for i in cutlass.range_constexpr(len(sums)):
                sRing[r * self.x_lane + offset + i, warp] = sums[i]

    @cute.jit
    def store_row_sums(self, sums, scale, r, group, sRow):
        """Sum the rows' dots over the lanes of the group -> sRow[row] = scale * sum."""
        sums, offset, owner = device.reduce_scatter(sums, r, LANE_BITS)
        if owner:
            for i in cutlass.range_constexpr(len(sums)):
                sRow[(offset + i) * self.groups + group] = sums[i] * scale

    @cute.jit
    def fold(self, load_state, load_scaled, ring_chunk, store_row, C, decay, pos):
        """Fold the window into the checkpoint and store it.

        Register tile of fold_rows x (chunks * vec): every B value that is loaded serves fold_rows
        FMAs. The dots with C come from the fp32 accumulators, before they are rounded.

        Args:
            load_state: (row i, chunk c) -> state values as Float32.
            load_scaled: (entry j, block f) -> fold_rows values s_j x_j of rows f * fold_rows...
            ring_chunk: (entry j, chunk c) -> shared-memory tile of B_j in fp32.
            store_row: (row i, its new values) -> stores them.
            C: this lane's C values, in the order of the chunks.

        Returns:
            this lane's part of S C for each of its rows.
        """
        R, width = self.fold_rows, self.chunks * self.vec
        dots = []
        for f in cutlass.range_constexpr(self.rows // R):
            acc = cute.make_rmem_tensor((width, R), Float32)
            for i in cutlass.range_constexpr(R):
                for c in cutlass.range_constexpr(self.chunks):
                    values = load_state(f * R + i, c)
                    for v in cutlass.range_constexpr(self.vec):
                        acc[c * self.vec + v, i] = values[v] * decay
            for j in cutlass.range(pos + 1, unroll=1):
                scaled = load_scaled(j, f)
                for c in cutlass.range_constexpr(self.chunks):
                    b = device.load_f32(ring_chunk(j, c), self.vec, Float32)
                    for i in cutlass.range_constexpr(R):
                        old = [acc[c * self.vec + v, i] for v in range(self.vec)]
                        new = device.fma(b, [scaled[i]] * self.vec, old, self.packed)
                        for v in cutlass.range_constexpr(self.vec):
                            acc[c * self.vec + v, i] = new[v]
            for i in cutlass.range_constexpr(R):
                values = [acc[v, i] for v in range(width)]
                store_row(f * R + i, values)
                dots.append(device.dot(values, C, self.packed))
        return dots

    def store_row(self, values, gState, dice, slot, h, tile, row, r):
        """Round a thread's part of a state row and store it, chunk by chunk."""
        call = dice.call_of(slot, h, tile * self.tile_p + row) if self.stochastic else 0
        for c in range(self.chunks):
            chunk = values[c * self.vec:(c + 1) * self.vec]
            out = cute.make_rmem_tensor((self.vec,), self.state_dtype)
            if self.vec < 8:  # fp32: nothing is rounded
                for v in range(self.vec):
                    out[v] = chunk[v]
            else:
                first = (c * LANES + r) * (self.vec // 8)
                for i in range(self.vec // 8):
                    words = dice.words(call + first + i) if self.stochastic else None
                    eight = self.rounded(chunk[8 * i:8 * i + 8], words)
                    cute.autovec_copy(eight, cute.local_tile(out, (8,), (i,)))
            cute.autovec_copy(out, self.chunk(gState[row, None], c, r))
