"""mbarrier objects: phases that end when all arrivals and all announced bytes have come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tests.ptx.builder import Array
from tests.ptx.errors import BarrierError, UninitializedRead

if TYPE_CHECKING:
    from tests.ptx.machine import Lanes, Machine

WORD = 8       # bytes of an mbarrier


class Barriers:
    """The mbarriers of all CTAs, one place for every eight bytes of shared memory."""

    def __init__(self, machine: Machine, shared_bytes: int) -> None:
        self._machine = machine
        self.places = -(-shared_bytes // WORD)
        self._expected, self._pending, self._bytes, self.phase = (
            np.zeros(machine.ctas * self.places, np.int64) for _ in range(4))
        self._unfenced = np.full(machine.ctas * self.places, -1)     # the thread that initialised, until its fence

    def place(self, cta: Array, address: Array) -> NDArray[np.int64]:
        return cta * self.places + self._machine.shared.offsets(address, WORD, WORD) // WORD

    def init(self, lanes: Lanes, address: Array, count: Array) -> None:
        """``mbarrier.init``.

        Raises:
            BarrierError: a count of zero, or initialised twice.
        """
        at = self.place(lanes.cta, address)
        if (count <= 0).any() or self._expected[at].any() or np.unique(at).size != at.size:
            raise BarrierError("an mbarrier is initialised twice, or for no arrivals")
        self._expected[at] = self._pending[at] = count
        self._unfenced[at] = lanes.index
        if self._machine.races is not None:
            offset = at % self.places * WORD
            self._machine.races.write(lanes.cta, lanes.thread, offset, WORD, np.zeros((lanes.count, 1), np.uint64))

    def fence(self, lanes: Lanes) -> None:
        """``fence.mbarrier_init``: the copy engine may now complete on what these threads initialised."""
        self._unfenced[np.isin(self._unfenced, lanes.index)] = -1

    def check_fenced(self, at: NDArray[np.int64]) -> None:
        if (self._unfenced[at] >= 0).any():
            raise BarrierError("a bulk copy completes on an mbarrier that no fence.mbarrier_init has published")

    def arrive(self, lanes: Lanes, address: Array, count: Array, expected_bytes: Array) -> NDArray[np.int64]:
        """``mbarrier.arrive``; returns the phases in which the lanes arrived."""
        at = self._existing(lanes, address)
        phase = self.phase[at]
        if self._machine.races is not None:
            self._machine.races.release(lanes.cta, lanes.thread, at)
        np.add.at(self._bytes, at, expected_bytes)
        np.subtract.at(self._pending, at, count)
        if (self._pending[at] < 0).any():
            raise BarrierError("more arrivals than the mbarrier expects in a phase")
        self._end_phases(at)
        return phase

    def land(self, at: int, size: int) -> None:
        """Bytes of a bulk copy have arrived."""
        self._bytes[at] -= size
        self._end_phases(np.array([at]))

    def ready(self, lanes: Lanes, address: Array, parity: Array) -> NDArray[np.bool_]:
        """Whether the phase of this parity has ended."""
        return (self.phase[self._existing(lanes, address)] & 1) != parity

    def acquire(self, lanes: Lanes, address: Array) -> None:
        """What happened before the end of the phase is visible from here on."""
        if self._machine.races is not None:
            self._machine.races.acquire(lanes.cta, lanes.thread, self.place(lanes.cta, address))

    def _existing(self, lanes: Lanes, address: Array) -> NDArray[np.int64]:
        at = self.place(lanes.cta, address)
        if (self._expected[at] == 0).any():
            raise UninitializedRead("the mbarrier is not initialised")
        if self._machine.races is not None:
            self._machine.races.observe(lanes.cta, lanes.thread, at % self.places * WORD, WORD)
        return at

    def _end_phases(self, at: NDArray[np.int64]) -> None:
        at = np.unique(at)
        ended = at[(self._pending[at] == 0) & (self._bytes[at] == 0)]
        self.phase[ended] += 1
        self._pending[ended] = self._expected[ended]
        if self._machine.races is not None:
            for place in ended:
                self._machine.races.end_phase(int(place) // self.places, int(place), int(self.phase[place]))
