"""``replayssm-tune run`` in the test's process, on a GPU that is only pretended (``tests.tune_fake``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replayssm_tune import cli, run

ROOT = Path(__file__).parents[1]
FAKE = [sys.executable, "-m", "tests.tune_fake"]
Tune = Callable[..., tuple[int, str]]


def tuning(out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *fixed: str) -> Tune:
    """Runs the command with ``fixed`` and further arguments, ``fake`` as TUNE_FAKE: (exit code, what it said)."""
    monkeypatch.setattr(run, "LAB", [*FAKE, "--lab"])
    monkeypatch.setattr(run, "COMPILER", [*FAKE, "--compiler"])
    monkeypatch.setattr(run, "gpu_is_here", lambda: True)
    monkeypatch.chdir(ROOT)

    def call(*arguments: str, **fake: Any) -> tuple[int, str]:
        monkeypatch.setenv("TUNE_FAKE", json.dumps(fake))
        code = cli.main(["run", *fixed, "--out", str(out), *arguments])
        captured = capsys.readouterr()
        return code, captured.out + captured.err
    return call
