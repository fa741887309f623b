"""What the compilations of all kernels share: the cache, the options, fake tensors. Imports the DSL on use."""

import os
from collections.abc import Callable
from typing import Any

import torch

from replayssm_cute import compile_cache


def compiled(key: tuple[Any, ...], make: Callable[[], tuple[Any, list[object]]], target: str,
             options: str = "") -> Callable[..., Any]:
    """A kernel, called with torch tensors on the current stream: out of the cache or compiled now.

    Args:
        key: as ``compile_cache.get`` takes it.
        make: the kernel and its fake arguments; it may import the DSL.
        target: ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``.
        options: further compiler options; with any, the cache is bypassed.
    """
    def build() -> Any:
        if not torch.cuda.is_available():
            # Without a GPU the DSL takes its architecture from the environment, at its first import.
            os.environ.setdefault("CUTE_DSL_ARCH", target)
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_stream

        kernel, arguments = make()
        return cute.compile(kernel, *arguments, make_fake_stream(use_tvm_ffi_env_stream=True),
                            options=f"--enable-tvm-ffi --gpu-arch={target} {options}".strip())

    return build() if options else compile_cache.get(target, key, build)


def fake_rows(dtype: Any, *shape: int, first: Any, align: int) -> Any:
    """A fake tensor (first, *shape): dense inside, its first stride symbolic and in multiples of ``align`` bytes."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    dense: list[int] = []
    size = 1
    for n in reversed(shape):
        dense.insert(0, size)
        size *= n
    step = cute.sym_int64(divisibility=max(1, align * 8 // dtype.width))
    return make_fake_tensor(dtype, (first, *shape), (step, *dense), assumed_align=align)
