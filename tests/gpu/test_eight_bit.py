"""8-bit checkpoints on the GPU: the codes and scales of the specification, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm_cute.reference.mamba2 import replay_step
from replayssm_cute.rounding import dequantize
from replayssm_cute.validate import mamba2_problem
from tests.cases import ARGUMENTS, bits
from tests.gpu.kinds import prepare
from tests.gpu.test_rounding import cloned, exact_fold

F32, I8, E4M3 = torch.float32, torch.int8, torch.float8_e4m3fn
POOLS = ("state", "state_scale", "x_cache", "dt_cache", "B_cache", "rand_seed")


def exact_codes(dtype: torch.dtype, headdim: int, dstate: int) -> dict[str, Any]:
    """``exact_fold`` of codes whose scales are powers of two, so that the fold stays exact in fp32."""
    args = exact_fold(F32, headdim, dstate)
    gen = torch.Generator("cuda").manual_seed(3)
    shape = args["state"].shape
    codes = torch.randint(-126, 127, shape, generator=gen, device="cuda").to(I8)
    if dtype is E4M3:
        codes = torch.where(codes.view(E4M3).float().isnan(), 0, codes).view(E4M3)
    args["state"] = codes
    args["state_scale"] = 2.0 ** torch.randint(-3, 1, shape[:3], generator=gen, device="cuda").float()
    return args


def launch(kind: str, args: dict[str, Any], rounds: int) -> None:
    values = [args[k] for k in (*ARGUMENTS, "rand_seed", "state_scale")]
    values[-2] = values[-2] if rounds else None
    problem = mamba2_problem(*values, dt_softplus=False, max_cache_len=16, philox_rounds=rounds)
    prepare(kind, problem, 5)(*values)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["bulk", "triton"])
@pytest.mark.parametrize("dtype", [I8, E4M3], ids=str)
@pytest.mark.parametrize(("rounds", "headdim", "dstate"), [(0, 64, 128), (5, 64, 128), (10, 80, 128), (5, 64, 256),
                                                           (0, 32, 64)])
def test_the_same_bits_as_the_specification(kind: str, dtype: torch.dtype, rounds: int, headdim: int,
                                            dstate: int) -> None:
    args = exact_codes(dtype, headdim, dstate)
    got, want = ({**cloned(args), "state_scale": args["state_scale"].clone()} for _ in range(2))
    if not rounds:
        want["rand_seed"] = None
    replay_step(**want, dt_softplus=False, philox_rounds=rounds)
    launch(kind, got, rounds)
    for name in POOLS[:-1] if not rounds else POOLS:
        assert torch.equal(bits(got[name]), bits(want[name])), name
    flushed = [8, 3, 1]
    assert not torch.equal(bits(got["state"][flushed]), bits(args["state"][flushed]))
    error = (got["out"].double() - want["out"].double()).norm() / want["out"].double().norm()
    assert error < 2.5e-3, float(error)  # bf16 rounding of the output gives 1.7e-3


@pytest.mark.parametrize("kind", ["bulk", "triton"])
@pytest.mark.parametrize("dtype", [I8, E4M3], ids=str)
def test_rows_that_are_not_finite_and_rows_of_zeros(kind: str, dtype: torch.dtype) -> None:
    """An infinity in a row's inputs makes that row NaN and no other; a row of zeros keeps its zeros."""
    args = exact_codes(dtype, 64, 128)
    args["x_cache"][3, 2, 1, 7] = torch.inf
    args["state"].view(I8)[8, 1, 5] = 0
    args["x"][0, 1, 5] = 0
    got = {**cloned(args), "state_scale": args["state_scale"].clone()}
    launch(kind, got, 0)
    value = dequantize(got["state"], got["state_scale"])[[8, 3, 1]]
    bad = value.isnan().any(-1)
    assert bad.sum() == 1 and bad[1, 2, 7] and value[1, 2, 7].isnan().all()
    assert (value[0, 1, 5] == 0).all()
