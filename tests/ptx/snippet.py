"""Run a few lines of PTX on arrays, for tests of the executor itself."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from tests.ptx.code import load
from tests.ptx.machine import Machine
from tests.ptx.memory import GlobalMemory

FIRST_ADDRESS, SPACING = 0x7F1000000000, 1 << 34

TEMPLATE = """
.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry snippet(
{params}
)
.reqntid {threads}, 1, 1
{{
	.reg .pred 	%p<32>;
	.reg .b16 	%rs<32>;
	.reg .b32 	%r<99>;
	.reg .b64 	%rd<99>;
{loads}
	mov.u32 	%r0, %tid.x;
	mul.wide.u32 	%rd0, %r0, 4;
{body}
	ret;
}}
"""


def run_snippet(body: str, *arrays: NDArray[np.generic], threads: int = 32, ctas: int = 1, shared_bytes: int = 0,
                seed: int | None = None, read_only: int = 0, dependent: bool = False) -> None:
    """Execute ``body`` with the address of array i in ``%rd{10 + i}``, ``%tid.x`` in ``%r0``, 4 times it in ``%rd0``.

    Arrays are changed in place; the first ``read_only`` of them must not be. ``smem`` is the shared memory.

    Raises:
        PtxError: what the program does wrong.
    """
    params = ",\n".join(f"\t.param .u64 array_{i}" for i in range(len(arrays)))
    loads = "\n".join(f"\tld.param.b64 \t%rd{10 + i}, [array_{i}];" for i in range(len(arrays)))
    lines = "\n".join(f"\t{line.strip()}" for line in body.strip().splitlines())
    code = load(TEMPLATE.format(params=params, loads=loads, body=lines, threads=threads))
    memory, addresses = GlobalMemory(), []
    for i, array in enumerate(arrays):
        addresses.append(FIRST_ADDRESS + i * SPACING)
        memory.map(addresses[-1], array.view(np.uint8).reshape(-1), f"array {i}", i >= read_only)
    memory.freeze()
    Machine(code, memory, (ctas, 1, 1), struct.pack(f"<{len(arrays)}Q", *addresses), shared_bytes, seed,
            dependent=dependent).run()
    memory.copy_back()
