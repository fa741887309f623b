"""The GPU suite: skipped as a whole where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        here, skip = Path(__file__).parent, pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if here in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def free_memory() -> None:
    """Workers share one GPU: a test starts with what the ones before it have given back."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
