"""Triton's host path on a machine without a GPU: everything real but the driver.

Kernels are really compiled, for sm_90; loading them is counted and launches are recorded. Run as a script it
checks what a captured graph relies on and prints one JSON object: a step that has been prepared never compiles
again, whatever the batch, the strides and the slots, and each launch passes what the kernel's signature asks for.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from fallback_triton.mamba2_step import recurrent_step
from replayssm_cute.arch import Arch
from replayssm_cute.backends import triton as backend
from replayssm_cute.types import Mamba2Problem
from replayssm_cute.validate import mamba2_problem
from tests.cases import Case, make_case

ARCH = Arch("cuda", (9, 0), "NVIDIA_H200", 132)
loaded: Counter[str] = Counter()
launches: list[tuple[str, int]] = []


class FakeLauncher:
    """Stands in for the launcher that Triton builds for a signature; checks what it is given."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name, self.types = metadata.name, list(source.signature.values())

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, launch_metadata: Any,
                 enter: Any, leave: Any, *args: Any) -> None:
        assert len(args) == len(self.types) and (y, z) == (1, 1)
        for kind, value in zip(self.types, args, strict=True):
            if kind.startswith("*"):
                assert isinstance(value, torch.Tensor), (kind, value)
            elif kind in ("i32", "i64"):
                assert type(value) is int, (kind, value)
            else:
                assert kind == "constexpr", kind
        launches.append((self.name, x))


def load_binary(name: str, *_: Any) -> tuple[int, int, int, int, int]:
    loaded[name] += 1
    return 0, 0, 0, 0, 1024


DRIVER = SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0, launcher_cls=FakeLauncher,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    utils=SimpleNamespace(load_binary=load_binary, get_device_properties=lambda device: {"max_shared_mem": 232448}))


def problem_of(case: Case) -> Mamba2Problem:
    return mamba2_problem(*case.args(), dt_softplus=True, max_cache_len=case.buffer_len)


def main() -> None:
    triton.runtime.driver.set_active(DRIVER)
    geometry: dict[str, Any] = {"nheads": 4, "headdim": 80, "dstate": 128, "buffer_len": 16}
    cases = [make_case(batch=batch, slot_padding=slots, row_padding=rows, **geometry)
             for batch, slots, rows in ((1, 0, 0), (3, 32, 0), (16, 0, 8), (5, 112, 24))]
    problem = problem_of(cases[0])
    assert all(problem_of(c) == problem for c in cases), "one problem at every batch and stride"
    step = backend.prepare(problem, ARCH, 8, None)
    prepared = dict(loaded)
    for case in cases:
        step(*case.args(), None)
    assert dict(loaded) == prepared == {"replay_kernel": 1} and [x for _, x in launches] == [4, 12, 64, 20]

    # Other alignment, dtypes or options are another problem, hence another kernel, and never the wrong one.
    for change in ({"row_padding": 1}, {"z": True}, {"D": "full"}, {"state": torch.float16}, {"D": None},
                   {"index_dtype": torch.int64}, {"flush_dtype": torch.bool}, {"dt": torch.float32}):
        other = make_case(batch=2, **geometry, **change)
        assert problem_of(other) != problem
        backend.prepare(problem_of(other), ARCH, 2, None)(*other.args())
    assert loaded["replay_kernel"] == 9
    backend.prepare(problem, ARCH, 4, None)
    assert loaded["replay_kernel"] == 9, "preparing again finds the compiled kernel"

    for case in cases:
        a = case.args()
        recurrent_step(*a[:9], a[14], a[15], a[16], dt_softplus=True)
    assert loaded["step_kernel"] == 1 and launches[-1] == ("step_kernel", 20)

    args = cases[0].args()
    started, count = time.perf_counter(), 2000
    for _ in range(count):
        step(*args)
    print(json.dumps({"loaded": loaded, "launches": len(launches) - count,
                      "host_us": round((time.perf_counter() - started) / count * 1e6, 2)}))


if __name__ == "__main__":
    main()
