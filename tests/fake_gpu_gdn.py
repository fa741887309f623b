"""The Gated DeltaNet kernels' host path without a GPU, as ``tests.fake_gpu`` has it for Mamba2.

What has been prepared never compiles again, whatever the batch, the strides and the slots; other problems get other
kernels; each launch passes what the kernel's signature asks for. Prints one JSON object.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton

from fallback_triton import gdn_cursors, gdn_step
from replayssm_cute.backends import gdn_triton as backend
from replayssm_cute.gdn_validate import fold_problem
from tests.fake_gpu import ARCH, DRIVER, launches, loaded
from tests.gdn_cases import Case, make_case, problem_of

SHAPE: dict[str, Any] = {"K": 32, "V": 32, "k_heads": 2, "ratio": 2, "buffer_len": 8, "tokens": 2}


def check_step(spec: bool, changes: list[dict[str, Any]]) -> None:
    """One kernel for one problem at any batch, stride and slot; another for each of the changes."""
    name = "verify_kernel" if spec else "decode_kernel"
    cases = [make_case(spec=spec, batch=batch, slot_padding=slots, row_padding=rows, **SHAPE)
             for batch, slots, rows in ((1, 0, 0), (3, 32, 0), (5, 64, 8))]
    problem = problem_of(cases[0])
    assert all(problem_of(c) == problem for c in cases), "one problem at every batch and stride"
    step, first = backend.prepare(problem, ARCH), len(launches)
    prepared = loaded[name]
    for case in cases:
        step(*case.op_args())
    assert loaded[name] == prepared == 1 and launches[first:] == [(name, 4), (name, 12), (name, 20)]
    for change in changes:
        other = make_case(spec=spec, batch=2, **{**SHAPE, **change})
        assert problem_of(other) != problem
        backend.prepare(problem_of(other), ARCH)(*other.op_args())
    assert loaded[name] == 1 + len(changes)


def check_fold(case: Case) -> None:
    """Two layers, and every row in its own slot."""
    state = torch.stack([case["state"]] * 2)
    rings = {name: None if ring is None else torch.stack([ring] * 2) for name, ring in case.rings.items()}
    rest = (case["ssm_state_indices"], case["ssm_state_indices"], case["replay_indices"], case["write_pos"],
            case["cache_base"], case["is_flush"], None, case.null_block_id)
    problem = fold_problem(state, rings, *rest, l2norm=True)
    backend.prepare(problem, ARCH)(state, *rings.values(), *rest)
    assert launches[-1] == ("fold_kernel", 2 * len(case.lengths) * 4)


def check_cursors(case: Case) -> None:
    cursors = case["write_pos"], case["cache_base"], case["is_flush"]
    for accepted in (torch.tensor([1, 1, 1]), None):
        for _ in range(2):
            gdn_cursors.commit(*cursors, accepted, case["replay_indices"], -1, ring_len=8, max_cache_len=8,
                               max_spec_len=2, fold_every_commit=False)
    gdn_cursors.reset(*cursors, case["replay_indices"], -1)
    assert launches[-2:] == [("commit_kernel", 1), ("reset_kernel", 1)]


def main() -> None:
    triton.runtime.driver.set_active(DRIVER)
    check_step(False, [{"row_padding": 1}, {"state": torch.float16}, {"act": torch.float16}, {"ring": torch.float32},
                       {"index_dtype": torch.int64}, {"l2norm": False}, {"force": False}, {"buffer_len": 5}])
    check_step(True, [{"index_dtype": torch.int64}, {"exact": False}, {"tokens": 3}])
    case = make_case(spec=True, batch=3, **SHAPE)
    check_fold(case)
    check_cursors(case)
    decode = make_case(batch=3, **SHAPE)
    for _ in range(2):
        gdn_step.recurrent_step(*(decode[n] for n in ("state", "q", "k", "v", "a", "b", "A_log", "dt_bias")),
                                decode["ssm_state_indices"], -1, decode["out"], scale=decode.scale)
    print(json.dumps({"loaded": loaded, "launches": len(launches)}))


if __name__ == "__main__":
    main()
