"""Stochastic rounding on the GPU: the specification's bits, and a seed that advances by itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from replayssm_cute.mamba2 import selective_state_update_replayssm_output_only
from replayssm_cute.reference.mamba2 import replay_step
from replayssm_cute.rounding import seed_state
from replayssm_cute.validate import mamba2_problem
from tests.cases import ARGUMENTS, bits
from tests.gpu.kinds import KINDS, act_dtype, prepare

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ORDER = (*ARGUMENTS, "rand_seed")


def exact_fold(state: torch.dtype, headdim: int = 64, dstate: int = 128, nheads: int = 6, ngroups: int = 2,
               scale: int = 0, act: torch.dtype = BF16, batch: int = 5) -> dict[str, Any]:
    """A flush whose fp32 arithmetic is exact in any order: no decay, and few bits in every factor.

    ``scale`` moves the values by a power of two, to reach subnormal results of fp16. ``batch``: a multiple of five; the
    slots are of the first five rows, larger batches name their own.
    """
    gen = torch.Generator("cuda").manual_seed(0)
    slots, L = batch + 4, 16

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=gen, device="cuda").float()

    def steps(*shape: int) -> torch.Tensor:
        return torch.randint(1, 4, shape, generator=gen, device="cuda") * 0.25

    H, P, N, G = nheads, headdim, dstate, ngroups
    return {
        "state": (integers(slots, H, P, N) * 2.0 ** (scale - 3)).to(state),
        "x": (integers(batch, H, P) * 2.0 ** (scale - 11)).to(act),
        "dt": steps(batch, H).to(act)[:, :, None].expand(-1, -1, P),
        "A": torch.zeros(H, device="cuda")[:, None, None].expand(H, P, N),
        "B": integers(batch, G, N).to(act), "C": integers(batch, G, N).to(act), "D": None, "dt_bias": None, "z": None,
        "x_cache": (integers(slots, H, L, P) * 2.0 ** (scale - 11)).to(act), "dt_cache": steps(slots, H, L),
        "B_cache": integers(slots, G, L, N).to(act),
        "write_pos": torch.tensor([0, 3, 15, 8, 1], device="cuda", dtype=torch.int32).repeat(batch // 5),
        "is_flush": torch.tensor([1, 1, 1, 0, 1], device="cuda", dtype=torch.int8).repeat(batch // 5),
        "state_batch_indices": torch.tensor([8, 3, 1, 5, 0], device="cuda", dtype=torch.int32), "null_block_id": 0,
        "out": torch.zeros(batch, H, P, device="cuda", dtype=act),
        "rand_seed": seed_state(2 ** 63 + 12345, "cuda", step=2 ** 33 + 7, first_head=H, total_heads=4 * H)}


def cloned(args: dict[str, Any]) -> dict[str, Any]:
    changed = ("state", "x_cache", "dt_cache", "B_cache", "out", "rand_seed")
    return {k: v.clone() if k in changed and v is not None else v for k, v in args.items()}


def prepared(kind: str, args: dict[str, Any], rounds: int) -> functools.partial[object]:
    problem = mamba2_problem(*(args[k] for k in ORDER), dt_softplus=False, max_cache_len=16, philox_rounds=rounds)
    return functools.partial(prepare(kind, problem, len(args["write_pos"])), *(args[k] for k in ORDER))


def launch(kind: str, args: dict[str, Any], rounds: int) -> None:
    prepared(kind, args, rounds)()
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [F16, BF16], ids=str)
@pytest.mark.parametrize(("rounds", "headdim", "dstate", "scale"), [
    (5, 64, 128, 0), (10, 64, 128, -15), (1, 64, 128, -18), (5, 80, 128, 0), (10, 128, 256, 0), (7, 32, 64, 15)])
def test_the_same_bits_as_the_specification(kind: str, state: torch.dtype, rounds: int, headdim: int, dstate: int,
                                            scale: int) -> None:
    args = exact_fold(state, headdim, dstate, scale=scale, act=act_dtype(kind, F32))
    got, want, nearest = cloned(args), cloned(args), cloned(args)
    replay_step(**want, dt_softplus=False, philox_rounds=rounds, dtype=torch.float64)
    launch(kind, got, rounds)
    for name in ("state", "x_cache", "dt_cache", "B_cache", "rand_seed"):
        assert torch.equal(bits(got[name]), bits(want[name])), name
    replay_step(**nearest, dt_softplus=False, dtype=torch.float64)
    flushed = [8, 3, 1]
    assert not torch.equal(nearest["state"][flushed], want["state"][flushed]), "the case must need rounding"
    assert torch.equal(got["out"], nearest["out"]), "y comes from the unrounded state"


@pytest.mark.parametrize("batch", [60, 300, 700])
def test_every_row_of_large_batches(batch: int) -> None:
    """Persistent CTAs sort the rows by their flags, up to a batch; every row must be served once."""
    args, gen = exact_fold(F16, batch=batch), torch.Generator().manual_seed(batch)
    slots = torch.randperm(batch, generator=gen) + 1
    args["state_batch_indices"] = slots.where(torch.arange(batch) % 50 != 7, 0).to("cuda", torch.int32)
    forced = (torch.rand(batch, generator=gen) < 0.2).cuda()
    args["is_flush"] = (forced | (args["write_pos"] == 15)).to(torch.int8)
    got, want = cloned(args), cloned(args)
    replay_step(**want, dt_softplus=False, philox_rounds=5, dtype=torch.float64)
    launch("bulk", got, 5)
    for name in ("state", "x_cache", "dt_cache", "B_cache", "out", "rand_seed"):
        assert torch.equal(bits(got[name]), bits(want[name])), name


@pytest.mark.parametrize("kind", KINDS)
def test_general_values_round_to_a_neighbour(kind: str) -> None:
    """With decay the fp32 fold may differ in its last bit, which moves a rounding once in thousands."""
    args = exact_fold(F16, act=act_dtype(kind, F32))
    args["A"] = (-torch.rand(6, device="cuda"))[:, None, None].expand(6, 64, 128)
    got, want, exact = cloned(args), cloned(args), cloned(args)
    exact["state"] = exact["state"].float()
    replay_step(**exact, dt_softplus=False, dtype=torch.float64)
    replay_step(**want, dt_softplus=False, philox_rounds=10)
    launch(kind, got, 10)
    flushed = [8, 3, 1]
    a, b, e = (t["state"][flushed].double() for t in (got, want, exact))
    assert (a != b).double().mean() < 2e-3
    unit = torch.clamp(2.0 ** (torch.floor(torch.log2(e.abs().clamp(min=2.0 ** -14))) - 10), min=2.0 ** -24)
    assert ((a - e).abs() < unit).all() and ((b - e).abs() < unit).all()
    assert abs(float(((a - e) / unit).mean())) < 4 * 0.29 / a.numel() ** 0.5 + 2e-4, "unbiased"


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_graph_draws_anew_and_reproducibly(kind: str) -> None:
    args = exact_fold(F16, act=act_dtype(kind, F32))
    start = cloned(args)
    launch(kind, cloned(args), 5)  # compiled before the capture
    step = prepared(kind, args, 5)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        step()
    states = []
    for replay in range(64):
        for name in ("state", "x_cache", "dt_cache", "B_cache"):
            args[name].copy_(start[name])
        graph.replay()
        torch.cuda.synchronize()
        assert int(args["rand_seed"][1]) == int(start["rand_seed"][1]) + replay + 1
        assert int(args["rand_seed"][2]) == 0
        states.append(args["state"][[8, 3, 1]].double())
    assert not torch.equal(states[0], states[1])
    again = cloned(start)
    again["rand_seed"][1] += 5
    launch(kind, again, 5)
    assert torch.equal(again["state"][[8, 3, 1]].double(), states[5]), "reproducible from (seed, step)"
    exact = cloned(start)
    exact["state"] = exact["state"].float()
    replay_step(**exact, dt_softplus=False, dtype=torch.float64)
    e = exact["state"][[8, 3, 1]].double()
    unit = torch.clamp(2.0 ** (torch.floor(torch.log2(e.abs().clamp(min=2.0 ** -14))) - 10), min=2.0 ** -24)
    mean = torch.stack(states).mean(0)
    assert float(((mean - e) / unit).abs().max()) < 0.5 * 6 / 8, "each element averages to its fp32 value"
    assert abs(float(((mean - e) / unit).mean())) < 1e-3


def test_the_default_state_advances_in_the_public_op() -> None:
    args = {k: v for k, v in exact_fold(F16).items() if k != "rand_seed"}
    run = functools.partial(selective_state_update_replayssm_output_only, dt_softplus=False, max_cache_len=16,
                            enable_stochastic_rounding=True, cache_philox_rounds=5)
    first, second = ({k: v.clone() if isinstance(v, torch.Tensor) and v.stride()[-1] else v for k, v in args.items()}
                     for _ in range(2))
    run(**first)
    run(**second)
    assert not torch.equal(first["state"], second["state"])
