"""Replay decode for state-space and linear-attention layers.

Importing this package costs no more than torch: Triton, the CuTe DSL and the GPU driver are
touched on first use.
"""

__version__ = "0.1.0"
