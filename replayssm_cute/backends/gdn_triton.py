"""The Gated DeltaNet Triton kernels as a backend: any GPU that Triton serves, and the CPU under its interpreter."""

from __future__ import annotations

from collections.abc import Callable

from fallback_triton.gdn_config import default_config
from replayssm_cute.arch import Arch
from replayssm_cute.backends.triton import OLDEST, _installed, _interpreting, _warp_size
from replayssm_cute.gdn_dispatch import Problem
from replayssm_cute.gdn_types import GdnFoldProblem
from replayssm_cute.types import SUPPORTED, Support


def supports(problem: Problem, arch: Arch) -> Support:
    if not _installed():
        return Support(False, "triton is not installed")
    if arch.kind == "cpu" and not _interpreting():
        return Support(False, "no GPU, and Triton was not imported under TRITON_INTERPRET=1")
    if arch.kind == "cuda" and arch.capability < OLDEST:
        return Support(False, f"the kernels need compute capability 8.0, {arch} has less")
    return SUPPORTED


def prepare(problem: Problem, arch: Arch) -> Callable[..., object]:
    config = default_config(problem, _warp_size(arch))
    if isinstance(problem, GdnFoldProblem):
        from fallback_triton.gdn_fold import compile_fold
        return compile_fold(problem, config)
    if problem.tokens:
        from fallback_triton.gdn_verify import compile_verify
        return compile_verify(problem, config)
    from fallback_triton.gdn_decode import compile_decode
    return compile_decode(problem, config)
