"""Runs a launch: which threads execute which block next, and what they see.

All threads of all CTAs that stand at the same block execute it together, each register an array with one
element a thread. Threads part at branches and meet where they stand at the same block again; the lowest
block goes first, so that they meet where the compiler meant them to. A block that holds an instruction
of a whole warp waits for the whole warp.

With a seed, a random half of the warps moves only when no other can (the same warps of every CTA with an even
seed, any with an odd one), blocks are taken in random order, and bulk copies land at random times: a result
that depends on any of it shows a missing wait.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.ptx.barriers import Barriers
from tests.ptx.builder import Array
from tests.ptx.code import Block, Code
from tests.ptx.copies import Copies
from tests.ptx.errors import BarrierError, PtxError, UninitializedRead
from tests.ptx.memory import GlobalMemory, SharedMemory
from tests.ptx.races import Races

EAGER = 0.5          # share of the warps that go first in a seeded order
OUT_OF_TIME = 0.1    # chance of a wait to give up once before it succeeds, in a seeded order


class Lanes:
    """Threads that execute a block together, in ascending order, and their registers."""

    def __init__(self, machine: Machine, index: NDArray[np.int64], env: dict[str, Array]) -> None:
        self.machine, self.index, self.env = machine, index, env
        self.count = index.size
        self.cta, self.thread = index // machine.threads, index % machine.threads

    def all(self, value: Array) -> Array:
        """One value a lane."""
        return value if value.shape[0] == self.count else np.repeat(value, self.count)

    def subset(self, chosen: Array, registers: set[str]) -> Lanes:
        return Lanes(self.machine, self.index[chosen], {r: self.env[r][chosen] for r in registers if r in self.env})

    def special(self, name: str) -> Array:
        """%tid, %ctaid, %ntid, %nctaid and %laneid."""
        x, y, z = self.machine.grid
        group, _, axis = name[1:].partition(".")
        if group == "laneid":
            return self.thread % 32
        if group == "tid":
            return self.thread if axis == "x" else np.zeros(1, np.int64)
        if group == "ctaid":
            return {"x": self.cta % x, "y": self.cta // x % y, "z": self.cta // (x * y)}[axis]
        sizes = (self.machine.threads, 1, 1) if group == "ntid" else (x, y, z)
        return np.array([sizes["xyz".index(axis)]])


class Machine:
    """One launch of a program.

    Args:
        code: the translated program.
        memory: global memory, frozen.
        grid: CTAs in three dimensions.
        params: the parameter buffer of the entry.
        shared_bytes: dynamic shared memory of a CTA.
        seed: of the order of warps and copies; None takes the lowest block first and lands copies at the
            last moment.
        races: whether to look for races in shared memory.
        blur: seed of errors that are added to what the hardware computes approximately; None for none.
        dependent: launched while the grid before still runs (programmatic dependent launch): no access to
            global memory may come before ``griddepcontrol.wait``.
    """

    def __init__(self, code: Code, memory: GlobalMemory, grid: tuple[int, int, int], params: bytes,
                 shared_bytes: int, seed: int | None = None, races: bool = True, blur: int | None = None,
                 dependent: bool = False) -> None:
        self.code, self.memory, self.grid, self.params = code, memory, grid, params
        self.threads, self.ctas = code.program.threads, grid[0] * grid[1] * grid[2]
        if self.threads % 32:
            raise BarrierError(f"{self.threads} threads are no whole warps")
        self.total = self.threads * self.ctas
        self._noise = None if blur is None else np.random.default_rng(blur)
        self.random = None if seed is None else np.random.default_rng(seed)
        self._eager = np.repeat(self._choose_eager(seed), 32)
        self.shared = SharedMemory(self.ctas, shared_bytes)
        self.races = Races(self.ctas, self.threads, shared_bytes) if races and shared_bytes else None
        self.barriers, self.copies = Barriers(self, shared_bytes), Copies(self)
        self.exit = len(code.blocks)
        self.executed: set[int] = set()                           # blocks
        self._waited = np.full(self.total, not dependent)         # for the grid before
        self._at = np.zeros(self.total, np.int16)                 # the block that a thread will execute
        self._registers: dict[str, Array] = {}
        self._defined: dict[str, NDArray[np.bool_]] = {}
        self._owned: set[str] = set()                             # arrays that no other register shares

    def _choose_eager(self, seed: int | None) -> NDArray[np.bool_]:
        """For each warp, whether it moves before the others."""
        warps = self.threads // 32
        if self.random is None or seed is None:
            return np.ones(warps * self.ctas, bool)
        if seed % 2:
            return self.random.random(warps * self.ctas) < EAGER
        return np.tile(self.random.random(warps) < EAGER, self.ctas)

    def run(self) -> None:
        """Execute to the end.

        Raises:
            PtxError: whatever the program does wrong, with the line that does it.
        """
        with np.errstate(all="ignore"):
            while (self._at != self.exit).any():
                found = self._next()
                if found is not None:
                    self._execute(*found)
                    if self.random is not None:
                        self.copies.land_some(self.random)
                elif not self.copies.land_all():
                    raise BarrierError(self._stuck())
        self.copies.check_finished()

    def missed(self) -> list[str]:
        """Where blocks begin that no thread has executed."""
        return [block.steps[0].instruction.text for block in self.code.blocks
                if block.steps and block.number not in self.executed]

    # ---- scheduling -------------------------------------------------------------------------------

    def _next(self) -> tuple[Block, NDArray[np.int64]] | None:
        """A block and the threads that execute it now; None where all wait."""
        present = np.flatnonzero(np.bincount(self._at, minlength=self.exit + 1)[:-1])
        if self.random is not None:
            present = self.random.permutation(present)
        late = None
        for number in present:
            block = self.code.blocks[number]
            index = self._ready(block, self._at == number)
            first = index[self._eager[index]] if block.needs != "cta" else index
            if first.size:
                return block, first
            if index.size and late is None:
                late = block, index
        return late

    def _ready(self, block: Block, here: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Threads of those ``here`` for which all that the block needs has arrived."""
        if block.needs in ("cta", "warp"):
            unit = self.threads if block.needs == "cta" else 32
            here = np.repeat(here.reshape(-1, unit).all(1), unit)
        if block.needs == "wait":
            index = np.flatnonzero(here)
            ready = block.steps[0].ready
            assert ready is not None
            here = here.copy()
            here[index] = self._guarded(block, 0, lambda: ready(self._lanes(block, index)))
        return np.flatnonzero(here)

    def _lanes(self, block: Block, index: NDArray[np.int64]) -> Lanes:
        """The threads with the registers that the block reads."""
        env, whole = {}, index.size == self.total
        for register in block.uses:
            defined = self._defined.get(register)
            if defined is None or not (defined.all() if whole else defined[index].all()):
                raise UninitializedRead(f"line {block.steps[0].instruction.line if block.steps else '?'}: "
                                        f"{register} is read by threads that never wrote it")
            env[register] = self._registers[register] if whole else self._registers[register][index]
        return Lanes(self, index, env)

    def _execute(self, block: Block, index: NDArray[np.int64]) -> None:
        self.executed.add(block.number)
        lanes = self._lanes(block, index)
        for number, step in enumerate(block.steps):
            try:
                step.run(lanes)
            except PtxError as error:
                raise self._located(block, number, error) from error
        for register in block.keeps:
            self._keep(register, lanes)
        if block.branch is None or block.branch.guard is None:
            self._at[index] = block.next
        else:
            taken = lanes.all(lanes.env[block.branch.guard]) != block.branch.negated
            self._at[index] = np.where(taken, block.target, block.next)

    def _guarded(self, block: Block, number: int, f):  # type: ignore[no-untyped-def]
        try:
            return f()
        except PtxError as error:
            raise self._located(block, number, error) from error

    def _located(self, block: Block, number: int, error: PtxError) -> PtxError:
        ins = block.steps[number].instruction
        return type(error)(f"line {ins.line}: {ins.text}: {error}")

    def _keep(self, register: str, lanes: Lanes) -> None:
        """Store a block's register for the blocks behind it."""
        value = lanes.env[register]
        if lanes.count == self.total:
            self._registers[register], self._defined[register] = value, np.ones(self.total, bool)
            self._owned.discard(register)
            return
        if register not in self._registers:
            self._registers[register] = np.zeros(self.total, value.dtype)
            self._defined[register] = np.zeros(self.total, bool)
        elif register not in self._owned:
            self._registers[register] = self._registers[register].copy()
        self._owned.add(register)
        self._registers[register][lanes.index] = value
        self._defined[register][lanes.index] = True

    def _stuck(self) -> str:
        """Who waits where, for a launch that cannot go on."""
        places = []
        for number in np.unique(self._at):
            who = np.flatnonzero(self._at == number)
            block = None if number == self.exit else self.code.blocks[number]
            where = "the exit" if block is None or not block.steps else \
                f"line {block.steps[0].instruction.line}: {block.steps[0].instruction.text}"
            one = f"CTA {who[0] // self.threads} thread {who[0] % self.threads}"
            places.append(f"{who.size} threads ({one}, ...) at {where}")
        return "no thread can go on; " + "; ".join(places)

    def runs_out_of_time(self) -> bool:
        """Whether a wait gives up although it could succeed."""
        return self.random is not None and self.random.random() < OUT_OF_TIME

    def blurred(self, result: Array, error: Array) -> Array:
        """Float32 results moved by up to ``error``, as those of other hardware may be."""
        if self._noise is None:
            return result
        return (result + error * self._noise.uniform(-1, 1, result.size)).astype(np.float32)

    # ---- memory, and barriers of whole warps and CTAs ---------------------------------------------

    def wait_for_grid(self, lanes: Lanes) -> None:
        self._waited[lanes.index] = True

    def check_dependent(self, lanes: Lanes) -> None:
        """Raises BarrierError where a thread touches global memory while the grid before may still write it."""
        if not self._waited[lanes.index].all():
            raise BarrierError("global memory is accessed before griddepcontrol.wait")

    def load_global(self, lanes: Lanes, address: Array, width: int, count: int, relaxed: bool = False) -> list[Array]:
        """A relaxed load may come before the wait: it says that it knows its value to be stale at times."""
        if not relaxed:
            self.check_dependent(lanes)
        return self.memory.load(address, width, count)

    def store_global(self, lanes: Lanes, address: Array, values: list[Array]) -> None:
        self.check_dependent(lanes)
        self.memory.store(address, values)

    def load_shared(self, lanes: Lanes, address: Array, width: int, count: int) -> list[Array]:
        offset = self.shared.offsets(address, width * count, width * count)
        if self.races is not None:
            self.races.read(lanes.cta, lanes.thread, offset, width * count)
        return self.shared.load(lanes.cta, offset, width, count)

    def store_shared(self, lanes: Lanes, address: Array, values: list[Array]) -> None:
        size = values[0].dtype.itemsize * len(values)
        offset = self.shared.offsets(address, size, size)
        if self.races is not None:
            self.races.write(lanes.cta, lanes.thread, offset, size, np.stack(values, 1))
        self.shared.store(lanes.cta, offset, values)

    def fence_copies(self, lanes: Lanes) -> None:
        if self.races is not None:
            self.races.fence(lanes.cta, lanes.thread)

    def sync_warps(self, lanes: Lanes) -> None:
        if self.races is not None:
            self.races.sync_warps(lanes.index[::32] // 32)

    def sync_ctas(self, lanes: Lanes) -> None:
        if self.races is not None:
            self.races.sync_ctas(lanes.cta[::self.threads])
