"""What the kernels' sm_90a code computes on a GPU, stored bit for bit, to hold the executor against.

    python -m tests.ptx.vectors --out tests/vectors/sm_90a.npz

runs the cases of ``vectors_cases.py`` on a GPU of capability 9.0, with the kernels and configs that the executor
runs, and stores what they wrote: outputs, appended ring rows, checkpoints, scales. Of a checkpoint every
``SAMPLE``-th element is stored, of all of it a hash.

``tests/test_ptx_vectors.py`` compares. The file holds results, not code: kernels may change as long as they compute
the same numbers. A change of the numbers themselves needs a new file.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import io
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.cases import Case, bits, scale_of, written
from tests.ptx.vectors_cases import KERNELS, KINDS, STEP, case_of, dice_of, without_codes

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "vectors" / "sm_90a.npz"
SAMPLE = 11                       # shares no divisor with any shape, so that every row and column occurs
RESULTS = ("out", "x_cache", "dt_cache", "B_cache", "state", "state_scale")

#: Runs a kernel's step on a case, in place: (kernel, case, generator's state).
Runner = Callable[[str, Case, Tensor | None], None]
#: Stored bits by "kernel/kind/result"; hashes of all of a result and of the inputs, and the provenance.
Vectors = tuple[dict[str, NDArray[np.integer]], dict[str, str], dict[str, str]]


def run(name: str, kind: str, runner: Runner) -> tuple[Case, dict[str, Tensor]]:
    """(the case before the step, all that the step had to write, by result).

    Raises:
        ValueError: it wrote something else, or did not count the step.
    """
    before, dice = case_of(name, kind), dice_of(name)
    after = before.clone()
    runner(name, after, dice)
    if dice is not None and dice[1] != STEP + 1:
        raise ValueError(f"{name}: the generator's step is {int(dice[1])}, not {STEP + 1}")
    masks = written_masks(before)
    for argument, buffer in after.buffers.items():
        same = bits(buffer) == bits(before.buffers[argument])
        if not bool((same | masks.get(argument, torch.zeros_like(same))).all()):
            raise ValueError(f"{name}, {kind}: {argument} changed where it must not")
    return before, {r: after.buffers[r][masks[r]] for r in RESULTS if r in masks}


def written_masks(case: Case) -> dict[str, Tensor]:
    """``cases.written``, of the scales of an 8-bit checkpoint as well."""
    masks = written(case)
    if "state_scale" in case.buffers:
        masks["state_scale"] = torch.zeros_like(case.buffers["state_scale"], dtype=torch.bool)
        for b in case.live:
            case.views["state_scale"].of(masks["state_scale"])[case.slots[b]] = case.cursors[b][1]
    return masks


def kept(result: str, values: Tensor) -> Tensor:
    """What the file holds of a result."""
    return values[::SAMPLE] if result == "state" else values


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(bits(t.contiguous()).numpy().tobytes() for t in tensors)).hexdigest()[:16]


def input_digest(case: Case) -> str:
    """Of the numbers: which NaN a processor makes of another type's is its own affair."""
    buffers = [case.buffers[name] for name in sorted(case.buffers)]
    return digest(*(torch.where(torch.isnan(b), torch.zeros_like(b), b) if b.is_floating_point() and b.itemsize > 1
                    else b for b in buffers))


def record(runner: Runner, provenance: dict[str, str], kernels: Sequence[str] = KERNELS) -> Vectors:
    """Run every case of some kernels; what the file holds of it."""
    arrays, digests = {}, {}
    for name in kernels:
        for kind in KINDS:
            case, results = run(name, kind, runner)
            digests[f"{name}/{kind}"] = input_digest(case)
            for result, values in results.items():
                label = f"{name}/{kind}/{result}"
                arrays[label], digests[label] = bits(kept(result, values)).numpy(), digest(values)
    return arrays, digests, provenance


def save(vectors: Vectors, path: Path) -> None:
    """Write the file, once everything is there."""
    arrays, digests, provenance = vectors
    buffer = io.BytesIO()
    text = json.dumps({"digests": digests, "provenance": provenance})
    np.savez_compressed(buffer, about=np.frombuffer(text.encode(), np.uint8),
                        **arrays)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())


def load(path: Path = FILE) -> Vectors:
    with np.load(path) as held:
        about = json.loads(held["about"].tobytes())
        arrays = {name: held[name] for name in held.files if name != "about"}
    return arrays, about["digests"], about["provenance"]


# ---- comparison -------------------------------------------------------------------------------------

