"""The tuner on a GPU that is only pretended: everything real but the measuring and the compiling process.

As ``python -m tests.tune_fake ARGUMENTS`` it is ``replayssm-tune ARGUMENTS`` on the pretended GPU. As
``python -m tests.tune_fake --lab`` or ``--compiler`` it is one of the two processes. What candidates do is read
from the JSON of the environment variable TUNE_FAKE:

* ``us``, ``error``: pairs of a text and a number; the first whose text occurs in the candidate's JSON counts;
* ``crash``, ``hang``, ``raise``, ``no_compile``: texts; a candidate with one of them does so;
* ``delay``: seconds a sample takes; ``log``: a file that gets one line a request;
* ``copy``: bytes a second of the pretended copy.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

FAKE: dict[str, Any] = json.loads(os.environ.get("TUNE_FAKE", "{}"))
H200 = {"kind": "cuda", "capability": [9, 0], "name": "NVIDIA_H200", "sms": 132}
INFO = {"capability": "9.0", "sms": 132, "torch": "2.13.0", "triton": "3.6.0", "cutlass_dsl": "4.8.0",
        "date": "2026-11-30T10:00:00Z"}


def lab(request: dict[str, Any]) -> dict[str, Any]:
    """Stands in for ``Lab.answer``."""
    do, text = request["do"], json.dumps(request, sort_keys=True)
    if FAKE.get("log"):
        with Path(FAKE["log"]).open("a") as log:
            log.write(f"{os.getpid()} {time.monotonic()} {text}\n")
    if do == "device":
        return {"arch": H200, "id": FAKE.get("id", f"fake-{os.getppid()}"), "build": "b"}
    if do == "yardstick":
        return {"bandwidth": FAKE.get("copy", 4e12), "provenance": {**INFO, **FAKE.get("info", {})}}
    if _has("crash", text):
        os.kill(os.getpid(), signal.SIGSEGV)
    if _has("hang", text):
        time.sleep(1000)
    if _has("raise", text):
        raise RuntimeError("an illegal memory access")
    if do == "check":
        return {"error": _first("error", text, 1e-3)}
    time.sleep(FAKE.get("delay", 0.0))
    return {"us": _first("us", text, 40.0 if do == "per_step" else 20.0)}


def compiler(request: dict[str, Any]) -> dict[str, Any]:
    """Stands in for ``compiler.answer``."""
    if _has("no_compile", json.dumps(request, sort_keys=True)):
        raise RuntimeError("does not compile")
    return {"registers": 96, "spilled": 0, "shared": 1000, "threads": 128} if request["resources"] else {}


def _has(what: str, text: str) -> bool:
    return any(part in text for part in FAKE.get(what, []))


def _first(what: str, text: str, default: float) -> float:
    return float(next((value for part, value in FAKE.get(what, []) if part in text), default))


def main() -> int:
    if sys.argv[1:] in (["--lab"], ["--compiler"]):
        from replayssm_tune.process import serve
        serve(lab if sys.argv[1] == "--lab" else compiler, healthy=lambda: False)
    from replayssm_tune import cli, run
    run.LAB = [sys.executable, "-m", "tests.tune_fake", "--lab"]
    run.COMPILER = [sys.executable, "-m", "tests.tune_fake", "--compiler"]
    run.gpu_is_here = lambda: True
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
