"""Requests decoded speculatively over many windows, beside the recurrence run token by token.

The recurrence (``reference.gdn.recurrent_step``) sees only accepted tokens. Before every step all ring rows without a
committed record are poisoned, so that only cursors connect one step with the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replayssm_cute.reference import gdn, gdn_spec

F32, F64 = torch.float32, torch.float64
NULL = -1


@dataclass
class Shape:
    """Sizes of a chain: ``tokens`` a window, ``buffer_len`` ring rows, K = ``k_size``, V = ``v_size``."""

    tokens: int = 4
    buffer_len: int = 16
    k_heads: int = 1
    ratio: int = 2
    k_size: int = 16
    v_size: int = 8
    exact: bool = True
    requests: int = 3


@dataclass
class Chain:
    """A batch of requests (and one padded row) on one layer's pools.

    Attributes:
        shadow: (requests, HV, V, K) recurrent states after the accepted tokens.
        flushes, output_error: what has happened so far; the error is relative to the largest output.
        bases: values that ``cache_base`` has had.
        recurrence: one token of the rule, as ``reference.gdn.recurrent_step``; it sets the bits of the shadow.
    """

    shape: Shape
    dtype: torch.dtype = F32
    act: torch.dtype = torch.bfloat16
    ring: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = F32
    device: str = "cpu"
    seed: int = 0
    flushes: int = 0
    output_error: float = 0.0
    bases: set[int] = field(default_factory=set)
    recurrence: Callable[..., tuple[Tensor, Tensor]] = gdn.recurrent_step

    def __post_init__(self) -> None:
        s, self.gen = self.shape, torch.Generator().manual_seed(self.seed)
        HV, L, rows = s.k_heads * s.ratio, s.buffer_len, s.requests + 2
        self.slots = torch.tensor([*[(2 * i + 1) % (s.requests + 2) for i in range(s.requests)], NULL])
        self.keys = torch.tensor([*range(s.requests, 0, -1), NULL])

        def pool(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.full((rows, *size), math.nan, dtype=dtype, device=self.device)

        self.state = pool(HV, s.v_size, s.k_size, dtype=self.state_dtype)
        narrow = F64 if self.dtype == F64 else self.ring
        raw = F64 if self.dtype == F64 else self.act
        wide = F64 if self.dtype == F64 else F32
        self.rings: dict[str, Tensor | None] = {
            "d_cache": pool(HV, L, s.v_size, dtype=narrow), "k_cache": pool(s.k_heads, L, s.k_size, dtype=narrow),
            "g_cache": pool(HV, L, dtype=wide), "rawv_cache": None, "rawk_cache": None, "beta_cache": None}
        if s.exact:
            self.rings |= {"rawv_cache": pool(HV, L, s.v_size, dtype=raw),
                           "rawk_cache": pool(s.k_heads, L, s.k_size, dtype=raw), "beta_cache": pool(HV, L, dtype=wide)}
        self.cursors = {name: torch.full((rows,), 77, dtype=dtype, device=self.device) for name, dtype in
                        (("write_pos", torch.int32), ("cache_base", torch.int32), ("is_flush", torch.int8))}
        self.A_log = torch.log(torch.rand(HV, generator=self.gen) * 2 + 0.05).to(self.device)
        self.dt_bias = (torch.randn(HV, generator=self.gen) - 3).to(self.device)
        self.shadow = self.normal(s.requests, HV, s.v_size, s.k_size, dtype=self.state_dtype).to(self.dtype) * 0.5
        self.state[self.live_slots] = self.shadow.to(self.state_dtype)
        self.indices = {"ssm_state_indices": self.slots.int().to(self.device),
                        "replay_indices": self.keys.int().to(self.device), "null_block_id": NULL}

    @property
    def live_slots(self) -> Tensor:
        return self.slots[:-1].to(self.device)

    @property
    def live_keys(self) -> Tensor:
        return self.keys[:-1].to(self.device)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self.gen)
        return values.to(dtype or (F64 if self.dtype == F64 else self.act)).to(self.device)

    def window(self) -> dict[str, Tensor]:
        """The inputs of a window for every row, the padded one included, and the output buffer."""
        s, n = self.shape, (self.shape.requests + 1) * self.shape.tokens
        HV = s.k_heads * s.ratio
        return {"q": self.normal(n, s.k_heads, s.k_size), "k": self.normal(n, s.k_heads, s.k_size),
                "v": self.normal(n, HV, s.v_size), "a": self.normal(n, HV), "b": self.normal(n, HV),
                "out": torch.full((n, HV, s.v_size), math.nan, dtype=F64 if self.dtype == F64 else self.act,
                                  device=self.device),
                "query_start_loc": torch.arange(0, n + 1, s.tokens, dtype=torch.int32, device=self.device)}

    def step(self, verify: Callable[[Chain, dict[str, Tensor]], object], commit: Callable[[Chain, Tensor], object],
             accepted: Tensor) -> None:
        """Verify a window, check it and the checkpoints that it folded, then accept ``accepted`` (requests,) tokens."""
        self.poison()
        inputs, flushed = self.window(), self.cursors["is_flush"][self.live_keys].bool()
        verify(self, inputs)
        if bool(flushed.any()):
            self.flushes += int(flushed.sum())
            self.check_states(self.state[self.live_slots[flushed]], self.shadow[flushed])
        state, T, worst = self.shadow, self.shape.tokens, 0.0
        out = inputs["out"].unflatten(0, (-1, T))
        assert bool((out[-1] == 0).all()), "a padded row's output is not zero"
        new = self.shadow.clone()
        for t in range(T):
            row = {n: inputs[n].unflatten(0, (-1, T))[:-1, t] for n in ("q", "k", "v", "a", "b")}
            o, state = self.recurrence(state, **row, A_log=self.A_log, dt_bias=self.dt_bias)
            worst = max(worst, float((out[:-1, t].double() - o.double()).abs().max() / o.abs().max()))
            keep = (accepted > t).to(self.device)
            new[keep] = state[keep]
        self.shadow, self.output_error = new, max(self.output_error, worst)
        commit(self, torch.cat([accepted, torch.tensor([3])]).int().to(self.device))
        self.bases |= set(self.cursors["cache_base"][self.live_keys].tolist())

    def check_states(self, got: Tensor, want: Tensor) -> None:
        """Folded checkpoints against the recurrence: the same bits where an fp32 fold is exact."""
        if self.dtype == F64:
            torch.testing.assert_close(got.double(), want, rtol=1e-12, atol=1e-12)
        elif self.shape.exact and self.state_dtype == F32:
            assert torch.equal(got, want), f"{int((got != want).sum())} elements differ from the recurrence"
        else:
            assert float((got.double() - want.double()).norm() / want.double().norm()) < 0.05

    def poison(self) -> None:
        """NaN in every ring row that holds no committed record of a live request."""
        L = self.shape.buffer_len
        m, base = (self.cursors[n][self.live_keys].long()[:, None] for n in ("write_pos", "cache_base"))
        invalid = (torch.arange(L, device=self.device) - base) % L >= m
        for ring in self.rings.values():
            if ring is not None:
                keys, at = invalid.nonzero().T
                ring[self.live_keys[keys], :, at] = math.nan


def reference_verify(chain: Chain, inputs: dict[str, Tensor], naive: bool = False) -> None:
    step = gdn_spec.verify_naive if naive else gdn_spec.verify
    step(chain.state, **inputs, A_log=chain.A_log, dt_bias=chain.dt_bias, rings=chain.rings, **chain.cursors,
         **chain.indices, scale=chain.shape.k_size ** -0.5, dtype=chain.dtype)  # type: ignore[arg-type]


def reference_commit(chain: Chain, accepted: Tensor) -> None:
    gdn_spec.commit(**chain.cursors, num_accepted=accepted, replay_indices=chain.indices["replay_indices"],  # type: ignore[arg-type]
                    null_block_id=NULL, ring_len=chain.shape.buffer_len, max_cache_len=chain.shape.buffer_len,
                    max_spec_len=chain.shape.tokens, fold_every_commit=False)


def reference_reset(chain: Chain) -> None:
    gdn_spec.reset(**chain.cursors, replay_indices=chain.indices["replay_indices"], null_block_id=NULL)  # type: ignore[arg-type]


def acceptance(gen: torch.Generator, requests: int, tokens: int) -> Tensor:
    """Accepted tokens of a step, 1 to T, and 0 now and then."""
    return torch.randint(0, tokens + 1, (requests,), generator=gen)
