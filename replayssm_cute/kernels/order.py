"""In which order the CTAs of a persistent kernel take items where some rows cost more than others.

A row that flushes with stochastic rounding or folds exactly takes its CTA a microsecond or several longer for each
item. Dealt round robin as they come, the luckless CTAs get several of them where one is the mean, or theirs last, and
the launch waits. So every CTA reads the flags of all rows, takes its share of the costly items and its share of the
rest, and mixes the two evenly. Only the order in which items are computed depends on this, no result.

The first items of a CTA, one for each of its stages, keep their places, so that their copies set out before the flags
are sorted; so do all items of the rows that they belong to.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from replayssm_cute.kernels.targets import SORTED_ROWS


class Order:
    """Mixin of persistent kernels. They define

    * ``row_items``  items of a batch row; ``stages``; ``stagger(first, left)``, an offset in 0 .. left - 1: CTAs that
      differ in it take the costly ones of their ``left`` items at different times;
    * ``s.flags``, ``s.rows``  SORTED_ROWS Int32 each in shared memory, the former filled in for the rows that move.
    """

    def deal(self, batch, first, step, count):
        """What sorting needs to know; the rows from ``head`` on move, none where they are more than fit.

        Args:
            first, step, count: unsorted, the items of this CTA are ``first`` + k ``step`` for k < ``count``.
        """
        head = (self.stages * step + self.row_items - 1) // self.row_items
        head = Int32(cutlass.select_(batch - head <= SORTED_ROWS, cutlass.min(head, batch), batch))
        start = head * self.row_items                                   # the first item that moves
        skipped = (start - first + step - 1) // step                    # of this CTA's
        left = cutlass.max(count - skipped, Int32(1))
        return SimpleNamespace(head=head, rows=batch - head, step=step, start=start, left=left,
                               first=first + skipped * step - start, offset=self.stagger(first, left))

    @cute.jit
    def sort_rows(self, s, deal, lane):
        """Costly rows from the front of the order on, the others from its back. One warp.

        Returns:
            How many of the items that come to this CTA are costly.
        """
        flags, rows = s.flags, s.rows
        front, back, below = Int32(0), deal.rows - 1, (Int32(1) << lane) - 1
        for first in cutlass.range(0, deal.rows, 32, unroll=1):
            i, flag = first + lane, Int32(-1)
            if i < deal.rows:
                flag = Int32(flags[i] != 0)
            costly, others = cute.arch.vote_ballot_sync(flag > 0), cute.arch.vote_ballot_sync(flag == 0)
            if flag > 0:
                rows[front + cute.arch.popc(Int32(costly) & below)] = deal.head + i
            if flag == 0:
                rows[back - cute.arch.popc(Int32(others) & below)] = deal.head + i
            front, back = front + cute.arch.popc(costly), back - cute.arch.popc(others)
        cute.arch.sync_warp()
        mine = (front * self.row_items - deal.first + deal.step - 1) // deal.step
        return cutlass.min(cutlass.max(mine, Int32(0)), deal.left)

    @cute.jit
    def moved(self, s, deal, costly, item):
        """The item that this CTA takes in the place of its ``item``, once the rows are sorted; any for another's."""
        if item >= deal.start:
            k = cutlass.min((item - deal.start) // deal.step, deal.left - 1)
            before = (k * costly + deal.offset) // deal.left
            after = ((k + 1) * costly + deal.offset) // deal.left
            k = Int32(cutlass.select_(after > before, before, costly + k - before))
            place = cutlass.min(deal.first + k * deal.step, deal.rows * self.row_items - 1)
            item = s.rows[place // self.row_items] * self.row_items + place % self.row_items
        return item
