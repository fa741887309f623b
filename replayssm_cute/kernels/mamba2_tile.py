"""What the two Mamba2 replay kernels share: the window's weights and the epilogue.

Eight lanes form a lane group. A group reads a row of N elements as chunks c * 8 + lane of one vector
load each, so that it takes whole 128-byte lines; dots over a row are reduced over its lanes.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, const_expr

from replayssm_cute.kernels import device, rounding
from replayssm_cute.kernels.building import fake_rows
from replayssm_cute.kernels.mamba2_config import LANES, Mamba2Config, state_vector
from replayssm_cute.kernels.targets import Target
from replayssm_cute.rounding import LARGEST_CODE
from replayssm_cute.types import Mamba2Problem

CUTE_DTYPES = {torch.float32: cutlass.Float32, torch.float16: cutlass.Float16,
               torch.bfloat16: cutlass.BFloat16, torch.int32: cutlass.Int32,
               torch.int64: cutlass.Int64, torch.int8: cutlass.Int8, torch.bool: cutlass.Boolean,
               torch.float8_e4m3fn: cutlass.Float8E4M3FN}
LANE_BITS = (1, 2, 4)           # lanes of a group
SEED_WORDS = 8                  # int64 words of the generator's state


class ReplayTile:
    """Static layout of a tile and the arithmetic on it; base of both kernels.

    A thread owns ``rows`` rows of the state, spread over the lanes of a group.
    """

    def __init__(self, problem: Mamba2Problem, config: Mamba2Config, target: Target) -> None:
        g = problem.geometry
        self.problem, self.config = problem, config
        self.H, self.P, self.N, self.G = g.nheads, g.headdim, g.dstate, g.ngroups
        self.L, self.ratio = problem.buffer_len, g.heads_per_group
        self.state_dtype = CUTE_DTYPES[problem.state_dtype]
        self.act_dtype = CUTE_DTYPES[problem.act_dtype]
        self.packed, self.hardware_rounding = target.packed_fma, target.stochastic_cvt
        self.stochastic = problem.philox_rounds > 0
        self.coded = problem.state_dtype in LARGEST_CODE           # an 8-bit checkpoint with scales
        self.signed = problem.state_dtype is torch.int8            # its codes are int8, not e4m3
        self.tile_p, self.threads = config.tile_p, config.threads
        self.tiles = self.P // self.tile_p
        self.warps, self.groups = self.threads // 32, self.threads // LANES
        self.rows = self.tile_p // self.groups                     # state rows of a thread
        self.vec = state_vector(problem, config)
        self.chunks = self.N // (LANES * self.vec)
        self.dt_parts = -(-self.L // 32)                           # dt ring entries of a lane

    def chunk(self, row_tensor, c, lane_in_group):
        """Chunk c of a row of N elements: what one lane loads at once."""
        return cute.local_tile(row_tensor, (self.vec,), (c * LANES + lane_in_group,))

    def row_values(self, row_tensor, lane_in_group, dtype):
        """A lane's share of a row of N elements, in the order of the chunks, as Float32."""
        values = []
        for c in range(self.chunks):
            values += device.load_f32(self.chunk(row_tensor, c, lane_in_group), self.vec, dtype)
        return values

    def discretize(self, raw):
        """dt' of the current token from dt + dt_bias."""
        return device.softplus(raw) if self.problem.dt_softplus else raw

    def window_weights(self, dt_ring, dt_now, A, pos, lane):
        """Weights of the window: s_j = dt'_j exp(A sum of later dt').

        Args:
            dt_ring: dt' of ring entries 32 k + lane; what lies at or past ``pos`` is ignored.
            dt_now: dt' of the current token, entry ``pos``.

        Returns:
            ([s_j of entry 32 k + lane; zero past ``pos``], decay of the checkpoint)
        """
        parts = []
        for k, held in enumerate(dt_ring):
            j = lane + 32 * k
            value = device.select(j < pos, held, Float32(0.0))
            parts.append(device.select(j == pos, dt_now, value))
        later, total = device.suffix_sums(parts, lane, self.L)
        rate = A * device.LOG2E
        s = [d * cute.math.exp2(rate * t, fastmath=True) for d, t in zip(parts, later)]
        return s, cute.math.exp2(rate * total, fastmath=True)

    def weight_of(self, s, j):
        """s_j out of the lane that holds it."""
        value = cute.arch.shuffle_sync(s[0], j % 32)
        for k in range(1, self.dt_parts):
            value = device.select(j < 32 * k, value, cute.arch.shuffle_sync(s[k], j % 32))
        return value

    def throw_dice(self, mSeed):
        """The launch's random words; None where the checkpoint is rounded to nearest."""
        if not self.stochastic:
            return None
        return rounding.Dice(mSeed, self.H, self.P, self.N * self.state_dtype.width // 128, self.problem.philox_rounds)

    def rounded(self, eight, words):
        """Eight fp32 values as a fragment of the state's type; ``words`` of the generator, None rounds to nearest."""
        return rounding.stored(eight, words, self.state_dtype, self.hardware_rounding)

    def finish(self, y, x, D, z):
        """y + D x, times silu(z); Nones are left out."""
        if D is not None:
            y = D * x + y
        if z is not None:
            y = y * device.silu(z)
        return y


def fake_arguments(problem: Mamba2Problem) -> list[object]:
    """Fake tensors for the canonical arguments of a step, in order; no GPU is needed.

    Batch, slots and every first stride are symbolic; inner strides, dtypes and alignments are
    compiled in, and the compiled function checks them on every call.
    """
    from cutlass.cute.runtime import make_fake_tensor as fake

    g, L = problem.geometry, problem.buffer_len
    H, P, N, G = g.nheads, g.headdim, g.dstate, g.ngroups
    batch, slots = cute.sym_int(), cute.sym_int()
    state, act = CUTE_DTYPES[problem.state_dtype], CUTE_DTYPES[problem.act_dtype]

    def tied(dtype, *shape, first=None):
        head = () if first is None else (first,)
        strides = tuple(cute.sym_int64() for _ in (*head, 0)) + (0,) * (len(shape) - 1)
        return fake(CUTE_DTYPES[dtype], (*head, *shape), strides)

    D = None
    if problem.D_dtype is not None:
        D = tied(problem.D_dtype, H, P) if problem.D_tied else \
            fake(CUTE_DTYPES[problem.D_dtype], (H, P), (cute.sym_int64(), 1))
    x = fake_rows(act, H, P, first=batch, align=16)
    index = CUTE_DTYPES[problem.index_dtype]
    indices = fake(index, tuple(cute.sym_int() for _ in range(problem.index_ndim)),
                   tuple(cute.sym_int64() for _ in range(problem.index_ndim)))
    return [
        fake_rows(state, H, P, N, first=slots, align=problem.state_align), x,
        tied(problem.dt_dtype, H, P, first=batch), tied(torch.float32, H, P, N),
        fake_rows(act, G, N, first=batch, align=16), fake_rows(act, G, N, first=batch, align=16), D,
        None if problem.dt_bias_dtype is None else tied(problem.dt_bias_dtype, H, P),
        fake_rows(act, H, P, first=batch, align=16) if problem.has_z else None,
        fake_rows(act, H, L, P, first=slots, align=16),
        fake_rows(cutlass.Float32, H, L, first=slots, align=max(4, problem.dt_align)),
        fake_rows(act, G, L, N, first=slots, align=16),
        fake(cutlass.Int32, (cute.sym_int(),), (1,)),
        fake(CUTE_DTYPES[problem.flush_dtype], (cute.sym_int(),), (1,)),
        indices, cutlass.Int32(0), fake_rows(act, H, P, first=batch, align=16),
        fake(cutlass.Int64, (SEED_WORDS,), (1,)) if problem.philox_rounds else None,
        *([fake_rows(cutlass.Float32, H, P, first=slots, align=16)] if problem.state_dtype in LARGEST_CODE else [])]


def load_scalars(mDt, mDtBias, mA, b, h):
    """(dt + dt_bias, A) of one row and head, as Float32."""
    raw = mDt[b, h, 0].to(Float32)
    if const_expr(mDtBias is not None):
        raw = raw + mDtBias[h, 0].to(Float32)
    return raw, mA[h, 0, 0]


def load_slot(mIndices, b):
    """Slot of a batch row: the index, or column 0 of it."""
    return mIndices[b, 0] if const_expr(cute.rank(mIndices) == 2) else mIndices[b]
