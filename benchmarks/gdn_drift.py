"""State error of Gated DeltaNet over a long speculative decode, by fold and ring type: numbers, no time.

One request is verified in windows of T tokens with random acceptance until it has as many tokens as asked for. Beside
it run the recurrence in float64, and the one in float32 token by token, by the same backend: a window of one token
whose record the next step folds. The exact fold must have the bits of the latter.

    python -m benchmarks.gdn_drift [--tokens 16384] [--backend cute]

With ``--backend torch`` 16,384 tokens take some fifteen minutes of one CPU core.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm_cute.gdn import gdn_replayssm_spec_decode
from replayssm_cute.gdn_cursors import GdnCursors, commit_gdn_replayssm_spec
from replayssm_cute.gdn_fold import snapshot_gdn_replayssm
from replayssm_cute.gdn_layout import allocate_gdn_pool
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.reference.gdn import recurrent_step

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
GEOMETRY, T, L = GdnGeometry(1, 4, 128, 128), 4, 16
MARKS = (1024, 4096, 16384)


@dataclass(frozen=True)
class Variant:
    """A way to keep the state: fold, ring dtype, checkpoint dtype."""

    name: str
    exact: bool
    ring: torch.dtype
    state: torch.dtype


EXACT = Variant("exact fold, fp32 checkpoint", True, BF16, F32)
VARIANTS = (EXACT, Variant("ring fold, bf16 ring", False, BF16, F32),
            Variant("ring fold, fp16 ring", False, F16, F32), Variant("ring fold, fp32 ring", False, F32, F32),
            Variant("exact fold, fp16 checkpoint", True, BF16, F16),
            Variant("exact fold, bf16 checkpoint", True, BF16, BF16),
            Variant("ring fold, bf16 ring and checkpoint", False, BF16, BF16))


class Request:
    """One request on the pools of one layer; slot 1 takes copies of its state."""

    def __init__(self, variant: Variant, tokens: int, buffer_len: int, device: str, backend: str) -> None:
        self.tokens, self.L, self.device, self.backend = tokens, buffer_len, device, backend
        self.pool = allocate_gdn_pool(2, GEOMETRY, buffer_len, exact_fold=variant.exact, state_dtype=variant.state,
                                      ring_dtype=variant.ring, device=device)
        self.rings: dict[str, Tensor | None] = {"rawv_cache": None, "rawk_cache": None, "beta_cache": None,
                                                **self.pool.rings}
        self.cursors = GdnCursors.allocate(2, device)
        self.index, self.copy = (torch.tensor([i], dtype=torch.int32, device=device) for i in range(2))
        self.starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)

    def step(self, inputs: tuple[Tensor, ...], gates: tuple[Tensor, Tensor], accepted: int) -> None:
        """Verify a window (q, k, v, a, b) and keep the first ``accepted`` of its tokens."""
        c = self.cursors
        gdn_replayssm_spec_decode(*inputs, *gates, self.pool.state, **self.rings, out=torch.empty_like(inputs[2]),
                                  query_start_loc=self.starts, ssm_state_indices=self.index, replay_indices=self.index,
                                  write_pos=c.write_pos, cache_base=c.cache_base, is_flush=c.is_flush,
                                  max_cache_len=self.L, max_spec_len=self.tokens, null_block_id=-1,
                                  backend=self.backend)
        n = torch.tensor([accepted], dtype=torch.int32, device=self.device)
        commit_gdn_replayssm_spec(c.write_pos, c.cache_base, c.is_flush, n, self.index, self.L, self.tokens,
                                  null_block_id=-1)

    def state(self) -> Tensor:
        """The state with all records, as stored in the checkpoint's dtype."""
        layers = {name: ring[None] for name, ring in self.rings.items() if ring is not None}
        snapshot_gdn_replayssm(self.pool.state[None], layers, self.index, self.copy, self.index, self.cursors,
                               null_block_id=-1)
        return self.pool.state[1:]


def gates() -> tuple[Tensor, Tensor]:
    """(A_log, dt_bias): four heads that forget over about 10, 100, 1,000 and 10,000 tokens."""
    A, step = torch.tensor([8.0, 4.0, 2.0, 1.0]), torch.tensor([0.1 / 8, 0.01 / 4, 0.001 / 2, 0.0001])
    return torch.log(A), step + torch.log(-torch.expm1(-step))


def measure(tokens: int, device: str, backend: str) -> dict[int, tuple[list[tuple[float, bool]], float]]:
    """At every mark: of each variant the relative error (2-norm, over the heads) of the state against float64 and
    whether it has the bits of the token-by-token recurrence in fp32; and the error of that one."""
    gen = torch.Generator().manual_seed(0)
    A_log, dt_bias = (t.to(device) for t in gates())
    ours, plain = [Request(v, T, L, device, backend) for v in VARIANTS], Request(EXACT, 1, 2, device, backend)
    oracle = torch.zeros(1, *plain.pool.state.shape[1:], dtype=F64, device=device)
    found: dict[int, tuple[list[tuple[float, bool]], float]] = {}
    done = 0
    while done < tokens:
        q, k, v = (torch.randn(T, heads, 128, generator=gen).to(device, BF16) for heads in (1, 1, 4))
        a, b = ((torch.randn(T, 4, generator=gen) * s).to(device, BF16) for s in (0.5, 1.0))
        accepted = int(torch.randint(1, T + 1, (1,), generator=gen))
        for request in ours:
            request.step((q, k, v, a, b), (A_log, dt_bias), accepted)
        for t in range(accepted):
            token = q[t:t + 1], k[t:t + 1], v[t:t + 1], a[t:t + 1], b[t:t + 1]
            plain.step(token, (A_log, dt_bias), 1)
            _, oracle = recurrent_step(oracle, *token, A_log, dt_bias)
        before, done = done, done + accepted
        for mark in MARKS:
            if before < mark <= done:
                states, recurrent = [request.state() for request in ours], plain.state()
                found[mark] = [(distance(s, oracle), bool(torch.equal(s, recurrent))) for s in states], \
                    distance(recurrent, oracle)
    return found


def distance(state: Tensor, exact: Tensor) -> float:
    return float((state.double() - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=MARKS[-1])
    parser.add_argument("--backend", default="cute" if torch.cuda.is_available() else "torch")
    args = parser.parse_args()
    device = "cpu" if args.backend == "torch" else "cuda"
    found = measure(args.tokens, device, args.backend)
    print("| state error after tokens | " + " | ".join(f"{mark:,}" for mark in found) + " |")
    print("|---" * (1 + len(found)) + "|")
    for i, variant in enumerate(VARIANTS):
        errors = (rows[i] for rows, _ in found.values())
        print(f"| {variant.name} | " + " | ".join(f"{e:.1e}" + ", the same bits" * same for e, same in errors) + " |")
    print("| fp32 recurrence, token by token | " + " | ".join(f"{plain:.1e}" for _, plain in found.values()) + " |")


if __name__ == "__main__":
    main()
