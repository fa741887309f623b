"""What an H200 computed with the kernels' sm_90a code, against what the executor makes of the same code.

Where only exact operations lie between inputs and result, bit for bit. The others pass through ``ex2.approx`` and
``lg2.approx`` (softplus, decay), ``rcp.approx`` (the output gate) and the sums of the tensor cores, whose last bits
PTX does not define; they must be as near as runs of the executor that err by as much as is documented.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from replayssm_cute.reference.mamba2 import replay_step
from replayssm_cute.validate import mamba2_problem
from tests.cases import ARGUMENTS, Case, oracle
from tests.ptx import vectors
from tests.ptx.kernels import spec_of
from tests.ptx.vectors_cases import KERNELS, KINDS, case_of, dice_of, without_codes

#: Blurred runs of the executor lie up to 11.8 fp32 roundings from a sharp one: 5 seeds of every case.
ROUNDINGS = 16.0
#: They change up to 0.2% of the values of 16 bits, and no code; one of a case's 512 outputs is 0.2%.
SHARE = 0.01
FEW = ("bulk-bf16", "bulk-f16-sr", "bulk-e4m3-sr", "register-act-f16-sr")


def torch_step(name: str, case: Case, dice: Tensor | None) -> None:
    """The specification, as a runner."""
    options: dict[str, Any] = {} if dice is None else {"rand_seed": dice, "philox_rounds": spec_of(name).rounds}
    if "state_scale" in case.buffers:
        options["state_scale"] = case["state_scale"]
    replay_step(**{a: case.get(a) for a in ARGUMENTS}, dt_softplus=True, **options)


@functools.lru_cache(maxsize=2 * len(FEW))
def executed(name: str, kind: str) -> tuple[Case, dict[str, Tensor]]:
    return vectors.run(name, kind, vectors.executor())


def faults(held: vectors.Vectors, name: str, kind: str) -> list[str]:
    """What the executor computes otherwise in a case than it is held, in words."""
    arrays, digests, _ = held
    case, results = executed(name, kind)
    found = [] if digests[f"{name}/{kind}"] == vectors.input_digest(case) else ["other inputs"]
    for result, values in results.items():
        label, got = f"{name}/{kind}/{result}", vectors.kept(result, values)
        share, apart = vectors.distance(case, result, got, torch.from_numpy(arrays[label]).view(got.dtype))
        exact = vectors.must_agree(case, kind, result)
        limits = (0.0, 0.0) if exact else (1.0 if got.element_size() == 4 else SHARE,
                                           1.0 if got.element_size() == 1 else ROUNDINGS)
        same = not exact or digests[label] == vectors.digest(values)
        if share > limits[0] or apart > limits[1] or not same:
            found.append(f"{result}: {share:.2%} differ, by up to {apart:.3g}")
    return found


@functools.cache
def held() -> vectors.Vectors:
    return vectors.load()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KERNELS)
def test_the_executor_computes_what_the_gpu_computed(name: str, kind: str) -> None:
    assert not faults(held(), name, kind)


def test_the_file_is_complete() -> None:
    arrays, digests, provenance = held()
    assert {label.rpartition("/")[0] for label in arrays} == {f"{name}/{kind}" for name in KERNELS for kind in KINDS}
    assert digests.keys() >= arrays.keys() and "H200" in provenance["device"]


@pytest.mark.parametrize("name", KERNELS)
def test_exact_cases_are_exact_and_give_what_is_specified(name: str) -> None:
    """So that a GPU which differs from the executor there differs from the specification too, or the executor does."""
    case = case_of(name, "exact")
    plain = without_codes(case)
    value = oracle(plain)["state"][[case.slots[b] for b in case.live if case.cursors[b][1]]]
    assert torch.equal(value.float().double(), value)
    assert not faults(vectors.record(torch_step, {}, [name]), name, "exact")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> vectors.Vectors:
    """PyTorch in the GPU's place, through the file."""
    path: Path = tmp_path_factory.mktemp("vectors") / "folder" / "torch.npz"
    before = vectors.record(torch_step, {"device": "CPU"}, FEW)
    vectors.save(before, path)
    after = vectors.load(path)
    assert after[1:] == before[1:] and after[0].keys() == before[0].keys()
    assert all((after[0][label] == before[0][label]).all() for label in before[0])
    assert path.stat().st_size * len(KERNELS) / len(FEW) < 700_000
    return after


@pytest.mark.parametrize("name", FEW)
def test_another_order_of_sums_passes(name: str, stand_in: vectors.Vectors) -> None:
    assert not faults(stand_in, name, "general")


@pytest.mark.parametrize("name", FEW)
def test_results_that_are_wrong_do_not_pass(name: str, stand_in: vectors.Vectors) -> None:
    """One value that is off by two units, in each result of both kinds of numbers."""
    arrays, digests, provenance = stand_in
    for label in (label for label in arrays if label.startswith(f"{name}/")):
        _, kind, result = label.split("/")
        wrong = arrays[label].copy()
        wrong[5] += 64 if wrong.itemsize == 4 else 2
        said = faults(({**arrays, label: wrong}, digests, provenance), name, kind)
        assert [text.partition(":")[0] for text in said] == [result], label


def test_other_inputs_do_not_pass(stand_in: vectors.Vectors) -> None:
    arrays, digests, provenance = stand_in
    other = {**digests, "bulk-bf16/exact": "0"}
    assert faults((arrays, other, provenance), "bulk-bf16", "exact") == ["other inputs"]


@pytest.mark.parametrize("name", KERNELS)
def test_the_gpu_would_take_the_cases(name: str) -> None:
    """They pose the problem that the kernel is compiled for, down to alignment."""
    spec = spec_of(name)
    for case in (case_of(name, kind) for kind in KINDS):
        posed = mamba2_problem(*case.args(), dice_of(name), case.get("state_scale"), dt_softplus=True,
                               max_cache_len=spec.buffer_len, philox_rounds=spec.rounds)
        assert posed == spec.problem()


def test_a_call_reaches_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many arguments as the kernel takes; here it refuses tensors of the CPU."""
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    for name in ("bulk-bf16", "bulk-i8-sr"):
        with pytest.raises(ValueError, match=r"(?s)Mismatched Tensor on argument #0 .*device_type=cuda"):
            vectors.call(name, 132, case_of(name, "exact"), dice_of(name))


def test_a_step_that_writes_elsewhere_is_not_stored() -> None:
    def step(name: str, case: Case, dice: Tensor | None) -> None:
        torch_step(name, case, dice)
        case.buffers["B_cache"][0] = 1.0
    with pytest.raises(ValueError, match="B_cache changed where it must not"):
        vectors.run("bulk-bf16", "exact", step)


def test_the_sample_meets_every_row_and_column() -> None:
    """Of the two slots that a case flushes."""
    for H, P, N, _ in {spec_of(name).shape for name in KERNELS}:
        places = vectors.kept("state", torch.arange(2 * H * P * N))
        assert len(set((places // N % P).tolist())) == P and len(set((places % N).tolist())) == N
