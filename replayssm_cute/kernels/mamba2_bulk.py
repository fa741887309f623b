"""Mamba2 replay step, bulk design: persistent CTAs, one producer warp, consumers in shared memory.

For large batches, where bandwidth rules: a tile's state is ONE bulk copy and the valid rows of a
ring are ONE bulk copy, so that exactly the needed bytes move, stale ring rows are never touched,
and the bytes in flight do not depend on registers. Items (row, head, tile) are dealt round robin,
which spreads flushing rows over CTAs and over time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from replayssm_cute.kernels import device
from replayssm_cute.kernels.compat import SmemAllocator
from replayssm_cute.kernels.mamba2_config import LANES
from replayssm_cute.kernels.mamba2_tile import ReplayTile, load_scalars, load_slot

EVICT_FIRST = 0x12F0000000000000  # L2 policy word: evict_first for the whole access
CONSUMERS = 1                     # named barrier of the compute threads


class Mamba2BulkKernel(ReplayTile):
    """``min_ctas`` CTAs a multiprocessor of ``threads`` + 32 threads; the last warp produces."""

    def __init__(self, problem, config, target, sms: int) -> None:
        super().__init__(problem, config, target)
        self.stages, self.ctas = config.stages, config.min_ctas * sms
        self.input_bytes = self.act_dtype.width // 8
        self.state_bytes = self.tile_p * self.N * self.state_dtype.width // 8
        self.input_vec = 128 // self.act_dtype.width               # inputs of one 16-byte load
        self.input_chunks = self.N // (LANES * self.input_vec)

    @cute.jit
    def __call__(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                 mIndices, null_block_id: Int32, mOut, stream):
        items = mX.shape[0] * (self.H * self.tiles)
        self.kernel(mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                    mIndices, null_block_id, mOut, items).launch(
            grid=(cutlass.min(items, self.ctas), 1, 1), block=(self.threads + 32, 1, 1),
            stream=stream, min_blocks_per_mp=self.config.min_ctas, preferred_smem_carveout=100)

    @cute.kernel
    def kernel(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
               mIndices, null_block_id, mOut, items):
        tid, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        count = (items - first + step - 1) // step
        s = self.allocate()
        ahead = (Int32(0), Int32(0), Int32(0), Float32(0.0), Float32(0.0))
        if tid == self.threads:  # its latency overlaps the set-up of the barriers
            ahead = self.load_item(mDt, mDtBias, mA, mPos, mFlush, mIndices, null_block_id, first)
        if tid == 0:
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(s.full + i, 1)
                cute.arch.mbarrier_init(s.empty + i, self.warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if tid < self.threads:
            self.consume(s, mState, mD, mZ, mXc, mDtc, mBc, mOut, first, step, count, tid)
        if tid == self.threads:
            self.produce(s, mState, mX, mDt, mA, mB, mC, mDtBias, mXc, mDtc, mBc, mPos, mFlush,
                         mIndices, null_block_id, first, step, count, ahead)

    def allocate(self):
        """Shared memory: the stages, the meeting places of partial sums, and the barriers."""
        smem, ST = SmemAllocator(), self.stages

        def tensor(dtype, *shape, align=16):
            return smem.allocate_tensor(dtype, cute.make_ordered_layout(shape, tuple(range(len(shape)))),
                                        byte_alignment=align)

        class Shared:
            state = tensor(self.state_dtype, self.N, self.tile_p, ST, align=128)
            x = tensor(self.act_dtype, self.P, self.L, ST, align=128)
            B = tensor(self.act_dtype, self.N, self.L, ST, align=128)
            C = tensor(self.act_dtype, self.N, ST, align=128)
            dt = tensor(Float32, self.L, ST)
            ints = tensor(Int32, 4, ST)           # slot (-1: padded row), write_pos, is_flush
            floats = tensor(Float32, 2, ST)       # dt' of the current token, A
            # Two of each, by the item's parity: one barrier an item is then enough.
            ring = tensor(Float32, self.tile_p, self.warps, 2)
            row = tensor(Float32, self.tile_p, 2)
            scaled = tensor(Float32, self.tile_p, self.L)
            full = smem.allocate_array(Int64, ST)
            empty = smem.allocate_array(Int64, ST)

        return Shared

    def split(self, item):
        """Item -> (batch row, head, tile)."""
        return item // (self.H * self.tiles), item // self.tiles % self.H, item % self.tiles

    # ---- producer: one thread ---------------------------------------------------------------------

    @cute.jit
    def load_item(self, mDt, mDtBias, mA, mPos, mFlush, mIndices, null_block_id, item):
        """(slot, write_pos, is_flush, dt + dt_bias, A) of an item; slot -1 for a padded row."""
        b, h, _ = self.split(item)
        slot = Int32(load_slot(mIndices, b))
        if slot == null_block_id:
            slot = Int32(-1)
        raw, A = load_scalars(mDt, mDtBias, mA, b, h)
        return slot, Int32(mPos[b]), Int32(mFlush[b]), raw, A

    @cute.jit
    def produce(self, s, mState, mX, mDt, mA, mB, mC, mDtBias, mXc, mDtc, mBc, mPos, mFlush, mIndices,
                null_block_id, first, step, count, ahead):
        slot, pos, flush, raw, A = ahead
        ints, floats = s.ints, s.floats
        for k in cutlass.range(count, unroll=1):
            item = first + k * step
            following = (slot, pos, flush, raw, A)
            if k + 1 < count:  # in flight while this item waits for its stage
                following = self.load_item(mDt, mDtBias, mA, mPos, mFlush, mIndices, null_block_id,
                                           item + step)
            dt_now = self.discretize(raw)
            stage = k % self.stages
            if k >= self.stages:
                cute.arch.mbarrier_wait(s.empty + stage, ((k // self.stages) & 1) ^ 1)
            ints[0, stage] = slot
            ints[1, stage] = pos
            ints[2, stage] = flush
            floats[0, stage] = dt_now
            floats[1, stage] = A
            if slot >= 0:
                self.copy_item(s, mState, mX, mB, mC, mXc, mDtc, mBc, item, stage, Int64(slot), pos)
            else:
                cute.arch.mbarrier_arrive(s.full + stage)
            slot, pos, flush, raw, A = following

    @cute.jit
    def copy_item(self, s, mState, mX, mB, mC, mXc, mDtc, mBc, item, stage, slot, pos):
        """Issue the bulk copies of one item; the current token lands right behind the ring rows."""
        b, h, tile = self.split(item)
        g = h // self.ratio
        bar = s.full + stage
        policy = None
        if const_expr(self.config.evict_first):
            policy = Int64(EVICT_FIRST)
        x_row, b_row = self.P * self.input_bytes, self.N * self.input_bytes
        cute.arch.mbarrier_arrive_and_expect_tx(
            bar, self.state_bytes + (pos + 1) * (x_row + b_row) + b_row + self.L * 4)
        bulk_copy(s.state[None, None, stage], mState[slot, h, tile * self.tile_p, None],
                  Int32(self.state_bytes), bar, policy)
        bulk_copy(s.dt[None, stage], mDtc[slot, h, None], Int32(self.L * 4), bar)
        if pos > 0:  # a bulk copy of no bytes is invalid
            bulk_copy(s.B[None, None, stage], mBc[slot, g, None, None], pos * b_row, bar)
            bulk_copy(s.x[None, None, stage], mXc[slot, h, None, None], pos * x_row, bar)
        bulk_copy(s.B[None, pos, stage], mB[b, g, None], Int32(b_row), bar)
        bulk_copy(s.x[None, pos, stage], mX[b, h, None], Int32(x_row), bar)
        bulk_copy(s.C[None, stage], mC[b, g, None], Int32(b_row), bar)

    # ---- consumers --------------------------------------------------------------------------------

    @cute.jit
    def consume(self, s, mState, mD, mZ, mXc, mDtc, mBc, mOut, first, step, count, tid):
        lane, warp = tid % 32, tid // 32
        r, group = tid % 8, tid // 8
        D, z = self.load_epilogue(mD, mZ, first, tid)
        for k in cutlass.range(count, unroll=1):
            item = first + k * step
            b, h, tile = self.split(item)
            stage = k % self.stages
            parity = k % 2
            D_next, z_next = D, z
            if k + 1 < count:  # in flight during this item
                D_next, z_next = self.load_epilogue(mD, mZ, item + step, tid)
            cute.arch.mbarrier_wait(s.full + stage, (k // self.stages) & 1)
            if s.ints[0, stage] >= 0:
                slot = Int64(s.ints[0, stage])
                pos = s.ints[1, stage]
                dt_now = s.floats[0, stage]
                dt_ring = []
                for i in cutlass.range_constexpr(self.dt_parts):
                    dt_ring.append(s.dt[cutlass.min(lane + 32 * i, self.L - 1), stage])
                weights, decay = self.replay_weights(dt_ring, dt_now, s.floats[1, stage], pos, lane, group)
                C = self.load_vectors(s.C[None, stage], self.vec, self.chunks, r)
                gState = cute.local_tile(mState[slot, h, None, None], (self.tile_p, self.N), (tile, 0))
                y = Float32(0.0)
                if s.ints[2, stage] == 0:
                    self.replay(s, stage, parity, C, weights, decay, dt_now, mXc[slot, h, None, None],
                                mDtc[slot, h, None], mBc[slot, h // self.ratio, None, None], h, tile, pos,
                                lane, r, group, warp)
                else:
                    self.flush(s, stage, parity, C, weights, decay, gState, tile, pos, r, group)
                x = Float32(0.0)
                if tid < self.tile_p:
                    x = s.x[tile * self.tile_p + tid, pos, stage].to(Float32)
                flushed = s.ints[2, stage]
                self.release(s, stage, lane)
                cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=self.threads)
                if tid < self.tile_p:
                    y = s.row[tid, parity]
                    if flushed == 0:
                        for w in cutlass.range_constexpr(self.warps):
                            y = y + s.ring[tid, w, parity]
                    y = self.finish(y, x, D if const_expr(mD is not None) else None,
                                    z if const_expr(mZ is not None) else None)
                    mOut[b, h, tile * self.tile_p + tid] = y.to(self.act_dtype)
            else:
                self.release(s, stage, lane)
            D, z = D_next, z_next

    @cute.jit
    def release(self, s, stage, lane):
        """This warp has read its part of the stage: give it back, before the epilogue."""
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(s.empty + stage)

    @cute.jit
    def load_epilogue(self, mD, mZ, item, tid):
        """D and z of the output row that this thread finishes; zeros for what is absent."""
        b, h, tile = self.split(item)
        p = tile * self.tile_p + cutlass.min(tid, self.tile_p - 1)
        D, z = Float32(0.0), Float32(0.0)
        if const_expr(mD is not None):
            D = mD[h, p].to(Float32)
        if const_expr(mZ is not None):
            z = mZ[b, h, p].to(Float32)
        return D, z

    def load_vectors(self, sRow, vec, chunks, r):
        """A lane's share of N inputs in shared memory, in the order of chunks of ``vec``."""
        values = []
        for c in range(chunks):
            values += device.load_f32(cute.local_tile(sRow, (vec,), (c * LANES + r,)), vec, self.act_dtype)
        return values

    @cute.jit
    def replay(self, s, stage, parity, C, weights, decay, dt_now, gXc, gDtc, gBc, h, tile, pos,
               lane, r, group, warp):
        """Output without a flush, and the append: ring partials in s.ring, decay * (S C) in s.row."""
        C_input = C
        if const_expr(self.input_vec != self.vec):  # the state's chunks are narrower or wider
            C_input = self.load_vectors(s.C[None, stage], self.input_vec, self.input_chunks, r)
        sums = [Float32(0.0)] * self.x_lane
        for p in cutlass.range_constexpr(self.passes):
            j = self.entry(p, group)
            rB = cute.make_rmem_tensor((self.input_vec, self.input_chunks), self.act_dtype)
            rX = cute.make_rmem_tensor((self.x_lane,), self.act_dtype)
            rB.fill(0.0)  # what lies past the window in the stage may be NaN
            rX.fill(0.0)
            if j <= pos:
                for c in cutlass.range_constexpr(self.input_chunks):
                    cute.autovec_copy(self.input_chunk(s.B[None, j, stage], c, r), rB[None, c])
                cute.autovec_copy(self.x_part(self.x_tile(s.x[None, j, stage], tile), r), rX)
            B = []
            for c in cutlass.range_constexpr(self.input_chunks):
                B = B + device.to_f32(rB[None, c], self.input_vec)
            score = device.lane_sum(device.dot(B, C_input, self.packed), (1, 2, 4)) * weights[p]
            sums = device.fma(device.to_f32(rX, self.x_lane), [score] * self.x_lane, sums, self.packed)
            if j == pos:
                cute.autovec_copy(rX, self.x_part(self.x_tile(gXc[j, None], tile), r))
                if tile == 0:
                    if h % self.ratio == 0:
                        for c in cutlass.range_constexpr(self.input_chunks):
                            cute.autovec_copy(rB[None, c], self.input_chunk(gBc[j, None], c, r))
                    if r == 0:
                        gDtc[j] = dt_now
        self.store_ring_sums(sums, lane, r, warp, s.ring[None, None, parity])
        dots = []
        for i in cutlass.range_constexpr(self.rows):
            values = []
            for c in cutlass.range_constexpr(self.chunks):
                values = values + self.state_chunk(s, stage, i, c, r, group)
            dots.append(device.dot(values, C, self.packed))
        self.store_row_sums(dots, decay, r, group, 0, s.row[None, parity])

    @cute.jit
    def flush(self, s, stage, parity, C, weights, decay, gState, tile, pos, r, group):
        """Fold the window into the checkpoint; S C lands in s.row."""
        # An earlier flush of this CTA may still read the scaled x.
        cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=self.threads)
        for p in cutlass.range_constexpr(self.passes):
            j = self.entry(p, group)
            if j <= pos:
                rX = cute.make_rmem_tensor((self.x_lane,), self.act_dtype)
                cute.autovec_copy(self.x_part(self.x_tile(s.x[None, j, stage], tile), r), rX)
                self.stage_fold(rX, weights[p], p, r, group, s.scaled)
        cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=self.threads)
        self.fold(lambda i, c: self.state_chunk(s, stage, i, c, r, group),
                  lambda j, c: self.chunk(s.B[None, j, stage], c, r), self.act_dtype, gState,
                  s.scaled, C, decay, pos, r, group, s.row[None, parity])

    def input_chunk(self, row, c, r):
        return cute.local_tile(row, (self.input_vec,), (c * LANES + r,))

    def x_tile(self, row, tile):
        return cute.local_tile(row, (self.tile_p,), (tile,))

    def state_chunk(self, s, stage, i, c, r, group):
        """Chunk c of the thread's state row i, out of the stage, as Float32."""
        return device.load_f32(self.chunk(s.state[None, self.row(i, group), stage], c, r), self.vec,
                               self.state_dtype)


def bulk_copy(dst, src, nbytes, barrier, policy=None):
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
