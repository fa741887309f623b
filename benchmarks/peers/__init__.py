"""Decode kernels of other packages, where they are installed, timed beside ours on identical data."""
