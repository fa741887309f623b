"""The scorer warp of the bulk kernel: one weight per ring entry, and the append.

Without a flush a window entry enters the output as w_j x_j with w_j = s_j (B_j . C); with one it
enters the state as (s_j x_j) B_j^T. The scorer computes what all consumer warps share of that.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from replayssm_cute.kernels import device, mma
from replayssm_cute.kernels.mamba2_stage import C_SCALE, DECAY, DT, FACTS, FLUSH, HEAD, POS, SLOT, TILE, A


class Scorer:
    """Mixin of the bulk kernel."""

    @cute.jit
    def score(self, s, mXc, mDtc, mBc, count, lane):
        weight, scales = s.weight, s.scales
        for k in cutlass.range(count, unroll=1):
            stage, phase, m = k % self.stages, (k // self.stages) & 1, k % FACTS
            cute.arch.mbarrier_wait(s.window + stage, phase)
            live, appending = s.ints[SLOT, m] >= 0, False
            pos, dt_now = s.ints[POS, m], self.discretize(s.floats[DT, m])
            if live:
                appending = s.ints[FLUSH, m] == 0
                dt_ring = [s.dt[cutlass.min(lane + 32 * i, self.L - 1), stage] for i in range(self.dt_parts)]
                w, decay = self.window_weights(dt_ring, dt_now, s.floats[A, m], pos, lane)
                scales[DECAY, stage] = decay
                if appending:
                    if const_expr(self.c_parts > 1):
                        self.split_c(s, stage, lane)
                    self.score_entries(s, stage, w, pos, lane)
                else:
                    for i in cutlass.range_constexpr(self.dt_parts):
                        if lane + 32 * i < self.entries:
                            weight[lane + 32 * i, stage] = w[i]
                    self.pair_entries(s, stage, pos, lane)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(s.scored + stage)
                if appending:
                    self.append(s, mXc, mDtc, mBc, stage, m, pos, dt_now)
                    # The appends must have left the stage before it is filled again.
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(s.empty + stage)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def append(self, s, mXc, mDtc, mBc, stage, m, pos, dt_now):
        """Current token -> ring row ``pos``, copied out of the stage; one thread."""
        slot, h = Int64(s.ints[SLOT, m]), s.ints[HEAD, m]
        if s.ints[TILE, m] == 0:
            bulk_store(mXc[slot, h, pos, None], s.x[None, pos, stage], self.P * self.input_bytes)
            if h % self.ratio == 0:
                bulk_store(mBc[slot, h // self.ratio, pos, None], self.b_row(s, pos, stage),
                           self.N * self.input_bytes)
            cute.arch.cp_async_bulk_commit_group()
            mDtc[slot, h, pos] = dt_now

    @cute.jit
    def split_c(self, s, stage, lane):
        """C as high + low * 2^-LOW_SHIFT in fp16, over a power of two that fits it into fp16's range."""
        c_part, scales = s.c_part, s.scales
        n = self.N // 32
        values = device.load_f32(cute.local_tile(s.C[None, stage], (n,), (lane,)), n, self.act_dtype)
        largest = device.absolute(values[0])
        for i in cutlass.range_constexpr(1, n):
            largest = cute.arch.fmax(largest, device.absolute(values[i]))
        for stride in cutlass.range_constexpr(5):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 2 ** stride))
        scale, inverse = mma.power_of_two(largest)
        high = cute.make_rmem_tensor((n,), cutlass.Float16)
        low = cute.make_rmem_tensor((n,), cutlass.Float16)
        for i in cutlass.range_constexpr(n):
            v = values[i] * inverse
            high[i] = v.to(cutlass.Float16)
            low[i] = ((v - high[i].to(Float32)) * float(2 ** mma.LOW_SHIFT)).to(cutlass.Float16)
        cute.autovec_copy(high, cute.local_tile(c_part[None, 0, stage], (n,), (lane,)))
        cute.autovec_copy(low, cute.local_tile(c_part[None, 1, stage], (n,), (lane,)))
        scales[C_SCALE, stage] = scale

    @cute.jit
    def score_entries(self, s, stage, weights, pos, lane):
        """w_j = s_j (B_j . C), in parts of the inputs' type -> s.w_part."""
        w_part = s.w_part
        g, q = lane // 4, lane % 4
        # Lanes 2 and 3 of four take row g + 8; a lane whose columns do not fit its row takes none.
        mine, row = (q % 2) == (g % 2), g + 8 * (q // 2)
        for t in cutlass.range_constexpr(self.entries // 16):
            # Rows past the window are read as the current token's: finite whenever that is, weight 0.
            low, high = cutlass.min(16 * t + g, pos), cutlass.min(16 * t + g + 8, pos)
            sums = mma.rows_times_vector(self.b_row(s, low, stage), self.b_row(s, high, stage),
                                         s.C[None, stage], self.N, lane)
            w = self.weight_of(weights, 16 * t + row) * device.select(q < 2, sums[0], sums[2])
            parts = mma.split(w)
            if mine:
                for i in cutlass.range_constexpr(mma.PARTS):
                    w_part[16 * t + row, i, stage] = parts[i]

    @cute.jit
    def pair_entries(self, s, stage, pos, lane):
        """Rewrite a flushing stage's B in place as the fold's operand: words (B_2i, B_2i+1)[n].

        Word row i starts at i * (N + 8): eight words of padding keep the fold's loads free of bank
        conflicts. It lies past the rows it replaces, so blocks of 16 entries go from the last to the
        first. Entries past the window repeat the current token's B: finite whenever that is, and of
        weight 0.
        """
        pairs = cute.recast_tensor(s.B[None, stage], Uint32)
        words, chunks = self.N + 8, self.N // mma.CHUNK
        tasks = 8 * chunks // 32                    # (word row, chunk) pairs of a lane and block
        for t in cutlass.range_constexpr(self.entries // 16 - 1, -1, -1):
            loaded = []
            for i in cutlass.range_constexpr(tasks):
                j, at = 16 * t + (lane + 32 * i) // chunks * 2, (lane + 32 * i) % chunks
                loaded.append((self.b_words(s, cutlass.min(j, pos), at, stage),
                               self.b_words(s, cutlass.min(j + 1, pos), at, stage)))
            cute.arch.sync_warp()  # the block is in registers
            for i in cutlass.range_constexpr(tasks):
                even, odd = loaded[i]
                out = cute.make_rmem_tensor((mma.CHUNK,), Uint32)
                for c in cutlass.range_constexpr(mma.CHUNK // 2):
                    out[2 * c] = (even[c] & Uint32(0xFFFF)) | (odd[c] << 16)
                    out[2 * c + 1] = (even[c] >> 16) | (odd[c] & Uint32(0xFFFF0000))
                row = cute.local_tile(pairs, (words,), (8 * t + (lane + 32 * i) // chunks,))
                cute.autovec_copy(out, cute.local_tile(row, (mma.CHUNK,), ((lane + 32 * i) % chunks,)))
        # The stage's next filler is the copy engine: it must not overtake these stores.
        cute.arch.fence_proxy("async.shared", space="cta")

    def b_row(self, s, j, stage):
        """Row j of a stage's B ring: N inputs."""
        return cute.local_tile(s.B[None, stage], (self.N,), (j,))

    def b_words(self, s, j, at, stage):
        """Chunk ``at`` of B_j, as four packed registers."""
        fragment = cute.make_rmem_tensor((mma.CHUNK,), self.act_dtype)
        cute.autovec_copy(cute.local_tile(self.b_row(s, j, stage), (mma.CHUNK,), (at,)), fragment)
        packed = cute.recast_tensor(fragment, Uint32)
        return [packed[i] for i in range(4)]


def bulk_store(dst, src, nbytes):
    """Shared -> global bulk copy of ``nbytes`` (16-byte multiples), in the thread's current group."""
    cute.arch.inline_ptx("cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
                         read_only_args=[dst.iterator, src.iterator, Int32(nbytes)])
