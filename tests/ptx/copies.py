"""Bulk copies: they land some time after they are issued, never before.

Without a seed they land at the last moment, when no thread can go on or one waits for its group; with
one at random times. A wait that is missing then finds old bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.ptx.builder import Array
from tests.ptx.errors import BarrierError, MemoryFault

if TYPE_CHECKING:
    from tests.ptx.machine import Lanes, Machine

UNIT = 16           # bytes; sizes and addresses of bulk copies are multiples of it
LAND = 0.2          # chance of a copy to land after a block, in a seeded order


class Copy(NamedTuple):
    """A copy on its way. ``barrier`` is the mbarrier that it completes on, -1 for a store."""

    cta: int
    offset: int
    address: int
    size: int
    barrier: int


class Copies:
    """All bulk copies of a launch."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._loads: list[Copy] = []
        self._open: dict[int, list[Copy]] = {}                  # stores since the last commit, by thread
        self._groups: dict[int, list[list[Copy]]] = {}          # committed stores, by thread, oldest first

    def load(self, lanes: Lanes, target: Array, source: Array, size: Array, barrier: Array) -> None:
        """``cp.async.bulk.shared.global``: lands in the CTA's own memory and completes on its mbarrier."""
        self._machine.check_dependent(lanes)
        at = self._machine.barriers.place(lanes.cta, barrier)
        self._machine.barriers.check_fenced(at)
        for i in range(lanes.count):
            copy = self._copy(lanes, i, target, source, size, int(at[i]))
            if self._machine.races is not None:
                phase = int(self._machine.barriers.phase[copy.barrier])
                self._machine.races.copy_in(copy.cta, int(lanes.thread[i]), copy.offset, copy.size, copy.barrier, phase)
            self._loads.append(copy)

    def store(self, lanes: Lanes, target: Array, source: Array, size: Array) -> None:
        """``cp.async.bulk.global.shared``: joins the thread's open group."""
        self._machine.check_dependent(lanes)
        for i in range(lanes.count):
            copy = self._copy(lanes, i, source, target, size, -1)
            if self._machine.races is not None:
                self._machine.races.copy_out(copy.cta, int(lanes.thread[i]), copy.offset, copy.size)
            self._open.setdefault(int(lanes.index[i]), []).append(copy)

    def prefetch(self, source: Array, size: Array) -> None:
        """``cp.async.bulk.prefetch.L2``: nothing but an access, which must be as right as any."""
        for i in range(source.size):
            self._check_size(int(size[i]))
            self._machine.memory.places(source[i:i + 1], int(size[i]), UNIT, False)

    def _check_size(self, size: int) -> None:
        if size % UNIT or size <= 0:
            raise MemoryFault(f"a bulk copy of {size} bytes")

    def _copy(self, lanes: Lanes, i: int, shared: Array, address: Array, size: Array, barrier: int) -> Copy:
        self._check_size(int(size[i]))
        offset = self._machine.shared.offsets(shared[i:i + 1], int(size[i]), UNIT)
        self._machine.memory.places(address[i:i + 1], int(size[i]), UNIT, barrier < 0)
        return Copy(int(lanes.cta[i]), int(offset[0]), int(address[i]), int(size[i]), barrier)

    def commit(self, lanes: Lanes) -> None:
        for thread in lanes.index.tolist():
            self._groups.setdefault(thread, []).append(self._open.pop(thread, []))

    def wait(self, lanes: Lanes, pending: int) -> None:
        """All but the newest ``pending`` groups of each thread land now."""
        for i, thread in enumerate(lanes.index.tolist()):
            groups = self._groups.get(thread, [])
            while len(groups) > pending:
                for copy in groups.pop(0):
                    self._land(copy)
            if not groups and thread not in self._open and self._machine.races is not None:
                self._machine.races.copies_read(int(lanes.cta[i]), int(lanes.thread[i]))

    def land_all(self) -> bool:
        """Let every load land; whether there was one."""
        loads, self._loads = self._loads, []
        for copy in loads:
            self._land(copy)
        return bool(loads)

    def land_some(self, random: np.random.Generator) -> None:
        chosen = random.random(len(self._loads)) < LAND
        loads, self._loads = self._loads, [c for c, now in zip(self._loads, chosen, strict=True) if not now]
        for copy, now in zip(loads, chosen, strict=True):
            if now:
                self._land(copy)

    def check_finished(self) -> None:
        """Raises BarrierError where threads have left with copies on their way."""
        if self._loads or self._open or any(self._groups.values()):
            raise BarrierError("the program ends with bulk copies on their way")

    def _land(self, copy: Copy) -> None:
        memory, shared = self._machine.memory, self._machine.shared
        if copy.barrier < 0:
            memory.write_bytes(copy.address, shared.read_bytes(copy.cta, copy.offset, copy.size), UNIT)
        else:
            shared.write_bytes(copy.cta, copy.offset, memory.read_bytes(copy.address, copy.size, UNIT))
            self._machine.barriers.land(copy.barrier, copy.size)
