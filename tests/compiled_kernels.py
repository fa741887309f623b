"""Which kernels the tests compile for a target, and what each is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from replayssm_cute.kernels.mamba2_config import Mamba2Config, default_config, ranked, validate
from replayssm_cute.kernels.targets import Target
from replayssm_cute.registry import models, tuned
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem

STATES = (torch.float32, torch.float16, torch.bfloat16)
Kernel = tuple[Mamba2Problem, Mamba2Config]


def make_problem(shape: tuple[int, int, int, int], state: torch.dtype, buffer_len: int = 16,
                 act: torch.dtype = torch.bfloat16, **changes: Any) -> Mamba2Problem:
    options = {"dt_bias_dtype": torch.bfloat16, "D_dtype": torch.bfloat16, **changes}
    return Mamba2Problem(Mamba2Geometry(*shape), buffer_len, state, act, act, act, torch.int8, torch.int32,
                         **options)


def problems() -> list[Mamba2Problem]:
    """Every served head shape and dtype, and the odd corners."""
    f32, f16, bf16 = STATES
    shapes = [(64, 64, 128, 8), (96, 80, 128, 8), (48, 64, 256, 1), (32, 128, 256, 2), (80, 64, 64, 1)]
    main = (64, 64, 128, 8)
    found = [make_problem(shape, state) for shape in shapes for state in STATES]
    found += [make_problem(main, f32, 5), make_problem(main, f16, 36), make_problem((48, 64, 256, 1), f16, 64),
              make_problem((48, 64, 256, 1), f32, 64), make_problem((14, 64, 128, 1), f16, 1),
              make_problem(main, f16, has_z=True, D_tied=False, index_ndim=2),
              make_problem(main, f16, state_align=16, D_dtype=None, dt_bias_dtype=None)]
    found += [make_problem(main, f16, philox_rounds=5), make_problem(main, f16, philox_rounds=10),
              make_problem(main, bf16, philox_rounds=5), make_problem((96, 80, 128, 8), f16, philox_rounds=10),
              make_problem(main, f16, act=f16, philox_rounds=5)]
    found += [make_problem(shape, code, philox_rounds=r) for shape, r in ((main, 0), (main, 5), (shapes[2], 10))
              for code in (torch.int8, torch.float8_e4m3fn)]
    # What the bulk design does not take: other inputs, shapes and rings.
    found += [make_problem(shape, state, act=act) for shape in shapes[:3]
              for state, act in ((f32, f32), (f16, f16), (bf16, f16))]
    found += [make_problem((24, 32, 64, 1), f32, 5, act=f16), make_problem((7, 24, 128, 1), f16),
              make_problem(main, f32, act=f32, D_tied=False, has_z=True)]
    return found


def choices(problem: Mamba2Problem, target: Target) -> list[Mamba2Config]:
    """The first choice of each design that serves the problem.

    Raises:
        AssertionError: no design does.
    """
    valid = [c for c in ranked(problem, 1, target) if validate(problem, c, target)]
    assert valid, problem
    return list({c.design: c for c in reversed(valid)}.values())


def row_kernels(target: Target) -> Iterator[Kernel]:
    """What the shipped registry rows of the target's devices name, in the order of the files.

    Not what predicted rows name, which is the heuristic's choice (``tests/test_predicted_rows.py``).
    """
    for path in sorted(tuned.SHIPPED_FOLDER.glob("op=mamba2_decode,*.json")):
        file = tuned.load_file(path)
        if file.provenance.predicted or file.provenance.capability != "{}.{}".format(*target.capability):
            continue
        _, headdim, dstate, state = file.shape
        for row in file.rows:
            if "cute" in row.backends:
                g = row.size.geometry((headdim, dstate))
                yield (make_problem((g.nheads, headdim, dstate, g.ngroups), models.DTYPES[state], row.buffer_len),
                       Mamba2Config.from_dict(row.backends["cute"].config))


def model_kernels(target: Target) -> Iterator[Kernel]:
    """The heuristic's choice at batch 1 for every published model.

    At larger batches it drops ``prefetch`` and ``evict_first``: the same kernel with less code.
    """
    for model in models.mamba2_models():
        g = model.geometry
        for state in model.validated_state_dtypes:
            problem = make_problem((g.nheads, g.headdim, g.dstate, g.ngroups), state)
            config = default_config(problem, 1, target)
            assert config is not None, problem
            yield problem, config


def shape_key(problem: Mamba2Problem, config: Mamba2Config) -> tuple[Mamba2Problem, Mamba2Config]:
    """What decides a kernel's code but for the constants that count heads and groups."""
    g = problem.geometry
    return replace(problem, geometry=Mamba2Geometry(1, g.headdim, g.dstate, 1)), config


def kernels(target: Target) -> dict[str, Kernel]:
    """All kernels by their label; of those that differ in heads and groups only, one."""
    found = [(problem, config) for problem in problems() for config in choices(problem, target)]
    held = {shape_key(*kernel) for kernel in found}
    for kernel in (*row_kernels(target), *model_kernels(target)):
        if shape_key(*kernel) not in held:
            held.add(shape_key(*kernel))
            found.append(kernel)
    labels = {label(*kernel): kernel for kernel in found}
    assert len(labels) == len(found), "two kernels of one label"
    return labels


def label(problem: Mamba2Problem, config: Mamba2Config) -> str:
    """Problem and config in words: what is usual is left out."""
    p, c = problem, config

    def name(dtype: torch.dtype | None) -> str:
        return str(dtype).removeprefix("torch.")

    words = [str(p.geometry), name(p.state_dtype), f"L={p.buffer_len}"]
    words += [f"{name(p.act_dtype)} inputs"] if p.act_dtype != torch.bfloat16 else []
    words += [f"SR{p.philox_rounds}"] if p.philox_rounds else []
    words += [text for text, said in (("z", p.has_z), ("whole D", not p.D_tied), ("no D", p.D_dtype is None),
                                      (f"align={p.state_align}", p.state_align < 32)) if said]
    words += [c.design, f"tile={c.tile_p}", f"threads={c.threads}", f"ctas={c.min_ctas}"]
    words += [f"stages={c.stages}"] if c.design == "bulk" else [f"vec={c.vec_bits}"]
    words += [flag for flag in ("evict_first", "pdl", "prefetch") if getattr(c, flag)]
    return " ".join(words)
