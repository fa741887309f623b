"""Values of the Gated DeltaNet steps: head geometry, and the problem that a call poses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm_cute.errors import ArgumentError


@dataclass(frozen=True)
class GdnGeometry:
    """Head geometry of one Gated DeltaNet layer on one tensor-parallel rank.

    Attributes:
        num_k_heads: Hk, heads of q and k; divides ``num_v_heads``.
        num_v_heads: HV, heads of v, of the state and of the output.
        head_k_dim: K, columns of a head's state.
        head_v_dim: V, rows of a head's state.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int = 128
    head_v_dim: int = 128

    def __post_init__(self) -> None:
        for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(name, "a positive integer", value)
        if self.num_v_heads % self.num_k_heads:
            raise ArgumentError("num_v_heads", f"a multiple of num_k_heads={self.num_k_heads}", self.num_v_heads)

    @property
    def ratio(self) -> int:
        """Value heads that share a key head."""
        return self.num_v_heads // self.num_k_heads

    @property
    def state_elements(self) -> int:
        """Elements of one request's state in one layer."""
        return self.num_v_heads * self.head_v_dim * self.head_k_dim

    def shard(self, tp: int) -> GdnGeometry:
        """Geometry of one rank of ``tp``; every rank holds whole key heads with all their value heads.

        Raises:
            ArgumentError: ``tp`` does not divide the key heads.
        """
        if tp < 1 or self.num_k_heads % tp:
            raise ArgumentError("tp", f"a positive divisor of num_k_heads={self.num_k_heads}", tp)
        return GdnGeometry(self.num_k_heads // tp, self.num_v_heads // tp, self.head_k_dim, self.head_v_dim)

    def __str__(self) -> str:
        return f"{self.num_v_heads}/{self.num_k_heads}x{self.head_v_dim}x{self.head_k_dim}"


@dataclass(frozen=True)
class GdnProblem:
    """Everything about a step that a kernel may be specialised on, bar the batch.

    Attributes:
        geometry: the rank's head geometry.
        buffer_len: L, rows of the rings.
        state_dtype: dtype of the checkpoint pool.
        act_dtype: dtype of q, k, v, out and of the raw rings.
        ring_dtype: dtype of ``d_cache`` and ``k_cache``.
        gate_dtypes: dtypes of a, b, A_log and dt_bias.
        index_dtype: dtype of the slot indices.
        key_dtype: dtype of the ring indices of a verify step.
        flag_dtype: dtype of ``is_flush`` or ``force_flush``; None where a flush is never forced.
        scale: factor of q.
        tokens: T, most tokens a row of a verify step; 0 for standard decode.
        exact_fold: the ring keeps the raw inputs, and a flush replays them.
        launch_mode: which rows of a verify step take part: "both", "verify" or "flush".
        l2norm: q and k are divided by their 2-norms.
        philox_rounds: rounds of the generator that rounds the stored checkpoint; 0 rounds to nearest.
        state_align: greatest power of two, at most 16, that divides the byte address of every row of the pool.
        row_align: the same over the rows of the activations and of the rings that hold vectors.
    """

    geometry: GdnGeometry
    buffer_len: int
    state_dtype: torch.dtype
    act_dtype: torch.dtype
    ring_dtype: torch.dtype
    gate_dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]
    index_dtype: torch.dtype = torch.int32
    key_dtype: torch.dtype = torch.int32
    flag_dtype: torch.dtype | None = None
    scale: float = 128 ** -0.5
    tokens: int = 0
    exact_fold: bool = False
    launch_mode: str = "both"
    l2norm: bool = True
    philox_rounds: int = 0
    state_align: int = 16
    row_align: int = 16

    @property
    def op(self) -> str:
        return "gdn_verify" if self.tokens else "gdn_decode"

    def __str__(self) -> str:
        state, act = (str(d).removeprefix("torch.") for d in (self.state_dtype, self.act_dtype))
        kind = f"verify T={self.tokens}" if self.tokens else "decode"
        return f"GDN {kind} {self.geometry}, state {state}, inputs {act}, L={self.buffer_len}"


@dataclass(frozen=True)
class GdnFoldProblem:
    """What a fold outside of a step (all layers, snapshot, retirement) may be specialised on.

    Attributes as in ``GdnProblem``; ``raw_dtype`` is that of the raw rings, None where the ring's d are folded;
    ``index_dtypes`` are those of the source slots, the target slots and the rings.
    """

    geometry: GdnGeometry
    buffer_len: int
    state_dtype: torch.dtype
    ring_dtype: torch.dtype
    raw_dtype: torch.dtype | None
    index_dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    flag_dtype: torch.dtype | None
    has_counts: bool
    l2norm: bool
    state_align: int = 16
    row_align: int = 16

    op = "gdn_fold"

    def __str__(self) -> str:
        return f"GDN fold {self.geometry}, state {str(self.state_dtype).removeprefix('torch.')}, L={self.buffer_len}"
