"""Mamba2 replay step, bulk design: persistent CTAs whose warps have three roles.

For larger batches, where bandwidth rules. Items (row, head, tile) are dealt round robin, which
spreads flushing rows over CTAs and over time, and evenly where a flush draws random words
(``order.py``); each passes through a ring of stages in shared memory.

* The producer (one warp) reads what the items need to know of their rows, 32 items at once and a
  block ahead, so that no item waits for a global load, and issues the copies. A tile's state is ONE
  bulk copy and the valid rows of a ring are ONE bulk copy, so that exactly the needed bytes move,
  stale ring rows are never touched, and the bytes in flight do not depend on registers.
* The scorer (one warp) turns dt and B . C into one weight per ring entry while the state is still on
  its way, and appends the current token to the rings straight from shared memory.
* The consumers own 16 state rows a warp and need no barrier among themselves: checkpoint . C and
  x^T . weights leave complete sums in their registers.

Products of 2-byte operands run on the tensor cores, exact to fp32 (``mma.py``): they take a tenth
of the instructions of FFMA, and a 2-byte state at full bandwidth leaves no room for more. So does the
fold of a flush, on 1 / L of the items.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from replayssm_cute.kernels import mma, rounding
from replayssm_cute.kernels.compat import SmemAllocator
from replayssm_cute.kernels.mamba2_coded import CodedConsumer
from replayssm_cute.kernels.mamba2_consumer import Consumer
from replayssm_cute.kernels.mamba2_scorer import Scorer
from replayssm_cute.kernels.mamba2_stage import (
    DT,
    FACTS,
    FLUSH,
    HEAD,
    POS,
    ROW,
    SLOT,
    TILE,
    A,
    D,
)
from replayssm_cute.kernels.mamba2_tile import ReplayTile, load_slot
from replayssm_cute.kernels.order import Order
from replayssm_cute.kernels.targets import SORTED_ROWS

EVICT_FIRST = 0x12F0000000000000  # L2 policy word: evict_first for the whole access


class Mamba2BulkKernel(Order, Scorer, Consumer, CodedConsumer, ReplayTile):
    """``min_ctas`` CTAs a multiprocessor, of ``threads`` consumers and two more warps."""

    def __init__(self, problem, config, target, sms: int) -> None:
        super().__init__(problem, config, target)
        self.stages, self.ctas = config.stages, config.min_ctas * sms
        self.sorts, self.row_items = self.stochastic, self.H * self.tiles     # drawing makes a flush costly
        self.input_bytes = self.act_dtype.width // 8
        self.state_bytes = self.tile_p * self.N * self.state_dtype.width // 8
        self.entries = -(-self.L // 16) * 16                       # ring rows that products take
        # C must be split to be carried in fp16, where the state or its codes are; see ``Scorer.split_c``.
        self.c_parts = 2 if self.coded or self.state_dtype is cutlass.Float16 else 1

    @cute.jit
    def __call__(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                 mIndices, null_block_id: Int32, mOut, mSeed, stream):
        self.launch(mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                    mIndices, null_block_id, mOut, mSeed, None, stream)

    def launch(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
               mIndices, null_block_id, mOut, mSeed, mScale, stream):
        items = mX.shape[0] * (self.H * self.tiles)
        rounds = (items + self.ctas - 1) // self.ctas
        self.kernel(mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                    mIndices, null_block_id, mOut, mSeed, mScale, items).launch(
            # As few CTAs as take no more rounds: all of them then end together.
            grid=((items + rounds - 1) // rounds, 1, 1), block=(self.threads + 64, 1, 1),
            stream=stream, min_blocks_per_mp=self.config.min_ctas, preferred_smem_carveout=100,
            use_pdl=self.config.pdl)

    @cute.kernel
    def kernel(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
               mIndices, null_block_id, mOut, mSeed, mScale, items):
        tid, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        count = (items - first + step - 1) // step
        if const_expr(self.config.prefetch):
            if warp == self.warps + 1:  # the scorer is the last to be needed
                self.prefetch(mState, mXc, mDtc, mBc, mPos, mIndices, null_block_id, items, first, step, tid % 32)
        if const_expr(self.config.pdl):
            cute.arch.griddepcontrol_wait()
        sources = (mDt, mDtBias, mA, mD, mPos, mFlush, mIndices)
        # Only the producer uses them, but loaded here they are on their way during the set-up.
        item = cutlass.min(first + tid % 32 * step, items - 1)
        facts = self.load_facts(*sources, item)
        dice = self.throw_dice(mSeed)
        s = self.allocate()
        if tid == 0:
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(s.window + i, 1)
                cute.arch.mbarrier_init(s.full + i, 1)
                cute.arch.mbarrier_init(s.scored + i, 1)
                cute.arch.mbarrier_init(s.empty + i, self.warps + 1)
            cute.arch.mbarrier_init_fence()
        deal = None
        if const_expr(self.sorts):
            deal = self.deal(mX.shape[0], first, step, count)
            self.read_flags(s, mFlush, deal, tid)
        cute.arch.sync_threads()
        if const_expr(self.stochastic):
            if tid == 0:
                rounding.advance(mSeed, step)
        # As branches of one another: what only one role needs must not live through the others' code.
        if warp < self.warps:
            self.consume(s, mState, mScale, mD, mZ, mOut, dice, count, tid % 32, warp)
        elif warp == self.warps:
            self.produce(s, sources, mState, mScale, mX, mB, mC, mXc, mDtc, mBc, null_block_id, items, first, step,
                         count, item, facts, deal, tid % 32)
        else:
            self.score(s, mXc, mDtc, mBc, count, tid % 32)

    def allocate(self):
        """Shared memory: the stages with what the scorer adds to them, and the barriers."""
        smem, ST, E = SmemAllocator(), self.stages, self.entries

        def tensor(dtype, *shape, align=16):
            return smem.allocate_tensor(dtype, cute.make_ordered_layout(shape, tuple(range(len(shape)))),
                                        byte_alignment=align)

        class Shared:
            state = tensor(self.state_dtype, self.N, self.tile_p, ST, align=128)
            x = tensor(self.act_dtype, self.P, E, ST, align=128)
            # N + 8: room for the fold's form of B, ``Scorer.pair_entries``.
            B = tensor(self.act_dtype, (self.N + 8) * E, ST, align=128)
            C = tensor(self.act_dtype, self.N, ST, align=128)
            dt = tensor(Float32, self.L, ST)
            ints = tensor(Int32, 8, FACTS)
            floats = tensor(Float32, 4, FACTS)
            # Written by the scorer. A C part starts 64 bytes past a 128-byte line, so that the two
            # parts that a load fetches together lie in different banks.
            c_part = tensor(cutlass.Float16, self.N + mma.K_BLOCK, self.c_parts, ST, align=128) \
                if self.c_parts > 1 else None
            row_scale = tensor(Float32, self.tile_p, ST) if self.coded else None
            w_part = tensor(self.act_dtype, E, mma.PARTS, ST)
            weight = tensor(Float32, E, ST)
            scales = tensor(Float32, 2, ST)
            flags, rows = (tensor(Int32, SORTED_ROWS) if self.sorts else None for _ in range(2))
            window = smem.allocate_array(Int64, ST)               # rings, x, B, C have landed
            full = smem.allocate_array(Int64, ST)                 # the state has
            scored = smem.allocate_array(Int64, ST)
            empty = smem.allocate_array(Int64, ST)

        return Shared

    @cute.jit
    def prefetch(self, mState, mXc, mDtc, mBc, mPos, mIndices, null_block_id, items, first, step, lane):
        """Bring what the first items will read into L2, while the launch before may still be running.

        L2 is where all writes meet, so that nothing read later is stale, whatever that launch writes. The
        slot and the cursor may be; a stale one costs a useless prefetch, and none leaves the pools. They are
        not kept in L1, from where they are read again after the wait.
        """
        item = first + lane * step
        if lane < self.stages and item < items:
            b, h, tile = self.split(item)
            index = mIndices.iterator + mIndices.layout(b if const_expr(self.problem.index_ndim == 1) else (b, 0))
            slot, pos = Int64(load_relaxed(index)), load_relaxed(mPos.iterator + b)
            if slot >= 0 and slot < mState.shape[0] and slot != null_block_id:
                g, rows = h // self.ratio, cutlass.min(cutlass.max(pos, Int32(0)), Int32(self.L))
                bulk_prefetch(mState[slot, h, tile * self.tile_p, None], Int32(self.state_bytes))
                bulk_prefetch(mDtc[slot, h, None], Int32(self.L * 4))
                if rows > 0:
                    bulk_prefetch(mBc[slot, g, None, None], rows * (self.N * self.input_bytes))
                    bulk_prefetch(mXc[slot, h, None, None], rows * (self.P * self.input_bytes))

    @cute.jit
    def read_flags(self, s, mFlush, deal, tid):
        """The flags of the rows that move, into shared memory; all threads of the CTA."""
        flags = s.flags
        for i in cutlass.range(tid, deal.rows, self.threads + 64, unroll=1):
            flags[i] = Int32(mFlush[deal.head + i])

    def stagger(self, first, left):
        """Flushes come in the middle half of a CTA's items, where the others hide them."""
        return left // 4 + first % cutlass.max(left // 2, Int32(1))

    # ---- producer: one warp -----------------------------------------------------------------------

    def split(self, item):
        """Item -> (batch row, head, tile)."""
        return item // (self.H * self.tiles), item // self.tiles % self.H, item % self.tiles

    @cute.jit
    def load_facts(self, mDt, mDtBias, mA, mD, mPos, mFlush, mIndices, item):
        """What a lane needs to know of its item, as loaded: nothing waits for it here."""
        b, h, _ = self.split(item)
        bias = skip = Float32(0.0)
        if const_expr(mDtBias is not None):
            bias = mDtBias[h, 0]
        if const_expr(mD is not None and self.problem.D_tied):
            skip = mD[h, 0]
        return load_slot(mIndices, b), mPos[b], mFlush[b], mDt[b, h, 0], bias, mA[h, 0, 0], skip

    @cute.jit
    def store_facts(self, s, facts, null_block_id, item, m):
        """Write a lane's facts where every warp finds them; returns (slot, write_pos)."""
        index, pos, flush, raw, bias, rate, skip = facts
        ints, floats = s.ints, s.floats
        slot = Int32(index)
        if slot == null_block_id:
            slot = Int32(-1)
        ints[SLOT, m], ints[POS, m], ints[FLUSH, m] = slot, pos, Int32(flush)
        ints[ROW, m], ints[HEAD, m], ints[TILE, m] = self.split(item)
        floats[DT, m] = raw.to(Float32) + bias.to(Float32)
        floats[A, m], floats[D, m] = rate, skip.to(Float32)
        return slot, pos

    @cute.jit
    def produce(self, s, sources, mState, mScale, mX, mB, mC, mXc, mDtc, mBc, null_block_id, items, first, step,
                count, item, facts, deal, lane):
        """``item``, ``facts``: the lane's item of the first 32, and what it needs to know of it."""
        slots, cursors, own, costly = Int32(0), Int32(0), item, Int32(0)
        for k in cutlass.range(count, unroll=1):
            if k % 32 == 0:  # a new block: its facts have arrived, the next block's set out
                own = item
                slots, cursors = self.store_facts(s, facts, null_block_id, own, (k + lane) % FACTS)
                item = cutlass.min(first + (k + 32 + lane) * step, items - 1)
                if const_expr(self.sorts):
                    if k > 0:
                        item = self.moved(s, deal, costly, item)
                facts = self.load_facts(*sources, item)
            if const_expr(self.sorts):
                if k == self.stages:  # the copies of the first items have set out
                    costly = self.sort_rows(s, deal, lane)
                    own = self.moved(s, deal, costly, cutlass.min(first + lane * step, items - 1))
                    item = self.moved(s, deal, costly, cutlass.min(first + (32 + lane) * step, items - 1))
                    moved, facts = self.load_facts(*sources, own), self.load_facts(*sources, item)
                    if lane >= self.stages:
                        slots, cursors = self.store_facts(s, moved, null_block_id, own, lane)
            slot = cute.arch.shuffle_sync(slots, k % 32)
            pos = cute.arch.shuffle_sync(cursors, k % 32)
            taken = cute.arch.shuffle_sync(own, k % 32) if const_expr(self.sorts) else first + k * step
            stage = k % self.stages
            if k >= self.stages:
                cute.arch.mbarrier_wait(s.empty + stage, ((k // self.stages) & 1) ^ 1)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                if slot >= 0:
                    b, h, tile = self.split(taken)
                    self.copy_item(s, mState, mScale, mX, mB, mC, mXc, mDtc, mBc, b, h, tile, stage, Int64(slot), pos)
                else:
                    cute.arch.mbarrier_arrive(s.window + stage)
                    cute.arch.mbarrier_arrive(s.full + stage)
        if const_expr(self.config.pdl):  # all that is left is to drain
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def copy_item(self, s, mState, mScale, mX, mB, mC, mXc, mDtc, mBc, b, h, tile, stage, slot, pos):
        """Issue the bulk copies of one item; the current token lands right behind the ring rows."""
        g, window = h // self.ratio, s.window + stage
        policy = None
        if const_expr(self.config.evict_first):
            policy = Int64(EVICT_FIRST)
        x_row, b_row = self.P * self.input_bytes, self.N * self.input_bytes
        scale_bytes = 4 * self.tile_p if self.coded else 0
        cute.arch.mbarrier_arrive_and_expect_tx(s.full + stage, self.state_bytes + scale_bytes)
        bulk_load(s.state[None, None, stage], mState[slot, h, tile * self.tile_p, None],
                  Int32(self.state_bytes), s.full + stage, policy)
        if const_expr(self.coded):
            bulk_load(s.row_scale[None, stage], cute.local_tile(mScale[slot, h, None], (self.tile_p,), (tile,)),
                      Int32(scale_bytes), s.full + stage)
        cute.arch.mbarrier_arrive_and_expect_tx(window, (pos + 1) * (x_row + b_row) + b_row + self.L * 4)
        bulk_load(s.dt[None, stage], mDtc[slot, h, None], Int32(self.L * 4), window)
        if pos > 0:  # a bulk copy of no bytes is invalid
            bulk_load(s.B[None, stage], mBc[slot, g, None, None], pos * b_row, window)
            bulk_load(s.x[None, None, stage], mXc[slot, h, None, None], pos * x_row, window)
        bulk_load(self.b_row(s, pos, stage), mB[b, g, None], Int32(b_row), window)
        bulk_load(s.x[None, pos, stage], mX[b, h, None], Int32(x_row), window)
        bulk_load(s.C[None, stage], mC[b, g, None], Int32(b_row), window)


class Mamba2CodedKernel(Mamba2BulkKernel):
    """The same of an 8-bit checkpoint, whose scales (slots, H, P) are one argument more."""

    @cute.jit
    def __call__(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                 mIndices, null_block_id: Int32, mOut, mSeed, mScale, stream):
        self.launch(mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                    mIndices, null_block_id, mOut, mSeed, mScale, stream)


def load_relaxed(pointer):
    """An integer of 32 or 64 bits from L2, past L1."""
    width = pointer.dtype.width
    return cute.arch.inline_ptx(f"ld.relaxed.gpu.global.s{width} {{$w0}}, [{{$r0}}];",
                                write_only_types=[pointer.dtype], read_only_args=[pointer])


def bulk_prefetch(src, nbytes):
    """Global -> L2 prefetch of ``nbytes`` (16-byte multiples)."""
    cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[src.iterator, nbytes])


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
