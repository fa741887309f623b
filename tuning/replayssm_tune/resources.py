"""What a compiled kernel takes of the machine, read from its machine code. Needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayssm_cute.arch import Arch
from replayssm_cute.errors import UnsupportedError
from replayssm_cute.gdn_types import GdnProblem
from replayssm_cute.kernels.targets import for_capability
from replayssm_cute.types import Mamba2Problem


@dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    Attributes:
        registers: a thread.
        spilled: bytes of stack a thread; on AMD registers spilled. 0 where nothing spills.
        shared: bytes of shared memory a CTA; for CuTe, which asks for it at launch, the estimate of its config.
        threads: of a CTA.
    """

    registers: int
    spilled: int
    shared: int
    threads: int


def of(backend: str, problem: Mamba2Problem | GdnProblem, config: dict[str, Any], arch: Arch) -> Resources:
    """Compile for an architecture and read the result.

    Raises:
        UnsupportedError: the backend has no resources to tell there, or not this config.
    """
    return {"cute": _cute, "triton": _triton}[backend](problem, config, arch)


def _cute(problem: Mamba2Problem | GdnProblem, config: dict[str, Any], arch: Arch) -> Resources:
    from replayssm_cute.kernels import gdn_config, mamba2_config
    from replayssm_cute.kernels.gdn import compile_gdn
    from replayssm_cute.kernels.mamba2 import compile_mamba2

    target = for_capability(arch.capability)
    if target is None:
        raise UnsupportedError("cute", f"the kernels are built for 9.0, 10.0 and 10.3, not for {arch}")
    with tempfile.TemporaryDirectory() as folder:
        where = target.name, arch.sms or target.sms, f"--keep-cubin --dump-dir {folder}"
        if isinstance(problem, GdnProblem):
            plan = gdn_config.GdnConfig.from_dict(config)
            compile_gdn(problem, plan, *where)
            shared = gdn_config.smem_bytes(problem, plan)
            threads = 32 * (plan.warps + gdn_config.extra_warps(problem, plan))
        else:
            chosen = mamba2_config.Mamba2Config.from_dict(config)
            compile_mamba2(problem, chosen, *where)
            shared = mamba2_config.smem_bytes(problem, chosen)
            threads = chosen.threads + (64 if chosen.design == "bulk" else 0)  # and a producer and a scorer warp
        usage = resource_usage(next(Path(folder).glob("*.cubin")))
    return Resources(usage["REG"], usage["STACK"] + usage["LOCAL"], shared, threads)


def _triton(problem: Mamba2Problem | GdnProblem, config: dict[str, Any], arch: Arch) -> Resources:
    from fallback_triton.launch import compile_options
    from fallback_triton.offline import FEATURES, TARGETS, compile_for

    name = "sm_{}{}".format(*arch.capability)
    if name not in TARGETS:
        raise UnsupportedError("triton", f"{arch} is none of the offline targets {', '.join(TARGETS)}")
    found = compile_for(name, *_triton_kernel(problem, config, FEATURES[name]), compile_options(config["num_warps"],
                                                                                config["max_registers"]))
    return Resources(found.registers, found.spilled, found.shared, config["num_warps"] * TARGETS[name].warp_size)


def _triton_kernel(problem: Mamba2Problem | GdnProblem, config: dict[str, Any],
                   target: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """The kernel with its run-time arguments and its constants."""
    from fallback_triton import gdn_decode, gdn_verify, mamba2
    from fallback_triton.gdn_config import GdnTritonConfig
    from fallback_triton.mamba2_config import Mamba2TritonConfig

    if not isinstance(problem, GdnProblem):
        constants = mamba2.replay_constants(problem, Mamba2TritonConfig.from_dict(config), target)
        return mamba2.replay_kernel, mamba2.replay_arguments(problem), constants
    chosen = GdnTritonConfig.from_dict(config)
    if problem.tokens:
        return (gdn_verify.verify_kernel, gdn_verify.verify_arguments(problem),
                gdn_verify.verify_constants(problem, chosen))
    return (gdn_decode.decode_kernel, gdn_decode.decode_arguments(problem),
            gdn_decode.decode_constants(problem, chosen, target))


def cuobjdump(cubin: Path, option: str) -> str:
    """What the tool says about a cubin: the one on the path, of the wheel, or the one that Triton brings."""
    patterns = ("nvidia/cu*/bin/cuobjdump", "triton/backends/nvidia/bin/cuobjdump")
    packaged = (str(found) for pattern in patterns for folder in sys.path for found in Path(folder).glob(pattern))
    tool = shutil.which("cuobjdump") or next(packaged, None)
    if tool is None:
        raise UnsupportedError("resources", "cuobjdump is neither on the path nor among the installed packages")
    return subprocess.run([tool, option, str(cubin)], capture_output=True, text=True, check=True).stdout


def resource_usage(cubin: Path) -> dict[str, int]:
    """``REG``, ``STACK`` and ``LOCAL`` of the only kernel of a cubin: registers, and bytes a thread."""
    line = next(line for line in cuobjdump(cubin, "--dump-resource-usage").splitlines() if "REG:" in line)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", line)}
