"""*Validated* of the Gated DeltaNet entries on the GPU: one step of their heads, dtypes, rings and windows, by the
backend that is chosen, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from replayssm_cute import dispatch
from replayssm_cute.gdn import gdn_replayssm_decode, gdn_replayssm_spec_decode
from replayssm_cute.gdn_types import GdnGeometry
from tests.gdn_cases import check, make_case
from tests.test_gdn_op import decode_options, verify_options
from tests.test_registry_gdn import DTYPES, ENTRIES, LENGTHS, WINDOWS

GEOMETRIES = sorted({entry.geometry for entry in ENTRIES}, key=str)


def check_step(tokens: int, length: int, g: GdnGeometry, state_dtype: torch.dtype) -> None:
    """A step of five rows, flushes and one of padding among them; ``tokens`` 0 is standard decode."""
    before = make_case(spec=tokens > 0, tokens=tokens, k_heads=g.num_k_heads, ratio=g.ratio, K=g.head_k_dim,
                       V=g.head_v_dim, buffer_len=length, state=state_dtype, batch=5, padded=(2,))
    case, op = before.to("cuda"), "gdn_verify" if tokens else "gdn_decode"
    slow = dispatch.served[op, "torch"]
    if tokens:
        gdn_replayssm_spec_decode(**verify_options(case))
    else:
        gdn_replayssm_decode(**decode_options(case))
    check(before, case.to("cpu"))
    assert dispatch.served[op, "torch"] == slow, "PyTorch served on a GPU"


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "length"), [*((0, length) for length in LENGTHS), *WINDOWS])
def test_rings_and_windows(tokens: int, length: int, state_dtype: torch.dtype) -> None:
    check_step(tokens, length, GdnGeometry(1, 3), state_dtype)


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_heads_of_every_model(geometry: GdnGeometry, tokens: int) -> None:
    check_step(tokens, 16, geometry, torch.float32)
