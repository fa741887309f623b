"""Launch parameters of the Gated DeltaNet Triton kernels: their validity and heuristic. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import dataclass

from fallback_triton.mamba2_config import MAX_REGISTERS, MAX_STATE_PER_THREAD, next_power_of_two, tile_columns
from replayssm_cute.gdn_types import GdnFoldProblem, GdnGeometry, GdnProblem
from replayssm_cute.launch_config import LaunchConfig
from replayssm_cute.rounding import elements_per_call
from replayssm_cute.types import SUPPORTED, Support


@dataclass(frozen=True)
class GdnTritonConfig(LaunchConfig):
    """How a program splits a head's state.

    Attributes:
        block_v: rows of the state that a program holds, a power of two.
        num_warps: warps of a program.
        state_k: columns of a state tile (see ``fallback_triton.device``), a power of two.
        ring_k: the same for the k ring and the window's k.
        max_registers: limit of registers a thread on NVIDIA, 0 for the compiler's choice.
    """

    block_v: int
    num_warps: int = 4
    state_k: int = 32
    ring_k: int = 64
    max_registers: int = 0

    def tiles(self, head_v_dim: int) -> int:
        """Programs of one head."""
        return -(-head_v_dim // self.block_v)


def state_per_thread(geometry: GdnGeometry, config: GdnTritonConfig, warp_size: int) -> float:
    """State elements that a thread holds at once, masked ones included."""
    columns = -(-geometry.head_k_dim // config.state_k) * config.state_k
    return config.block_v * columns / (config.num_warps * warp_size)


def validate(problem: GdnProblem | GdnFoldProblem, config: GdnTritonConfig, warp_size: int = 32) -> Support:
    """Whether the kernels can be built so: the one predicate of heuristic, registry and tuner."""
    g, c = problem.geometry, config
    for name in ("block_v", "num_warps", "state_k", "ring_k"):
        value = getattr(c, name)
        if value < 1 or value & (value - 1):
            return Support(False, f"{name}={value} is not a power of two")
    if c.block_v >= 2 * g.head_v_dim:
        return Support(False, f"block_v={c.block_v} does not fit V={g.head_v_dim}")
    if c.num_warps * warp_size > 512:
        return Support(False, f"{c.num_warps} warps of {warp_size} exceed 512 threads")
    if max(c.state_k, c.ring_k) > next_power_of_two(g.head_k_dim):
        return Support(False, f"a tile is wider than K={g.head_k_dim}")
    if getattr(problem, "philox_rounds", 0) and c.state_k < elements_per_call(problem.state_dtype):
        return Support(False, f"state_k={c.state_k} splits a call of the random generator")
    if state_per_thread(g, c, warp_size) > MAX_STATE_PER_THREAD:
        return Support(False, f"a thread would hold more than {MAX_STATE_PER_THREAD} state elements")
    if not 0 <= c.max_registers <= MAX_REGISTERS or (c.max_registers and warp_size != 32):
        return Support(False, f"max_registers={c.max_registers} is not in 0..{MAX_REGISTERS}, or no NVIDIA GPU")
    return SUPPORTED


def default_config(problem: GdnProblem | GdnFoldProblem, warp_size: int = 32) -> GdnTritonConfig:
    """The heuristic where no measurement is at hand. Always valid. It does not look at the batch.

    At most 64 rows and about 64 state elements a thread: a flush holds them all in fp32. Rows of an odd V are masked
    only in the last program of a head. With fp32 rings the compiler takes more registers than pay: 168 are 9 to 20%
    faster on an H200 at every batch.
    """
    g, limit = problem.geometry, 0
    if isinstance(problem, GdnProblem) and problem.ring_dtype.itemsize == 4 and not problem.tokens and warp_size == 32:
        limit = 168
    block_v = min(64, 1 << (g.head_v_dim.bit_length() - 1))
    while block_v > 16 and -g.head_v_dim % block_v * 4 > g.head_v_dim:
        block_v //= 2
    for num_warps in (1, 2, 4, 8):
        threads = num_warps * warp_size
        config = GdnTritonConfig(block_v, num_warps, tile_columns(g.head_k_dim, problem.state_dtype.itemsize, threads),
                                 tile_columns(g.head_k_dim, problem.ring_dtype.itemsize, threads), limit)
        if 2 * threads > 256 or state_per_thread(g, config, warp_size) <= 64:
            return config
    raise AssertionError("unreachable: the loop ends with 256 threads")
