"""Cursors inside a CUDA graph: replayed with other contents in the same tensors."""

from __future__ import annotations

import pytest
import torch

from replayssm_cute.cursors import decode_cursors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_follows_what_its_tensors_hold() -> None:
    rows = torch.tensor([[115, 99, 7, 101, 23], [1, 1, 0, 1, 1], [100, 100, 100, 100, 20]])
    counts = rows.to("cuda", torch.int32)
    out = (torch.full((5,), 77, dtype=torch.int32, device="cuda"),
           torch.zeros(5, dtype=torch.int8, device="cuda"))
    decode_cursors(*counts, 16, block_size=24, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_cursors(*counts, 16, block_size=24, out=out)
    for step in range(40):
        counts.copy_(rows)
        counts[0] += step
        graph.replay()
        asked = rows + torch.tensor([[step], [0], [0]])
        want = decode_cursors(*asked, 16, block_size=24)
        assert out[0].tolist() == want[0].tolist() and out[1].tolist() == want[1].tolist()
