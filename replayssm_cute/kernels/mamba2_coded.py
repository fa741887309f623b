"""The flush of an 8-bit checkpoint in the bulk kernel.

A row's scale depends on the whole row, whose new values would not fit the registers. So they are computed
twice: first for the largest one and for the output, then to be rounded and stored.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, Uint64

from replayssm_cute.kernels import codes, device, mma
from replayssm_cute.kernels.mamba2_stage import DECAY, HEAD, SLOT, TILE, WARP_ROWS
from replayssm_cute.rounding import LARGEST_CODE


class CodedConsumer:
    """Mixin of the bulk kernel; see ``Consumer.flush`` for how columns are dealt to lanes."""

    @cute.jit
    def flush_codes(self, s, mState, mScale, dice, stage, m, pos, lane, warp):
        """Fold the window into the checkpoint; (y, row of the warp, this lane holds it)."""
        g, q = lane // 4, lane % 4
        row = warp * WARP_ROWS + g
        slot, head, first = Int64(s.ints[SLOT, m]), s.ints[HEAD, m], s.ints[TILE, m] * self.tile_p
        window = [self.scaled_x(s, stage, m, t, pos, lane, warp) for t in range(self.entries // 16)]
        dots, largest = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Uint32)
        dots.fill(0.0)
        largest.fill(0)
        for c in cutlass.range(self.N // mma.K_BLOCK, unroll=1):
            new = self.new_values(s, stage, window, c, row, lane)
            C = self.eight(s.C[None, stage], c * (mma.K_BLOCK // mma.CHUNK) + q, self.act_dtype)
            for half in cutlass.range_constexpr(2):
                dots[half] = dots[half] + device.dot(new[half], C, self.packed)
                for value in new[half]:
                    largest[half] = cutlass.max(largest[half], codes.magnitude(value))
        scales = [self.scale_of(largest[half]) for half in range(2)]
        gState = cute.recast_tensor(mState[slot, head, None, None], cutlass.Int8)
        for c in cutlass.range(self.N // mma.K_BLOCK, unroll=1):
            new = self.new_values(s, stage, window, c, row, lane)
            words = self.words_of_block(dice, slot, head, first + row, c, q)
            for half in cutlass.range_constexpr(2):
                _, reciprocal, mask = scales[half]
                at = c * (mma.K_BLOCK // mma.CHUNK) + q
                self.store_codes(cute.local_tile(gState[first + row + 8 * half, None], (8,), (at,)),
                                 [v * reciprocal for v in new[half]],
                                 None if words is None else words[2 * half:2 * half + 2], mask)
        if q == 0:
            for half in cutlass.range_constexpr(2):
                mScale[slot, head, first + row + 8 * half] = scales[half][0]
        sums, offset, owner = device.reduce_scatter([dots[0], dots[1]], q, (1, 2))
        return sums[0], g + 8 * offset, owner

    def new_values(self, s, stage, window, c, row, lane):
        """Eight new values each of rows ``row`` and ``row`` + 8 of the tile in columns block c."""
        delta, at = self.window_product(s, stage, window, c, lane), c * (mma.K_BLOCK // mma.CHUNK) + lane % 4
        new, decay = [], s.scales[DECAY, stage]
        for half in range(2):
            old = self.decoded(s.state[None, row + 8 * half, stage], at, s.row_scale[row + 8 * half, stage])
            new.append([old[4 * e + t] * decay + delta[t][2 * half + e] for e in range(2) for t in range(4)])
        return new

    def decoded(self, row, at, scale):
        """Eight neighbours of a row of codes, as Float32."""
        fragment = cute.make_rmem_tensor((8,), row.element_type)
        cute.autovec_copy(cute.local_tile(row, (8,), (at,)), fragment)
        packed, halves = cute.recast_tensor(fragment, Uint32), cute.make_rmem_tensor((8,), cutlass.Float16)
        words = cute.recast_tensor(halves, Uint32)
        for i, word in enumerate(codes.to_fp16([packed[0], packed[1]], self.signed)):
            words[i] = word
        return [v * scale for v in device.to_f32(halves, 8)]

    def scale_of(self, largest):
        """``codes.row_scale`` of a row of which four neighbouring lanes hold a share each."""
        for stride in (1, 2):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, stride))
        return codes.row_scale(largest, LARGEST_CODE[self.problem.state_dtype])

    def words_of_block(self, dice, slot, head, row, c, q):
        """Two random words for the lane's eight columns of block c in ``row``, and two in ``row`` + 8; or None.

        A call serves 16 neighbours, those of lanes q and q ^ 1: the even lane makes the call of the first
        row, the odd one that of the second, and they swap halves.
        """
        if not self.stochastic:
            return None
        odd = q % 2
        words = dice.words(dice.call_of(slot, head, row + 8 * odd) + Uint64(2 * c + q // 2))
        own = [Uint32(cutlass.select_(odd == 1, words[2 + i], words[i])) for i in range(2)]
        given = [Uint32(cutlass.select_(odd == 1, words[i], words[2 + i])) for i in range(2)]
        taken = [cute.arch.shuffle_sync_bfly(w, 1) for w in given]
        return [Uint32(cutlass.select_(odd == half, a, b)) for half in range(2) for a, b in zip(own, taken)]

    def store_codes(self, tile, values, words, mask):
        """Round eight values over their scale and store the codes."""
        fragment = cute.make_rmem_tensor((8,), cutlass.Int8)
        packed = cute.recast_tensor(fragment, Uint32)
        for i, word in enumerate(codes.encode(values, words, self.signed, self.hardware_rounding)):
            packed[i] = word & mask
        cute.autovec_copy(fragment, tile)
