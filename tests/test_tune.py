"""The tuner without a GPU: its search space, its choice, the rows it writes, and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fallback_triton import mamba2_config as triton_config
from replayssm_cute import arch as archs
from replayssm_cute.arch import Arch
from replayssm_cute.kernels import mamba2_config as cute_config
from replayssm_cute.kernels.targets import for_capability
from replayssm_cute.registry import tuned
from replayssm_cute.registry.models import mamba2_models
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem
from replayssm_tune import cli, measure, run, workload
from replayssm_tune.space import candidates

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
H200 = Arch("cuda", (9, 0), "NVIDIA_H200", 132)
B200 = Arch("cuda", (10, 0), "NVIDIA_B200", 148)
NANO = Mamba2Geometry(64, 64, 128, 8)
INFO = {"capability": "9.0", "sms": 132, "torch": "2.13.0", "triton": "3.6.0", "cutlass_dsl": "4.8.0",
        "date": "2026-11-30T10:00:00Z"}


def problem(geometry: Mamba2Geometry = NANO, state: torch.dtype = F16, act: torch.dtype = BF16,
            buffer_len: int = 16) -> Mamba2Problem:
    return Mamba2Problem(geometry, buffer_len, state, act, act, act, torch.int8, torch.int32, dt_bias_dtype=act,
                         D_dtype=act)


@pytest.mark.parametrize("device", [H200, B200], ids=str)
@pytest.mark.parametrize("state", [F32, F16, BF16], ids=str)
def test_candidates_of_every_model_are_valid_and_begin_with_the_default(device: Arch, state: torch.dtype) -> None:
    target = for_capability(device.capability)
    assert target is not None
    for geometry in {m.geometry for m in mamba2_models()}:
        p = problem(geometry, state)
        for batch in (1, 512):
            default = cute_config.default_config(p, batch, target)
            found = [cute_config.Mamba2Config.from_dict(c) for c in candidates("cute", p, batch, device)]
            assert found[:1] == ([default] if default else [])
            assert len(set(found)) == len(found) and all(cute_config.validate(p, c, target) for c in found)
            triton = [triton_config.Mamba2TritonConfig.from_dict(c) for c in candidates("triton", p, batch, device)]
            assert triton[0] == triton_config.default_config(p) and len(set(triton)) == len(triton) > 1
            assert all(triton_config.validate(p, c) for c in triton)


@pytest.mark.parametrize("heads_per_group", [1, 3, 7, 14, 16])
def test_every_head_ratio_has_candidates(heads_per_group: int) -> None:
    p = problem(Mamba2Geometry(2 * heads_per_group, 64, 128, 2))
    for device in (H200, B200):
        assert len(candidates("cute", p, 64, device)) > 4


@pytest.mark.parametrize(("act", "order"), [(BF16, ("design",)), (F32, ("design", "vec_bits", "tile_p", "threads"))])
def test_no_candidate_sums_in_another_order(act: torch.dtype, order: tuple[str, ...]) -> None:
    """A row's bits do not depend on the batch, which decides between the candidates."""
    for device in (H200, B200):
        kinds = {tuple(c[name] for name in order)
                 for batch in (1, 8, 64, 512) for c in candidates("cute", problem(act=act), batch, device)}
        assert len(kinds) == 1
    splits = {tuple(v for k, v in c.items() if k != "max_registers")
              for batch in (1, 512) for c in candidates("triton", problem(act=act), batch, H200)}
    assert len(splits) == 1


def test_the_workload_flushes_every_row_once_a_cycle() -> None:
    for batch in (1, 5, 48):
        w = workload.make_workload(Mamba2Geometry(2, 16, 32, 1), batch, F16, 8, device="cpu", cold_bytes=1e5)
        assert w.flushes == batch and len(w.phases) == 8
        assert sorted(w.indices.tolist()) == list(range(1, batch + 1)), "slot 0 is the null block"
        cursors = torch.stack([pos for pos, _ in w.phases])
        assert all(sorted(cursors[:, b].tolist()) == list(range(8)) for b in range(batch))
        assert sum(p.state.numel() * 2 for p in w.pools) >= 1e5


def test_rows_are_merged_by_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archs, "of", lambda device: H200)
    for batch, us in ((1, 3.0), (64, 21.0), (64, 20.0)):
        w = workload.make_workload(NANO, 1, F16, 16, device="cpu", cold_bytes=1.0)
        w.batch = batch
        entries = {"cute": {"config": {"a": 1}, "us": us, "runner_up": None}}
        cli.merge_row(tmp_path / "new", NANO, "float16", INFO, measure.registry_row(w, entries, 40.0, 4e12))
    path, = (tmp_path / "new").glob("*.json")
    file = tuned.load_file(path)
    assert [(r.batch, r.backends["cute"].us) for r in file.rows] == [(1, 3.0), (64, 20.0)]
    assert file.rows[0].per_step_us == 40.0 and 0 < (file.rows[1].copy_percent or 0) < 200
    assert file.provenance.device == "NVIDIA_H200" and file.provenance.date == "2026-11-30"


def test_list_and_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(m.name in out for m in mamba2_models())
    assert cli.main(["explain", "--model", "nemotron-3-nano-30b-a3b", "--batch", "64", "--state-dtype", "float16"]) == 0
    assert "64x64x128/8" in capsys.readouterr().out


def test_check_names_the_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "op=mamba2_decode,headdim=64,dstate=128,state_dtype=float16,device_name=NVIDIA_H200.json"
    bad.write_text("{")
    assert cli.main(["check", str(bad)]) == 2
    assert bad.name in capsys.readouterr().err


def test_run_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "gpu_is_here", lambda: False)
    assert cli.main(["run", "--geometry", "64x64x128/8"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_geometry_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["explain", "--geometry", "64x64"])
    assert "is not HxPxN/G" in capsys.readouterr().err
