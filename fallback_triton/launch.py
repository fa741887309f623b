"""From a Triton kernel to a callable that only launches: what the kernels share on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor


def interpreted(kernel: Any) -> bool:
    """Whether Triton was imported under TRITON_INTERPRET=1: the kernel then runs in Python, on the CPU."""
    return not isinstance(kernel, triton.JITFunction)


@dataclass(frozen=True)
class Target:
    """What kernels may use of a target.

    Attributes:
        ptx: instructions written in PTX.
        pdl: programmatic dependent launch, from compute capability 9.0 on: a launch may begin while the one before
            still runs, and waits for it itself (``device.wait_for_predecessor``).
        order: flushing rows may go first (``order``): where that was measured, which is on NVIDIA's GPUs with Triton
            up to 3.6. Triton 3.9 takes 70 registers more for it, or spills up to 472 bytes a thread for sm_80.
    """

    ptx: bool = False
    pdl: bool = False
    order: bool = False

    @classmethod
    def of(cls, kernel: Any) -> Target:
        """That of the current device, for a kernel that is interpreted or not."""
        if interpreted(kernel):
            return cls(order=True)
        return cls.at(triton.runtime.driver.active.get_current_target())

    @classmethod
    def at(cls, target: Any) -> Target:
        """That of a ``GPUTarget``."""
        nvidia = target.backend == "cuda"
        measured = tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6)
        return cls(nvidia, nvidia and target.arch >= 90, nvidia and measured)


def runtime_parameters(function: Any) -> list[str]:
    """Names of a kernel's parameters that are no compile-time constants."""
    notes = function.__annotations__
    code = function.__code__
    return [name for name in code.co_varnames[:code.co_argcount] if notes.get(name) is not triton.language.constexpr]


def kernel(function: Any) -> Any:
    """``triton.jit`` without any specialisation on run-time values.

    By default Triton compiles another kernel whenever an integer becomes 1 or divisible by 16 or a
    pointer loses its 16-byte alignment, which could then happen while a graph is captured. These
    kernels take what they rely on, the alignment of rows, as constants, so that the dtypes and the
    constants alone select the compiled kernel.
    """
    return triton.jit(do_not_specialize=runtime_parameters(function))(function)


def compile_kernel(kernel: Any, arguments: list[Any], constants: dict[str, Any],
                   options: dict[str, Any]) -> Callable[..., None]:
    """Compile (or interpret) a kernel and return ``launch(programs, *runtime_arguments)``.

    Args:
        arguments: for every run-time parameter a dtype for a tensor, an int, or None where absent.
        constants: the values of all ``constexpr`` parameters, in the order of the signature; where ``PDL`` is among
            them and true, the kernel is launched so.
        options: compiler options such as ``num_warps``.

    The compiled kernel is loaded onto the current device here and called directly afterwards:
    nothing compiles later, and a launch does not pass through Triton's argument specialisation.
    """
    if interpreted(kernel):
        def interpret(programs: int, *values: Any) -> None:
            kernel[(programs,)](*values, **constants)
        return interpret

    if constants.get("PDL"):
        options = {**options, "launch_pdl": True}
    compiled = kernel.warmup(*arguments, grid=(1,), **constants, **options)
    compiled.run  # noqa: B018  loads the module; the first launch may be inside a graph capture
    tail = tuple(constants.values())

    def launch(programs: int, *values: Any) -> None:
        compiled[(programs, 1, 1)](*values, *tail)
    return launch


def compile_options(num_warps: int, max_registers: int) -> dict[str, Any]:
    """Compiler options; fused multiply-add is asked for, since Triton means to turn its default off."""
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": True}
    if max_registers:
        options["maxnreg"] = max_registers
    return options


def stride(t: Tensor | None, axis: int = 0) -> int:
    """A stride, 0 where the tensor is absent."""
    return 0 if t is None else t.stride(axis)


def row_alignment(tensors: Iterable[Tensor], limit: int = 16) -> int:
    """Greatest power of two up to ``limit`` that divides the byte address of every row."""
    align = limit
    for t in tensors:
        numbers = [t.data_ptr(), *(s * t.element_size() for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)
                                   if n > 1)]
        while any(number % align for number in numbers):
            align //= 2
    return align
