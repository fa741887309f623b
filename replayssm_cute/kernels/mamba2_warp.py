"""A warp's arithmetic on 16 rows of a state with 2-byte inputs: what the direct and the bulk kernel share.

Both give the same bits, so that a row does not depend on the batch that decides between them. They
differ in where the operands come from; the order of every sum is set here.

Without a flush a window entry enters the output as w_j x_j with w_j = s_j (B_j . C), and the
checkpoint as its product with C: tensor cores for a 2-byte state, FFMA for an fp32 one. With a flush
the window is folded into the rows on the tensor cores: s_j x_j, split into three bf16 parts, times
B_j; the checkpoint joins in fp32 afterwards, so that it is rounded once.

Lanes are named as in ``mma.py``: g = lane // 4, q = lane % 4.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from replayssm_cute.kernels import device, mma
from replayssm_cute.kernels.mamba2_tile import LANE_BITS, ReplayTile

WARP_ROWS = 16                  # state rows of a warp: those of one product
FULL_ROWS = 4                   # rows of an fp32 state that a group of eight lanes multiplies with C


class WarpRows(ReplayTile):
    """Base of the kernels whose warps own 16 rows each."""

    def __init__(self, problem, config, target) -> None:
        super().__init__(problem, config, target)
        self.half = self.state_dtype.width == 16
        self.blocks = self.N // mma.K_BLOCK
        self.entries = -(-self.L // 16) * 16                       # ring rows that products take
        # C must be split to be carried in fp16, where the state is.
        self.c_parts = 2 if self.state_dtype is cutlass.Float16 else 1

    # ---- which lane holds what --------------------------------------------------------------------

    def half_row(self, lane):
        """(row of the warp, whether this lane holds it) of a product of packed rows."""
        g, q = lane // 4, lane % 4
        return g + 8 * (q // 2), (q % 2) == (g % 2)

    def full_row(self, lane):
        """The same of ``full_sum``."""
        return lane // 8 * FULL_ROWS + lane % 2 * 2 + lane // 2 % 2, lane % 8 < 4

    def fold_row(self, lane):
        """The same of ``fold_dots``."""
        return lane // 4 + 8 * (lane % 2), lane % 4 < 2

    # ---- without a flush --------------------------------------------------------------------------

    def entry_weight(self, low, high, vector, weights, t, lane):
        """w_j of entry 16 t + ``half_row(lane)``, where the lane holds it."""
        sums = mma.rows_times_vector(self.act_dtype, self.blocks, low, high, vector)
        row, _ = self.half_row(lane)
        return self.weight_of(weights, 16 * t + row) * device.select(lane % 4 < 2, sums[0], sums[2])

    def split_c(self, values, strides):
        """C as (high + low * 2^-LOW_SHIFT) * scale with high and low in fp16.

        Args:
            values: this lane's share of C.
            strides: bits of the lane number over which C is spread.

        Returns:
            (fragment high, fragment low, scale); scale is a power of two.
        """
        largest = device.absolute(values[0])
        for value in values[1:]:
            largest = cute.arch.fmax(largest, device.absolute(value))
        for stride in strides:
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, stride))
        scale, inverse = mma.power_of_two(largest)
        high, low = (cute.make_rmem_tensor((len(values),), cutlass.Float16) for _ in range(2))
        for i, value in enumerate(values):
            v = value * inverse
            high[i] = v.to(cutlass.Float16)
            low[i] = ((v - high[i].to(Float32)) * float(2 ** mma.LOW_SHIFT)).to(cutlass.Float16)
        return high, low, scale

    def half_dots(self, low, high, vector):
        """A 2-byte state times C, to be finished by ``half_output``."""
        return mma.rows_times_vector(self.state_dtype, self.blocks, low, high, vector)

    def half_output(self, sums, c_scale, decay, ring, lane):
        """y of ``half_row(lane)`` from ``half_dots`` and ``ring_sums``."""
        q = lane % 4
        checkpoint = device.select(q < 2, sums[0], sums[2])
        if const_expr(self.c_parts > 1):
            low = device.select(q < 2, sums[1], sums[3]) * float(2.0 ** -mma.LOW_SHIFT)
            checkpoint = (checkpoint + low) * c_scale
        return checkpoint * decay + device.select(q < 2, ring[0], ring[1])

    def full_dot(self, row, C):
        """A lane's part of an fp32 row times C.

        Args:
            row: the lane's values in two lists, the first and the second halves of its 32-byte
                pieces in either order.
            C: the same of C, in the same order.
        """
        return device.dot(row[0], C[0], self.packed) + device.dot(row[1], C[1], self.packed)

    def full_sum(self, dots, lane):
        """The product of ``full_row(lane)`` with C, from the ``full_dot`` of the lane group's rows."""
        sums, _, _ = device.reduce_scatter(dots, lane % 8, LANE_BITS)
        return sums[0]

    def full_output(self, dot, decay, ring, lane):
        """y of ``full_row(lane)`` from ``full_sum`` and ``ring_sums``."""
        row, _ = self.full_row(lane)
        holder = row % 8 * 4
        return dot * decay + device.select(row < 8, cute.arch.shuffle_sync(ring[0], holder),
                                           cute.arch.shuffle_sync(ring[1], holder))

    def ring_block(self, sums, x, own, low, lane):
        """Add w_j x_j of 16 entries to the four running ``sums``, which start at zero.

        Args:
            x: x^T as left operand.
            own, low: weights of entries 2q, 2q + 1 and 2q + 8, 2q + 9, packed: the part that is
                high where g is even and middle where it is odd, and the low part.
        """
        even = lane // 4 % 2 == 0
        # Even columns take the high part and before it the low one, odd columns the middle one.
        low = [Uint32(cutlass.select_(even, w, Uint32(0))) for w in low]
        sums = mma.mma(self.act_dtype, x, low, sums)
        return mma.mma(self.act_dtype, x, own, sums)

    def ring_sums(self, sums):
        """sum_j w_j x_j of rows g and g + 8, in every lane of g, from the running sums."""
        return sums[0] + sums[1], sums[2] + sums[3]

    # ---- flush ------------------------------------------------------------------------------------

    def scaled_x(self, x, first, second):
        """(s_j x_j)^T of 16 entries in bf16 parts, from x^T and s of 2q, 2q + 1 and 2q + 8, 2q + 9."""
        weights = list(first) * 2 + list(second) * 2
        return mma.split_packed([a * b for a, b in zip(mma.unpack(x), weights)])

    def fold_chunk(self, scaled, right, old, decay):
        """New fp32 values of one chunk of rows g and g + 8: decay * old + sum_j (s_j x_j) B_j^T.

        A k block of columns is four products wide. Column 2q + e of product n is element 4 e + n of
        the chunk of lane q: a lane then holds eight neighbours of a row, and its right operands of
        the four products are neighbours too, ``fold_column`` on.

        Args:
            scaled: ``scaled_x`` of every 16 entries.
            right: for every 16 entries and both halves of 8, four words (B_2q, B_2q+1)[column].
            old: eight values of row g and of row g + 8.
        """
        delta = [[Float32(0.0)] * 4 for _ in range(4)]
        for parts, words in zip(scaled, right):
            for n in range(4):
                for part in reversed(parts):  # the small parts first
                    delta[n] = mma.mma(self.act_dtype, part, (words[0][n], words[1][n]), delta[n])
        return [[old[half][4 * e + n] * decay + delta[n][2 * half + e] for e in range(2) for n in range(4)]
                for half in range(2)]

    def fold_column(self, block, lane):
        """Which four neighbouring columns of B make a lane's right operands of a k block."""
        g = lane // 4
        return (block // 2 * 64 + g // 2 * 16 + block % 2 * 8 + g % 2 * 4) // 4

    def fold_dots(self, dots, lane):
        """S C of ``fold_row(lane)``, from the lane's parts of rows g and g + 8."""
        sums, _, _ = device.reduce_scatter(dots, lane % 4, (1, 2))
        return sums[0]

    def call_of(self, dice, slot, head, row):
        """Number of the random generator's call for the first eight elements of a state row."""
        return dice.call_of(slot, head, row) if self.stochastic else Int32(0)
