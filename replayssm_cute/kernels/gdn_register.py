"""Gated DeltaNet step, register design: one CTA per (row, value head, tile of V).

For small batches, where latency rules: the checkpoint goes from global memory straight into the fragments of the
products, every load that depends on the slot is issued before anything is used, and only an exact fold has barriers.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from replayssm_cute.kernels import device, rounding
from replayssm_cute.kernels.compat import SmemAllocator
from replayssm_cute.kernels.gdn_config import RECORDS
from replayssm_cute.kernels.gdn_fold import Fold
from replayssm_cute.kernels.gdn_gates import exp, gates
from replayssm_cute.kernels.gdn_producer import SKIPPED, Producer
from replayssm_cute.kernels.gdn_tile import TILE, GdnTile
from replayssm_cute.kernels.gdn_window import Window


class GdnRegisterKernel(Window, Fold, GdnTile):
    """grid (HV * V / tile_v, batch)."""

    load_facts = Producer.load_facts

    @cute.jit
    def __call__(self, mState, mQ, mK, mV, mA, mB, mAlog, mBias, mDc, mKc, mGc, mRv, mRk, mBeta, mOut, mStarts, mSlots,
                 mKeys, mPos, mBase, mFlush, null_block_id: Int32, mSeed, stream):
        batch = mStarts.shape[0] - 1 if const_expr(self.spec) else mQ.shape[0]
        self.kernel(mState, mQ, mK, mV, mA, mB, mAlog, mBias, mDc, mKc, mGc, mRv, mRk, mBeta, mOut, mStarts, mSlots,
                    mKeys, mPos, mBase, mFlush, null_block_id, mSeed).launch(
            grid=(self.HV * self.tiles_v, batch, 1), block=(32 * self.warps, 1, 1), stream=stream,
            min_blocks_per_mp=self.config.min_ctas, preferred_smem_carveout=50, use_pdl=self.config.pdl)

    @cute.kernel
    def kernel(self, mState, mQ, mK, mV, mA, mB, mAlog, mBias, mDc, mKc, mGc, mRv, mRk, mBeta, mOut, mStarts, mSlots,
               mKeys, mPos, mBase, mFlush, null_block_id, mSeed):
        tid, _, _ = cute.arch.thread_idx()
        bx, b, _ = cute.arch.block_idx()
        s = self.allocate()
        if const_expr(self.config.pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        dice = self.throw_dice(mSeed)
        if const_expr(self.stochastic):
            cute.arch.sync_threads()  # all threads have read the step
            ctas, rows, _ = cute.arch.grid_dim()
            if tid == 0:
                rounding.advance(mSeed, ctas * rows)
        h, tile, warp, lane = bx // self.tiles_v, bx % self.tiles_v, tid // 32, tid % 32
        slot, key, pos, base, flush, start, count = self.load_facts(mStarts, mSlots, mKeys, mPos, mBase, mFlush,
                                                                   null_block_id, b)
        item = SimpleNamespace(
            slot=Int64(slot), key=Int64(key), h=h, tile=tile, records=pos, base=base, start=start, count=count,
            warp=warp, head_warp=tile * self.warps + warp, lane=lane,
            append=Boolean(True) if const_expr(self.spec) else flush == 0)
        # The window does not depend on the slot: it is on its way while the slot is waited for.
        z, v = self.zero_window()
        self.load_window(mQ, mK, mV, item, h // self.ratio, z, v)
        raw = [self.load_gates(mA, mB, item, t) for t in range(self.tiles)]
        constants = mAlog[h], mBias[h]
        if slot >= 0:
            self.serve(s, mState, mK, mDc, mKc, mGc, mRv, mRk, mBeta, mOut, dice, item, flush, z, v, raw, constants)
        elif slot > SKIPPED:
            self.clear_output(mOut, start, count, h, tile * self.warps + warp, lane)

    def allocate(self):
        """Shared memory for the records of an exact fold; None without one."""
        if not self.exact:
            return None
        smem = SmemAllocator()

        def tensor(dtype, *shape):
            return smem.allocate_tensor(dtype, cute.make_ordered_layout(shape, tuple(range(len(shape)))),
                                        byte_alignment=16)

        return SimpleNamespace(k=tensor(Float32, self.K, self.records),
                               v=tensor(self.act_dtype, self.tile_v, self.records),
                               decay=tensor(Float32, RECORDS), beta=tensor(Float32, RECORDS))

    @cute.jit
    def serve(self, s, mState, mK, mDc, mKc, mGc, mRv, mRk, mBeta, mOut, dice, item, flush, z, v, raw, constants):
        """The item of a live row."""
        lane, h, hk = item.lane, item.h, item.h // self.ratio
        state = self.fragment(self.state_dtype, self.W, self.chunks, self.rows)
        first = item.tile * self.tile_v + self.first_row(item.warp, lane)
        self.load_rows(mState[item.slot, h, None, None], first, state, lane % 4)
        old_g, held = Float32(0.0), item.records
        if const_expr(self.exact):  # else the fold will find the ring's rows in L1
            held = Int32(cutlass.select_(flush != 0, Int32(0), item.records))
        if lane < item.records:
            old_g = mGc[item.key, h, self.ring_row(item.base, lane)]
        src = SimpleNamespace(state=state, k=mKc[item.key, hk, None, None], d=mDc[item.key, h, None, None],
                              base=item.base, now=mK[item.start, hk, None], q=lane % 4,
                              d_at=TILE * item.head_warp + lane % 4)
        ring = self.load_ring(src, held, lane)
        g, gate, beta = self.window_gates(raw, *(x.to(Float32) for x in constants), item)
        later, total = device.suffix_sums([old_g], lane, self.L)
        src.weights, decay = device.select(lane < item.records, exp(later[0]), Float32(0.0)), exp(total)
        if const_expr(self.spec):
            if flush != 0:
                if const_expr(self.exact):
                    self.fold(s, src, item, mState, mRv[item.key, h, None, None], mRk[item.key, hk, None, None],
                              mBeta[item.key, h, None], old_g)
                else:
                    self.fold_ring(src, item, mState, decay, None, None, None, None, True)
            decay = device.select(flush != 0, Float32(1.0), decay)
            src.weights = device.select(flush != 0, Float32(0.0), src.weights)
        d, inverse_k = self.verify_window(None, src, item, mOut, mDc, mKc, mGc, mRv, mRk, mBeta, z, v, g, gate, beta,
                                          ring, decay, None)
        if const_expr(not self.spec):
            if flush != 0:
                d_now = [cute.arch.shuffle_sync(x, lane - lane % 4) for x in d[0]]
                norm = cute.arch.shuffle_sync(inverse_k[0], 0)
                self.fold_ring(src, item, mState, decay, exp(g[0]), d_now, lambda c: self.k_chunk(src, c, norm), dice,
                               False)

    @cute.jit
    def fold(self, s, src, item, mState, gRv, gRk, gBeta, old_g):
        """Exact fold: the CTA's warps normalise the records in turn, then each folds them into its rows."""
        sk, sv, s_decay, s_beta = s.k, s.v, s.decay, s.beta
        lane = item.lane
        if item.warp == 0 and lane < item.records:
            s_decay[lane], s_beta[lane] = exp(old_g), gBeta[self.ring_row(item.base, lane)]
        for j in cutlass.range(item.warp, item.records, self.warps, unroll=1):
            row = self.ring_row(item.base, j)
            self.normalise(gRk[row, None], sk[None, j], lane)
            for n in cutlass.range_constexpr((self.tile_v + 31) // 32):
                sv[32 * n + lane, j] = gRv[row, item.tile * self.tile_v + 32 * n + lane]
        cute.arch.sync_threads()
        self.fold_exact(src, item, mState, sk, sv, s_decay, s_beta)

    # ---- what an item reads -------------------------------------------------------------------------

    def load_rows(self, gHead, first, state, q):
        """The lane's rows of the checkpoint, past L1: they are used once."""
        atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), self.state_dtype, num_bits_per_copy=128,
                                   l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE)
        for r in range(self.rows):
            for c in range(self.chunks):
                cute.copy(atom, self.chunk(gHead[first + 2 * r, None], c, q), state[None, c, r])

    @cute.jit
    def load_window(self, mQ, mK, mV, item, hk, z, v):
        """The lane's fragments of the row's tokens; those of absent ones stay zero."""
        g, q = item.lane // 4, item.lane % 4
        for t in cutlass.range_constexpr(self.tiles):
            column = TILE * t + g // 2
            if column < item.count:
                if g % 2 == 0:
                    self.load_z(mQ[item.start + column, hk, None], z[t], q)
                else:
                    self.load_z(mK[item.start + column, hk, None], z[t], q)
            token = TILE * t + q
            if token < item.count:
                row = mV[item.start + token, item.h, None]
                cute.autovec_copy(self.neighbours(row, item.head_warp, item.lane), v[t])

    def load_z(self, row, z, q):
        for c in range(self.chunks):
            cute.autovec_copy(self.chunk(row, c, q), z[None, c])

    def load_gates(self, mA, mB, item, t):
        """a and b of the lane's token of tile t, or of some other one where it is absent."""
        token = item.start + cutlass.max(cutlass.min(TILE * t + item.lane % 4, item.count - 1), 0)
        token = cutlass.min(token, mA.shape[0] - 1)
        return mA[token, item.h], mB[token, item.h]

    def window_gates(self, raw, A_log, dt_bias, item):
        """(g of every token, g and beta of the lane's token of every tile); zeros for absent ones."""
        q, gate, beta = item.lane % 4, [], []
        for t, (a, b) in enumerate(raw):
            pair, there = gates(a.to(Float32), b.to(Float32), A_log, dt_bias), TILE * t + q < item.count
            gate.append(device.select(there, pair[0], Float32(0.0)))
            beta.append(device.select(there, pair[1], Float32(0.0)))
        return [cute.arch.shuffle_sync(gate[i // TILE], item.lane - q + i % TILE) for i in range(self.T)], gate, beta

    def load_state(self, src, c, r):
        return src.state[None, c, r]

    def keep(self, src, c, r, fragment):
        for e in range(self.W):
            src.state[e, c, r] = fragment[e]

    def load_k(self, src, j, c, fragment):
        cute.autovec_copy(self.chunk(src.k[self.ring_row(src.base, j), None], c, src.q), fragment)

    def load_d(self, src, j, fragment):
        row = src.d[self.ring_row(src.base, j), None]
        cute.autovec_copy(cute.local_tile(row, (2 * self.rows,), (src.d_at,)), fragment)

    def weight(self, src, j):
        return cute.arch.shuffle_sync(src.weights, j)

    def k_chunk(self, src, c, norm):
        """The current token's normalised k."""
        return [x * norm for x in device.load_f32(self.chunk(src.now, c, src.q), self.W, self.act_dtype)]
