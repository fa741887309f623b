"""*Validated* of the Gated DeltaNet entries: the replay of their heads, dtypes, rings and windows.

Standard decode meets the float64 recurrence. A verify step's windows meet the fp32 recurrence, and what its exact fold
leaves in an fp32 checkpoint has its bits (``tests.gdn_chain``). ``tests/gpu/test_registry_gdn.py`` has the GPU's part.
"""

from __future__ import annotations

import math

import pytest
import torch

from replayssm_cute.gdn_layout import RING_NAMES, gdn_ring_shapes
from replayssm_cute.gdn_types import GdnGeometry
from replayssm_cute.reference import gdn
from replayssm_cute.registry.models import gdn_models
from tests.gdn_chain import Chain, Shape, acceptance, reference_commit, reference_reset, reference_verify

ENTRIES = gdn_models()
# Distinct (value heads a key head, K, V) of the entries; three value heads stand for more.
SHAPES = sorted({(min(entry.geometry.ratio, 3), entry.geometry.head_k_dim, entry.geometry.head_v_dim)
                 for entry in ENTRIES})
LENGTHS = sorted({length for entry in ENTRIES for length in entry.validated_buffer_lens})
WINDOWS = sorted({(tokens, length) for entry in ENTRIES for tokens in entry.validated_tokens
                  for length in entry.validated_buffer_lens if length >= 2 * tokens})
DTYPES = sorted({dtype for entry in ENTRIES for dtype in entry.validated_state_dtypes}, key=str)
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_meets_the_recurrence(shape: tuple[int, int, int], length: int, state_dtype: torch.dtype) -> None:
    """Two ring cycles of two key heads with fp32 rings, so that what differs is fp32 arithmetic and the rounding of the
    checkpoint, once a cycle."""
    ratio, K, V = shape
    g, generator = GdnGeometry(2, 2 * ratio, K, V), torch.Generator().manual_seed(length)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    A_log, dt_bias = draw(g.num_v_heads) * 0.3, draw(g.num_v_heads) - 3
    state = torch.zeros(1, g.num_v_heads, V, K, dtype=state_dtype)
    exact, slot = state.double(), torch.zeros(1, dtype=torch.int32)
    shapes = gdn_ring_shapes(g, length)
    rings = [torch.full((1, *shapes[name]), math.nan) for name in RING_NAMES]
    for step in range(2 * length):
        q, k, v = draw(1, 2, K), draw(1, 2, K), draw(1, g.num_v_heads, V)
        a, b = draw(1, g.num_v_heads), draw(1, g.num_v_heads)
        out, w = torch.empty(1, g.num_v_heads, V), torch.tensor([step % length], dtype=torch.int32)
        gdn.replay_decode(state, q, k, v, a, b, A_log, dt_bias, *rings, w, None, slot, -1, out, scale=K ** -0.5)
        o, exact = gdn.recurrent_step(exact, q, k, v, a, b, A_log, dt_bias)
        tolerance = 4 * ROUNDING[state_dtype]
        assert (out - o).abs().max() <= tolerance * o.abs().max(), f"step {step}"
    assert (state.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "length"), WINDOWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_verify_meets_the_recurrence(shape: tuple[int, int, int], tokens: int, length: int,
                                     state_dtype: torch.dtype) -> None:
    """Windows with random acceptance until the request has folded twice; bf16 rings, as an engine has them."""
    ratio, K, V = shape
    chain = Chain(Shape(tokens, length, 1, ratio, K, V, requests=1), state_dtype=state_dtype)
    reference_reset(chain)
    while chain.flushes < 2:
        chain.step(reference_verify, reference_commit, acceptance(chain.gen, 1, tokens))
    assert chain.output_error < 1e-2, "bf16 outputs and rings: at most 7e-3 was seen"
