"""Races in shared memory, by vector clocks.

Every thread has a clock, and knows how far it has seen the clock of every other *actor* of its CTA: the
threads, and the copy engine, once for each mbarrier that loads complete on and once for each thread that
issues stores. Barriers hand this knowledge on: ``bar.sync`` among all threads of a CTA, ``bar.warp.sync`` among
those of a warp, an mbarrier from those who arrive to those who wait. Two accesses to the same bytes, one of
them a store, race unless the later one's actor has seen the earlier one's clock.

Clocks count up when knowledge is handed on; the threads of a warp share the count, not the knowledge.
Of a warp's reads only the last are remembered.

The copy engine does not see a thread's stores before ``fence.proxy.async``, executed by that thread or by one
that has seen the store. Loads of threads need no fence before the engine writes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.ptx.builder import Array
from tests.ptx.errors import RaceError

GRAIN = 2          # bytes that are told apart
ENGINES = 64       # actors of the copy engine in a CTA
MANY = -1          # more than one lane of the warp


class Races:
    """Shadow of the shared memory of all CTAs."""

    def __init__(self, ctas: int, threads: int, shared_bytes: int) -> None:
        self.threads, self.warps = threads, threads // 32
        self.actors, self.grains = threads + ENGINES, -(-shared_bytes // GRAIN)
        self._seen = np.zeros((ctas, threads, self.actors), np.int32)
        self._count = np.ones((ctas, self.warps), np.int32)
        self._writer = np.full((ctas, self.grains), -1, np.int16)
        self._written = np.zeros((ctas, self.grains), np.int32)              # the writer's clock
        self._read = np.zeros((ctas, self.grains, self.warps), np.int32)     # the warp's clock
        self._reader = np.zeros((ctas, self.grains, self.warps), np.int16)    # a lane, or MANY
        self._sent = np.zeros((ctas, self.grains), np.int32)                 # read by the copy engine
        self._sender = np.zeros((ctas, self.grains), np.int16)
        self._unfenced = np.zeros((ctas, self.grains), bool)                 # stored, and not fenced yet
        self._engine: list[dict[tuple[str, int], int]] = [{} for _ in range(ctas)]
        self._released: dict[int, Array] = {}                                # by mbarrier: of this phase
        self._visible: dict[int, Array] = {}                                 # and of those that have ended
        self._own(np.arange(ctas)[:, None], np.arange(self.warps)[None])

    def _own(self, cta: Array, warp: Array) -> None:
        """Every thread knows its own clock."""
        own = np.expand_dims(warp, -1) * 32 + np.arange(32)
        self._seen[np.expand_dims(cta, -1), own, own] = self._count[cta, warp][..., None]

    def _tick(self, cta: Array, warp: Array) -> None:
        self._count[cta, warp] += 1
        self._own(cta, warp)

    def _actor(self, cta: int, kind: str, key: int) -> int:
        """The copy engine for one mbarrier ("load") or one thread ("store")."""
        found = self._engine[cta].setdefault((kind, key), len(self._engine[cta]))
        if found >= ENGINES:
            raise RaceError(f"more than {ENGINES} mbarriers and threads with copies")
        return self.threads + found

    # ---- accesses ---------------------------------------------------------------------------------

    def _spread(self, cta: Array, thread: Array, offset: Array, size: int) -> tuple[Array, Array, Array]:
        """(cta, thread, grain) for every grain of the accesses."""
        grains = -(-size // GRAIN)
        grain = (offset[:, None] // GRAIN + np.arange(grains)).reshape(-1)
        return np.repeat(cta, grains), np.repeat(thread, grains), grain

    def observe(self, cta: Array, thread: Array, offset: Array, size: int) -> None:
        """A read that nothing later can conflict with, of a barrier."""
        self._check_writer(*self._spread(cta, thread, offset, size), "reads what")

    def read(self, cta: Array, thread: Array, offset: Array, size: int) -> None:
        cta, thread, grain = self._spread(cta, thread, offset, size)
        self._check_writer(cta, thread, grain, "reads what")
        warp, lane = thread // 32, thread % 32
        clock = self._count[cta, warp]
        at = (cta, grain, warp)
        again = (self._read[at] == clock) & (self._reader[at] != lane)
        self._read[at] = clock
        self._reader[at] = np.where(again, MANY, lane)
        shared = self._reader[at] != lane           # of the lanes of this very access the last one's entry stands
        self._reader[cta[shared], grain[shared], warp[shared]] = MANY

    def write(self, cta: Array, thread: Array, offset: Array, size: int, values: Array) -> None:
        """A store; ``values`` (lanes, words) tell whether threads of it agree about the same bytes."""
        cta, thread, grain = self._spread(cta, thread, offset, size)
        self._check_writer(cta, thread, grain, "overwrites what")
        self._check_readers(cta, thread, grain)
        self._check_agreement(cta, grain, values.view(np.uint8).reshape(values.shape[0], -1), size)
        self._writer[cta, grain] = thread
        self._written[cta, grain] = self._count[cta, thread // 32]
        self._unfenced[cta, grain] = True

    def _check_agreement(self, cta: Array, grain: Array, raw: Array, size: int) -> None:
        """Raise where lanes of one store write different values to the same bytes."""
        at = (cta * self.grains + grain).reshape(raw.shape[0], -1)[:, 0]
        order = np.argsort(at, kind="stable")
        same = at[order][1:] == at[order][:-1]
        if same.any() and (raw[order][1:][same] != raw[order][:-1][same]).any():
            where = int(at[order][1:][same][0] % self.grains) * GRAIN
            raise RaceError(f"lanes of one store write different values to shared offset {where}, {size} bytes")

    def _check_writer(self, cta: Array, thread: Array, grain: Array, verb: str) -> None:
        writer = self._writer[cta, grain]
        bad = (writer >= 0) & (self._seen[cta, thread, writer] < self._written[cta, grain])
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            who = f"thread {writer[i]}" if writer[i] < self.threads else "a bulk copy"
            raise RaceError(f"CTA {cta[i]}: thread {thread[i]} {verb} {who} wrote to shared offset "
                            f"{int(grain[i]) * GRAIN}, and no barrier orders them")

    def _check_readers(self, cta: Array, thread: Array, grain: Array) -> None:
        bad = self._seen[cta, thread, self._sender[cta, grain]] < self._sent[cta, grain]
        for warp in range(self.warps):
            clock, reader = self._read[cta, grain, warp], self._reader[cta, grain, warp]
            of_one = self._seen[cta, thread, warp * 32 + np.maximum(reader, 0)] < clock
            some = np.flatnonzero((clock > 0) & (reader == MANY))
            if some.size:
                seen = self._seen[cta[some], thread[some], warp * 32:warp * 32 + 32].min(1)
                bad[some] |= seen < clock[some]
            bad |= of_one & (reader != MANY) & (clock > 0)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise RaceError(f"CTA {cta[i]}: thread {thread[i]} overwrites shared offset {int(grain[i]) * GRAIN}, "
                            "which others read, and no barrier orders them")

    # ---- the copy engine --------------------------------------------------------------------------

    def copy_in(self, cta: int, thread: int, offset: int, size: int, barrier: int, phase: int) -> None:
        """A bulk load is issued: from now on its bytes belong to it, until the phase ends."""
        at, grain = np.full(size // GRAIN, cta), offset // GRAIN + np.arange(size // GRAIN)
        who = np.full(grain.size, thread)
        self._check_writer(at, who, grain, "lets a copy overwrite what")
        self._check_readers(at, who, grain)
        self._check_fenced(cta, grain)
        self._writer[cta, grain] = self._actor(cta, "load", barrier)
        self._written[cta, grain] = phase + 1

    def copy_out(self, cta: int, thread: int, offset: int, size: int) -> None:
        """A bulk store is issued: it reads its bytes until the thread has waited for it."""
        grain = offset // GRAIN + np.arange(size // GRAIN)
        self._check_writer(np.full(grain.size, cta), np.full(grain.size, thread), grain, "lets a copy read what")
        self._check_fenced(cta, grain)
        self._sender[cta, grain] = self._actor(cta, "store", thread)
        self._sent[cta, grain] = self._seen[cta, thread, self._actor(cta, "store", thread)] + 1

    def _check_fenced(self, cta: int, grain: Array) -> None:
        if self._unfenced[cta, grain].any():
            offset = int(grain[self._unfenced[cta, grain]][0]) * GRAIN
            raise RaceError(f"CTA {cta}: a bulk copy touches shared offset {offset}, and no proxy fence followed "
                            "the store to it")

    def fence(self, cta: Array, thread: Array) -> None:
        """``fence.proxy.async`` of some threads."""
        for c, t in zip(cta.tolist(), thread.tolist(), strict=True):
            grain = np.flatnonzero(self._unfenced[c])
            seen = self._seen[c, t, self._writer[c, grain]] >= self._written[c, grain]
            self._unfenced[c, grain[seen]] = False

    def copies_read(self, cta: int, thread: int) -> None:
        self._seen[cta, thread, self._actor(cta, "store", thread)] += 1

    # ---- barriers ---------------------------------------------------------------------------------

    def sync_warps(self, warp: Array) -> None:
        """``warp`` counts over all CTAs."""
        cta, warp = warp // self.warps, warp % self.warps
        lanes = warp[:, None] * 32 + np.arange(32)
        known = self._seen[cta[:, None], lanes].max(1)
        self._seen[cta[:, None], lanes] = known[:, None]
        self._tick(cta, warp)

    def sync_ctas(self, cta: Array) -> None:
        self._seen[cta] = self._seen[cta].max(1)[:, None]
        self._tick(cta[:, None], np.arange(self.warps)[None])

    def release(self, cta: Array, thread: Array, barrier: Array) -> None:
        """Threads arrive at mbarriers."""
        for c, t, b in zip(cta.tolist(), thread.tolist(), barrier.tolist(), strict=True):
            known = self._seen[c, t]
            self._released[b] = np.maximum(self._released[b], known) if b in self._released else known.copy()
        ticking: NDArray[np.int64] = np.unique(cta * self.warps + thread // 32)
        self._tick(ticking // self.warps, ticking % self.warps)

    def end_phase(self, cta: int, barrier: int, phase: int) -> None:
        known = self._released.pop(barrier)
        if ("load", barrier) in self._engine[cta]:
            known[self._actor(cta, "load", barrier)] = phase
        before = self._visible.get(barrier)
        self._visible[barrier] = known if before is None else np.maximum(before, known)

    def acquire(self, cta: Array, thread: Array, barrier: Array) -> None:
        """Threads have seen the end of a phase of their mbarriers."""
        for b in np.unique(barrier).tolist():
            if b in self._visible:
                at = cta[barrier == b], thread[barrier == b]
                self._seen[at] = np.maximum(self._seen[at], self._visible[b])
