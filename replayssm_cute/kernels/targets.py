"""Which targets the kernels are compiled for, and what each offers. Asks no driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A compilation target of the CuTe kernels.

    Attributes:
        name: as the compiler spells it.
        capability: the compute capability that runs it.
        packed_fma: two fp32 FMAs in one instruction (``fma.rn.f32x2``).
        wide_loads: 256-bit global loads and stores.
        stochastic_cvt: ``cvt.rs``; it assembles for sm_100a and sm_103a only.
        smem_per_sm: shared memory of a multiprocessor, in bytes.
        sms: multiprocessors of the usual part, for plans made without a device.
    """

    name: str
    capability: tuple[int, int]
    packed_fma: bool
    wide_loads: bool
    stochastic_cvt: bool
    smem_per_sm: int = 228 * 1024
    sms: int = 132


TARGETS = {t.name: t for t in (
    Target("sm_90a", (9, 0), packed_fma=False, wide_loads=False, stochastic_cvt=False, sms=132),
    Target("sm_100a", (10, 0), packed_fma=True, wide_loads=True, stochastic_cvt=True, sms=148),
    Target("sm_103a", (10, 3), packed_fma=True, wide_loads=True, stochastic_cvt=True, sms=148),
)}

SMEM_PER_CTA = 227 * 1024
REGISTERS_PER_SM = 64 * 1024
SORTED_ROWS = 512        # batch rows whose order (``order``) fits a kernel's shared memory; larger batches keep theirs


def for_capability(capability: tuple[int, int]) -> Target | None:
    """The target a device runs, None where the kernels are not built for it."""
    return next((t for t in TARGETS.values() if t.capability == capability), None)
