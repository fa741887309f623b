"""A model of the time of a Mamba2 replay step, on an H200 and on what nobody here has.

A step takes ``start + tail * share of steps with a flush + body``. The body is the p-norm of four times, each of
which would be the body's if the others were nothing:

* memory: the bytes that the method must move (``mamba2_step_bytes``) at the bandwidth of a large copy;
* issue: the instructions of all heads (``benchmarks/issue_counts.py``), one a cycle and scheduler; of an 8-bit
  checkpoint, whose conversions wait for one another, ``coded`` times as long;
* shared memory: their wavefronts, bank conflicts included, one a cycle and multiprocessor;
* latency: Little's law. The grid holds CTAs times stages tiles of a head in flight, and every tile is in flight for
  ``LATENCY_US`` at least. In the register design a CTA is a tile.

So it tells a config from another by its tile, CTAs and stages. It knows nothing of ``evict_first``, ``pdl`` and
``prefetch``, nor of the longer tail that more stages bring: between configs that keep enough bytes in flight it does
not choose (docs/performance.md).

``start``, ``tail``, p and ``coded`` are calibrated by ``benchmarks/speed_model.py``, which writes ``speed_model.json``.
They are taken as they are to other devices, to other head shapes, to stochastic rounding and to the register design.
The latency is not calibrated: at full bandwidth items are in flight for 3 us and more, so that no row depends on it. It
is what a step of batch 1, 2.5 us, leaves beside the 0.98 us before its first copy and the
0.62 us behind its last arrival, which a trace showed (docs/performance.md).

Figures of the devices, with their sources:

* H200: 4.8 TB/s (NVIDIA's data sheet), 132 SMs and 1.98 GHz as reported by the driver in the benchmark.
* B200: 8 TB/s (NVIDIA: 64 TB/s of a DGX B200 with eight), 148 SMs, a clock "similar to the high power SXM5 H100"
  (chipsandcheese.com, "Nvidia's B200: Keeping the CUDA Juggernaut Rolling"), here the H200's.
* GB200: as a B200, with the 152 SMs that its driver reports (benchmarks of CuTe and CUDA kernels on GitHub).
* B300: 8 TB/s (glennklockwood.com/garden/processors/B300). NVIDIA's 160 SMs are those of the whole chip; its driver
  reports 148, as a B200's, and the same clock is taken.
* A large copy reaches the same share of the HBM's bandwidth on all: what was measured on the H200.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replayssm_cute.kernels.mamba2_config import Mamba2Config
from replayssm_cute.layout import mamba2_step_bytes
from replayssm_cute.rounding import LARGEST_CODE
from replayssm_cute.types import Mamba2Geometry

VERSION = 2                     # of the equations; counted up when they change
COUNTS = Path(__file__).with_name("issue_counts.json")
COUNTED_BUFFER_LEN = 16         # L of the counts
CALIBRATED = Path(__file__).with_name("speed_model.json")
SCHEDULERS = 4                  # of a multiprocessor, an instruction a cycle each
LATENCY_US = 0.8
LARGE_BATCH = 64                # from here on the model's error is told apart


@dataclass(frozen=True)
class Device:
    """What the model knows of a device.

    Attributes:
        target: of the compiler; names the issue counts.
        sms: multiprocessors.
        clock_ghz: of the multiprocessors.
        hbm_tbs: bandwidth of the memory on paper, in TB/s.
    """

    target: str
    sms: int
    clock_ghz: float
    hbm_tbs: float


#: By product, as ``registry.devices`` names it.
DEVICES = {"H200": Device("sm_90a", 132, 1.98, 4.8), "B200": Device("sm_100a", 148, 1.98, 8.0),
           "GB200": Device("sm_100a", 152, 1.98, 8.0), "B300": Device("sm_103a", 148, 1.98, 8.0)}


@dataclass(frozen=True)
class Step:
    """What is launched: a layer, a batch, and how."""

    geometry: Mamba2Geometry
    buffer_len: int
    state_dtype: torch.dtype
    batch: int
    config: Mamba2Config
    philox_rounds: int = 0
    act_dtype: torch.dtype = torch.bfloat16

    @property
    def nbytes(self) -> float:
        return self.batch * mamba2_step_bytes(self.geometry, self.buffer_len, self.state_dtype, self.act_dtype)

    @property
    def heads(self) -> int:
        return self.batch * self.geometry.nheads

    @property
    def tiles(self) -> int:
        """Work items: tiles of the heads of all rows."""
        return self.heads * (self.geometry.headdim // self.config.tile_p)


@dataclass(frozen=True)
class Parameters:
    """What is calibrated.

    Attributes:
        start: microseconds of launch, first copy and last item.
        tail: microseconds more of a step in which a row flushes.
        sharpness: p of the norm; the larger, the less the limits disturb each other.
        copy_share: share of the HBM's bandwidth that a large copy reaches.
        coded: cycles that an instruction of a kernel with an 8-bit checkpoint takes of its scheduler.
    """

    start: float
    tail: float
    sharpness: float
    copy_share: float
    coded: float = 1.0


@functools.cache
def issue_counts() -> dict[str, dict[str, dict[str, int]]]:
    """``issued`` and ``wavefronts`` of a head, by target and ``count_name``."""
    return json.loads(COUNTS.read_text())


@functools.cache
def calibrated() -> dict[str, Any]:
    """What the calibration wrote: ``parameters``, and how far off they were.

    ``error`` holds the largest relative error of a time that was measured on the H200, rounded to nearest, of 2 and 4
    bytes, of batches
    below ``LARGE_BATCH`` (``small``) and from it on (``large``); ``provenance`` the versions of that measurement.
    """
    return json.loads(CALIBRATED.read_text())


def parameters() -> Parameters:
    """The calibrated ones."""
    return Parameters(**calibrated()["parameters"])


def margin(batch: int) -> float:
    """How much slower than another a config must be predicted to be the slower one for sure.

    Two predictions at one point, each off by at most the measured error e, order the configs rightly where they
    differ by more than (1 + e) / (1 - e) - 1.
    """
    error = calibrated()["error"]["large" if batch >= LARGE_BATCH else "small"]
    return (1 + error) / (1 - error) - 1


def count_name(g: Mamba2Geometry, state: torch.dtype, tile_p: int, rounds: int = 0,
               act: torch.dtype = torch.bfloat16) -> str:
    """What decides a head's instructions, in words; inputs that are not bf16 take the register design."""
    inputs = "" if act is torch.bfloat16 else f" {name_of(act)} inputs"
    return f"{g.headdim}x{g.dstate} {name_of(state)}" + (f" SR{rounds}" if rounds else "") + inputs + f" tile={tile_p}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def limits_us(step: Step, device: Device, copy_share: float, coded: float = 1.0) -> tuple[float, float, float, float]:
    """Microseconds of the body by memory, by issue, by shared memory and by latency alone.

    Raises:
        KeyError: nothing was counted for this head shape, dtype and tile.
    """
    counts = issue_counts()[device.target][count_name(step.geometry, step.state_dtype, step.config.tile_p,
                                                      step.philox_rounds, step.act_dtype)]
    memory = step.nbytes / (device.hbm_tbs * copy_share * 1e6)
    cycle_us = step.heads / (device.sms * device.clock_ghz * 1e3)      # of a head a cycle and multiprocessor
    in_flight = min(step.tiles, device.sms * step.config.min_ctas * max(step.config.stages, 1))
    cycles = coded if step.state_dtype in LARGEST_CODE else 1.0
    return (memory, cycles * counts["issued"] / SCHEDULERS * cycle_us, counts["wavefronts"] * cycle_us,
            LATENCY_US * step.tiles / in_flight)


def norm(values: tuple[float, ...], p: float) -> float:
    return sum(v ** p for v in values) ** (1 / p)


def flushing(step: Step) -> float:
    """Share of steps in which at least one row flushes; cursors are spread evenly."""
    return min(1.0, step.batch / step.buffer_len)


def step_us(step: Step, device: Device, p: Parameters) -> float:
    """Predicted microseconds of a step.

    Raises:
        KeyError: as ``limits_us``.
    """
    body = norm(limits_us(step, device, p.copy_share, p.coded), p.sharpness)
    return p.start + p.tail * flushing(step) + body
