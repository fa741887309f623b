"""Gated DeltaNet step, staged design: persistent CTAs whose warps have roles.

For larger batches, where bandwidth rules. Items (row, value head, tile of V) are dealt round robin, which spreads
flushing rows over CTAs and over time, and evenly where rows fold exactly (``order.py``); each passes through a ring of
stages in shared memory.

* The producer (one warp, ``gdn_producer``) keeps everything that items read on its way: a tile's checkpoint is ONE bulk
  copy, the valid rows of a ring at most two, so that stale ring rows are never touched.
* For exact folds one warp normalises the raw k of a flushing row while the item waits for its turn.
* The others compute (``gdn_window``, ``gdn_fold``): each owns 8 * rows rows and needs no barrier. They give a stage
  back as soon as its contents are in registers, before the window's tokens are solved one behind the other.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from replayssm_cute.kernels import device, rounding
from replayssm_cute.kernels.compat import SmemAllocator
from replayssm_cute.kernels.gdn_config import RECORDS, extra_warps
from replayssm_cute.kernels.gdn_fold import Fold
from replayssm_cute.kernels.gdn_gates import exp
from replayssm_cute.kernels.gdn_producer import (
    BASE,
    BETA,
    COUNT,
    FLUSH,
    GATE,
    HEAD,
    KEY,
    PADDED,
    POS,
    SLOT,
    START,
    TILE_V,
    Producer,
)
from replayssm_cute.kernels.gdn_tile import TILE, GdnTile
from replayssm_cute.kernels.gdn_window import Window
from replayssm_cute.kernels.order import Order
from replayssm_cute.kernels.targets import SORTED_ROWS


class GdnStagedKernel(Order, Producer, Window, Fold, GdnTile):
    """``min_ctas`` CTAs a multiprocessor."""

    def __init__(self, problem, config, target, sms: int) -> None:
        super().__init__(problem, config, target)
        self.stages, self.sms, self.ctas = config.stages, sms, config.min_ctas * sms
        self.threads, self.row_items = 32 * (self.warps + extra_warps(problem, config)), self.HV * self.tiles_v

    @cute.jit
    def __call__(self, mState, mQ, mK, mV, mA, mB, mAlog, mBias, mDc, mKc, mGc, mRv, mRk, mBeta, mOut, mStarts, mSlots,
                 mKeys, mPos, mBase, mFlush, null_block_id: Int32, mSeed, stream):
        batch = mStarts.shape[0] - 1 if const_expr(self.spec) else mQ.shape[0]
        items = batch * (self.HV * self.tiles_v)
        rounds = (items + self.ctas - 1) // self.ctas
        self.kernel(mState, mQ, mK, mV, mA, mB, mAlog, mBias, mDc, mKc, mGc, mRv, mRk, mBeta, mOut, mStarts, mSlots,
                    mKeys, mPos, mBase, mFlush, null_block_id, mSeed, items, batch).launch(
            # As few CTAs as take no more rounds: all of them then end together.
            grid=((items + rounds - 1) // rounds, 1, 1), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.config.min_ctas, preferred_smem_carveout=100, use_pdl=self.config.pdl)

    @cute.kernel
    def kernel(self, mState, mQ, mK, mV, mA, mB, mAlog, mBias, mDc, mKc, mGc, mRv, mRk, mBeta, mOut, mStarts, mSlots,
               mKeys, mPos, mBase, mFlush, null_block_id, mSeed, items, batch):
        tid, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        count = (items - first + step - 1) // step
        if const_expr(self.config.pdl):
            cute.arch.griddepcontrol_wait()
        rows = (mStarts, mSlots, mKeys, mPos, mBase, mFlush, null_block_id)
        # Only the producer uses them, but loaded here they are on their way during the set-up.
        facts = self.load_facts(*rows, cutlass.min(first + tid % 32 * step, items - 1) // self.row_items)
        dice = self.throw_dice(mSeed)
        s = self.allocate()
        if tid == 0:
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(s.full + i, 1)
                cute.arch.mbarrier_init(s.empty + i, self.warps + (1 if self.exact else 0))
                if const_expr(self.exact):
                    cute.arch.mbarrier_init(s.ready + i, 1)
            if const_expr(self.exact):
                cute.arch.mbarrier_init(s.flagged, self.warps)
            cute.arch.mbarrier_init_fence()
        deal = self.deal(batch, first, step, count) if const_expr(self.exact) else None
        cute.arch.sync_threads()
        if const_expr(self.stochastic):  # all threads have read the step
            if tid == 0:
                rounding.advance(mSeed, step)
        # As branches of one another: what only one role needs must not live through the others' code.
        if warp < self.warps:
            if const_expr(self.exact):
                self.read_flags(s, mSlots, mKeys, mFlush, null_block_id, deal, tid)
            self.consume(s, mState, mOut, mDc, mKc, mGc, mRv, mRk, mBeta, dice, count, tid % 32, warp)
        elif warp == self.warps:
            self.produce(s, mState, mQ, mK, mV, mA, mB, mAlog, mBias, mDc, mKc, mGc, mRv, mRk, mBeta, rows, first,
                         step, count, facts, deal, tid % 32)
        elif const_expr(self.exact):
            self.prepare_folds(s, count, tid % 32)

    def allocate(self):
        """Shared memory: the stages, and their barriers."""
        smem, ST = SmemAllocator(), self.stages

        def tensor(dtype, *shape, align=16):
            return smem.allocate_tensor(dtype, cute.make_ordered_layout(shape, tuple(range(len(shape)))),
                                        byte_alignment=align)

        state = tensor(self.state_dtype, self.K, self.tile_v, ST, align=128)
        k, d = (tensor(self.ring_dtype, n, self.records, ST, align=128) for n in (self.K, self.V))
        return SimpleNamespace(
            # The ring's k and d; in their place, of a row that is folded exactly, the raw k and v.
            state=state, k=k, d=d, raw_k=self.raw(k), raw_v=self.raw(d),
            z=tensor(self.act_dtype, self.K, 2 * self.T, ST, align=128),     # q of all tokens, then k
            v=tensor(self.act_dtype, self.tile_v, self.T, ST, align=128),
            weight=tensor(Float32, RECORDS, ST), decay=tensor(Float32, ST),
            gates=tensor(Float32, self.T, 2, ST), ints=tensor(Int32, 16, ST),
            fold_k=tensor(Float32, self.K, self.records, ST, align=128) if self.exact else None,
            fold_decay=tensor(Float32, RECORDS, ST) if self.exact else None,
            fold_beta=tensor(Float32, RECORDS, ST) if self.exact else None,
            flags=tensor(Int32, SORTED_ROWS) if self.exact else None,      # ``order``
            rows=tensor(Int32, SORTED_ROWS) if self.exact else None,
            full=smem.allocate_array(Int64, ST), empty=smem.allocate_array(Int64, ST),
            ready=smem.allocate_array(Int64, ST) if self.exact else None,
            flagged=smem.allocate_array(Int64, 1) if self.exact else None)

    def raw(self, records):
        """Records of the inputs' dtype in the place of some of the ring's."""
        if not self.exact or self.ring_dtype is self.act_dtype:
            return records
        width, stride = cute.size(records, mode=[0]), self.ring_dtype.width // self.act_dtype.width
        return cute.make_tensor(cute.recast_ptr(records.iterator, dtype=self.act_dtype), cute.make_layout(
            (width, self.records, self.stages), stride=(1, width, width * self.records * stride)))

    def stagger(self, first, left):
        """CTAs that share a multiprocessor fold at different times."""
        return first // self.sms % self.config.min_ctas * left // self.config.min_ctas

    # ---- consumers ----------------------------------------------------------------------------------

    @cute.jit
    def read_flags(self, s, mSlots, mKeys, mFlush, null_block_id, deal, tid):
        """Which rows will fold, into shared memory, while the first items are on their way; all consumers."""
        flags = s.flags
        for i in cutlass.range(tid, deal.rows, 32 * self.warps, unroll=1):
            slot, key, flag = Int32(mSlots[deal.head + i]), Int32(mKeys[deal.head + i]), Int32(0)
            if slot >= 0 and slot != null_block_id and key >= 0 and key != null_block_id:
                flag = Int32(mFlush[key])
            flags[i] = flag
        cute.arch.sync_warp()
        if tid % 32 == 0:
            cute.arch.mbarrier_arrive(s.flagged)

    @cute.jit
    def consume(self, s, mState, mOut, mDc, mKc, mGc, mRv, mRk, mBeta, dice, count, lane, warp):
        for k in cutlass.range(count, unroll=1):
            stage, phase = k % self.stages, (k // self.stages) & 1
            cute.arch.mbarrier_wait(s.full + stage, phase)
            slot = s.ints[SLOT, stage]
            if slot >= 0:
                self.serve(s, mState, mOut, mDc, mKc, mGc, mRv, mRk, mBeta, dice, stage, phase, slot, lane, warp)
            else:
                if slot == PADDED:
                    self.clear_output(mOut, s.ints[START, stage], s.ints[COUNT, stage], s.ints[HEAD, stage],
                                      s.ints[TILE_V, stage] * self.warps + warp, lane)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(s.empty + stage)

    @cute.jit
    def serve(self, s, mState, mOut, mDc, mKc, mGc, mRv, mRk, mBeta, dice, stage, phase, slot, lane, warp):
        """One item of a live row."""
        ints = s.ints
        flush, tile = ints[FLUSH, stage] != 0, ints[TILE_V, stage]
        item = SimpleNamespace(
            slot=Int64(slot), key=Int64(ints[KEY, stage]), h=ints[HEAD, stage], tile=tile, records=ints[POS, stage],
            base=ints[BASE, stage], start=ints[START, stage], count=ints[COUNT, stage], warp=warp,
            head_warp=tile * self.warps + warp, lane=lane,
            append=Boolean(True) if const_expr(self.spec) else ints[FLUSH, stage] == 0)
        src = SimpleNamespace(
            state=s.state[None, None, stage], k=s.k[None, None, stage], d=s.d[None, None, stage],
            weights=s.weight[None, stage], z=s.z[None, None, stage], row=self.first_row(warp, lane), q=lane % 4,
            d_at=TILE * item.head_warp + lane % 4)
        decay, held = s.decay[stage], item.records
        if const_expr(self.spec):
            if flush:
                self.fold(s, src, item, mState, stage, phase, decay)
            held = Int32(cutlass.select_(flush, Int32(0), item.records))
            decay = Float32(cutlass.select_(flush, Float32(1.0), decay))
        ring = self.load_ring(src, held, lane)
        z, v = self.zero_window()
        self.load_window(s, item, stage, z, v)
        g, gate, beta = self.load_gates_of(s, stage, lane)
        d, inverse_k = self.verify_window(s.empty + stage, src, item, mOut, mDc, mKc, mGc, mRv, mRk, mBeta, z, v, g,
                                          gate, beta, ring, decay, item.append)
        if const_expr(not self.spec):
            if flush:
                first = lane - lane % 4
                d_now = [cute.arch.shuffle_sync(x, first) for x in d[0]]
                norm = cute.arch.shuffle_sync(inverse_k[0], 0)
                self.fold_ring(src, item, mState, decay, exp(g[0]), d_now, lambda c: self.k_chunk(src, c, norm),
                               dice, False)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(s.empty + stage)

    @cute.jit
    def fold(self, s, src, item, mState, stage, phase, decay):
        """Fold the records into the checkpoint, in the pool and in the stage."""
        if const_expr(self.exact):
            cute.arch.mbarrier_wait(s.ready + stage, phase)
            values = cute.local_tile(s.raw_v[None, None, stage], (self.tile_v, self.records), (item.tile, 0))
            self.fold_exact(src, item, mState, s.fold_k[None, None, stage], values, s.fold_decay[None, stage],
                            s.fold_beta[None, stage])
        else:
            self.fold_ring(src, item, mState, decay, None, None, None, None, True)
        fence_stores()

    @cute.jit
    def load_window(self, s, item, stage, z, v):
        """The lane's fragments of the row's tokens; those of absent ones stay zero."""
        g, q = item.lane // 4, item.lane % 4
        for t in cutlass.range_constexpr(self.tiles):
            column = TILE * t + g // 2
            if column < item.count:
                for c in cutlass.range_constexpr(self.chunks):
                    cute.autovec_copy(self.chunk(s.z[None, column + g % 2 * self.T, stage], c, q), z[t][None, c])
            token = TILE * t + q
            if token < item.count:
                cute.autovec_copy(self.neighbours(s.v[None, token, stage], item.warp, item.lane), v[t])

    def load_gates_of(self, s, stage, lane):
        """(g of every token, g and beta of the lane's token of every tile)."""
        mine = [cutlass.min(TILE * t + lane % 4, self.T - 1) for t in range(self.tiles)]
        return ([s.gates[i, GATE, stage] for i in range(self.T)], [s.gates[i, GATE, stage] for i in mine],
                [s.gates[i, BETA, stage] for i in mine])

    # ---- what an item reads -------------------------------------------------------------------------

    def load_state(self, src, c, r):
        fragment = self.fragment(self.state_dtype, self.W)
        cute.autovec_copy(self.chunk(src.state[None, src.row + 2 * r], c, src.q), fragment)
        return fragment

    def keep(self, src, c, r, fragment):
        cute.autovec_copy(fragment, self.chunk(src.state[None, src.row + 2 * r], c, src.q))

    def load_k(self, src, j, c, fragment):
        cute.autovec_copy(self.chunk(src.k[None, j], c, src.q), fragment)

    def load_d(self, src, j, fragment):
        cute.autovec_copy(cute.local_tile(src.d[None, j], (2 * self.rows,), (src.d_at,)), fragment)

    def weight(self, src, j):
        return src.weights[j]

    def k_chunk(self, src, c, norm):
        """The current token's normalised k."""
        return [x * norm for x in device.load_f32(self.chunk(src.z[None, self.T], c, src.q), self.W, self.act_dtype)]

    # ---- the warp that prepares exact folds ---------------------------------------------------------

    @cute.jit
    def prepare_folds(self, s, count, lane):
        for k in cutlass.range(count, unroll=1):
            stage, phase = k % self.stages, (k // self.stages) & 1
            cute.arch.mbarrier_wait(s.full + stage, phase)
            if s.ints[SLOT, stage] >= 0:
                if s.ints[FLUSH, stage] != 0:
                    for j in cutlass.range(s.ints[POS, stage], unroll=1):
                        self.normalise(s.raw_k[None, j, stage], s.fold_k[None, j, stage], lane)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(s.ready + stage)
                cute.arch.mbarrier_arrive(s.empty + stage)


def fence_stores():
    """What was stored to shared memory comes before the bulk copies that fill it anew."""
    cute.arch.inline_ptx("fence.proxy.async.shared::cta;")
