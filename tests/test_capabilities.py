"""What each compute capability is served with: the backend, and stochastic rounding in hardware or in software.

The driver is mocked; everything above it is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from replayssm_cute import arch as archs
from replayssm_cute import dispatch
from replayssm_cute.errors import UnsupportedError
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.registry import tuned
from replayssm_cute.registry.support import supports_replayssm
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from tests.test_supports import SUPER

BF16 = torch.bfloat16
HARDWARE, SOFTWARE = "stochastic, in hardware (cvt.rs)", "stochastic, in software"
# Capability -> backend that serves, how it rounds; and how the CuTe kernels would, None where they are not built.
PATHS = {(9, 0): ("triton", SOFTWARE, SOFTWARE), (10, 0): ("cute", HARDWARE, HARDWARE),
         (10, 3): ("cute", HARDWARE, HARDWARE), (11, 0): ("triton", SOFTWARE, None),
         (12, 0): ("triton", SOFTWARE, None), (12, 1): ("triton", SOFTWARE, None)}

SetGpu = Callable[[tuple[int, int]], torch.device]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[SetGpu]:
    """A driver that reports one GPU of the given capability, and a registry that has measured nothing."""
    def set_capability(capability: tuple[int, int]) -> torch.device:
        major, minor = capability
        properties = SimpleNamespace(name="Mock GPU", major=major, minor=minor, multi_processor_count=148)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        forget()
        return torch.device("cuda", 0)

    def forget() -> None:
        archs._gpu.cache_clear()
        tuned.clear_cache()
        dispatch.candidates.cache_clear()

    monkeypatch.setattr(tuned, "SHIPPED_FOLDER", tmp_path)
    monkeypatch.delenv("REPLAYSSM_TUNED_DIR", raising=False)
    yield set_capability
    forget()


def problem(state_dtype: torch.dtype, rounds: int = 5) -> Mamba2Problem:
    return Mamba2Problem(Mamba2Geometry(128, 64, 128, 8), 16, state_dtype, BF16, BF16, BF16, torch.int8, torch.int32,
                         philox_rounds=rounds)


@pytest.mark.parametrize("capability", PATHS, ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float16, BF16], ids=str)
def test_explain_states_the_path(gpu: SetGpu, capability: tuple[int, int], state_dtype: torch.dtype) -> None:
    device = gpu(capability)
    backend, how, cute = PATHS[capability]
    first, *others = dispatch.explain(problem(state_dtype), 64, device).splitlines()
    assert f"sm_{capability[0]}{capability[1]}" in first
    served = next(line for line in others if line.startswith("->"))
    assert served.split()[1] == backend and served.endswith(f"rounding {how}")
    line = next(line for line in others if "cute" in line.split()[:2])
    assert line.endswith(f"rounding {cute}") if cute else "cannot: the kernels are built for 9.0, 10.0 and 10.3" in line
    assert "rounding" not in dispatch.explain(problem(state_dtype, 0), 64, device)


@pytest.mark.parametrize("capability", PATHS, ids=str)
def test_supports_states_the_path(gpu: SetGpu, capability: tuple[int, int]) -> None:
    device = gpu(capability)
    backend, how, _ = PATHS[capability]
    answer = supports_replayssm(SUPER, device=device, state_dtype="float16", stochastic_rounding=True)
    assert answer and answer.rounding == how and answer.warnings == ()
    assert answer.backend.startswith(f"batch 1, 64, 512: {backend} (")
    assert supports_replayssm(SUPER, device=device, state_dtype="float16").rounding == "to nearest"
    assert supports_replayssm(SUPER, device=None, state_dtype="float16").backend == answer.backend, "the current GPU"


@pytest.mark.parametrize("capability", PATHS, ids=str)
def test_explain_states_the_path_of_8_bit_checkpoints(gpu: SetGpu, capability: tuple[int, int]) -> None:
    """e4m3 takes the path of the 16-bit types; for int8 no device has an instruction."""
    device = gpu(capability)
    backend, how, _ = PATHS[capability]
    for state_dtype, rounding in ((torch.float8_e4m3fn, how), (torch.int8, SOFTWARE)):
        served = next(line for line in dispatch.explain(problem(state_dtype), 64, device).splitlines()
                      if line.startswith("->"))
        assert served.split()[1] == backend and served.endswith(f"rounding {rounding}")


@pytest.mark.parametrize("capability", [(11, 0), (12, 0), (12, 1)], ids=str)
def test_cute_by_name_is_refused_with_the_reason(gpu: SetGpu, capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError, match=r"'cute'.*9\.0, 10\.0 and 10\.3"):
        dispatch.prepare(problem(torch.float16), 64, gpu(capability), "cute")


def test_hardware_is_claimed_for_the_targets_whose_kernels_use_it() -> None:
    """The kernels take ``cvt.rs`` from the same flag; tests/test_cute_compile.py looks for it in their machine code."""
    claimed = {t.capability for t in TARGETS.values() if t.stochastic_cvt}
    assert claimed == {capability for capability, (_, _, cute) in PATHS.items() if cute == HARDWARE}
