"""The Gated DeltaNet Triton kernels as a backend: any GPU that Triton serves, and the CPU under its interpreter."""

from __future__ import annotations

from collections.abc import Callable

from fallback_triton.gdn_config import default_config
from replayssm_cute.arch import Arch
from replayssm_cute.backends.triton import available, warp_size
from replayssm_cute.gdn_dispatch import Problem
from replayssm_cute.gdn_types import GdnFoldProblem
from replayssm_cute.types import Support


def supports(problem: Problem, arch: Arch) -> Support:
    return available(arch)


def prepare(problem: Problem, arch: Arch) -> Callable[..., object]:
    config = default_config(problem, warp_size(arch))
    if isinstance(problem, GdnFoldProblem):
        from fallback_triton.gdn_fold import compile_fold
        return compile_fold(problem, config)
    if problem.tokens:
        from fallback_triton.gdn_verify import compile_verify
        return compile_verify(problem, config)
    from fallback_triton.gdn_decode import compile_decode
    return compile_decode(problem, config)
