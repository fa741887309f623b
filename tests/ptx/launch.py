"""Launch a Mamba2 replay kernel on a case: the arguments of its device code and what they point to.

The host stub that the DSL emits hands each tensor to the kernel as a struct of its pointer, its sizes
that are not compiled in (32 bits) and its strides that are not (64 bits). ``None`` arguments take no
parameter. Every tensor lies at 64-bit addresses of its own, far from the others. Only what a step may touch
is mapped: the rows of the batch, the slots that live rows name, ``out`` of live rows.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replayssm_cute.kernels.mamba2_config import Mamba2Config
from tests.cases import POOLS, Case
from tests.ptx.code import Code
from tests.ptx.machine import Machine
from tests.ptx.memory import GlobalMemory

#: The kernels' parameters in order; the seed's state, the scales of an 8-bit checkpoint and the number of items
#: stand behind them.
ORDER = ("state", "x", "dt", "A", "B", "C", "D", "dt_bias", "z", "x_cache", "dt_cache", "B_cache", "write_pos",
         "is_flush", "state_batch_indices", "null_block_id", "out")
ROWS = ("x", "B", "C", "z", "out")
FIRST_ADDRESS, SPACING = 1 << 50, 1 << 45


@dataclass
class Kernel:
    """A compiled kernel: its code and what the host needs to launch it."""

    code: Code
    config: Mamba2Config
    shared_bytes: int


@dataclass
class Options:
    """How to launch.

    Attributes:
        ctas: of the bulk design, at most.
        first_slot: added to every slot number, so that pools lie as if they had so many more slots.
        seed: of the order of warps; see ``Machine``.
        races: whether to look for races.
        blur: seed of errors of approximate instructions; see ``Machine``.
        dice: the generator's state, changed by the launch.
    """

    ctas: int = 3
    first_slot: int = 0
    seed: int | None = None
    races: bool = True
    blur: int | None = None
    dice: Tensor | None = None


def launch(kernel: Kernel, case: Case, options: Options | None = None) -> Machine:
    """Run one step on the case, in place; the machine that ran it.

    Raises:
        PtxError: what the kernel did wrong.
    """
    options = options or Options()
    memory, sizes = GlobalMemory(), []
    params = b""
    for i, name in enumerate(ORDER):
        if name == "null_block_id":
            params += struct.pack("<ii", case.null_block_id, 0)
            sizes.append(4)
        elif name in case.buffers:
            part = _map(memory, case, name, FIRST_ADDRESS + i * SPACING, options.first_slot)
            params += part
            sizes.append(len(part))
    if options.dice is not None:
        memory.map(FIRST_ADDRESS - SPACING, _bytes(options.dice), "seed", True)
        params += struct.pack("<q", FIRST_ADDRESS - SPACING)
        sizes.append(8)
    if "state_scale" in case.buffers:
        part = _map(memory, case, "state_scale", FIRST_ADDRESS + len(ORDER) * SPACING, options.first_slot)
        params += part
        sizes.append(len(part))
    H, P = case.views["x"].size[1:]
    heads = H * (P // kernel.config.tile_p)
    grid = (heads, len(case.slots), 1)
    if kernel.config.design == "bulk":
        items = heads * len(case.slots)
        rounds = -(-items // options.ctas)
        grid = (-(-items // rounds), 1, 1)
        params += struct.pack("<i", items)
        sizes.append(4)
    assert sizes == [p.size for p in kernel.code.program.params], (sizes, kernel.code.program.params)
    memory.freeze()
    machine = Machine(kernel.code, memory, grid, params, kernel.shared_bytes, options.seed, options.races,
                      options.blur, kernel.config.pdl)
    machine.run()
    memory.copy_back()
    return machine


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _tensor(address: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """A tensor as a kernel's parameter."""
    head = struct.pack(f"<q{len(sizes)}i", address, *sizes)
    return head + bytes(-len(head) % 8) + struct.pack(f"<{len(strides)}q", *strides)


def _map(memory: GlobalMemory, case: Case, name: str, address: int, first_slot: int) -> bytes:
    """Map what a step may touch of an argument; the parameter that describes it."""
    view, raw = case.views[name], _bytes(case.buffers[name])
    item, batch = case.buffers[name].element_size(), len(case.slots)

    def row(number: int, index: int, length: int, writable: bool) -> None:
        """Map row ``index`` of the view as row ``number`` of the kernel's tensor."""
        first = (view.offset + index * view.stride[0]) * item
        memory.map(address + number * view.stride[0] * item, raw[first:first + length * item],
                   f"{name}[{number}]", writable)

    if name in (*POOLS, "state_scale"):
        for slot in sorted({case.slots[b] for b in case.live}):
            row(slot + first_slot, slot, int(np.prod(view.size[1:])), True)
        return _tensor(address, (view.size[0] + first_slot,), view.stride[:1])
    if name in ROWS:
        for b in case.live if name == "out" else range(batch):
            row(b, b, int(np.prod(view.size[1:])), name == "out")
        return _tensor(address, view.size[:1], view.stride[:1])
    if name in ("write_pos", "is_flush", "state_batch_indices"):
        return _map_facts(memory, case, name, address, first_slot)
    memory.map(address, raw, name, False)
    dynamic: dict[str, Any] = {"dt": (view.size[:1], view.stride[:2])}
    return _tensor(address, *dynamic.get(name, ((), view.stride[:1])))


def _map_facts(memory: GlobalMemory, case: Case, name: str, address: int, first_slot: int) -> bytes:
    """Map the entries of the batch's rows; slots are renumbered."""
    facts = case[name].clone()
    if name == "state_batch_indices":
        column = facts if facts.dim() == 1 else facts[:, 0]
        for b in case.live:
            column[b] += first_slot
    rows = len(case.slots)
    memory.map(address, _bytes(facts[:rows].contiguous()), name, False)
    indices = name == "state_batch_indices"
    return _tensor(address, tuple(facts.shape), tuple(facts.stride()) if indices else ())
