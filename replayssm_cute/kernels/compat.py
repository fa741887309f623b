"""Names that moved between the supported versions of the DSL (4.7 and 4.8)."""

try:
    from cutlass.memory import SmemAllocator
except ImportError:  # before 4.8
    from cutlass.utils import SmemAllocator

__all__ = ["SmemAllocator"]
