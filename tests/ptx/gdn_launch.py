"""Launch a Gated DeltaNet kernel on a case of ``tests.gdn_cases``; how arguments are passed is in ``launch``.

Only what a step may touch is mapped: the tokens of the batch, the slots and rings that live rows name, ``out`` of the
batch. Checkpoints, and the rings they go with, lie as if there were ``first_slot`` more slots in front.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from replayssm_cute.kernels.gdn_config import GdnConfig
from tests.gdn_cases import POOLS, RINGS, Case
from tests.ptx.code import Code
from tests.ptx.launch import FIRST_ADDRESS, SPACING, Options, _bytes, _tensor
from tests.ptx.machine import Machine
from tests.ptx.memory import GlobalMemory

#: The kernels' parameters in order; the seed's state and the number of items stand behind them.
ORDER = ("state", "q", "k", "v", "a", "b", "A_log", "dt_bias", *RINGS, "out", "query_start_loc", "ssm_state_indices",
         "replay_indices", "write_pos", "cache_base", "flush")
TOKENS = ("q", "k", "v", "a", "b", "out")
VECTORS = ("A_log", "dt_bias", "query_start_loc", "write_pos", "cache_base", "is_flush", "force_flush")


@dataclass
class Kernel:
    """A compiled kernel: its code and what the host needs to launch it."""

    code: Code
    config: GdnConfig
    shared_bytes: int


def launch(kernel: Kernel, case: Case, options: Options | None = None) -> Machine:
    """Run one step on the case, in place; the machine that ran it.

    Raises:
        PtxError: what the kernel did wrong.
    """
    options = options or Options()
    memory, params = GlobalMemory(), b""
    for i, name in enumerate(ORDER):
        name = ("is_flush" if case.spec else "force_flush") if name == "flush" else name
        if name in case.buffers:
            params += _map(memory, case, name, FIRST_ADDRESS + i * SPACING, options.first_slot)
    params += struct.pack("<ii", case.null_block_id, 0)
    if options.dice is not None:
        memory.map(FIRST_ADDRESS - SPACING, _bytes(options.dice), "seed", True)
        params += struct.pack("<q", FIRST_ADDRESS - SPACING)
    batch, parts = len(case.lengths), case.views["v"].size[1] * (case.views["v"].size[2] // kernel.config.tile_v)
    grid = (parts, batch, 1)
    if kernel.config.design == "staged":
        rounds = -(-parts * batch // options.ctas)
        grid = (-(-parts * batch // rounds), 1, 1)
        # The number of items follows the null block where no seed stands between them.
        params = params[:-4] if options.dice is None else params
        params += struct.pack("<ii", parts * batch, batch)
    memory.freeze()
    machine = Machine(kernel.code, memory, grid, params, kernel.shared_bytes, options.seed, options.races,
                      options.blur, kernel.config.pdl)
    machine.run()
    memory.copy_back()
    return machine


def _map(memory: GlobalMemory, case: Case, name: str, address: int, first_slot: int) -> bytes:
    """Map what a step may touch of an argument; the parameter that describes it."""
    if name in VECTORS or name in ("ssm_state_indices", "replay_indices"):
        return _map_vector(memory, case[name], name, address, case, first_slot)
    view, raw, item = case.views[name], _bytes(case.buffers[name]), case.buffers[name].element_size()
    pool = name in POOLS
    if pool:
        named = {(case.slots if name == "state" else case.keys)[b] for b in case.live}
        rows = [(s + first_slot, s) for s in sorted(named)]
    else:
        rows = [(t, t) for t in range(sum(case.lengths))]
    for number, row in rows:
        first = (view.offset + row * view.stride[0]) * item
        length = int(np.prod(view.size[1:])) * item
        memory.map(address + number * view.stride[0] * item, raw[first:first + length], f"{name}[{number}]",
                   pool or name == "out")
    return _tensor(address, (view.size[0] + (first_slot if pool else 0),), view.stride[:1])


def _map_vector(memory: GlobalMemory, values: Tensor, name: str, address: int, case: Case, first_slot: int) -> bytes:
    """A vector of cursors, indices or per-head constants; slots are renumbered, and cursors kept by slot move along."""
    held = values.clone()
    if name in ("ssm_state_indices", "replay_indices"):
        for b in case.live:
            held[b] += first_slot
    by_slot = case.spec and name in ("write_pos", "cache_base", "is_flush")
    at = address + (first_slot * held.element_size() if by_slot else 0)
    memory.map(at, _bytes(held.contiguous()), name, False)
    return _tensor(address, (held.shape[0] + (first_slot if by_slot else 0),), ())
