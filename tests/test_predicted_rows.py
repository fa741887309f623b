"""The rows that the speed model predicts for GPUs nobody here has: what is shipped, and that it claims no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import predicted_rows
from benchmarks.predicted_rows import DEVICE_NAMES
from replayssm_cute import dispatch
from replayssm_cute.arch import Arch
from replayssm_cute.kernels.mamba2_config import default_config
from replayssm_cute.kernels.targets import TARGETS
from replayssm_cute.registry import devices, tuned
from replayssm_cute.registry.models import DTYPES, mamba2_models
from replayssm_cute.registry.support import supports_replayssm
from replayssm_cute.registry.tuned_file import TunedFile
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from replayssm_tune.speed_model import DEVICES, VERSION
from tests.compiled_kernels import make_problem
from tests.test_supports import NANO

SHIPPED = {path.name: tuned.load_file(path) for path in sorted(tuned.SHIPPED_FOLDER.glob("*.json"))}
PREDICTED = {name: file for name, file in SHIPPED.items() if file.provenance.predicted}


@pytest.fixture(autouse=True)
def only_shipped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No folder of a user, and nothing of an earlier test."""
    monkeypatch.delenv(tuned.USER_FOLDER_VARIABLE, raising=False)
    for forget in (tuned.clear_cache, dispatch.candidates.cache_clear):
        forget()
    yield
    for forget in (tuned.clear_cache, dispatch.candidates.cache_clear):
        forget()


def problem(g: Mamba2Geometry, state: str) -> Mamba2Problem:
    return make_problem((g.nheads, g.headdim, g.dstate, g.ngroups), DTYPES[state])


def product(file: TunedFile) -> str:
    return devices.product_of(file.provenance.device) or ""


def test_the_committed_files_are_what_the_command_writes(tmp_path: Path) -> None:
    measured = SHIPPED.keys() - PREDICTED.keys()
    written = {path.name: path.read_bytes() for path in predicted_rows.write(tmp_path) if path.name not in measured}
    assert written == {name: (tuned.SHIPPED_FOLDER / name).read_bytes() for name in PREDICTED}
    assert len(written) >= 3 * 3 * 5


def test_the_command_leaves_measured_files_as_they_are(tmp_path: Path) -> None:
    written = predicted_rows.write(tmp_path)
    origin, rows = next((origin, rows) for name, origin, rows in predicted_rows.files() if name == written[0].name)
    tuned.write_rows(written[0], {**origin, "predicted": False, "method": "measured"}, rows[:1])
    before = written[0].read_bytes()
    assert predicted_rows.write(tmp_path) == written[1:] and written[0].read_bytes() == before


def test_every_model_has_rows_on_every_device() -> None:
    for name in DEVICE_NAMES.values():
        arch = devices.arch_by_name(name)
        assert arch is not None and arch.name == name
        for model in mamba2_models():
            g = model.geometry
            for state in DTYPES:
                keys = {row.key[:3] for row in tuned.rows_for(dispatch.OP, problem(g, state), arch)}
                assert (g.nheads, g.ngroups, 16) in keys, (name, model.name, state)


def test_the_provenance_says_predicted_and_by_what() -> None:
    for file in PREDICTED.values():
        p, device = file.provenance, DEVICES[product(file)]
        assert f"predicted by speed model {VERSION}, not measured: {device.hbm_tbs} TB/s" in p.method
        assert f"{device.sms} SMs at {device.clock_ghz} GHz, counts of {device.target}" in p.method
        assert p.sms == device.sms and p.triton is None, "Triton is not modelled"


def test_rows_hold_the_heuristics_choice_and_possible_times() -> None:
    for file in PREDICTED.values():
        target = TARGETS[DEVICES[product(file)].target]
        _, headdim, dstate, state = file.shape
        for row in file.rows:
            g = row.size.geometry((headdim, dstate))
            config = default_config(problem(g, state), row.batch, target)
            assert config is not None and row.backends.keys() == {"cute"}
            assert row.backends["cute"].config == config.to_dict() and row.backends["cute"].runner_up is None
            assert row.per_step_us is None and 0 < (row.copy_percent or 0) < 100


def test_the_runtime_takes_no_other_choice_from_them_than_the_policy_of_the_cache() -> None:
    """Between the batches of the rows ``evict_first`` changes a little earlier or later than in the heuristic."""
    arch = Arch("cuda", (10, 0), "NVIDIA_B200", 148)
    for g in {model.geometry for model in mamba2_models()}:
        for batch in (1, 3, 20, 128, 300, 1000):
            asked = problem(g, "float16")
            config = default_config(asked, batch, TARGETS["sm_100a"])
            [cute] = [c for c in dispatch.candidates(asked, batch, arch) if c.backend == "cute"]
            assert config and cute.config and cute.config.keys() == config.to_dict().keys() and "predicted" in cute.row
            assert {**cute.config, "evict_first": config.evict_first} == config.to_dict()


@pytest.mark.parametrize("device", DEVICE_NAMES.values())
def test_supports_says_predicted(device: str) -> None:
    answer = supports_replayssm(NANO, device=device)
    assert answer and answer.predicted and not answer.tuned and answer.tune_command is not None
