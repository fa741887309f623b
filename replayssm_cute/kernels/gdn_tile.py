"""What the Gated DeltaNet kernels share: static sizes, how lanes hold a state, and their arguments.

A lane (g = lane // 4, q = lane % 4) of a warp owns ``rows`` rows of V and a quarter of their columns. Column
k = (4 W) c + W q + e of a row is element e of its chunk c, W elements being 16 bytes of the state: a fragment is one
16-byte access, and since all operands of a product are permuted alike, it feeds the tensor cores as it is.

Products have 8 columns z = q_0, k_0, q_1, k_1, ... for every four tokens (a *tile* of tokens), so that lane q holds the
results of token q side by side. Ring records are rows of the same kind; those of a block of 8 are held by lanes g.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.kernels import rounding
from replayssm_cute.kernels.building import fake_rows
from replayssm_cute.kernels.gdn_config import GdnConfig, max_records
from replayssm_cute.kernels.mamba2_tile import CUTE_DTYPES, SEED_WORDS
from replayssm_cute.kernels.targets import Target

TILE = 4           # tokens of a tile of columns
BLOCK = 8          # ring records of a block


class GdnTile:
    """Static layout; base of both kernels."""

    def __init__(self, problem: GdnProblem, config: GdnConfig, target: Target) -> None:
        g = problem.geometry
        self.problem, self.config = problem, config
        self.Hk, self.HV, self.K, self.V, self.ratio = g.num_k_heads, g.num_v_heads, g.head_k_dim, g.head_v_dim, g.ratio
        self.L, self.T, self.spec, self.exact = problem.buffer_len, problem.tokens or 1, problem.tokens > 0, \
            problem.exact_fold
        self.records = max_records(problem)
        self.blocks = -(-self.records // (2 * BLOCK)) * 2          # of ring records, in pairs: rows of a product
        self.tiles = -(-self.T // TILE)                            # of tokens
        self.state_dtype, self.act_dtype, self.ring_dtype = (
            CUTE_DTYPES[d] for d in (problem.state_dtype, problem.act_dtype, problem.ring_dtype))
        self.wide = self.state_dtype is Float32
        self.ring_bytes = problem.ring_dtype.itemsize
        self.W = 128 // self.state_dtype.width
        self.chunks = self.K // (4 * self.W)
        self.rows, self.tile_v, self.warps = config.rows, config.tile_v, config.warps
        self.tiles_v = self.V // self.tile_v                       # work items of a head
        self.head_warps = self.tiles_v * self.warps
        self.packed, self.hardware_rounding = target.packed_fma, target.stochastic_cvt
        self.stochastic = problem.philox_rounds > 0

    def first_row(self, warp, lane):
        """First of a lane's rows; the others follow at distance 2. ``warp`` counts within what the row counts in."""
        g = lane // 4
        return 8 * self.rows * warp + 2 * self.rows * (g // 2) + g % 2

    def chunk(self, row, c, q):
        """Chunk c of a row of K elements."""
        return cute.local_tile(row, (self.W,), (4 * c + q,))

    def fragment(self, dtype, *shape):
        return cute.make_rmem_tensor(shape, dtype)

    def to_neighbours(self, values, odd):
        """Values of a lane's rows -> those of ``rows`` neighbouring rows, which one store takes."""
        out = []
        for i in range(0, self.rows, 2):
            # Lane pairs (g, g + 1) exchange: both then hold half of the 2 * rows rows they share.
            half = self.rows // 2
            a, b = values[i // 2], values[i // 2 + half]
            other = cute.arch.shuffle_sync_bfly(pick(odd, a, b), 4)
            out += [pick(odd, other, a), pick(odd, b, other)]
        return out

    def from_neighbours(self, values, odd):
        """The reverse of ``to_neighbours``."""
        low, high = [], []
        for i in range(0, self.rows, 2):
            other = cute.arch.shuffle_sync_bfly(pick(odd, values[i], values[i + 1]), 4)
            low.append(pick(odd, other, values[i]))
            high.append(pick(odd, values[i + 1], other))
        return low + high

    def throw_dice(self, mSeed):
        """The launch's random words; None where the checkpoint is rounded to nearest."""
        if not self.stochastic:
            return None
        return rounding.Dice(mSeed, self.HV, self.V, self.K // self.W, self.problem.philox_rounds)

    def rounded(self, values, dice, call):
        """A fragment of the state's dtype from W Float32; ``call``: the generator's for these 16 bytes."""
        words = None if dice is None else dice.words(call)
        return rounding.stored(values, words, self.state_dtype, self.hardware_rounding)

    def zero_window(self):
        """Fragments of z (one a tile of tokens) and of v, zeros."""
        z = [self.fragment(self.act_dtype, self.W, self.chunks) for _ in range(self.tiles)]
        v = [self.fragment(self.act_dtype, self.rows) for _ in range(self.tiles)]
        for t in z + v:
            t.fill(0.0)
        return z, v

    @cute.jit
    def clear_output(self, mOut, start, count, h, warp, lane):
        """Zeros for the warp's part of a padded row's output; ``warp`` counts within the head."""
        zeros = self.fragment(self.act_dtype, self.rows)
        zeros.fill(0.0)
        for t in cutlass.range_constexpr(self.tiles):
            token = TILE * t + lane % 4
            if token < count:
                cute.autovec_copy(zeros, self.neighbours(mOut[start + token, h, None], warp, lane))

    def neighbours(self, row, warp, lane):
        """The ``rows`` neighbouring elements of a row of V that a lane stores."""
        return cute.local_tile(row, (self.rows,), (8 * warp + lane // 4,))


def pick(condition, a, b):
    """condition ? a : b of Float32 without a branch."""
    return Float32(cutlass.select_(condition, a, b))


def fake_arguments(problem: GdnProblem) -> list[object]:
    """Fake tensors for the arguments of the kernels' ``__call__``, in order; no GPU is needed.

    Batch, slots and every first stride are symbolic; inner strides, dtypes and alignments are compiled in, and the
    compiled function checks them on every call.
    """
    from cutlass.cute.runtime import make_fake_tensor as fake

    g, L, spec, exact = problem.geometry, problem.buffer_len, problem.tokens > 0, problem.exact_fold
    Hk, HV, K, V = g.num_k_heads, g.num_v_heads, g.head_k_dim, g.head_v_dim
    tokens, slots = cute.sym_int(), cute.sym_int()
    rings = cute.sym_int() if spec else slots
    state, act, ring = (CUTE_DTYPES[d] for d in (problem.state_dtype, problem.act_dtype, problem.ring_dtype))

    def vector(dtype, size=None):
        return None if dtype is None else fake(CUTE_DTYPES[dtype], (size or cute.sym_int(),), (1,))

    def ring_rows(dtype, *shape, there=True, align=16):
        return fake_rows(dtype, *shape, first=rings, align=align) if there else None

    a, b, A_log, dt_bias = problem.gate_dtypes
    i32 = torch.int32
    return [
        fake_rows(state, HV, V, K, first=slots, align=16), fake_rows(act, Hk, K, first=tokens, align=16),
        fake_rows(act, Hk, K, first=tokens, align=16), fake_rows(act, HV, V, first=tokens, align=16),
        fake_rows(CUTE_DTYPES[a], HV, first=tokens, align=a.itemsize),
        fake_rows(CUTE_DTYPES[b], HV, first=tokens, align=b.itemsize),
        vector(A_log), vector(dt_bias), ring_rows(ring, HV, L, V), ring_rows(ring, Hk, L, K),
        ring_rows(Float32, HV, L, align=4), ring_rows(act, HV, L, V, there=exact),
        ring_rows(act, Hk, L, K, there=exact), ring_rows(Float32, HV, L, there=exact, align=4),
        fake_rows(act, HV, V, first=tokens, align=16), vector(i32) if spec else None, vector(problem.index_dtype),
        vector(problem.key_dtype) if spec else None, vector(i32), vector(i32) if spec else None,
        vector(problem.flag_dtype), Int32(0), vector(torch.int64, SEED_WORDS) if problem.philox_rounds else None]
