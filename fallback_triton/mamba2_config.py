"""Launch parameters of the Mamba2 Triton kernels: their validity, search space and heuristic.

Nothing here imports Triton, so that a tuner or a registry can read it anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from replayssm_cute.launch_config import LaunchConfig
from replayssm_cute.rounding import elements_per_call
from replayssm_cute.types import SUPPORTED, Mamba2Geometry, Mamba2Problem, Support

LINE = 128              # bytes of a row that one load instruction of a warp should cover
MAX_STATE_PER_THREAD = 160
MAX_REGISTERS = 255


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Mamba2TritonConfig(LaunchConfig):
    """How a program of the Mamba2 kernels splits a head's state.

    Attributes:
        block_p: rows of the state that a program holds, a power of two.
        tail_p: further rows behind them, a power of two or 0, so that a head of 80 rows is 64 + 16
            in one program and not 128 rows of which 48 are masked; only with the head in one program.
        num_warps: warps of a program.
        state_n: columns of a state tile (see ``fallback_triton.device``), a power of two.
        ring_n: the same for B and its ring.
        fold_n: columns of the state that a flush folds at a time, a power of two.
        max_registers: limit of registers a thread on NVIDIA, 0 for the compiler's choice. It buys
            more programs a multiprocessor, that is more bytes in flight.
    """

    block_p: int
    tail_p: int = 0
    num_warps: int = 4
    state_n: int = 32
    ring_n: int = 64
    fold_n: int = 32
    max_registers: int = 0

    @property
    def rows(self) -> int:
        """Rows of a head that one program covers."""
        return self.block_p + self.tail_p

    def tiles(self, headdim: int) -> int:
        """Programs of one head."""
        return -(-headdim // self.rows)


def state_per_thread(geometry: Mamba2Geometry, config: Mamba2TritonConfig, warp_size: int) -> float:
    """State elements that a thread holds at once, masked ones included."""
    columns = -(-geometry.dstate // config.state_n) * config.state_n
    return config.rows * columns / (config.num_warps * warp_size)


def validate(problem: Mamba2Problem, config: Mamba2TritonConfig, warp_size: int = 32) -> Support:
    """Whether the kernels can be built so: the one predicate of heuristic, registry and tuner."""
    g, c = problem.geometry, config
    for name in ("block_p", "num_warps", "state_n", "ring_n", "fold_n"):
        value = getattr(c, name)
        if value < 1 or value & (value - 1):
            return Support(False, f"{name}={value} is not a power of two")
    if c.tail_p and (c.tail_p & (c.tail_p - 1) or c.tail_p < 0):
        return Support(False, f"tail_p={c.tail_p} is neither 0 nor a power of two")
    if c.block_p >= 2 * g.headdim or (c.tail_p and not c.block_p < g.headdim <= c.rows):
        return Support(False, f"block_p={c.block_p} and tail_p={c.tail_p} do not fit P={g.headdim}")
    if c.num_warps * warp_size > 512:
        return Support(False, f"{c.num_warps} warps of {warp_size} exceed 512 threads")
    if max(c.state_n, c.ring_n, c.fold_n) > next_power_of_two(g.dstate):
        return Support(False, f"a tile is wider than N={g.dstate}")
    if problem.philox_rounds and c.fold_n < elements_per_call(problem.state_dtype):
        return Support(False, f"fold_n={c.fold_n} splits a call of the random generator")
    if state_per_thread(g, c, warp_size) > MAX_STATE_PER_THREAD:
        return Support(False, f"a thread would hold more than {MAX_STATE_PER_THREAD} state elements")
    if not 0 <= c.max_registers <= MAX_REGISTERS or (c.max_registers and warp_size != 32):
        return Support(False, f"max_registers={c.max_registers} is not in 0..{MAX_REGISTERS}, or no NVIDIA GPU")
    return SUPPORTED


def default_config(problem: Mamba2Problem, warp_size: int = 32) -> Mamba2TritonConfig:
    """The heuristic of the replay step where no measurement is at hand. Always valid.

    It does not look at the batch: another split sums in another order, and a row is to give the same
    bits in any batch.

    * A program takes a whole head where it can, since every further program of a head repeats the
      work on the ring: up to 8 warps of 96 state elements a thread.
    * 64 state elements a thread; with a 2-byte state and inputs 128. There a full GPU is limited by
      instructions, of which a warp spends about 350 before its first state element, and 128 elements
      are no more registers in flight than 64 of fp32. Not so with an 8-bit state, whose codes take
      registers to convert: compiled for sm_90, int8 with stochastic rounding takes 234 registers at 128
      elements and 95 at 64, which keeps more bytes in flight.
    * At 64 fp32 elements a thread, 128 registers keep 128 KB of state in flight on a multiprocessor;
      the compiler would take up to 170. Compiled for sm_90 with 2-byte inputs and L = 16, this limit
      spills 8 bytes at N = 128 and 16 at N = 256.
    * A narrow state in two warps: with at most 168 registers six programs are resident and nothing spills;
      the compiler would take up to 249, for four, which makes 96x80x128 15% slower from batch 64 on. Measured on an
      H200 with stochastic rounding of 64x64x128: a limit of 160 costs 0.4%, 152 2%;
      four warps 9 to 26%, fold_n = 16 12 to 18%.
    """
    g, fp32 = problem.geometry, problem.state_dtype.itemsize == 4
    light = problem.buffer_len <= 16 and problem.act_dtype.itemsize == problem.ring_dtype.itemsize == 2
    nvidia = warp_size == 32
    config = _tile(g, problem.state_dtype.itemsize, problem.ring_dtype.itemsize, warp_size,
                   128 if light and nvidia and problem.state_dtype.itemsize == 2 else 64)
    if light and nvidia and fp32 and config.num_warps >= 4 and state_per_thread(g, config, warp_size) <= 64:
        return replace(config, max_registers=128)
    if light and nvidia and config.num_warps == 2 and not fp32:
        return replace(config, max_registers=168)
    return config


def default_step_config(geometry: Mamba2Geometry, state_itemsize: int, warp_size: int = 32) -> Mamba2TritonConfig:
    """The heuristic of the per-step baseline: a head a program, 64 state elements a thread.

    Two programs of 8 warps, not one, fit a multiprocessor with 128 registers a thread.
    """
    config = _tile(geometry, state_itemsize, state_itemsize, warp_size, 64)
    return replace(config, max_registers=128) if config.num_warps == 8 and warp_size == 32 else config


def _tile(g: Mamba2Geometry, state_itemsize: int, ring_itemsize: int, warp_size: int,
          per_thread: int) -> Mamba2TritonConfig:
    """The largest program that is sensible, at about ``per_thread`` state elements a thread."""
    block_p, tail_p = _split_rows(g.headdim, g.dstate, 8 * 96 * 32)
    for num_warps in (1, 2, 4, 8):
        threads = num_warps * warp_size
        config = Mamba2TritonConfig(
            block_p, tail_p, num_warps, tile_columns(g.dstate, state_itemsize, threads),
            tile_columns(g.dstate, ring_itemsize, threads), min(32, next_power_of_two(g.dstate)))
        if 2 * threads > 256 or state_per_thread(g, config, warp_size) <= 1.25 * per_thread:
            break
    return config


def _split_rows(headdim: int, dstate: int, most: int) -> tuple[int, int]:
    """(block_p, tail_p): the head in one program of at most ``most`` elements, else equal tiles."""
    block_p = 1 << (headdim.bit_length() - 1)
    tail_p = next_power_of_two(headdim - block_p) if headdim > block_p else 0
    if (block_p + tail_p) * dstate <= most:
        return block_p, tail_p
    while block_p > 1 and (block_p * dstate > most or headdim % block_p):
        if block_p * dstate <= most and -headdim % block_p * 8 <= headdim:
            break  # an eighth of the rows masked is cheaper than tiles of a few rows
        block_p //= 2
    return block_p, 0


def tile_columns(dstate: int, itemsize: int, threads: int) -> int:
    """Columns of a tile: ``LINE`` bytes, and fewer than the threads (see ``device``)."""
    return min(LINE // itemsize, max(16, threads // 2), next_power_of_two(dstate))
