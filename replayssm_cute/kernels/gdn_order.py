"""In which order the CTAs of the staged kernel take items where some rows fold exactly.

An exact fold takes an item several times as long as a verify alone. Dealt round robin as they come, the luckless of 264
CTAs get some 17 folds of 31 items where 10 are the mean, and all others wait for them: 182 us instead of 143 at batch
256. So every CTA first reads the flags of all rows, takes its share of the folding items and its share of the rest, and
mixes the two evenly. Only the order in which items are computed depends on this, no result.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

SORTED_ROWS = 512          # batch rows whose order fits the kernel's shared memory; larger batches keep theirs


class Order:
    """Mixin of the staged kernel."""

    @cute.jit
    def read_flags(self, s, mSlots, mKeys, mFlush, null_block_id, batch, tid):
        """Which rows will fold, into shared memory; all threads of the CTA."""
        flags = s.flags
        for b in cutlass.range(tid, batch, self.threads, unroll=1):
            slot, key, flag = Int32(mSlots[b]), Int32(mKeys[b]), Int32(0)
            if slot >= 0 and slot != null_block_id and key >= 0 and key != null_block_id:
                flag = Int32(mFlush[key])
            flags[b] = flag

    @cute.jit
    def sort_rows(self, s, batch, lane):
        """Rows that fold from the front of the order on, the others from its back; returns how many fold. One warp."""
        flags, rows = s.flags, s.rows
        front, back, below = Int32(0), batch - 1, (Int32(1) << lane) - 1
        for first in cutlass.range(0, batch, 32, unroll=1):
            b, flag = first + lane, Int32(-1)
            if b < batch:
                flag = flags[b]
            folding, others = cute.arch.vote_ballot_sync(flag > 0), cute.arch.vote_ballot_sync(flag == 0)
            if flag > 0:
                rows[front + cute.arch.popc(Int32(folding) & below)] = b
            if flag == 0:
                rows[back - cute.arch.popc(Int32(others) & below)] = b
            front, back = front + cute.arch.popc(folding), back - cute.arch.popc(others)
        cute.arch.sync_warp()
        return front

    @cute.jit
    def order_items(self, s, batch, first, step, count, lane):
        """What ``locate`` needs. Unsorted, item k of a CTA is ``first`` + k ``step``."""
        folds, sorted_rows = Int32(0), Int32(0)
        if const_expr(self.exact):
            if batch <= SORTED_ROWS:
                sorted_rows = Int32(1)
                folding = self.sort_rows(s, batch, lane) * (self.HV * self.tiles_v)
                folds = cutlass.min(cutlass.max((folding - first + step - 1) // step, Int32(0)), count)
        return SimpleNamespace(first=first, step=step, count=count, folds=folds, sorted=sorted_rows,
                               # CTAs that share a multiprocessor fold at different times.
                               offset=first // self.sms % self.config.min_ctas * count // self.config.min_ctas)

    @cute.jit
    def locate(self, s, order, k):
        """(batch row, head, tile) of the k-th item of this CTA, or of its last one."""
        k = cutlass.min(k, order.count - 1)
        if const_expr(self.exact):
            before = (k * order.folds + order.offset) // order.count
            folds = ((k + 1) * order.folds + order.offset) // order.count > before
            k = Int32(cutlass.select_(folds, before, order.folds + k - before))
        item = order.first + k * order.step
        b = item // (self.HV * self.tiles_v)
        if const_expr(self.exact):
            if order.sorted != 0:
                b = s.rows[b]
        return b, item // self.tiles_v % self.HV, item % self.tiles_v
