"""Global and shared memory: bytes behind addresses, with every access checked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.ptx.errors import MemoryFault, UninitializedRead

Array = NDArray[np.generic]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
#: Alignment up to which an address and its place in the backing store agree.
CONGRUENCE = 256
SHARED_BASE = 0x400         # the first KB of the shared window belongs to the system
GUARD = 32                  # bytes of the backing store in front of an allocation, never accessed


class GlobalMemory:
    """Ranges of 64-bit addresses. What is not mapped does not exist, however close it lies to what is."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, NDArray[np.uint8], str, bool]] = []

    def map(self, address: int, data: NDArray[np.uint8], name: str, writable: bool) -> None:
        """Make ``data`` (contiguous bytes, changed in place by ``copy_back``) the contents of a range."""
        if data.size:
            self._ranges.append((address, data, name, writable))

    def freeze(self) -> None:
        """Lay the ranges out in one backing store; to be called once, after the last ``map``.

        Raises:
            MemoryFault: two ranges overlap.
        """
        self._ranges.sort(key=lambda r: r[0])
        self._starts = np.array([r[0] for r in self._ranges], np.int64)
        self._sizes = np.array([r[1].size for r in self._ranges], np.int64)
        self._writable = np.array([r[3] for r in self._ranges])
        clash = np.flatnonzero(self._starts[1:] < (self._starts + self._sizes)[:-1])
        if clash.size:
            raise MemoryFault(f"{self._ranges[clash[0]][2]} and {self._ranges[clash[0] + 1][2]} overlap")
        places, end = [], 0
        for address, data, _, _ in self._ranges:
            place = -(-(end + GUARD) // CONGRUENCE) * CONGRUENCE + address % CONGRUENCE
            places.append(place)
            end = place + data.size
        self._places = np.array(places, np.int64)
        self._store = np.zeros(-(-end // CONGRUENCE) * CONGRUENCE, np.uint8)
        for place, (_, data, _, _) in zip(places, self._ranges, strict=True):
            self._store[place:place + data.size] = data

    def copy_back(self) -> None:
        """Bring what the program stored into the arrays that were mapped."""
        for place, (_, data, _, writable) in zip(self._places, self._ranges, strict=True):
            if writable:
                data[:] = self._store[place:place + data.size]

    def places(self, address: Array, size: int, align: int, writing: bool) -> Array:
        """Positions in the backing store of accesses of ``size`` bytes each.

        Raises:
            MemoryFault: an access is not inside one range, misaligned, or a store to a read-only range.
        """
        address = address.astype(np.int64)
        k = np.maximum(np.searchsorted(self._starts, address, "right") - 1, 0)
        offset = address - self._starts[k]
        bad = (offset < 0) | (offset + size > self._sizes[k])
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            _, _, name, _ = self._ranges[int(k[i])]
            raise MemoryFault(f"{size} bytes at {int(address[i]):#x} are not mapped; {name} begins "
                              f"{int(offset[i])} bytes before and has {int(self._sizes[k[i]])}")
        if (address % align).any():
            raise MemoryFault(f"address {int(address[address % align != 0][0]):#x} is not aligned to {align} bytes")
        if writing and not self._writable[k].all():
            name = self._ranges[int(k[~self._writable[k]][0])][2]
            raise MemoryFault(f"store to {name}, which is read-only")
        return offset + self._places[k]

    def load(self, address: Array, width: int, count: int) -> list[Array]:
        """``count`` neighbours of ``width`` bytes each, as unsigned arrays of one element a lane."""
        first = self.places(address, width * count, width * count, False) // width
        words = self._store.view(UNSIGNED[width])
        return [words[first + i] for i in range(count)]

    def store(self, address: Array, values: list[Array]) -> None:
        width = values[0].dtype.itemsize
        first = self.places(address, width * len(values), width * len(values), True) // width
        words = self._store.view(values[0].dtype)
        for i, value in enumerate(values):
            words[first + i] = value

    def read_bytes(self, address: int, size: int, align: int) -> NDArray[np.uint8]:
        place = int(self.places(np.array([address]), size, align, False)[0])
        return self._store[place:place + size].copy()

    def write_bytes(self, address: int, data: NDArray[np.uint8], align: int) -> None:
        place = int(self.places(np.array([address]), data.size, align, True)[0])
        self._store[place:place + data.size] = data


class SharedMemory:
    """The dynamic shared memory of every CTA of a launch, ``size`` bytes each."""

    def __init__(self, ctas: int, size: int) -> None:
        self.size = size
        self.pitch = -(-size // CONGRUENCE) * CONGRUENCE
        self._store = np.zeros(ctas * self.pitch, np.uint8)
        self._written = np.zeros(ctas * self.pitch, bool)

    def offsets(self, address: Array, size: int, align: int) -> Array:
        """Offsets in the CTA's memory.

        Raises:
            MemoryFault: outside of it, or misaligned.
        """
        offset = address.astype(np.int64) - SHARED_BASE
        bad = (offset < 0) | (offset + size > self.size)
        if bad.any():
            raise MemoryFault(f"{size} bytes at offset {int(offset[bad][0])} of {self.size} bytes of shared memory")
        if (offset % align).any():
            raise MemoryFault(f"shared offset {int(offset[offset % align != 0][0])} is not aligned to {align} bytes")
        return offset

    def load(self, cta: Array, offset: Array, width: int, count: int) -> list[Array]:
        """As ``GlobalMemory.load``.

        Raises:
            UninitializedRead: a byte that nothing was written to.
        """
        first = cta * self.pitch + offset
        written = self._written.view(UNSIGNED[width])
        words, out = self._store.view(UNSIGNED[width]), []
        all_written = UNSIGNED[width](int.from_bytes(b"\1" * width, "little"))
        for i in range(count):
            at = first // width + i
            if (written[at] != all_written).any():
                bad = int(offset[written[at] != all_written][0]) + i * width
                raise UninitializedRead(f"shared memory at offset {bad} was never written")
            out.append(words[at])
        return out

    def store(self, cta: Array, offset: Array, values: list[Array]) -> None:
        width = values[0].dtype.itemsize
        words, written = self._store.view(values[0].dtype), self._written.view(UNSIGNED[width])
        for i, value in enumerate(values):
            at = (cta * self.pitch + offset) // width + i
            words[at] = value
            written[at] = UNSIGNED[width](int.from_bytes(b"\1" * width, "little"))

    def read_bytes(self, cta: int, offset: int, size: int) -> NDArray[np.uint8]:
        at = slice(cta * self.pitch + offset, cta * self.pitch + offset + size)
        if not self._written[at].all():
            raise UninitializedRead(f"a bulk copy reads shared memory at {offset}..{offset + size}, partly unwritten")
        return self._store[at].copy()

    def write_bytes(self, cta: int, offset: int, data: NDArray[np.uint8]) -> None:
        at = slice(cta * self.pitch + offset, cta * self.pitch + offset + data.size)
        self._store[at] = data
        self._written[at] = True
