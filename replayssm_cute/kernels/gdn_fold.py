"""Folding ring records into a warp's rows of the checkpoint.

* ``fold_ring``  the ring's d at once, on the tensor cores: S = e^{G} S0 + sum_j (w_j d_j) k_j^T, with w_j d_j and k_j
  in bf16 parts, which carry them to fp32. The result has the layout of the checkpoint's fragments.
* ``fold_exact``  the raw inputs token by token, in the operations and the order of the Triton kernels' ``advance`` (see
  ``fallback_triton.gdn_device``), multiply-adds spelled out: an fp32 checkpoint then has the recurrence's bits.

Triton sums S k over its tiles of ``exact_tile`` columns first, for each column of a tile; then over the columns that a
thread of it holds side by side, in their order; then over threads, the farthest first. 16 bytes of state are what its
thread holds as well, so that all but two steps of this stay inside a lane.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from replayssm_cute.kernels import device, mma
from replayssm_cute.kernels.gdn_config import FOLDED
from replayssm_cute.kernels.gdn_gates import fma, inverse_norm
from replayssm_cute.kernels.gdn_mma import bf16_parts, product_of_parts, split, transpose, transposed_parts, whole
from replayssm_cute.kernels.gdn_tile import BLOCK


class Fold:
    """Mixin of the kernels; ``src`` as in ``gdn_window``, and

    * ``keep(src, c, r, fragment)``  lets ``load_state`` give this back from now on.
    """

    # ---- from the ring's d --------------------------------------------------------------------------

    @cute.jit
    def fold_ring(self, src, item, mState, decay, step, d_now, k_now, dice, keep):
        """Store e^G S0 + sum_j w_j d_j k_j^T, times ``step``, plus the current token's d k^T.

        Args:
            decay: exp of the ring's g.
            step: exp of the current token's g; with ``d_now`` and ``k_now`` None in a verify step.
            d_now: the token's d for each row of the lane.
            k_now: chunk number -> its normalised k.
            keep: whether the rounded state is to be read again.
        """
        lane = item.lane
        left = self.weighted_d(src, item, step)
        total = decay if const_expr(step is None) else decay * step
        first = item.tile * self.tile_v + self.first_row(item.warp, lane)
        call = 0
        if const_expr(self.stochastic):
            call = dice.call_of(item.slot, item.h, first)
        for c in cutlass.range_constexpr(self.chunks):
            if const_expr(self.stochastic or self.ring_dtype is not self.act_dtype):
                cute.arch.sync_warp()  # one chunk after the other: the parts of several at once would not fit registers
            keys = self.ring_chunk(src, item, c)
            now = None
            if const_expr(k_now is not None):
                now = k_now(c)
            for i in cutlass.range_constexpr(self.rows // 2):
                delta = self.ring_product(left, keys, i)
                for half in cutlass.range_constexpr(2):
                    r = 2 * i + half
                    old = device.to_f32(self.load_state(src, c, r), self.W)
                    new = [old[e] * total + delta[e // 2][2 * half + e % 2] for e in range(self.W)]
                    if const_expr(now is not None):
                        new = [d_now[r] * now[e] + new[e] for e in range(self.W)]
                    at = call + (2 * r * (self.K // self.W) + 4 * c + lane % 4) if const_expr(self.stochastic) else 0
                    self.store_chunk(src, item, mState, first, c, r, self.rounded(new, dice, at), keep)

    def store_chunk(self, src, item, mState, first, c, r, fragment, keep):
        """A chunk of the lane's row r to the pool."""
        row = mState[item.slot, item.h, first + 2 * r, None]
        cute.autovec_copy(fragment, self.chunk(row, c, item.lane % 4))
        if keep:
            self.keep(src, c, r, fragment)

    def weighted_d(self, src, item, step):
        """(w_j d_j)^T as left operands: [pair of blocks][part][rows 2 i, 2 i + 1] of four registers."""
        q, result = item.lane % 4, []
        for first in range(0, self.blocks, 2):
            halves = []
            for b in range(first, first + 2):
                parts = bf16_parts(self.ring_d(src, item, b))
                weights = [self.weight(src, BLOCK * b + 2 * q + e) for e in range(2)]
                if step is not None:
                    weights = [w * step for w in weights]
                pairs = [whole([transpose(part[r]) for part in parts]) for r in range(self.rows)]
                halves.append([split(low * weights[0], high * weights[1]) for low, high in pairs])
            result.append([[(halves[0][2 * i][p], halves[0][2 * i + 1][p], halves[1][2 * i][p], halves[1][2 * i + 1][p])
                            for i in range(self.rows // 2)] for p in range(mma.PARTS)])
        return result

    @cute.jit
    def ring_d(self, src, item, block):
        """The lane's part of d of its record of a block; zeros past the last record."""
        row = self.fragment(self.ring_dtype, 2 * self.rows)
        row.fill(0.0)
        j = BLOCK * block + item.lane // 4
        if const_expr(BLOCK * block < self.records):
            if j < item.records:
                self.load_d(src, j, row)
        return row

    @cute.jit
    def ring_chunk(self, src, item, c):
        """Chunk c of k of all records as right operands: [pair of blocks][pair of columns][part] -> two registers."""
        result = []
        for first in cutlass.range_constexpr(0, self.blocks, 2):
            halves = []
            for i in cutlass.range_constexpr(2):
                piece = self.fragment(self.ring_dtype, self.W)
                piece.fill(0.0)
                j = BLOCK * (first + i) + item.lane // 4
                if const_expr(BLOCK * (first + i) < self.records):
                    if j < item.records:
                        self.load_k(src, j, c, piece)
                parts = transposed_parts(piece)
                halves = halves + [[[part[e] for part in parts] for e in range(self.W // 2)]]
            result = result + [[list(zip(*pair)) for pair in zip(*halves)]]
        return result

    def ring_product(self, left, keys, i):
        """sum_j w_j d_j k_j^T of the lane's rows 2 i and 2 i + 1 in a chunk, by pair of columns."""
        delta = [mma.zeros() for _ in range(self.W // 2)]
        for parts, columns in zip(left, keys):
            for e in range(self.W // 2):
                delta[e] = product_of_parts([part[i] for part in parts], columns[e], delta[e])
        return delta

    # ---- from the raw inputs ------------------------------------------------------------------------

    @property
    def exact_tile(self):
        """Columns of a tile of the Triton kernels: 128 bytes of state."""
        return 8 * self.W

    def normalise(self, raw, target, lane):
        """A raw k row -> fp32 over its norm in shared memory, one warp; the order of ``gdn_device.normalised``."""
        columns, tiles = self.exact_tile // 32, self.K // self.exact_tile
        values = [[raw[self.exact_tile * i + 32 * n + lane].to(Float32) for i in range(tiles)]
                  for n in range(columns)]
        if self.problem.l2norm:
            sums = []
            for chain in values:
                total = chain[0] * chain[0]
                for x in chain[1:]:
                    total = fma(x, x, total)
                sums.append(total)
            total = sums[0] if columns == 1 else sums[0] + sums[1]
            norm = inverse_norm(device.lane_sum(total, (16, 8, 4, 2, 1)))
            values = [[x * norm for x in chain] for chain in values]
        for n in range(columns):
            for i in range(tiles):
                target[self.exact_tile * i + 32 * n + lane] = values[n][i]

    @cute.jit
    def fold_exact(self, src, item, mState, sKeys, sValues, sDecay, sBeta):
        """Replay the item's records on the checkpoint, store it, and let ``load_state`` give it back as stored.

        Args:
            sKeys: (K, records) normalised k, fp32. sValues: (rows of V, records) raw v.
            sDecay, sBeta: exp(g) and beta of the records.
        """
        first = self.first_row(item.warp, item.lane)
        for f in cutlass.range_constexpr(self.rows // FOLDED):
            S = self.fragment(Float32, self.W, self.chunks, FOLDED)
            for r in cutlass.range_constexpr(FOLDED):
                for c in cutlass.range_constexpr(self.chunks):
                    values = device.to_f32(self.load_state(src, c, FOLDED * f + r), self.W)
                    for e in cutlass.range_constexpr(self.W):
                        S[e, c, r] = values[e]
            for j in cutlass.range(item.records, unroll=1):
                v = [sValues[first + 2 * (FOLDED * f + r), j].to(Float32) for r in range(FOLDED)]
                self.advance(S, sKeys[None, j], v, sDecay[j], sBeta[j], item.lane % 4)
            for r in cutlass.range_constexpr(FOLDED):
                for c in cutlass.range_constexpr(self.chunks):
                    out = self.fragment(self.state_dtype, self.W)
                    out.store(S[None, c, r].load().to(self.state_dtype))
                    self.store_chunk(src, item, mState, item.tile * self.tile_v + first, c, FOLDED * f + r, out, True)

    def advance(self, S, key, v, decay, beta, q):
        """S <- decay S ;  S <- S + beta (v - S k) k^T for FOLDED rows of a lane; ``key``: k in shared memory."""
        k, sums = [], [[None] * (2 * self.W) for _ in range(FOLDED)]
        for c in range(self.chunks):
            k.append(device.load_f32(self.chunk(key, c, q), self.W, Float32))
            for r in range(FOLDED):
                held = self.scaled([S[e, c, r] for e in range(self.W)], decay)
                part = self.W * (c % 2)
                sums[r][part:part + self.W] = self.scaled(held, k[c]) if c < 2 else \
                    self.fused(held, k[c], sums[r][part:part + self.W])
                for e in range(self.W):
                    S[e, c, r] = held[e]
        d = []
        for r in range(FOLDED):
            halves = []
            for part in (0, self.W):
                total = sums[r][part] + sums[r][part + 1]
                for e in range(2, self.W):
                    total = sums[r][part + e] + total
                halves.append(total)
            d.append(beta * (v[r] - device.lane_sum(halves[0] + halves[1], (2, 1))))
        for c in range(self.chunks):
            for r in range(FOLDED):
                new = self.fused([d[r]] * self.W, k[c], [S[e, c, r] for e in range(self.W)])
                for e in range(self.W):
                    S[e, c, r] = new[e]

    def scaled(self, values, factor):
        """values[e] * factor (or factor[e]), rounded once; two at a time where the target can."""
        factors = factor if isinstance(factor, list) else [factor] * len(values)
        if not self.packed:
            return [x * y for x, y in zip(values, factors)]
        out = []
        for e in range(0, len(values), 2):
            out += cute.arch.mul_packed_f32x2((values[e], values[e + 1]), (factors[e], factors[e + 1]))
        return out

    def fused(self, a, b, c):
        """a[e] b[e] + c[e], rounded once."""
        if not self.packed:
            return [fma(x, y, z) for x, y, z in zip(a, b, c)]
        return device.fma(a, b, c, True)
