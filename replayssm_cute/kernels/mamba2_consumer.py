"""The consumer warps of the bulk kernel: operands out of shared memory, no barrier among the warps."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from replayssm_cute.kernels import device, mma
from replayssm_cute.kernels.mamba2_stage import C_SCALE, DECAY, FACTS, FLUSH, HEAD, POS, ROW, SLOT, TILE, D
from replayssm_cute.kernels.mamba2_warp import FULL_ROWS, WARP_ROWS


class Consumer:
    """Mixin of the bulk kernel."""

    @cute.jit
    def consume(self, s, mState, mD, mZ, mOut, dice, count, lane, warp):
        for k in cutlass.range(count, unroll=1):
            stage, phase, m = k % self.stages, (k // self.stages) & 1, k % FACTS
            cute.arch.mbarrier_wait(s.window + stage, phase)
            cute.arch.mbarrier_wait(s.full + stage, phase)
            if s.ints[SLOT, m] >= 0:
                pos = s.ints[POS, m]
                y, row, mine = Float32(0.0), Int32(0), cutlass.Boolean(False)
                if s.ints[FLUSH, m] == 0:
                    if const_expr(self.half):
                        y = self.replay_half(s, stage, phase, m, pos, lane, warp)
                        row, mine = self.half_row(lane)
                    else:
                        y = self.replay_full(s, stage, phase, m, pos, lane, warp)
                        row, mine = self.full_row(lane)
                else:
                    cute.arch.mbarrier_wait(s.scored + stage, phase)
                    y = self.flush(s, mState, dice, stage, m, pos, lane, warp)
                    row, mine = self.fold_row(lane)
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
        """Output rows of a 2-byte state."""
        g, q = lane // 4, lane % 4
        vector = s.C[None, stage]
        if const_expr(self.c_parts > 1):
            cute.arch.mbarrier_wait(s.scored + stage, phase)
            vector = s.c_part[None, g % 2, stage]
        low, high = (s.state[None, warp * WARP_ROWS + g + 8 * i, stage] for i in range(2))
        row_swap, column_swap = g % 2, g // 2 % 2
        sums = self.half_dots(lambda k: mma.packed(low, mma.chunk_of(k, row_swap, q)),
                              lambda k: mma.packed(high, mma.chunk_of(k, row_swap, q)),
                              lambda k: mma.packed(vector, mma.chunk_of(k, column_swap, q)))
        if const_expr(self.c_parts == 1):
            cute.arch.mbarrier_wait(s.scored + stage, phase)
        ring = self.window(s, stage, m, pos, lane, warp)
        return self.half_output(sums, s.scales[C_SCALE, stage], s.scales[DECAY, stage], ring, lane)

    @cute.jit
    def replay_full(self, s, stage, phase, m, pos, lane, warp):
        """Output rows of an fp32 state."""
        r, group = lane % 8, lane // 8
        # Half of the lanes begin with the second half of a piece: no bank conflicts.
        second = r // 4
        pieces = [device.load_f32(cute.local_tile(s.C[None, stage], (8,), (c * 8 + r,)), 8, self.act_dtype)
                  for c in range(self.N // 64)]
        C = [[device.select(second == half, piece[i], piece[i + 4]) for piece in pieces for i in range(4)]
             for half in range(2)]
        rows = [s.state[None, warp * WARP_ROWS + group * FULL_ROWS + i, stage] for i in range(FULL_ROWS)]
        dots = [self.full_dot([self.halves(row, (second + half) % 2, r) for half in range(2)], C) for row in rows]
        dot = self.full_sum(dots, lane)
        cute.arch.mbarrier_wait(s.scored + stage, phase)
        ring = self.window(s, stage, m, pos, lane, warp)
        return self.full_output(dot, s.scales[DECAY, stage], ring, lane)

    def halves(self, row, half, r):
        """The first or second halves of a lane's 32-byte pieces of an fp32 row."""
        values = []
        for c in range(self.N // 64):
            values += device.load_f32(cute.local_tile(row, (4,), ((c * 8 + r) * 2 + half,)), 4, Float32)
        return values

    def window(self, s, stage, m, pos, lane, warp):
        """What the window adds to rows g and g + 8."""
        part, q, sums = lane // 4 % 2, lane % 4, [Float32(0.0)] * 4
        for t in range(self.entries // 16):
            sums = self.ring_block(sums, self.x_block(s, stage, m, t, pos, lane, warp),
                                   self.weight_pair(s, stage, part, t, q), self.weight_pair(s, stage, 2, t, q), lane)
        return self.ring_sums(sums)

    def x_block(self, s, stage, m, t, pos, lane, warp):
        """x of ring entries 16 t .. 16 t + 15 for the warp's rows, as the left operand x^T.

        Rows past the window have weight 0; they are read as the current token's.
        """
        column = s.ints[TILE, m] * self.tile_p + warp * WARP_ROWS + lane // 8 % 2 * 8
        j = cutlass.min(16 * t + lane // 16 * 8 + lane % 8, pos)
        return mma.load_transposed(s.x[None, j, stage].iterator + column)

    def weight_pair(self, s, stage, part, t, q):
        """Weights of entries 2q, 2q + 1 and 2q + 8, 2q + 9 of block t, packed."""
        row = s.w_part[None, part, stage]
        return [mma.packed(row, 8 * t + 4 * half + q, 2)[0] for half in range(2)]

    # ---- flush ------------------------------------------------------------------------------------

    @cute.jit
    def flush(self, s, mState, dice, stage, m, pos, lane, warp):
        """Fold the window into the checkpoint and store it; output rows."""
        g, q = lane // 4, lane % 4
        row = warp * WARP_ROWS + g
        slot, head = Int64(s.ints[SLOT, m]), s.ints[HEAD, m]
        call = self.call_of(dice, slot, head, s.ints[TILE, m] * self.tile_p + row)
        gState = cute.local_tile(mState[slot, head, None, None], (self.tile_p, self.N), (s.ints[TILE, m], 0))
        scaled = [self.scaled_entries(s, stage, m, t, pos, lane, warp) for t in range(self.entries // 16)]
        decay = s.scales[DECAY, stage]
        dots = cute.make_rmem_tensor((2,), Float32)
        dots.fill(0.0)
        for k in cutlass.range(self.blocks, unroll=1):  # unrolled, it spills at P = 80
            at = mma.chunk_of(k, 0, q)
            old = [self.eight(s.state[None, row + 8 * half, stage], at, self.state_dtype) for half in range(2)]
            new = self.fold_chunk(scaled, self.right_operands(s, stage, k, lane), old, decay)
            C = self.eight(s.C[None, stage], at, self.act_dtype)
            for half in cutlass.range_constexpr(2):
                out, = self.rounded(new[half], dice, call + half * self.N + at)  # eight rows are N calls
                cute.autovec_copy(out, cute.local_tile(gState[row + 8 * half, None], (8,), (at,)))
                dots[half] = dots[half] + device.dot(new[half], C, self.packed)
        return self.fold_dots([dots[0], dots[1]], lane)

    def scaled_entries(self, s, stage, m, t, pos, lane, warp):
        """``scaled_x`` of block t of 16 entries."""
        first, second = (device.load_f32(cute.local_tile(s.weight[None, stage], (2,), (8 * t + 4 * half + lane % 4,)),
                                         2, Float32) for half in range(2))
        return self.scaled_x(self.x_block(s, stage, m, t, pos, lane, warp), first, second)

    def right_operands(self, s, stage, k, lane):
        """Right operands of ``fold_chunk`` out of what ``Scorer.pair_entries`` left."""
        pairs, operands = cute.recast_tensor(s.B[None, stage], Uint32), []
        for t in range(self.entries // 16):
            operands.append([])
            for half in range(2):
                fragment = cute.make_rmem_tensor((4,), Uint32)
                row = cute.local_tile(pairs, (self.N + 8,), (8 * t + 4 * half + lane % 4,))
                cute.autovec_copy(cute.local_tile(row, (4,), (self.fold_column(k, lane),)), fragment)
                operands[-1].append(fragment)
        return operands

    def eight(self, row, at, dtype):
        """Eight neighbours of a row in shared memory, as Float32."""
        return device.load_f32(cute.local_tile(row, (8,), (at,)), 8, dtype)
