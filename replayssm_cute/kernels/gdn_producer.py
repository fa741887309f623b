"""The producer warp of the staged kernel: facts of the rows, bulk copies, gates and weights.

What an item needs to know of its row is read for 32 items at once, one block ahead, and its gates one item ahead, so
that no item waits for a load from global memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from replayssm_cute.kernels import device
from replayssm_cute.kernels.gdn_gates import exp, gates
from replayssm_cute.kernels.mamba2_bulk import EVICT_FIRST, bulk_load

SLOT, KEY, POS, BASE, FLUSH, START, COUNT, HEAD, TILE_V = range(9)     # an item's integers
FACTS = 7                                      # those that are a row's: up to COUNT
PADDED, SKIPPED = -1, -2                       # slots of rows that are padding, or not of this launch
GATE, BETA = range(2)


class Producer:
    """Mixin of the staged kernel."""

    @cute.jit
    def load_facts(self, mStarts, mSlots, mKeys, mPos, mBase, mFlush, null_block_id, b):
        """The facts of batch row b, Int32 each, in their order."""
        slot = Int32(mSlots[b])
        key, start, count, base, forced = slot, b, Int32(1), Int32(0), Int32(0)
        if const_expr(self.spec):
            key, start = Int32(mKeys[b]), mStarts[b]
            count = mStarts[b + 1] - start
        pos = Int32(0)
        if const_expr(not self.spec):  # kept by batch row: they need not wait for the slot
            pos = mPos[b]
            if const_expr(mFlush is not None):
                forced = Int32(mFlush[b])
            forced = forced | Int32(pos == self.L - 1)
        if slot == null_block_id or slot < 0 or key == null_block_id or key < 0:
            slot = Int32(PADDED)
        if const_expr(self.spec):
            if slot >= 0:
                pos, base, forced = mPos[key], mBase[key], Int32(mFlush[key])
        if const_expr(self.problem.launch_mode != "both"):
            if slot >= 0 and (forced != 0) != (self.problem.launch_mode == "flush"):
                slot = Int32(SKIPPED)
        return slot, key, pos, base, forced, start, count

    @cute.jit
    def load_gates(self, mA, mB, mAlog, mBias, mGc, mBeta, facts, h, lane):
        """What the gates of an item are made of, as loaded: the lane's token, and the lane's record."""
        slot, key, pos, base, _, start, count = facts
        token = cutlass.min(start + cutlass.max(cutlass.min(lane, count - 1), 0), mA.shape[0] - 1)
        old_g, old_beta = Float32(0.0), Float32(0.0)
        if slot >= 0 and lane < pos:
            row = self.ring_row(base, lane)
            old_g = mGc[Int64(key), h, row]
            if const_expr(self.exact):
                old_beta = mBeta[Int64(key), h, row]
        return mA[token, h], mB[token, h], mAlog[h], mBias[h], old_g, old_beta

    @cute.jit
    def store_gates(self, s, raw, facts, stage, lane):
        """Gates of the window, weights of the records, and what an exact fold takes of them, into the stage."""
        a, b, A_log, dt_bias, old_g, old_beta = raw
        _, _, pos, _, _, _, count = facts
        gates_of, weights, decays = s.gates, s.weight, s.decay
        g, beta = gates(a.to(Float32), b.to(Float32), A_log.to(Float32), dt_bias.to(Float32))
        if lane < self.T:
            gates_of[lane, GATE, stage] = device.select(lane < count, g, Float32(0.0))
            gates_of[lane, BETA, stage] = device.select(lane < count, beta, Float32(0.0))
        later, total = device.suffix_sums([old_g], lane, self.L)
        weights[lane, stage] = device.select(lane < pos, exp(later[0]), Float32(0.0))
        if lane == 0:
            decays[stage] = exp(total)
        if const_expr(self.exact):
            fold_decay, fold_beta = s.fold_decay, s.fold_beta
            fold_decay[lane, stage], fold_beta[lane, stage] = exp(old_g), old_beta

    @cute.jit
    def store_facts(self, s, facts, h, tile, stage):
        """The item's integers into the stage; one lane."""
        ints = s.ints
        for i in cutlass.range_constexpr(FACTS):
            ints[i, stage] = facts[i]
        ints[HEAD, stage], ints[TILE_V, stage] = h, tile

    @cute.jit
    def produce(self, s, mState, mQ, mK, mV, mA, mB, mAlog, mBias, mDc, mKc, mGc, mRv, mRk, mBeta, rows, first, step,
                count, block, deal, lane):
        """``block``: the facts of the lane's item of the first 32."""
        inputs = (mA, mB, mAlog, mBias, mGc, mBeta)
        own = self.item(first, step, count, lane)
        ahead, later, costly = block, own, Int32(0)
        facts = [cute.arch.shuffle_sync(f, 0) for f in block]
        h, tile = self.place(own, first, step, count, 0)
        raw = self.load_gates(*inputs, facts, h, lane)
        for k in cutlass.range(count, unroll=1):
            stage = k % self.stages
            if k >= self.stages:
                cute.arch.mbarrier_wait(s.empty + stage, ((k // self.stages) & 1) ^ 1)
            cute.arch.sync_warp()
            self.copy_item(s, mState, mQ, mK, mV, mDc, mKc, mRv, mRk, facts, h, tile, stage, lane)
            if k % 32 == 0:
                later = self.item(first, step, count, k + 32 + lane)
                if const_expr(self.exact):
                    if k > 0:
                        later = self.moved(s, deal, costly, later)
                ahead = self.load_facts(*rows, later // self.row_items)
            self.store_gates(s, raw, facts, stage, lane)
            if lane == 0:
                self.store_facts(s, facts, h, tile, stage)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(s.full + stage, self.item_bytes(facts))
            if (k + 1) % 32 == 0:
                block, own = ahead, later
            if const_expr(self.exact):
                if k + 1 == self.stages:  # the copies of the first items have set out
                    cute.arch.mbarrier_wait(s.flagged, 0)
                    costly = self.sort_rows(s, deal, lane)
                    own = self.moved(s, deal, costly, self.item(first, step, count, lane))
                    later = self.moved(s, deal, costly, self.item(first, step, count, 32 + lane))
                    block = self.load_facts(*rows, own // self.row_items)
                    ahead = self.load_facts(*rows, later // self.row_items)
            facts = [cute.arch.shuffle_sync(f, (k + 1) % 32) for f in block]
            h, tile = self.place(own, first, step, count, k + 1)
            raw = self.load_gates(*inputs, facts, h, lane)
        if const_expr(self.config.pdl):  # all that is left is to drain
            cute.arch.griddepcontrol_launch_dependents()

    def item(self, first, step, count, k):
        """The k-th item of this CTA, unsorted, or its last one."""
        return first + cutlass.min(k, count - 1) * step

    def place(self, own, first, step, count, k):
        """(head, tile) of the k-th item of this CTA; sorted, it is ``own`` of lane k modulo 32."""
        item = cute.arch.shuffle_sync(own, k % 32) if self.exact else self.item(first, step, count, k)
        return item // self.tiles_v % self.HV, item % self.tiles_v

    def item_bytes(self, facts):
        """Bytes that the copies of an item bring."""
        slot, _, pos, _, flush, _, count = facts
        state, record = self.tile_v * self.K * self.state_dtype.width // 8, self.ring_bytes * (self.K + self.V)
        if const_expr(self.exact and self.ring_dtype is not self.act_dtype):
            record = Int32(cutlass.select_(flush != 0, Int32(2 * (self.K + self.V)), Int32(record)))
        live = state + pos * record + count * (4 * self.K + 2 * self.tile_v)
        return Int32(cutlass.select_(slot >= 0, live, Int32(0)))

    @cute.jit
    def copy_item(self, s, mState, mQ, mK, mV, mDc, mKc, mRv, mRk, facts, h, tile, stage, lane):
        """Issue the copies of a live item: one lane those of the slot, the lanes of the tokens those of the window."""
        slot, key, pos, base, flush, start, count = facts
        full, hk = s.full + stage, h // self.ratio
        if slot >= 0:
            if lane == 0:
                policy = Int64(EVICT_FIRST) if const_expr(self.config.evict_first) else None
                bulk_load(s.state[None, None, stage], mState[Int64(slot), h, tile * self.tile_v, None],
                          Int32(self.tile_v * self.K * self.state_dtype.width // 8), full, policy)
                if const_expr(self.exact):
                    if flush != 0:
                        self.copy_records(s.raw_k, s.raw_v, full, mRk, mRv, Int64(key), h, hk, base, pos, stage)
                    else:
                        self.copy_records(s.k, s.d, full, mKc, mDc, Int64(key), h, hk, base, pos, stage)
                else:
                    self.copy_records(s.k, s.d, full, mKc, mDc, Int64(key), h, hk, base, pos, stage)
            if lane < count:
                token = start + lane
                bulk_load(s.z[None, lane, stage], mQ[token, hk, None], Int32(2 * self.K), full)
                bulk_load(s.z[None, self.T + lane, stage], mK[token, hk, None], Int32(2 * self.K), full)
                bulk_load(s.v[None, lane, stage], cute.local_tile(mV[token, h, None], (self.tile_v,), (tile,)),
                          Int32(2 * self.tile_v), full)

    @cute.jit
    def copy_records(self, keys, values, full, mRingK, mRingV, key, h, hk, base, pos, stage):
        """The ``pos`` records behind ``base`` in their order: what lies behind the ring's end comes from its front."""
        k_bytes, v_bytes = (n * keys.element_type.width // 8 for n in (self.K, self.V))
        front = pos
        if const_expr(self.spec):
            front = cutlass.min(pos, self.L - base)
        if front > 0:  # a bulk copy of no bytes is invalid
            bulk_load(keys[None, 0, stage], mRingK[key, hk, base, None], front * k_bytes, full)
            bulk_load(values[None, 0, stage], mRingV[key, h, base, None], front * v_bytes, full)
        if const_expr(self.spec):
            if pos > front:
                bulk_load(keys[None, front, stage], mRingK[key, hk, 0, None], (pos - front) * k_bytes, full)
                bulk_load(values[None, front, stage], mRingV[key, h, 0, None], (pos - front) * v_bytes, full)
