"""Compile candidates ahead in processes that see no GPU. One of them runs as ``-m replayssm_tune.compiler``.

What they compile lies in the compilers' own caches on the disk, where the process with the GPU finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from replayssm_cute.arch import Arch
from replayssm_cute.kernels.targets import for_capability
from replayssm_tune.operations import OPERATIONS
from replayssm_tune.plan import Point, Unit
from replayssm_tune.process import Child, Lost, serve

SECONDS = 300.0  # for one kernel; seen: 1 to 6


class Compilers:
    """A pool of compiling processes.

    Args:
        command: of one process.
        jobs: processes; with 0 nothing is compiled ahead.
        arch: to compile for.
        resources: the answers say what the kernel takes of the machine; its code is not kept then.
    """

    def __init__(self, command: list[str], jobs: int, arch: Arch, resources: bool = False) -> None:
        self._command, self._arch, self._resources = command, arch, resources
        self._pool = ThreadPoolExecutor(jobs) if jobs else None
        self._local, self._children, self._closed = threading.local(), list[Child](), False
        self._futures: dict[tuple[Any, ...], Future[dict[str, Any]]] = {}

    def submit(self, kernels: Iterable[tuple[Unit, dict[str, Any]]]) -> None:
        """Begin to compile; ``kernels`` as ``plan.distinct`` gives them."""
        if self._pool is not None:
            for u, config in kernels:
                self._futures.setdefault(_key(u, config), self._pool.submit(self._compile, u, config))

    def result(self, u: Unit, config: dict[str, Any]) -> dict[str, Any]:
        """Wait for a kernel: the answer of ``answer``, empty where it was not submitted.

        Raises:
            Lost: it does not compile, or its compiler crashed or hung.
        """
        future = self._futures.get(_key(u, config))
        return {} if future is None else future.result()

    def close(self) -> None:
        """Kill the processes; what is not compiled yet never will be."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()

    def _compile(self, u: Unit, config: dict[str, Any]) -> dict[str, Any]:
        if self._closed:
            raise Lost("interrupted")
        if not hasattr(self._local, "child"):
            target = for_capability(self._arch.capability)
            environment = {"CUDA_VISIBLE_DEVICES": "", **({"CUTE_DSL_ARCH": target.name} if target else {})}
            self._local.child = Child(self._command, environment)
            self._children.append(self._local.child)
        request = {"point": u.point.to_dict(), "backend": u.backend, "config": config, "arch": asdict(self._arch),
                   "resources": self._resources}
        return self._local.child.ask(request, SECONDS)


def _key(u: Unit, config: dict[str, Any]) -> tuple[Any, ...]:
    return u.point.problem, u.backend, *sorted(config.items())


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel; with ``resources`` the answer holds the fields of ``resources.Resources``."""
    from replayssm_tune import resources

    point, arch = Point.from_dict(request["point"]), Arch(**{**request["arch"],
                                                           "capability": tuple(request["arch"]["capability"])})
    if request["resources"]:
        return asdict(resources.of(request["backend"], point.problem, request["config"], arch))
    if request["backend"] == "triton":
        if arch.kind != "cuda":
            return {}  # the architecture does not tell the target; the process with the GPU compiles
        _pretend(arch)
    OPERATIONS[point.op].launch(request["backend"], point.problem, arch, point.batch, request["config"])
    return {}


def _pretend(arch: Arch) -> None:
    """Let Triton compile into its cache, by a driver that says which device is meant and loads nothing."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 10 * arch.capability[0] + arch.capability[1], 32)
    utils = SimpleNamespace(load_binary=lambda *_: (0, 0, 0, 0, 1024),
                            get_device_properties=lambda device: {"max_shared_mem": 232448})
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, launcher_cls=lambda *_: None,
        get_current_target=lambda: target, utils=utils))


if __name__ == "__main__":
    serve(answer)
