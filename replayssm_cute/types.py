"""Values that travel between the modules: geometry, problem, and whether it can be served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replayssm_cute.errors import ArgumentError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Support:
    """Whether something can be served, and why not. A value, never an exception.

    Attributes:
        ok: True when it can be served.
        reason: empty when ``ok``; otherwise one sentence.
    """

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


SUPPORTED = Support(True)


@dataclass(frozen=True)
class Mamba2Geometry:
    """Head geometry of one Mamba2 layer on one tensor-parallel rank.

    Attributes:
        nheads: heads H.
        headdim: P, rows of a head's state.
        dstate: N, columns of a head's state.
        ngroups: G, groups that share B and C; divides ``nheads``.
    """

    nheads: int
    headdim: int
    dstate: int
    ngroups: int

    def __post_init__(self) -> None:
        for name in ("nheads", "headdim", "dstate", "ngroups"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(name, "a positive integer", value)
        if self.nheads % self.ngroups:
            raise ArgumentError("ngroups", f"a divisor of nheads={self.nheads}", self.ngroups)

    @property
    def heads_per_group(self) -> int:
        return self.nheads // self.ngroups

    @property
    def state_elements(self) -> int:
        """Elements of one request's state in one layer."""
        return self.nheads * self.headdim * self.dstate

    def shard(self, tp: int) -> Mamba2Geometry:
        """Geometry of one rank of a tensor-parallel group of ``tp`` ranks.

        Heads are divided. Groups are divided where ``tp`` divides them; a single group is
        replicated on every rank. Where neither holds, each rank gets the groups its own heads
        belong to, which needs the heads of a rank to lie in whole groups or inside one group.

        Raises:
            ArgumentError: ``tp`` does not divide the heads, or a rank's heads would straddle
                groups unevenly.
        """
        if tp < 1 or self.nheads % tp:
            raise ArgumentError("tp", f"a positive divisor of nheads={self.nheads}", tp)
        local = self.nheads // tp
        if self.ngroups % tp == 0:
            groups = self.ngroups // tp
        elif self.heads_per_group % local == 0:
            groups = 1  # the rank's heads all lie inside one group, which is replicated
        else:
            raise ArgumentError("tp", f"a size that splits {self.ngroups} groups of "
                                f"{self.heads_per_group} heads evenly or inside one group", tp)
        return Mamba2Geometry(local, self.headdim, self.dstate, groups)

    def __str__(self) -> str:
        return f"{self.nheads}x{self.headdim}x{self.dstate}/{self.ngroups}"


@dataclass(frozen=True)
class Mamba2Problem:
    """Everything about a Mamba2 decode call that a kernel may be specialised on, bar the batch.

    Attributes:
        geometry: the rank's head geometry.
        buffer_len: L, rows of the rings.
        state_dtype: dtype of the checkpoint pool.
        act_dtype: dtype of ``x``, ``B``, ``C``, ``z`` and ``out``.
        ring_dtype: dtype of ``x_cache`` and ``B_cache``.
        dt_dtype: dtype of ``dt``.
        flush_dtype: ``torch.int8`` or ``torch.bool``.
        index_dtype: ``torch.int32`` or ``torch.int64``.
        index_ndim: 1 or 2; with 2, column 0 holds the slot.
        dt_bias_dtype: dtype of ``dt_bias``, None where absent.
        D_dtype: dtype of ``D``, None where absent.
        D_tied: ``D`` is one value per head (stride 0 over P).
        has_z: the output gate is applied.
        dt_softplus: softplus is applied to dt.
        philox_rounds: rounds of the generator that rounds the stored checkpoint; 0 rounds to nearest.
        state_align: greatest power of two, at most 32, that divides the byte address of every
            row of the state pool.
        row_align: the same, at most 16, over the rows of activations, ``x_cache`` and ``B_cache``.
        dt_align: the same, at most 16, over the rows of ``dt_cache`` and of the scales of an 8-bit
            checkpoint.
    """

    geometry: Mamba2Geometry
    buffer_len: int
    state_dtype: torch.dtype
    act_dtype: torch.dtype
    ring_dtype: torch.dtype
    dt_dtype: torch.dtype
    flush_dtype: torch.dtype
    index_dtype: torch.dtype
    index_ndim: int = 1
    dt_bias_dtype: torch.dtype | None = None
    D_dtype: torch.dtype | None = None
    D_tied: bool = True
    has_z: bool = False
    dt_softplus: bool = True
    philox_rounds: int = 0
    state_align: int = 32
    row_align: int = 16
    dt_align: int = 16
