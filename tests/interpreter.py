"""Triton's interpreter in a process that runs other tests too.

Triton reads TRITON_INTERPRET when it is imported, and decides then for the rest of the process whether its
kernels are interpreted. So the modules that test numbers on the CPU import the kernels through here, which
sets the variable for the import alone; tests that compile for a real target run in a subprocess of their
own, whose environment does not have it.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType


def interpreted_import(name: str) -> ModuleType:
    """Import a module that holds Triton kernels so that they are interpreted."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        module = importlib.import_module(name)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    triton = sys.modules["triton"]
    if isinstance(triton.language.sum, triton.JITFunction):
        raise RuntimeError(f"Triton was imported in this process before {name} asked for its interpreter; "
                           "run these tests in a process of their own, or set TRITON_INTERPRET=1 for all of it")
    return module
