"""What the executor reports: faults of the program that it runs, and instructions that it does not know."""


class PtxError(Exception):
    """Base of all reports. Each names the PTX line where it happened."""


class UnknownInstructionError(PtxError):
    """An instruction, modifier or operand form that the executor does not implement."""


class MemoryFault(PtxError):
    """An access outside the registered memory, a misaligned one, or a store to a read-only tensor."""


class UninitializedRead(PtxError):
    """A register or a byte of shared memory is read before anything was written to it."""


class RaceError(PtxError):
    """Two accesses to shared memory, one of them a store, that no barrier orders."""


class BarrierError(PtxError):
    """A barrier that its threads do not all reach, or whose counts do not add up."""
