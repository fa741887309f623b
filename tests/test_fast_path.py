"""The public Mamba2 step after its first call: validated once, then straight to a launch that checks itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replayssm_cute import dispatch, mamba2
from replayssm_cute.errors import ArgumentError
from tests.cases import ARGUMENTS, make_case


class Launches:
    """Stands in for compiled launches: counts what is prepared and what is called."""

    def __init__(self) -> None:
        self.prepared, self.called, self.refuse = 0, 0, False

    def run(self, *args: Any) -> dispatch.Launch:
        self.prepared += 1
        return dispatch.Launch("cute", self.call, True)

    def call(self, *args: Any) -> None:
        if self.refuse:
            self.refuse = False
            raise ValueError("other strides")
        self.called += 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    fake = Launches()
    monkeypatch.setattr(dispatch, "run", fake.run)
    monkeypatch.setattr(mamba2, "_fast", {})
    monkeypatch.setattr(mamba2, "_checked", {})
    yield fake


def arguments(**options: Any) -> dict[str, Any]:
    case = make_case(batch=4, **options)
    return {**dict(zip(ARGUMENTS, case.args(), strict=True)), "max_cache_len": case.buffer_len,
            "dt_softplus": case.dt_softplus}


def step(args: dict[str, Any]) -> torch.Tensor:
    return mamba2.selective_state_update_replayssm_output_only(**args)


def test_validated_once(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    args, before = arguments(), dispatch.served[dispatch.OP, "cute"]
    assert step(args) is args["out"]
    monkeypatch.setattr(mamba2, "_resolve", lambda *a: pytest.fail("validated again"))
    for _ in range(3):
        assert step(args) is args["out"]
    assert launches.prepared == 1 and launches.called == 3
    assert dispatch.served[dispatch.OP, "cute"] == before + 4


@pytest.mark.parametrize("name", ["write_pos", "is_flush", "state_batch_indices"])
def test_vectors_that_are_too_short_are_refused(launches: Launches, name: str) -> None:
    """The launch cannot know how long they are: it reads as many as there are rows."""
    args = arguments()
    step(args)
    step(args)
    with pytest.raises(ArgumentError, match=name):
        step({**args, name: args[name][:3]})
    longer = {**args, name: torch.cat([args[name], args[name]])}
    step(longer)
    assert launches.called == 1 and launches.prepared == 2, "another length is validated anew"


def test_indices_of_as_many_elements_in_fewer_rows_are_refused(launches: Launches) -> None:
    args = arguments(index_columns=1)
    step(args)
    step(args)
    with pytest.raises(ArgumentError, match="state_batch_indices"):
        step({**args, "state_batch_indices": args["state_batch_indices"].reshape(2, -1)})


def test_a_launch_that_refuses_leads_back_to_validation(launches: Launches) -> None:
    args = arguments()
    step(args)
    launches.refuse = True
    step(args)
    assert launches.called == 1, "served by the launch that validation found"
    with pytest.raises(ArgumentError, match="A"):
        launches.refuse = True
        step({**args, "A": args["A"].double()})


def test_what_is_no_tensor_is_named(launches: Launches) -> None:
    """Where the key asks it something; the rest is left to the launch."""
    args = arguments()
    step(args)
    for name in ("state", "x", "B", "write_pos", "is_flush", "state_batch_indices"):
        with pytest.raises(ArgumentError, match=name):
            step({**args, name: None})
