"""The engine tests need the engine; they end with a table of what was seen."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_engine.py"]
ROWS = pytest.StashKey[list[list[str]]]()
COLUMNS = ["case", "tokens equal", "max |dlogprob|", "decode - prefill, replay (per step)", "flushes", "served by", ""]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> list[list[str]]:
    """Rows of the table at the end."""
    return pytestconfig.stash[ROWS]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = [COLUMNS, *config.stash[ROWS]]
    if len(rows) > 1:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        terminalreporter.section("replay decode in the engine, against the engine's own per-step path")
        for row in rows:
            terminalreporter.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
