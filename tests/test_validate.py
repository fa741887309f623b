"""Every refusal of the boundary: one clear error that names the argument, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from replayssm_cute import ArgumentError, UnsupportedError, dispatch
from replayssm_cute.mamba2 import selective_state_update_replayssm_output_only as step
from replayssm_cute.rounding import quantize, seed_state
from replayssm_cute.validate import mamba2_problem

BATCH, SLOTS, H, P, N, G, L = 3, 5, 4, 8, 16, 2, 4


def good() -> dict[str, Any]:
    torch.manual_seed(0)
    bf = torch.bfloat16
    return {
        "state": torch.randn(SLOTS, H, P, N), "x": torch.randn(BATCH, H, P).to(bf),
        "dt": torch.randn(BATCH, H).to(bf)[:, :, None].expand(-1, -1, P),
        "A": (-torch.rand(H))[:, None, None].expand(-1, P, N),
        "B": torch.randn(BATCH, G, N).to(bf), "C": torch.randn(BATCH, G, N).to(bf),
        "D": torch.randn(H)[:, None].expand(-1, P), "dt_bias": torch.randn(H)[:, None].expand(-1, P),
        "z": torch.randn(BATCH, H, P).to(bf), "dt_softplus": True,
        "x_cache": torch.randn(SLOTS, H, L, P).to(bf), "dt_cache": torch.rand(SLOTS, H, L),
        "B_cache": torch.randn(SLOTS, G, L, N).to(bf),
        "write_pos": torch.tensor([0, 3, 1], dtype=torch.int32),
        "is_flush": torch.tensor([0, 1, 0], dtype=torch.int8), "max_cache_len": L,
        "state_batch_indices": torch.tensor([1, 4, 2], dtype=torch.int32), "null_block_id": 0,
        "out": torch.full((BATCH, H, P), 7.0).to(bf)}


def rows_padded(t: torch.Tensor, by: int = 8) -> torch.Tensor:
    """The same values with a larger first stride."""
    flat = t.new_zeros(t.shape[0], t[0].numel() + by)
    flat[:, :t[0].numel()] = t.flatten(1)
    return flat[:, :t[0].numel()].view(t.shape)


BAD: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("state", lambda a: None, "a tensor"),
    ("state", lambda a: a["state"][0], "shape"),
    ("state", lambda a: a["state"].double(), "dtype float32"),
    ("state", lambda a: a["state"].transpose(2, 3).contiguous().transpose(2, 3), "dense"),
    ("state", lambda a: a["state"][:1].expand(SLOTS, -1, -1, -1), "first stride"),
    ("x", lambda a: a["x"][:, :-1], "shape"),
    ("x", lambda a: a["x"].double(), "dtype"),
    ("x", lambda a: a["x"].transpose(1, 2).contiguous().transpose(1, 2), "dense"),
    ("dt", lambda a: a["dt"].contiguous(), "one value per head"),
    ("dt", lambda a: a["dt"].long(), "dtype"),
    ("A", lambda a: a["A"].to(torch.bfloat16), "dtype float32"),
    ("A", lambda a: a["A"].contiguous(), "one value per head"),
    ("B", lambda a: a["B"].float(), "dtype bfloat16"),
    ("B", lambda a: torch.zeros(BATCH, 3, N).to(torch.bfloat16), "divides 4 heads"),
    ("B", lambda a: torch.zeros(BATCH, 0, N).to(torch.bfloat16), "divides 4 heads"),
    ("C", lambda a: a["C"][:, :1], "shape"),
    ("D", lambda a: a["D"][:, :4], "shape"),
    ("D", lambda a: torch.zeros(H, 2 * P)[:, ::2], "stride 0 or 1"),
    ("dt_bias", lambda a: a["dt_bias"].contiguous(), "one value per head"),
    ("z", lambda a: a["z"].float(), "dtype"),
    ("out", lambda a: None, "a tensor"),
    ("out", lambda a: a["out"].float(), "dtype bfloat16"),
    ("out", lambda a: a["out"][:2], "shape"),
    ("x_cache", lambda a: None, "a tensor"),
    ("x_cache", lambda a: a["x_cache"][:, :, :-1], "shape"),
    ("x_cache", lambda a: a["x_cache"].transpose(2, 3).contiguous().transpose(2, 3), "dense"),
    ("dt_cache", lambda a: None, "a tensor"),
    ("dt_cache", lambda a: a["dt_cache"].half(), "dtype float32"),
    ("B_cache", lambda a: None, "a tensor"),
    ("B_cache", lambda a: a["B_cache"].half(), "of x_cache"),
    ("B_cache", lambda a: a["B_cache"][:-1], "shape"),
    ("write_pos", lambda a: None, "a tensor"),
    ("write_pos", lambda a: a["write_pos"].long(), "dtype int32"),
    ("write_pos", lambda a: a["write_pos"][:2], "at least 3"),
    ("write_pos", lambda a: a["write_pos"].repeat(2)[::2], "stride 1"),
    ("is_flush", lambda a: None, "a tensor"),
    ("is_flush", lambda a: a["is_flush"].int(), "dtype int8 or bool"),
    ("is_flush", lambda a: a["is_flush"][:1], "at least 3"),
    ("state_batch_indices", lambda a: None, "a (3,) or (3, k) tensor"),
    ("state_batch_indices", lambda a: a["state_batch_indices"].short(), "dtype int32 or int64"),
    ("state_batch_indices", lambda a: a["state_batch_indices"][:2], "at least 3"),
    ("state_batch_indices", lambda a: a["state_batch_indices"][:, None, None], "tensor"),
    ("max_cache_len", lambda a: 0, "1..64"),
    ("max_cache_len", lambda a: 65, "1..64"),
    ("null_block_id", lambda a: None, "an int"),
]


@pytest.mark.parametrize(("name", "change", "expected"), BAD,
                         ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(BAD)])
def test_bad_argument(name: str, change: Callable[[dict[str, Any]], Any], expected: str) -> None:
    args = good()
    args[name] = change(args)
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(ArgumentError) as caught:
        step(**args)
    assert caught.value.name == name
    assert expected in caught.value.expected
    assert name in str(caught.value) and str(caught.value.got) in str(caught.value)
    for k, v in before.items():
        assert torch.equal(args[k], v), f"{k} was changed"


def test_ring_length_must_be_that_of_the_caches() -> None:
    with pytest.raises(ArgumentError, match="x_cache") as caught:
        step(**{**good(), "max_cache_len": L + 1})
    assert "(*, 4, 5, 8)" in caught.value.expected.replace("5, 4, 5, 8", "*, 4, 5, 8")


def test_device_mismatch_names_both() -> None:
    with pytest.raises(ArgumentError) as caught:
        step(**{**good(), "x": good()["x"].to("meta")})
    assert (caught.value.name, str(caught.value.got)) == ("x", "meta") and "cpu" in caught.value.expected


def stochastic(**changes: Any) -> dict[str, Any]:
    a = good()
    return {**a, "state": a["state"].half(), "enable_stochastic_rounding": True,
            "rand_seed": seed_state(1, "cpu"), **changes}


def test_good_stochastic_arguments_pass() -> None:
    a = stochastic(cache_philox_rounds=5)
    step(**a)
    assert a["rand_seed"][1] == 1
    step(**{**a, "rand_seed": None})


@pytest.mark.parametrize(("change", "name", "expected"), [
    ({"cache_philox_rounds": -1}, "cache_philox_rounds", "an integer in 0..16"),
    ({"cache_philox_rounds": 17}, "cache_philox_rounds", "an integer in 0..16"),
    ({"cache_philox_rounds": "ten"}, "cache_philox_rounds", "an integer in 0..16"),
    ({"cache_philox_rounds": True}, "cache_philox_rounds", "an integer in 0..16"),
    ({"rand_seed": seed_state(1, "meta")}, "rand_seed", "device cpu, where state is"),
    ({"rand_seed": seed_state(1, "cpu").int()}, "rand_seed", "dtype int64"),
    ({"rand_seed": seed_state(1, "cpu")[:4]}, "rand_seed", "shape (8)"),
    ({"rand_seed": 1}, "rand_seed", "a tensor")], ids=lambda v: str(v)[:40])
def test_bad_stochastic_arguments(change: dict[str, Any], name: str, expected: str) -> None:
    args = stochastic(**change)
    before = args["state"].clone()
    with pytest.raises(ArgumentError) as caught:
        step(**args)
    assert caught.value.name == name and expected in caught.value.expected
    assert torch.equal(args["state"], before)


def test_stochastic_rounding_needs_whole_calls_of_the_generator() -> None:
    a = stochastic()
    for name, width in (("state", 12), ("B", 12), ("C", 12), ("B_cache", 12)):
        a[name] = a[name][..., :width].contiguous()
    a["A"] = a["A"][..., :12]
    with pytest.raises(ArgumentError, match="state: expected a multiple of 8 columns for stochastic rounding, got 12"):
        step(**a)


def test_stochastic_rounding_of_an_fp32_state_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"enable_stochastic_rounding: .*float32 checkpoint drops no bits"):
        step(**stochastic(state=good()["state"]))


def eight_bit(**changes: Any) -> dict[str, Any]:
    codes, scale = quantize(good()["state"], torch.int8)
    return {**good(), "state": codes, "state_scale": scale, **changes}


def test_good_8_bit_arguments_pass() -> None:
    for dtype in (torch.int8, torch.float8_e4m3fn):
        codes, scale = quantize(good()["state"], dtype)
        step(**eight_bit(state=codes, state_scale=rows_padded(scale)))


@pytest.mark.parametrize(("change", "expected"), [
    (lambda a: {"state_scale": None}, "the scales of the int8 checkpoint, (5, 4, 8) float32"),
    (lambda a: {"state": good()["state"]}, "None, the checkpoint being float32"),
    (lambda a: {"state": good()["state"].half()}, "None, the checkpoint being float16"),
    (lambda a: {"state_scale": a["state_scale"][:, :, :4]}, "shape (5, 4, 8)"),
    (lambda a: {"state_scale": a["state_scale"].half()}, "dtype float32"),
    (lambda a: {"state_scale": a["state_scale"].to("meta")}, "device cpu, where state is"),
    (lambda a: {"state_scale": a["state_scale"].transpose(1, 2).contiguous().transpose(1, 2)}, "dense"),
    (lambda a: {"state_scale": 1.0}, "a tensor")])
def test_bad_scales(change: Callable[[dict[str, Any]], dict[str, Any]], expected: str) -> None:
    args = eight_bit()
    args.update(change(args))
    before = args["state"].clone()
    with pytest.raises(ArgumentError) as caught:
        step(**args)
    assert caught.value.name == "state_scale" and expected in caught.value.expected
    assert torch.equal(args["state"], before)


def test_named_backend_that_cannot_serve_raises_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"9\.0, 10\.0 and 10\.3"):
        step(**good(), backend="cute")
    with pytest.raises(ArgumentError, match="backend"):
        step(**good(), backend="cublas")


def test_good_arguments_pass_in_every_allowed_form() -> None:
    a = good()
    for name in ("state", "x", "B", "C", "z", "out", "x_cache", "dt_cache", "B_cache"):
        step(**{**good(), name: rows_padded(a[name])})
    step(**{**a, "is_flush": a["is_flush"].bool(), "state_batch_indices": a["state_batch_indices"].long()})
    step(**{**a, "state_batch_indices": torch.tensor([[1, 9], [4, 9], [2, 9]])})
    step(**{**a, "D": torch.randn(H, P), "dt_bias": None, "z": None})
    step(**{**a, "D": None, "bc_pre": torch.zeros(BATCH, G, L)})
    for name in ("write_pos", "is_flush", "state_batch_indices"):
        step(**{**a, name: torch.cat([a[name], a[name]])})


def test_empty_batch_is_a_no_op() -> None:
    a = good()
    for name in ("x", "dt", "B", "C", "z", "out"):
        a[name] = a[name][:0]
    assert step(**a).shape == (0, H, P)


def test_alignment_is_part_of_the_problem() -> None:
    a = good()
    order = ("state", "x", "dt", "A", "B", "C", "D", "dt_bias", "z", "x_cache", "dt_cache", "B_cache",
             "write_pos", "is_flush", "state_batch_indices", "null_block_id", "out")

    def problem(**changes: Any):
        args = {**a, **changes}
        return mamba2_problem(*(args[k] for k in order), state_scale=args.get("state_scale"), dt_softplus=True,
                              max_cache_len=L)

    aligned = problem()
    assert aligned.row_align == 16 and aligned.dt_align == 16 and aligned.state_align == 32
    shifted = torch.zeros(SLOTS * H * P * N + 4)[4:].view(SLOTS, H, P, N)
    assert problem(state=shifted).state_align == 16
    assert problem(x=rows_padded(a["x"], 2)).row_align == 4
    assert problem(dt_cache=rows_padded(a["dt_cache"], 2)).dt_align == 8
    codes, scale = quantize(a["state"], torch.int8)
    assert problem(state=codes, state_scale=scale).dt_align == 16
    assert problem(state=codes, state_scale=rows_padded(scale, 2)).dt_align == 8


def test_calls_are_counted_per_backend() -> None:
    before = dispatch.served[dispatch.OP, "torch"]
    a = good()
    for _ in range(3):
        step(**a, backend="torch")
    assert dispatch.served[dispatch.OP, "torch"] == before + 3
