"""Which device are we on? The one place that asks the driver.

What may be *compiled* is another question; ``replayssm_cute.kernels.targets`` answers it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arch:
    """A device as the dispatcher sees it.

    Attributes:
        kind: ``"cuda"``, ``"hip"`` or ``"cpu"``.
        capability: CUDA compute capability, (0, 0) elsewhere.
        name: the device's name as the registry spells it (spaces become underscores).
        sms: multiprocessors, 0 on a CPU.
    """

    kind: str
    capability: tuple[int, int] = (0, 0)
    name: str = "cpu"
    sms: int = 0

    def __str__(self) -> str:
        if self.kind == "cuda":
            return f"{self.name} (sm_{self.capability[0]}{self.capability[1]})"
        return f"{self.name} ({self.kind})" if self.kind != "cpu" else "CPU"


CPU = Arch("cpu")


@functools.cache
def _gpu(index: int) -> Arch:
    properties = torch.cuda.get_device_properties(index)
    name = properties.name.replace(" ", "_")
    if torch.version.hip:
        return Arch("hip", name=name, sms=properties.multi_processor_count)
    return Arch("cuda", (properties.major, properties.minor), name, properties.multi_processor_count)


def of(device: torch.device | str) -> Arch:
    """The architecture behind a torch device; the driver is asked once per device."""
    device = torch.device(device)
    if device.type != "cuda":
        return CPU
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


def default_device() -> torch.device:
    """The current GPU where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() \
        else torch.device("cpu")