def must_agree(case: Case, kind: str, result: str) -> bool:
    """Whether only exact operations lie between the inputs and a result, so that its bits must be the same.

    A ring row of x or B is the input itself. With exact numbers all the rest is exact too, but for the output gate's
    ``ex2.approx`` and ``rcp.approx``.
    """
    return result in ("x_cache", "B_cache") or (kind == "exact" and not (result == "out" and "z" in case.buffers))


def distance(case: Case, result: str, got: Tensor, want: Tensor) -> tuple[float, float]:
    """How far the stored values of two runs of a case lie apart: (share of values that differ, largest distance).

    Codes are as many codes apart as lie between them. Everything else is apart by so many fp32
    roundings of its sum's scale (``tests/tolerance.py``), beyond the one unit in the last place of the stored type
    that any difference before the rounding can turn into.
    """
    differ = float((bits(got) != bits(want)).float().mean())
    if want.element_size() == 1:
        return differ, float((in_order(got) - in_order(want)).abs().max())
    scale = want.double()
    if result != "state_scale":
        plain = without_codes(case)
        scale = kept(result, scale_of(plain).buffers[result][written(plain)[result]])
    apart = (got.double() - want.double()).abs() - unit(want)
    return differ, max(0.0, float((apart / (2.0 ** -24 * scale.abs() + torch.finfo(torch.float32).tiny)).max()))


def in_order(codes: Tensor) -> Tensor:
    """Codes as integers that count the representable values: neighbours differ by one."""
    raw = bits(codes).int()
    return raw if codes.dtype is torch.int8 else torch.where(raw < 0, -(raw + 128), raw)


def unit(values: Tensor) -> Tensor:
    """A unit in the last place, at least."""
    info = torch.finfo(values.dtype)
    return (values.double().abs() * info.eps).clamp(min=info.smallest_normal * info.eps)


# ---- runners, and the command -----------------------------------------------------------------------

def executor(target: str = "sm_90a", **options: object) -> Runner:
    """The executor; ``options`` are those of ``tests.ptx.launch``."""
    from tests.ptx.kernels import kernel
    from tests.ptx.launch import Options, launch

    def step(name: str, case: Case, dice: Tensor | None) -> None:
        launch(kernel(name, target), case, Options(dice=dice, races=False, **options))  # type: ignore[arg-type]
    return step


def compiled(name: str, sms: int) -> Callable[..., object]:
    """The step of a kernel, through the cache on disk."""
    from replayssm_cute.kernels.mamba2 import compile_mamba2
    from tests.ptx.kernels import config_of, spec_of
    return compile_mamba2(spec_of(name).problem(), config_of(name, "sm_90a"), "sm_90a", sms)


def _compile(name: str, sms: int) -> None:
    compiled(name, sms)


def compile_all(sms: int) -> None:
    """Fill the cache on disk in several processes at once: time on a GPU is dear."""
    workers = min(9, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(functools.partial(_compile, sms=sms), KERNELS))


def call(name: str, sms: int, case: Case, dice: Tensor | None) -> None:
    """A step on the device that holds the case; kernels of an 8-bit checkpoint take its scales last."""
    scales = (case["state_scale"],) if "state_scale" in case.buffers else ()
    compiled(name, sms)(*case.args(), dice, *scales)


def gpu() -> Runner:
    """The CuTe kernels on the GPU here.

    Raises:
        RuntimeError: its capability is not 9.0.
    """
    from replayssm_cute import arch as archs
    arch = archs.of("cuda")
    if arch.capability != (9, 0):
        raise RuntimeError(f"vectors are made on capability 9.0, not on {arch}")

    def step(name: str, case: Case, dice: Tensor | None) -> None:
        there, seed = case.to("cuda"), None if dice is None else dice.cuda()
        call(name, arch.sms, there, seed)
        torch.cuda.synchronize()
        for argument, buffer in there.buffers.items():
            case.buffers[argument].copy_(buffer)
        if dice is not None and seed is not None:
            dice.copy_(seed)
    return step


def source_hash() -> str:
    """Of the kernels' sources."""
    sources = sorted((ROOT / "replayssm_cute" / "kernels").glob("*.py"))
    return hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in sources)).hexdigest()[:16]


def provenance() -> dict[str, str]:
    import cutlass
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": str(torch.version.cuda),
            "dsl": cutlass.__version__, "date": datetime.date.today().isoformat(), "kernels": source_hash()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE)
    path = parser.parse_args().out
    runner = gpu()
    compile_all(torch.cuda.get_device_properties(0).multi_processor_count)
    vectors = record(runner, provenance())
    save(vectors, path)
    print(f"{len(vectors[0])} results, {path.stat().st_size / 1024:.0f} KB: {path}", vectors[2])


if __name__ == "__main__":
    main()
