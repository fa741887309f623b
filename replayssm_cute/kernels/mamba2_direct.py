"""Mamba2 replay step, direct design: a warp per 16 state rows, from global memory to registers.

For small batches, where latency rules: all that a warp needs is on its way before anything is used,
and no warp waits for another. Every warp computes the weights of the whole window for itself, which
costs it some tens of products and spares shared memory and its barriers. The arithmetic is that of
``mamba2_warp.py``, so a row has the same bits as in the bulk design, which serves larger batches.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from replayssm_cute.kernels import device, mma, rounding
from replayssm_cute.kernels.mamba2_tile import load_scalars, load_slot
from replayssm_cute.kernels.mamba2_warp import FULL_ROWS, WARP_ROWS, WarpRows

MAX_LOADED = 160                # registers of a lane for operands that are loaded at once; more spill
PIECE = 2 * mma.CHUNK           # neighbours of a row of 2-byte elements that a lane loads: 32 bytes


class Mamba2DirectKernel(WarpRows):
    """grid (H * tiles, batch), a warp for 16 rows of the tile."""

    def __init__(self, problem, config, target) -> None:
        super().__init__(problem, config, target)
        operands = self.N * self.state_dtype.width // 64 + self.entries * self.N // 64 + self.N // 8
        # Whether a lane holds all that it takes from memory at once; else it loads B as it goes, and a
        # flush the state too.
        self.replay_at_once = operands <= MAX_LOADED
        self.fold_at_once = operands + (24 if self.stochastic else 0) <= MAX_LOADED

    @cute.jit
    def __call__(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                 mIndices, null_block_id: Int32, mOut, mSeed, stream):
        # A carveout must be named with min_blocks_per_mp: the DSL would ask the local GPU for it.
        self.kernel(mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
                    mIndices, null_block_id, mOut, mSeed).launch(
            grid=(self.H * self.tiles, mX.shape[0], 1), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.config.min_ctas, preferred_smem_carveout=0, use_pdl=self.config.pdl)

    @cute.kernel
    def kernel(self, mState, mX, mDt, mA, mB, mC, mD, mDtBias, mZ, mXc, mDtc, mBc, mPos, mFlush,
               mIndices, null_block_id, mOut, mSeed):
        if const_expr(self.config.pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tid, _, _ = cute.arch.thread_idx()
        bx, b, _ = cute.arch.block_idx()
        h, tile = bx // self.tiles, bx % self.tiles
        g, lane, warp = h // self.ratio, tid % 32, tid // 32
        first = tile * self.tile_p + warp * WARP_ROWS           # the warp's rows of the head
        dice = self.throw_dice(mSeed)
        slot = Int64(load_slot(mIndices, b))  # 64-bit: slots * H * P * N passes 2^31
        pos, flush = Int32(mPos[b]), Int32(mFlush[b])
        raw, A = load_scalars(mDt, mDtBias, mA, b, h)
        C = self.pieces(mC[b, g, None], lane)
        if const_expr(self.stochastic):
            cute.arch.sync_threads()  # all threads have read the step
            ctas, rows, _ = cute.arch.grid_dim()
            if tid == 0:
                rounding.advance(mSeed, ctas * rows)
        if slot != Int64(null_block_id) and slot >= 0:
            gState = cute.local_tile(mState[slot, h, None, None], (WARP_ROWS, self.N), (first // WARP_ROWS, 0))
            B = Ring(mBc[slot, g, None, None], mB[b, g, None], pos)
            x = Ring(cute.local_tile(mXc[slot, h, None, None], (self.L, WARP_ROWS), (0, first // WARP_ROWS)),
                     cute.local_tile(mX[b, h, None], (WARP_ROWS,), (first // WARP_ROWS,)), pos)
            dt_ring = self.load_dt(mDtc[slot, h, None], pos, lane)
            if flush == 0:
                row, mine = self.half_row(lane) if const_expr(self.half) else self.full_row(lane)
                state = self.load_half(gState, lane) if const_expr(self.half) else \
                    self.load_full(gState, mC[b, g, None], lane)
                window = self.load_window(B, x, lane)
                epilogue = self.load_epilogue(x.current[row], mD, mZ, b, h, first + row)
                dt_now = self.discretize(raw)
                self.append(x, B, mDtc[slot, h, None], dt_now, h, first, lane)
                weights, decay = self.window_weights(dt_ring, dt_now, A, pos, lane)
                y = self.replay(state, window, C, weights, decay, lane)
                if mine:
                    mOut[b, h, first + row] = self.finish(y, *epilogue).to(self.act_dtype)
            else:
                row, mine = self.fold_row(lane)
                pieces = self.load_pieces(gState, B, mC[b, g, None], lane)
                x_blocks = [self.x_block(x, t, lane) for t in range(self.entries // 16)]
                epilogue = self.load_epilogue(x.current[row], mD, mZ, b, h, first + row)
                weights, decay = self.window_weights(dt_ring, self.discretize(raw), A, pos, lane)
                scaled = [self.scaled_entries(block, weights, t, lane) for t, block in enumerate(x_blocks)]
                call = self.call_of(dice, slot, h, first + lane // 4)
                y = self.fold(gState, pieces, scaled, decay, dice, call, lane)
                if mine:
                    mOut[b, h, first + row] = self.finish(y, *epilogue).to(self.act_dtype)

    # ---- loads ------------------------------------------------------------------------------------

    def pieces(self, row, lane):
        """A lane's 32-byte pieces of a row of 2-byte elements: q, q + 4, ... as packed registers."""
        return [mma.packed(row, 4 * m + lane % 4, PIECE) for m in range(self.N // (4 * PIECE))]

    @cute.jit
    def load_dt(self, gDtc, pos, lane):
        """dt' of ring entries 32 k + lane; zero at and past the cursor."""
        values = []
        for k in cutlass.range_constexpr(self.dt_parts):
            value = Float32(0.0)
            if lane + 32 * k < pos:
                value = gDtc[lane + 32 * k]
            values.append(value)
        return values

    def state_values(self, row, index, n):
        """Elements index * n ... of a state row, past L1: they are used once."""
        step = min(n, self.config.vec_bits // self.state_dtype.width)
        atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), self.state_dtype,
                                   num_bits_per_copy=step * self.state_dtype.width,
                                   l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE)
        fragment = cute.make_rmem_tensor((n,), self.state_dtype)
        for i in range(n // step):
            cute.copy(atom, cute.local_tile(row, (step,), (index * (n // step) + i,)),
                      cute.local_tile(fragment, (step,), (i,)))
        return fragment

    def load_half(self, gState, lane):
        """Pieces of rows g and g + 8 of a 2-byte state, for the product with C and for the fold."""
        return [[self.state_values(gState[lane // 4 + 8 * i, None], 4 * m + lane % 4, PIECE)
                 for m in range(self.N // (4 * PIECE))] for i in range(2)]

    def load_full(self, gState, gC, lane):
        """All ``full_piece``, or a function that loads one."""
        if self.replay_at_once:
            return [self.full_piece(gState, gC, c, lane) for c in range(self.N // 64)]
        return lambda c: self.full_piece(gState, gC, c, lane)

    def full_piece(self, gState, gC, c, lane):
        """Piece c of the ``FULL_ROWS`` fp32 rows that a group of eight lanes multiplies with C, and of C."""
        index = 8 * c + lane % 8
        return ([self.state_values(gState[lane // 8 * FULL_ROWS + i, None], index, 8) for i in range(FULL_ROWS)],
                device.load_f32(cute.local_tile(gC, (8,), (index,)), 8, self.act_dtype))

    def load_window(self, B, x, lane):
        """Blocks of 16 ring entries, or a function that loads one; see ``window_block``."""
        if self.replay_at_once:
            return [self.window_block(B, x, t, lane) for t in range(self.entries // 16)]
        return lambda t: self.window_block(B, x, t, lane)

    def window_block(self, B, x, t, lane):
        """Pieces of B_j of entries 16 t + g and 16 t + g + 8, and ``x_block`` t."""
        return *(self.pieces(B.row(16 * t + lane // 4 + 8 * i), lane) for i in range(2)), self.x_block(x, t, lane)

    def x_block(self, x, t, lane):
        """x of entries 16 t .. 16 t + 15 for the warp's rows, as the left operand x^T."""
        g, q = lane // 4, lane % 4
        return [mma.transpose(mma.packed(x.row(16 * t + i // 2 * 8 + g), i % 2 * 4 + q, 2)[0]) for i in range(4)]

    def load_pieces(self, gState, B, gC, lane):
        """All ``fold_operands``, or a function that loads them."""
        if self.fold_at_once:
            return [self.fold_operands(gState, B, gC, m, lane) for m in range(self.fold_pieces)]
        return lambda m: self.fold_operands(gState, B, gC, m, lane)

    def fold_operands(self, gState, B, gC, m, lane):
        """For piece m of the fold: the state of rows g and g + 8, right operands and C of each k block."""
        old = [self.state_values(gState[lane // 4 + 8 * i, None], self.fold_index(m, lane), self.fold_size)
               for i in range(2)]
        blocks = [m * (self.fold_size // 8) + i for i in range(self.fold_size // 8)]
        return (old, [self.right_operands(B, k, lane) for k in blocks],
                [mma.packed(gC, mma.chunk_of(k, 0, lane % 4)) for k in blocks])

    def right_operands(self, B, k, lane):
        """Right operands of ``fold_chunk``: pairs of rows of B, four neighbouring columns."""
        column, operands = self.fold_column(k, lane), []
        for t in range(self.entries // 16):
            pairs = [[16 * t + 8 * half + 2 * (lane % 4) + i for i in range(2)] for half in range(2)]
            operands.append([mma.interleave(*(mma.packed(B.row(j), column, 4) for j in pair)) for pair in pairs])
        return operands

    def load_epilogue(self, x, mD, mZ, b, h, row):
        """x, D and z of the output row that this lane finishes; None for what is absent."""
        return (x.to(Float32), None if mD is None else mD[h, row].to(Float32),
                None if mZ is None else mZ[b, h, row].to(Float32))

    # ---- the step ---------------------------------------------------------------------------------

    @cute.jit
    def append(self, x, B, gDtc, dt_now, h, first, lane):
        """Current token -> ring row ``pos``: x by every warp for its rows, the rest by the first of a head."""
        if lane < WARP_ROWS // mma.CHUNK:
            copy_chunk(x.current, x.ring[x.pos, None], lane)
        if first == 0:
            if h % self.ratio == 0:
                for i in cutlass.range_constexpr(-(-self.N // (32 * mma.CHUNK))):
                    if lane + 32 * i < self.N // mma.CHUNK:
                        copy_chunk(B.current, B.ring[B.pos, None], lane + 32 * i)
            if lane == 0:
                gDtc[x.pos] = dt_now

    @cute.jit
    def replay(self, state, window, C, weights, decay, lane):
        """y of the lane's output row, without a flush."""
        rows, columns = ordered(lane // 4 % 2), ordered(lane // 8 % 2)
        ring = cute.make_rmem_tensor((4,), Float32)
        ring.fill(0.0)
        if const_expr(self.replay_at_once):
            for t in cutlass.range_constexpr(self.entries // 16):
                self.add_block(ring, window[t], rows, columns(C), weights, t, lane)
        else:
            for t in cutlass.range(self.entries // 16, unroll=1):
                self.add_block(ring, window(t), rows, columns(C), weights, t, lane)
        ring = self.ring_sums(ring)
        if const_expr(self.half):
            vector, scale = self.c_operand(C, lane) if const_expr(self.c_parts > 1) else (C, None)
            low, high = ([words(piece) for piece in row] for row in state)
            return self.half_output(self.half_dots(rows(low), rows(high), columns(vector)), scale, decay, ring, lane)
        return self.full_output(self.full_product(state, lane), decay, ring, lane)

    @cute.jit
    def full_product(self, pieces, lane):
        """An fp32 state times C: ``WarpRows.full_dot`` and ``full_sum``, piece by piece."""
        acc = cute.make_rmem_tensor((4, 2, FULL_ROWS), Float32)
        acc.fill(0.0)
        if const_expr(self.replay_at_once):
            for c in cutlass.range_constexpr(self.N // 64):
                self.add_piece(acc, *pieces[c])
        else:
            for c in cutlass.range(self.N // 64, unroll=2):
                self.add_piece(acc, *pieces(c))
        totals = [[device.total([acc[k, half, i] for k in range(4)]) for half in range(2)] for i in range(FULL_ROWS)]
        return self.full_sum([first + second for first, second in totals], lane)

    def add_piece(self, acc, rows, C):
        """Add the products of one piece of the rows with C."""
        for i, row in enumerate(rows):
            values = device.to_f32(row, 8)
            for half in range(2):
                part = slice(4 * half, 4 * half + 4)
                sums = device.accumulate([acc[k, half, i] for k in range(4)], values[part], C[part], self.packed)
                for k in range(4):
                    acc[k, half, i] = sums[k]

    def add_block(self, ring, block, rows, C, weights, t, lane):
        """Add what a block of 16 entries gives to the running sums."""
        low, high, x = block
        w = self.entry_weight(rows(low), rows(high), C, weights, t, lane)
        sums = self.ring_block([ring[i] for i in range(4)], x, *self.weight_operands(w, lane), lane)
        for i in range(4):
            ring[i] = sums[i]

    def weight_operands(self, w, lane):
        """w_j, each in the lane that holds it, as the right operands of ``ring_sums``: (own, low) part."""
        even, values = lane // 4 % 2 == 0, []
        for i in range(4):
            r = 2 * (lane % 4) + i % 2                       # of eight; the second eight are behind q >= 2
            values.append(cute.arch.shuffle_sync(w, 4 * r + r % 2 + i // 2 * 2))
        high, middle, low = mma.split_packed(values)
        return [Uint32(cutlass.select_(even, a, b)) for a, b in zip(high, middle)], low

    def c_operand(self, C, lane):
        """C in fp16 with its scale: the high part where g is even, the low part where it is odd."""
        values = [v for piece in C for v in mma.unpack(piece)]
        high, low, scale = self.split_c(values, (1, 2))
        even = lane // 4 % 2 == 0
        mine = [Uint32(cutlass.select_(even, a, b)) for a, b in zip(words(high), words(low))]
        return [mine[i:i + PIECE // 2] for i in range(0, len(mine), PIECE // 2)], scale

    def scaled_entries(self, x, weights, t, lane):
        """``scaled_x`` of block t of 16 entries."""
        first = 16 * t + 2 * (lane % 4)
        pairs = [[self.weight_of(weights, first + 8 * half + i) for i in range(2)] for half in range(2)]
        return self.scaled_x(x, *pairs)

    @property
    def fold_size(self):
        """State elements of a piece: 32 bytes."""
        return 256 // self.state_dtype.width

    @property
    def fold_pieces(self):
        return self.N // (4 * self.fold_size)

    def fold_index(self, m, lane):
        """Number of a lane's piece m in a row."""
        return 4 * m + lane % 4 if self.half else mma.chunk_of(m, 0, lane % 4)

    @cute.jit
    def fold(self, gState, pieces, scaled, decay, dice, call, lane):
        """Fold the window into the checkpoint and store it; S C of ``fold_row(lane)``.

        Args:
            pieces: ``load_pieces``.
            call: the random generator's call for row g.
        """
        dots = cute.make_rmem_tensor((2,), Float32)
        dots.fill(0.0)
        if const_expr(self.fold_at_once):
            for m in cutlass.range_constexpr(self.fold_pieces):
                self.fold_piece(gState, pieces[m], scaled, decay, dice, call, m, lane, dots)
        else:
            for m in cutlass.range(self.fold_pieces, unroll=1):
                self.fold_piece(gState, pieces(m), scaled, decay, dice, call, m, lane, dots)
        return self.fold_dots([dots[0], dots[1]], lane)

    def fold_piece(self, gState, operands, scaled, decay, dice, call, m, lane, dots):
        """One piece of rows g and g + 8, chunk by chunk; adds their products with C to ``dots``."""
        old, right, C = operands
        out = [cute.make_rmem_tensor((self.fold_size,), self.state_dtype) for _ in range(2)]
        for i in range(self.fold_size // 8):
            at, tile = mma.chunk_of(m * (self.fold_size // 8) + i, 0, lane % 4), ((8,), (i,))
            held = [device.to_f32(cute.local_tile(row, *tile), 8) for row in old]
            new = self.fold_chunk(scaled, right[i], held, decay)
            vector = mma.unpack(C[i])
            for half in range(2):
                eight, = self.rounded(new[half], dice, call + half * self.N + at)  # eight rows are N calls
                cute.autovec_copy(eight, cute.local_tile(out[half], *tile))
                dots[half] = dots[half] + device.dot(new[half], vector, self.packed)
        for half in range(2):
            row = gState[lane // 4 + 8 * half, None]
            cute.autovec_copy(out[half], cute.local_tile(row, (self.fold_size,), (self.fold_index(m, lane),)))


class Ring:
    """Rows of a ring with the current token at the cursor.

    Rows past the cursor are read as the current token's: finite whenever that is, and of weight 0.
    """

    def __init__(self, ring, current, pos) -> None:
        self.ring, self.current, self.pos = ring, current, pos

    def row(self, j):
        """Entry j, by address and without a branch."""
        held = self.ring[cutlass.min(j, self.pos), None]
        address = cutlass.select_(j < self.pos, held.iterator.toint(), self.current.iterator.toint())
        pointer = cute.make_ptr(held.element_type, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, held.layout)


def ordered(swap):
    """Pieces -> (k block -> chunk), neighbouring chunks swapped where ``swap`` is 1."""
    def of(pieces):
        def chunk(block):
            piece, first = pieces[block // 2], swap == block % 2
            return [Uint32(cutlass.select_(first, a, b)) for a, b in zip(piece[:4], piece[4:])]
        return chunk
    return of


def words(fragment):
    """A fragment of 2-byte elements as packed registers."""
    packed = cute.recast_tensor(fragment, Uint32)
    return [packed[i] for i in range(cute.size(packed))]


def copy_chunk(source, target, index):
    """One 16-byte chunk of a row."""
    fragment = cute.make_rmem_tensor((mma.CHUNK,), source.element_type)
    cute.autovec_copy(cute.local_tile(source, (mma.CHUNK,), (index,)), fragment)
    cute.autovec_copy(fragment, cute.local_tile(target, (mma.CHUNK,), (index,)))
