"""Adapters between the dispatcher and the kernels, one file a backend."""
