"""One warp's part of a step: outputs of the window's tokens, their d, and the append. No other warp is needed.

The state before the window is never built. Its products with z = q and k of every token are

    S_prev z = e^{G_m} (S0 z) + sum_j w_j d_j (k_j . z)

with the ring's records j, w_j = exp of the sum of g behind record j. Inside the window, token s sees those before it
through (I + A) D = R, solved by forward substitution in fp32:

    R_s = beta_s (v_s - e^{G_s} S_prev k_s)    A_si = beta_s e^{G_s - G_i} (k_i . k_s)
    o_s = e^{G_s} S_prev q_s + sum_{i <= s} e^{G_s - G_i} (k_i . q_s) d_i

q and k stay raw in every product: bf16, which is exact, or fp16 beside fp16 (``columns``); their norms and the scale
multiply the results. The ring's k and d keep what their dtype holds: fp32 is two tf32 parts beside z, in all others
fp16 and fp32 are bf16 parts.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from replayssm_cute.kernels import mma
from replayssm_cute.kernels.gdn_gates import EPSILON, exp
from replayssm_cute.kernels.gdn_gates import inverse_norm as rsqrt
from replayssm_cute.kernels.gdn_mma import (
    mma_tf32,
    pack,
    product_of_parts,
    split,
    split_tf32,
    transpose,
    transposed_parts,
    unpack,
    words,
)
from replayssm_cute.kernels.gdn_tile import BLOCK, TILE, pick
from replayssm_cute.kernels.rounding import bits, from_bits, nearest

FP16_SHIFT = 13      # columns of z have a norm of at most 2^13 where they are carried in fp16


class Window:
    """Mixin of the kernels. ``src`` is a kernel's source of an item, read by the methods that it defines:

    * ``load_state(src, c, r)``  fragment of chunk c of the lane's row r of the checkpoint;
    * ``load_k(src, j, c, fragment)``, ``load_d(src, j, fragment)``  the lane's chunk of ring k, its 2 * rows of ring d;
    * ``weight(src, j)``  w_j, 0 from record ``src.records`` on.
    """

    # ---- the whole ----------------------------------------------------------------------------------

    @cute.jit
    def verify_window(self, m, src, item, mOut, mDc, mKc, mGc, mRv, mRk, mBeta, z, v, g, gate, beta, ring, decay,
                      release):
        """Outputs, d and append of an item.

        Args:
            m: mbarrier that gives the stage back when everything is in registers; None keeps it.
            z, v: fragments of the window, raw.
            g: g of every token, in every lane.
            gate, beta: of the lane's token of every tile.
            ring: what ``load_ring`` gave; decay: exp of the g of these records.
            release: whether to give the stage back here.

        Returns:
            (d, inverse norms of k) of the lane's token of every tile, for a fold that follows.
        """
        lane = item.lane
        gram = self.gram(z)
        norms_q, norms_k = self.squares(gram, lane)
        inverse_q = [self.inverse(n) * self.problem.scale for n in norms_q]
        inverse_k = [self.inverse(n) for n in norms_k]
        beside_ring = self.columns(self.ring_dtype, z, gram, norms_q, norms_k, lane)
        history = self.history(src, ring, beside_ring, lane)
        columns, undo_q, undo_k = beside_ring if const_expr(self.ring_dtype is self.state_dtype) else \
            self.columns(self.state_dtype, z, gram, norms_q, norms_k, lane)
        before = []                                                # by row: by tile: (q, k)
        for i in cutlass.range_constexpr(self.rows // 2):
            sums = self.state_products(src, i, columns)
            for t in cutlass.range_constexpr(self.tiles):
                scale_q, scale_k = decay * undo_q[t], decay * undo_k[t]
                sums[t] = [x * (scale_k if n % 2 else scale_q) for n, x in enumerate(sums[t])]
                sums[t] = self.add_history(history, i, t, sums[t])
                sums[t] = [x * (inverse_k[t] if n % 2 else inverse_q[t]) for n, x in enumerate(sums[t])]
            before = before + [[s[:2] for s in sums], [s[2:] for s in sums]]
        if const_expr(m is not None):
            cute.arch.sync_warp()
            if release:
                if lane == 0:
                    cute.arch.mbarrier_arrive(m)
        d, o = self.solve(gram, inverse_q, inverse_k, before, v, g, beta, lane)
        self.store(item, mOut, mDc, mKc, mGc, mRv, mRk, mBeta, z, v, gate, beta, inverse_k, d, o)
        return d, inverse_k

    def inverse(self, squares):
        return rsqrt(squares) if self.problem.l2norm else Float32(1.0)

    # ---- products -----------------------------------------------------------------------------------

    def gram(self, z):
        """z . z of all columns: [pair of tiles (rows)][tile (columns)] -> a product's four results.

        Columns of tiles before the pair are left out: nobody asks how a token sees later ones.
        """
        packed, zero = [words(t) for t in z], Uint32(0)
        result = []
        for pair in range(0, self.tiles, 2):
            row = [None] * pair
            for t in range(pair, self.tiles):
                acc = [mma.zeros(), mma.zeros()]
                for c in range(self.chunks):
                    for i in range(0, self.W // 2, 2):
                        low = [packed[pair][i + j, c] for j in range(2)]
                        high = [packed[pair + 1][i + j, c] if pair + 1 < self.tiles else zero for j in range(2)]
                        acc[c % 2] = mma.mma(self.act_dtype, (low[0], high[0], low[1], high[1]),
                                             [packed[t][i + j, c] for j in range(2)], acc[c % 2])
                row.append(total(*acc))
            result.append(row)
        return result

    def gram_entry(self, gram, i, is_k, t, which, lane_token):
        """z_row . z_column: row = k (or q) of token i, column = q (which 0) or k (1) of ``lane_token``."""
        row = gram[i // (2 * TILE)][t]
        return cute.arch.shuffle_sync(row[2 * (i // TILE % 2) + which], 4 * (2 * (i % TILE) + is_k) + lane_token)

    def squares(self, gram, lane):
        """Squared norms of q and of k of the lane's token of every tile."""
        q, norms_q, norms_k = lane % 4, [], []
        for t in range(self.tiles):
            entries = gram[t // 2][t]
            half = 2 * (t % 2)
            norms_q.append(cute.arch.shuffle_sync(entries[half], 9 * q))
            norms_k.append(cute.arch.shuffle_sync(entries[half + 1], 9 * q + 4))
        return norms_q, norms_k

    @cute.jit
    def load_ring(self, src, held, lane):
        """The lane's part of the ring's records: by block, (k, d); from record ``held`` on zeros, nothing is read."""
        result = []
        for block in cutlass.range_constexpr(self.blocks):
            j = BLOCK * block + lane // 4
            k_rows = self.fragment(self.ring_dtype, self.W, self.chunks)
            d_row = self.fragment(self.ring_dtype, 2 * self.rows)
            k_rows.fill(0.0)
            d_row.fill(0.0)
            if const_expr(BLOCK * block < self.records):
                if j < held:
                    for c in cutlass.range_constexpr(self.chunks):
                        self.load_k(src, j, c, k_rows[None, c])
                    self.load_d(src, j, d_row)
            result = result + [(k_rows, d_row)]
        return result

    def history(self, src, ring, columns, lane):
        """What the ring contributes: by pair of blocks, (d^T as left operands, weighted scores as right ones)."""
        result = []
        for first in range(0, self.blocks, 2):
            pair = ring[first:first + 2]
            d = [transposed_parts(row) for _, row in pair]
            result.append((list(zip(*d)), self.scores(src, first, [k for k, _ in pair], columns, lane)))
        return result

    def scores(self, src, first, keys, columns, lane):
        """w_j (k_j . z) of two blocks of records: [tile of tokens][part] -> right operand of two registers."""
        g, (packed, undo_q, undo_k) = lane // 4, columns
        weights = [self.weight(src, BLOCK * (first + i) + g) for i in range(2)]
        result = []
        for t in range(self.tiles):
            acc = self.products(keys, packed[t])
            halves = [[transpose(p) for p in split(acc[2 * i] * (weights[i] * undo_q[t]),
                                                   acc[2 * i + 1] * (weights[i] * undo_k[t]))] for i in range(2)]
            result.append(list(zip(*halves)))
        return result

    def products(self, rows, columns):
        """Two rows of a lane, fragments of all chunks, times the columns of a tile."""
        wide = rows[0].element_type is Float32
        sums = [mma.zeros() for _ in range(4 if wide else 2)]
        for c in range(self.chunks):
            self.add_product([row[None, c] for row in rows], c, columns, sums)
        return total(*sums)

    def add_history(self, history, i, t, sums):
        """sums + sum_j w_j d_j (k_j . z) for the lane's rows 2 i and 2 i + 1 and the columns of tile t."""
        for d, scores in history:
            left = [(a[2 * i], a[2 * i + 1], b[2 * i], b[2 * i + 1]) for a, b in d]
            sums = product_of_parts(left, scores[t], sums)
        return sums

    def columns(self, dtype, z, gram, norms_q, norms_k, lane):
        """z as the right operands beside rows of ``dtype``, and what undoes their scaling for q and k.

        fp16 takes z in fp16, over a power of two that brings its norm into fp16's range; that is exact.
        """
        one = [Float32(1.0)] * self.tiles
        if dtype is not cutlass.Float16:
            return [words(t) for t in z], one, one
        g, columns = lane // 4, []
        for t in range(self.tiles):
            entries, half = gram[t // 2][t], 2 * (t % 2)
            own = pick(g % 2 == 1, entries[half + 1], entries[half])
            factor, _ = power_of_two(cute.arch.shuffle_sync(own, 4 * g + g // 2))  # lane (g, g / 2) holds its square
            scaled = self.fragment(Uint32, self.W // 2, self.chunks)
            for c in range(self.chunks):
                for i in range(self.W // 2):
                    low, high = unpack(words(z[t])[i, c])
                    scaled[i, c] = pack(low * factor, high * factor, "f16x2")
            columns.append(scaled)
        return columns, *([power_of_two(n)[1] for n in norms] for norms in (norms_q, norms_k))

    def state_products(self, src, i, columns):
        """Checkpoint rows 2 i and 2 i + 1 of the lane times the columns of every tile."""
        sums = [[mma.zeros() for _ in range(4 if self.wide else 2)] for _ in range(self.tiles)]
        for c in range(self.chunks):
            rows = [self.load_state(src, c, 2 * i + r) for r in range(2)]
            for t in range(self.tiles):
                self.add_product(rows, c, columns[t], sums[t])
        return [total(*s) for s in sums]

    def add_product(self, rows, c, columns, sums):
        """Adds chunk c of two rows of a lane to one of the sums; what tf32 drops of fp32 has sums of its own."""
        if rows[0].element_type is Float32:
            self.wide_product(rows, c, columns, sums)
            return
        a = [words(row) for row in rows]
        for i in range(0, self.W // 2, 2):
            sums[c % 2] = mma.mma(rows[0].element_type, [a[j % 2][i + j // 2] for j in range(4)],
                                  [columns[i + j, c] for j in range(2)], sums[c % 2])

    def wide_product(self, rows, c, columns, sums):
        """The same of fp32 rows, in tf32."""
        for i in range(self.W // 2):
            columns_of = [bits(x) for x in unpack(columns[i, c])]
            high, low = split_tf32([rows[j % 2][2 * i + j // 2] for j in range(4)])
            sums[c % 2] = mma_tf32(high, columns_of, sums[c % 2])
            sums[2 + c % 2] = mma_tf32(low, columns_of, sums[2 + c % 2])

    # ---- the window's triangular system -------------------------------------------------------------

    def solve(self, gram, inverse_q, inverse_k, before, v, g, beta, lane):
        """(d, o) of the lane's token of every tile, for each of its rows: [tile][row]."""
        q, first, odd = lane % 4, lane - lane % 4, lane // 4 % 2 == 1
        since = self.decays(g, q)
        d, o = [], []
        for t in range(self.tiles):
            values = self.fragment(Float32, self.rows)
            values.store(v[t].load().to(Float32))
            mine = self.from_neighbours([values[r] for r in range(self.rows)], odd)
            passed = since[t][0]
            d.append([beta[t] * (mine[r] - passed * before[r][t][1]) for r in range(self.rows)])
            o.append([passed * before[r][t][0] for r in range(self.rows)])
        for i in range(self.T):
            source = [cute.arch.shuffle_sync(x, first + i % TILE) for x in d[i // TILE]]
            norm = cute.arch.shuffle_sync(inverse_k[i // TILE], first + i % TILE)
            for t in range(i // TILE, self.tiles):
                token = TILE * t + q
                share = since[t][i + 1] * norm
                seen = share * self.gram_entry(gram, i, 1, t, 0, q) * inverse_q[t]
                seen = pick(token >= i, seen, Float32(0.0))
                inner = beta[t] * share * self.gram_entry(gram, i, 1, t, 1, q) * inverse_k[t]
                inner = pick(token > i, inner, Float32(0.0))
                for r in range(self.rows):
                    there = pick(token >= i, source[r], Float32(0.0))
                    o[t][r] = seen * there + o[t][r]
                    d[t][r] = d[t][r] - inner * there
        return d, o

    def decays(self, g, q):
        """exp of the sum of g from token i up to the lane's token, by tile and i = 0 .. T.

        Sums run backwards from the lane's token: a difference of prefix sums would cancel.
        """
        result = []
        for t in range(self.tiles):
            running, values = Float32(0.0), [Float32(1.0)]
            for i in reversed(range(self.T)):
                running = running + pick(i <= TILE * t + q, g[i], Float32(0.0))
                values.insert(0, exp(running))
            result.append(values)
        return result

    # ---- output and append --------------------------------------------------------------------------

    @cute.jit
    def store(self, item, mOut, mDc, mKc, mGc, mRv, mRk, mBeta, z, v, gate, beta, inverse_k, d, o):
        """Outputs, and the window's records behind the committed ones, from the lanes that hold them."""
        lane, warp, h = item.lane, item.head_warp, item.h
        q, odd = lane % 4, lane // 4 % 2 == 1
        for t in cutlass.range_constexpr(self.tiles):
            out, record = self.to_neighbours(o[t], odd), self.to_neighbours(d[t], odd)
            token = TILE * t + q
            if token < item.count:
                cute.autovec_copy(nearest(out, self.act_dtype),
                                  self.neighbours(mOut[item.start + token, h, None], warp, lane))
                if item.append:
                    row = self.ring_row(item.base, item.records + token)
                    cute.autovec_copy(nearest(record, self.ring_dtype),
                                      self.neighbours(mDc[item.key, h, row, None], warp, lane))
                    if const_expr(self.exact):
                        cute.autovec_copy(v[t], self.neighbours(mRv[item.key, h, row, None], warp, lane))
                    if warp == 0 and lane < 4:
                        mGc[item.key, h, row] = gate[t]
                        if const_expr(self.exact):
                            mBeta[item.key, h, row] = beta[t]
            self.store_k(item, mKc, mRk, z[t], t, cute.arch.shuffle_sync(inverse_k[t], lane // 8))

    @cute.jit
    def store_k(self, item, mKc, mRk, z, t, norm):
        """k of the tokens of tile t: normalised, and raw. Each warp of a head stores some of the chunks."""
        g, q = item.lane // 4, item.lane % 4
        token = TILE * t + g // 2
        if item.append and item.h % self.ratio == 0 and g % 2 == 1 and token < item.count:
            row, hk = self.ring_row(item.base, item.records + token), item.h // self.ratio
            for c in cutlass.range_constexpr(self.chunks):
                if item.head_warp == c % self.head_warps:
                    if const_expr(self.exact):
                        cute.autovec_copy(z[None, c], self.chunk(mRk[item.key, hk, row, None], c, q))
                    raw = self.fragment(Float32, self.W)
                    raw.store(z[None, c].load().to(Float32))
                    cute.autovec_copy(nearest([raw[e] * norm for e in range(self.W)], self.ring_dtype),
                                      self.chunk(mKc[item.key, hk, row, None], c, q))

    def ring_row(self, base, j):
        """Physical row of record j."""
        return (base + j) & (self.L - 1) if self.spec else j


def total(*sums):
    """The sum of some products' results; apart, they need not wait for one another."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [[x + y for x, y in zip(a, b)] for a, b in zip(sums[:half], sums[half:])]
    return sums[0]


def power_of_two(squares):
    """(p, 1 / p), p a power of two that brings the root of ``squares`` to between 2^FP16_SHIFT and half of it or so."""
    exponent = Int32(bits(squares + Float32(EPSILON)) >> 23) - Int32(126)          # of the root, doubled, rounded up
    power = Int32(127 + FP16_SHIFT) - (exponent >> 1)
    return from_bits(power << 23), from_bits((Int32(254) - power) << 23)
