"""The consumer warps of the bulk kernel: 16 state rows each, no barrier among them.

Without a flush a warp multiplies its rows with C (tensor cores for a 2-byte state, FFMA for an fp32
one) and adds the window's x rows under the scorer's weights. With a flush it folds the window into
its rows on the tensor cores: s_j x_j, split into three bf16 parts, times B_j; the checkpoint joins in
fp32 afterwards, so that it is rounded once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from replayssm_cute.kernels import device, mma
from replayssm_cute.kernels.mamba2_stage import C_SCALE, DECAY, FACTS, FLUSH, HEAD, POS, ROW, SLOT, TILE, WARP_ROWS, D
from replayssm_cute.kernels.mamba2_tile import LANE_BITS


class Consumer:
    """Mixin of the bulk kernel."""

    @cute.jit
    def consume(self, s, mState, mScale, mD, mZ, mOut, dice, count, lane, warp):
        for k in cutlass.range(count, unroll=1):
            stage, phase, m = k % self.stages, (k // self.stages) & 1, k % FACTS
            cute.arch.mbarrier_wait(s.window + stage, phase)
            cute.arch.mbarrier_wait(s.full + stage, phase)
            if s.ints[SLOT, m] >= 0:
                pos = s.ints[POS, m]
                y, row, mine = Float32(0.0), Int32(0), cutlass.Boolean(False)
                if s.ints[FLUSH, m] == 0:
                    if const_expr(self.state_dtype.width < 32):
                        y, row, mine = self.replay_half(s, stage, phase, m, pos, lane, warp)
                    else:
                        y, row, mine = self.replay_full(s, stage, phase, m, pos, lane, warp)
                else:
                    cute.arch.mbarrier_wait(s.scored + stage, phase)
                    if const_expr(self.coded):
                        y, row, mine = self.flush_codes(s, mState, mScale, dice, stage, m, pos, lane, warp)
                    else:
                        y, row, mine = self.flush(s, mState, dice, stage, m, pos, lane, warp)
                if mine:
                    self.store_output(s, mD, mZ, mOut, stage, m, pos, y, warp * WARP_ROWS + row)
            cute.arch.sync_warp()  # the whole warp has read its part of the stage
            if lane == 0:
                cute.arch.mbarrier_arrive(s.empty + stage)

    @cute.jit
    def store_output(self, s, mD, mZ, mOut, stage, m, pos, y, row):
        """Skip connection, gate, and the store of one output element."""
        b, h = s.ints[ROW, m], s.ints[HEAD, m]
        p = s.ints[TILE, m] * self.tile_p + row
        skip = gate = None
        if const_expr(mD is not None):
            skip = s.floats[D, m] if const_expr(self.problem.D_tied) else mD[h, p].to(Float32)
        if const_expr(mZ is not None):
            gate = mZ[b, h, p].to(Float32)
        y = self.finish(y, s.x[p, pos, stage].to(Float32), skip, gate)
        mOut[b, h, p] = y.to(self.act_dtype)

    # ---- without a flush --------------------------------------------------------------------------

    @cute.jit
    def replay_half(self, s, stage, phase, m, pos, lane, warp):
        """Output rows of a 2-byte state or of codes; (y, row of the warp, this lane holds it)."""
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
            low = device.select(q < 2, sums[1], sums[3]) * float(2.0 ** -mma.LOW_SHIFT)
            checkpoint = (checkpoint + low) * s.scales[C_SCALE, stage]
        if const_expr(self.coded):
            checkpoint = checkpoint * s.row_scale[first + 8 * (q // 2), stage]
        ring = self.ring_rows(s, stage, m, pos, lane, warp)
        y = checkpoint * s.scales[DECAY, stage] + device.select(q < 2, ring[0], ring[1])
        return y, g + 8 * (q // 2), (q % 2) == (g % 2)

    @cute.jit
    def replay_full(self, s, stage, phase, m, pos, lane, warp):
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
        ring = self.ring_rows(s, stage, m, pos, lane, warp)
        row = group * self.rows + offset
        holder = (row % 8) * 4
        ring = device.select(row < 8, cute.arch.shuffle_sync(ring[0], holder),
                             cute.arch.shuffle_sync(ring[1], holder))
        return sums[0] * s.scales[DECAY, stage] + ring, row, owner

    def ring_rows(self, s, stage, m, pos, lane, warp):
        """sum_j w_j x_j of rows g and g + 8 of the warp, in every lane of g."""
        g, q = lane // 4, lane % 4
        sums = mma.zeros()
        for t in range(self.entries // 16):
            x = self.x_block(s, stage, m, t, pos, lane, warp)
            # Even columns take the high part and then the low one, odd columns the middle one.
            low = [Uint32(cutlass.select_(g % 2 == 0, w, Uint32(0))) for w in self.weight_pair(s, stage, 2, t, q)]
            sums = mma.mma(self.act_dtype, x, low, sums)
            sums = mma.mma(self.act_dtype, x, self.weight_pair(s, stage, g % 2, t, q), sums)
        return sums[0] + sums[1], sums[2] + sums[3]

    def x_block(self, s, stage, m, t, pos, lane, warp):
        """x of ring entries 16 t .. 16 t + 15 for the warp's rows, as the left operand x^T.

        Rows past the window have weight 0; they are read as the current token's.
        """
        column = s.ints[TILE, m] * self.tile_p + warp * WARP_ROWS + lane // 8 % 2 * 8
        j = cutlass.min(16 * t + lane // 16 * 8 + lane % 8, pos)
        return mma.load_transposed(s.x[None, j, stage].iterator + column)

    def weight_pair(self, s, stage, part, t, q):
        """Weights of entries 2q, 2q+1 and 2q+8, 2q+9 of block t, packed."""
        pairs = []
        for half in range(2):
            fragment = cute.make_rmem_tensor((2,), self.act_dtype)
            cute.autovec_copy(cute.local_tile(s.w_part[None, part, stage], (2,), (8 * t + 4 * half + q,)),
                              fragment)
            pairs.append(cute.recast_tensor(fragment, Uint32)[0])
        return pairs

    # ---- flush ------------------------------------------------------------------------------------

    @cute.jit
    def flush(self, s, mState, dice, stage, m, pos, lane, warp):
        """Fold the window into the checkpoint; (y, row of the warp, this lane holds it).

        A block of 32 columns is four products wide. Column 2q + e of product t is column
        8 q + 4 e + t of the block: a lane then holds eight neighbours of a row, which one load and
        one store move, and finds the four products' right operands side by side.
        """
        g, q = lane // 4, lane % 4
        row = warp * WARP_ROWS + g
        slot, head = Int64(s.ints[SLOT, m]), s.ints[HEAD, m]
        call = 0
        if const_expr(self.stochastic):
            call = dice.call_of(slot, head, s.ints[TILE, m] * self.tile_p + row)
        gState = cute.local_tile(mState[slot, head, None, None], (self.tile_p, self.N), (s.ints[TILE, m], 0))
        blocks = [self.scaled_x(s, stage, m, t, pos, lane, warp) for t in range(self.entries // 16)]
        decay = s.scales[DECAY, stage]
        dots = cute.make_rmem_tensor((2,), Float32)
        dots.fill(0.0)
        for c in cutlass.range(self.N // mma.K_BLOCK, unroll=1):  # unrolled, it spills at P = 80
            early = [self.random_words(dice, call, half, c, q, True) for half in range(2)]
            delta = self.window_product(s, stage, blocks, c, lane)
            at = c * (mma.K_BLOCK // mma.CHUNK) + q
            C = self.eight(s.C[None, stage], at, self.act_dtype)
            for half in cutlass.range_constexpr(2):
                old = self.eight(s.state[None, row + 8 * half, stage], at, self.state_dtype)
                new = [old[4 * e + t] * decay + delta[t][2 * half + e] for e in range(2) for t in range(4)]
                words = early[half]
                if const_expr(not self.hardware_rounding):
                    words = self.random_words(dice, call, half, c, q, False)
                cute.autovec_copy(self.rounded(new, words), cute.local_tile(gState[row + 8 * half, None], (8,), (at,)))
                dots[half] = dots[half] + device.dot(new, C, self.packed)
        sums, offset, owner = device.reduce_scatter([dots[0], dots[1]], q, (1, 2))
        return sums[0], g + 8 * offset, owner

    def random_words(self, dice, call, half, c, q, early):
        """Four words for the lane's eight columns of block c; None where it rounds to nearest, or at the other time.

        Drawn before the products they fit the registers of 10.x; behind them is how they were timed on 9.0.
        """
        if not self.stochastic or early != self.hardware_rounding:
            return None
        return dice.words(call + half * self.N, c * (mma.K_BLOCK // mma.CHUNK) + q)    # N calls: eight rows of N / 8

    def scaled_x(self, s, stage, m, t, pos, lane, warp):
        """(s_j x_j)^T of a block of 16 entries for the warp's rows, in bf16 parts."""
        q = lane % 4
        x = mma.unpack(self.x_block(s, stage, m, t, pos, lane, warp))
        pairs = [device.load_f32(cute.local_tile(s.weight[None, stage], (2,), (8 * t + 4 * half + q,)), 2, Float32)
                 for half in range(2)]
        weights = pairs[0] * 2 + pairs[1] * 2
        return mma.split_packed([a * b for a, b in zip(x, weights)])

    def window_product(self, s, stage, blocks, c, lane):
        """sum_j (s_j x_j) B_j^T over 32 columns: four products of 16 rows and 8 columns."""
        g, q = lane // 4, lane % 4
        pairs = cute.recast_tensor(s.B[None, stage], Uint32)
        delta = [mma.zeros() for _ in range(4)]
        for t, parts in enumerate(blocks):
            rows = []
            for half in range(2):
                fragment = cute.make_rmem_tensor((4,), Uint32)
                row = cute.local_tile(pairs, (self.N + 8,), (8 * t + 4 * half + q,))
                cute.autovec_copy(cute.local_tile(row, (4,), (c * (mma.K_BLOCK // 4) + g,)), fragment)
                rows.append(fragment)
            for n in range(4):
                for part in reversed(parts):  # the small parts first
                    delta[n] = mma.mma(self.act_dtype, part, (rows[0][n], rows[1][n]), delta[n])
        return delta

    def eight(self, row, at, dtype):
        """Eight neighbours of a row in shared memory, as Float32."""
        return device.load_f32(cute.local_tile(row, (8,), (at,)), 8, dtype)
