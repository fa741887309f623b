"""State error of Gated DeltaNet over a long speculative decode, by fold and ring type: numbers, no time.

One request is verified in windows of T tokens with random acceptance, by the PyTorch reference, until it has as many
tokens as asked for. Beside it runs the recurrence in float64, and the one in float32 that the exact fold must equal.

    python -m benchmarks.gdn_drift [--tokens 16384] [--device cuda]

On two CPU cores 1,024 tokens take some five minutes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm_cute.gdn_cursors import GdnCursors, commit_gdn_replayssm_spec
from replayssm_cute.gdn_layout import allocate_gdn_pool
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.reference import gdn, gdn_spec

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


VARIANTS = (Variant("exact fold, fp32 checkpoint", True, BF16, F32), Variant("ring fold, bf16 ring", False, BF16, F32),
            Variant("ring fold, fp16 ring", False, F16, F32), Variant("ring fold, fp32 ring", False, F32, F32),
            Variant("exact fold, fp16 checkpoint", True, BF16, F16),
            Variant("exact fold, bf16 checkpoint", True, BF16, BF16),
            Variant("ring fold, bf16 ring and checkpoint", False, BF16, BF16))


def gates() -> tuple[Tensor, Tensor]:
    """(A_log, dt_bias): four heads that forget over about 10, 100, 1,000 and 10,000 tokens."""
    A, step = torch.tensor([8.0, 4.0, 2.0, 1.0]), torch.tensor([0.1 / 8, 0.01 / 4, 0.001 / 2, 0.0001])
    return torch.log(A), step + torch.log(-torch.expm1(-step))


def measure(variant: Variant, tokens: int, device: str) -> dict[int, tuple[float, float]]:
    """Relative errors (2-norm, over the heads) of the state against float64 at every mark: (ours, fp32 recurrence)."""
    gen = torch.Generator().manual_seed(0)
    A_log, dt_bias = (t.to(device) for t in gates())
    pool = allocate_gdn_pool(1, GEOMETRY, L, exact_fold=variant.exact, state_dtype=variant.state,
                             ring_dtype=variant.ring, device=device)
    rings: dict[str, Tensor | None] = {"rawv_cache": None, "rawk_cache": None, "beta_cache": None, **pool.rings}
    cursors, index = GdnCursors.allocate(1, device), torch.zeros(1, dtype=torch.int32, device=device)
    exact, plain = (torch.zeros(1, *pool.state.shape[1:], dtype=dtype, device=device) for dtype in (F64, F32))
    starts, found, done = torch.tensor([0, T], device=device), {}, 0
    while done < tokens:
        q, k, v = (torch.randn(T, heads, 128, generator=gen).to(device, BF16) for heads in (1, 1, 4))
        a, b = ((torch.randn(T, 4, generator=gen) * s).to(device, BF16) for s in (0.5, 1.0))
        out = torch.empty_like(v)
        gdn_spec.verify(pool.state, q, k, v, a, b, A_log, dt_bias, rings, out, starts, index, index, cursors.write_pos,
                        cursors.cache_base, cursors.is_flush, -1, scale=128 ** -0.5)
        accepted = int(torch.randint(1, T + 1, (1,), generator=gen))
        for t in range(accepted):
            row = (x[t:t + 1] for x in (q, k, v, a, b))
            inputs = tuple(row)
            _, exact = gdn.recurrent_step(exact, *inputs, A_log, dt_bias)
            _, plain = gdn.recurrent_step(plain, *inputs, A_log, dt_bias)
        n = torch.tensor([accepted], dtype=torch.int32, device=device)
        commit_gdn_replayssm_spec(cursors.write_pos, cursors.cache_base, cursors.is_flush, n, index, L, T,
                                  null_block_id=-1)
        before, done = done, done + accepted
        for mark in MARKS:
            if before < mark <= done:
                got = gdn_spec.folded(pool.state, rings, index.long(), cursors.write_pos.long(),
                                      cursors.cache_base.long(), True, F32)
                found[mark] = tuple(float((s.double() - exact).norm() / exact.norm()) for s in (got, plain))
    return found  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=MARKS[-1])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    tokens = args.tokens
    print("| | " + " | ".join(f"{m:,} tokens" for m in MARKS if m <= tokens) + " |")
    print("|---" * (1 + sum(m <= tokens for m in MARKS)) + "|")
    for variant in VARIANTS:
        found = measure(variant, tokens, args.device)
        print(f"| {variant.name} | " + " | ".join(f"{ours:.1e}" for ours, _ in found.values()) + " |", flush=True)
    print("| fp32 recurrence | " + " | ".join(f"{plain:.1e}" for _, plain in found.values()) + " |")


if __name__ == "__main__":
    main()
