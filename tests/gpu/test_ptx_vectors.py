"""The GPU still computes the results that are stored for the executor, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.cases import bits
from tests.ptx import vectors
from tests.ptx.vectors_cases import KERNELS, KINDS


@pytest.mark.parametrize("name", KERNELS)
def test_the_stored_results(name: str) -> None:
    """Where this fails with kernels whose numbers were meant to change, ``python -m tests.ptx.vectors`` stores anew."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("results are stored of capability 9.0")
    arrays, digests, _ = vectors.load()
    for kind in KINDS:
        case, results = vectors.run(name, kind, vectors.gpu())
        assert vectors.input_digest(case) == digests[f"{name}/{kind}"]
        for result, values in results.items():
            label = f"{name}/{kind}/{result}"
            assert (bits(vectors.kept(result, values)).numpy() == arrays[label]).all(), label
            assert vectors.digest(values) == digests[label], label
