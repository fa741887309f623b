"""Tuned rows: the file format, the lookup rule, families of devices and the user's folder."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm_cute.arch import Arch
from replayssm_cute.errors import RegistryError
from replayssm_cute.registry import devices, tuned
from replayssm_cute.types import Mamba2Geometry, Mamba2Problem

H200 = Arch("cuda", (9, 0), "NVIDIA_H200", 132)
OP = "mamba2_decode"
Json = dict[str, Any]


def problem(nheads: int = 64, ngroups: int = 8, buffer_len: int = 16, headdim: int = 64, dstate: int = 128,
            state_dtype: torch.dtype = torch.float16) -> Mamba2Problem:
    bf16 = torch.bfloat16
    return Mamba2Problem(Mamba2Geometry(nheads, headdim, dstate, ngroups), buffer_len, state_dtype,
                         bf16, bf16, bf16, torch.int8, torch.int32)


def provenance(device: str = "NVIDIA_H200", **changes: Any) -> Json:
    capability = {"B200": "10.0", "GB200": "10.0", "B300": "10.3", "GB300": "10.3"}.get(
        devices.product_of(device) or "", "9.0")
    return {"device": device, "capability": capability, "sms": 132, "torch": "2.13.0",
            "triton": "3.6.0", "cutlass_dsl": "4.8.0", "package": "0.1.0", "date": "2026-11-30",
            "method": "CUDA graph, cold L2", "predicted": False, **changes}


def row(nheads: int = 64, ngroups: int = 8, buffer_len: int = 16, batch: int = 64, us: float = 20.0,
        **changes: Any) -> Json:
    entry = {"config": {"design": "bulk", "stages": 2}, "us": us,
             "runner_up": {"config": {"design": "register"}, "us": us + 1}}
    other = {"config": {"num_warps": 4}, "us": us + 2, "runner_up": None}
    return {"nheads": nheads, "ngroups": ngroups, "buffer_len": buffer_len, "batch": batch,
            "backends": {"cute": entry, "triton": other}, "per_step_us": 30.0, "copy_percent": 95.5,
            **changes}


class Folders:
    """A shipped and a user folder that stand in for the real ones."""

    def __init__(self, root: Path) -> None:
        self.shipped, self.user = root / "shipped", root / "user"
        self.shipped.mkdir()
        self.user.mkdir()

    def write(self, rows: list[Json], device: str = "NVIDIA_H200", user: bool = False,
              headdim: int = 64, dstate: int = 128, state_dtype: str = "float16",
              **changes: Any) -> Path:
        folder = self.user if user else self.shipped
        path = folder / tuned.file_name(OP, headdim, dstate, state_dtype, device)
        tuned.write_rows(path, provenance(device, **changes), rows)
        tuned.clear_cache()
        return path


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Folders(tmp_path)
    monkeypatch.setattr(tuned, "SHIPPED_FOLDER", made.shipped)
    monkeypatch.setenv("REPLAYSSM_TUNED_DIR", str(made.user))
    tuned.clear_cache()
    yield made
    tuned.clear_cache()


def found(problem_: Mamba2Problem, batch: int, arch: Arch = H200) -> tuple[int, int, int, int]:
    hit = tuned.lookup(OP, problem_, batch, arch)
    assert hit is not None
    return hit.key


def test_exact_row_and_its_parts(folders: Folders) -> None:
    folders.write([row(batch=1, us=3.0), row(batch=64), row(batch=512, us=150.0)])
    hit = tuned.lookup(OP, problem(), 64, H200)
    assert hit is not None and hit.key == (64, 8, 16, 64)
    assert hit.backends["cute"].us == 20.0 and hit.backends["triton"].us == 22.0
    assert hit.backends["cute"].config == {"design": "bulk", "stages": 2}
    assert hit.backends["cute"].runner_up == {"config": {"design": "register"}, "us": 21.0}
    assert hit.measured and not hit.borrowed
    assert hit.describe().startswith("NVIDIA_H200, batch 64, 2026-11-30: cute 20.0 us, triton 22.0 us")


def timed(batch: int, cute_us: float, triton_us: float, **more: Any) -> dict[str, Any]:
    entries = row()["backends"]
    entries["cute"]["us"], entries["triton"]["us"] = cute_us, triton_us
    return row(batch=batch, backends=entries, **more)


def test_one_backend_is_the_fastest_of_a_layer_at_every_batch(folders: Folders) -> None:
    """Least geometric mean over the batches of the nearest layer; other layers have no say."""
    folders.write([timed(1, 4.0, 3.0), timed(64, 20.0, 40.0), timed(512, 150.0, 140.0),
                   timed(1, 9.0, 3.0, nheads=16, ngroups=8)])
    name, evidence = tuned.fastest(OP, problem(), H200) or ("", "")
    assert name == "cute" and "NVIDIA_H200, batch 1 to 512" in evidence and "cute 22.9 us, triton 25.6 us" in evidence
    assert (tuned.fastest(OP, problem(nheads=16), H200) or ("", ""))[0] == "triton"


def test_nothing_is_the_fastest_on_a_device_that_was_not_measured(folders: Folders) -> None:
    folders.write([row()])
    assert tuned.fastest(OP, problem(), H200) is not None
    assert tuned.fastest(OP, problem(), Arch("cuda", (9, 0), "NVIDIA_H200_NVL", 132)) is None
    assert tuned.fastest(OP, problem(headdim=80), H200) is None


@pytest.mark.parametrize("other", [
    problem(headdim=80), problem(dstate=256), problem(state_dtype=torch.float32),
    problem(state_dtype=torch.bfloat16)])
def test_shape_and_state_dtype_are_exact(folders: Folders, other: Mamba2Problem) -> None:
    folders.write([row()])
    assert tuned.lookup(OP, other, 64, H200) is None


def test_another_op_or_device_has_no_rows(folders: Folders) -> None:
    folders.write([row()])
    assert tuned.lookup("mamba2_verify", problem(), 64, H200) is None
    assert tuned.lookup(OP, problem(), 64, Arch("cpu")) is None
    assert tuned.lookup(OP, problem(), 64, Arch("cuda", (8, 0), "NVIDIA_A100-SXM4-80GB", 108)) is None


def test_heads_per_group_outranks_buffer_len_and_batch(folders: Folders) -> None:
    folders.write([row(nheads=128, batch=64), row(nheads=64, buffer_len=64, batch=1)])
    assert found(problem(), 64) == (64, 8, 64, 1)
    assert found(problem(nheads=16, ngroups=1), 64) == (128, 8, 16, 64)
    # 8 and 16 heads a group, asked for 12: 16/12 is nearer than 12/8
    assert found(problem(nheads=96), 64) == (128, 8, 16, 64)


def test_buffer_len_outranks_batch_and_prefers_the_larger_on_a_tie(folders: Folders) -> None:
    folders.write([row(buffer_len=8, batch=64), row(buffer_len=24, batch=1), row(buffer_len=32, batch=64)])
    assert found(problem(buffer_len=24), 64) == (64, 8, 24, 1)
    assert found(problem(buffer_len=16), 64) == (64, 8, 24, 1)
    assert found(problem(buffer_len=11), 64) == (64, 8, 8, 64)


def test_work_is_compared_in_log2_and_ties_take_the_smaller(folders: Folders) -> None:
    folders.write([row(batch=b) for b in (1, 16, 64)])
    assert found(problem(), 4) == (64, 8, 16, 1)       # 4x from 1 and from 16: the smaller
    assert found(problem(), 5) == (64, 8, 16, 16)
    assert found(problem(), 30) == (64, 8, 16, 16)     # linear distance would say 16, log2 too
    assert found(problem(), 33) == (64, 8, 16, 64)     # linear distance says 16, log2 says 64
    assert found(problem(nheads=16, ngroups=2), 64) == (64, 8, 16, 16)  # same work, a TP rank


def test_equal_work_takes_the_fewer_heads(folders: Folders) -> None:
    folders.write([row(nheads=64, ngroups=8, batch=16), row(nheads=32, ngroups=4, batch=32)])
    assert found(problem(nheads=64, ngroups=8), 16) == (32, 4, 16, 32)


def test_order_in_the_file_is_irrelevant(folders: Folders) -> None:
    rows = [row(nheads=h, ngroups=g, buffer_len=length, batch=b)
            for h, g in ((64, 8), (128, 8), (32, 4)) for length in (8, 16) for b in (1, 8, 64)]
    asked = [(problem(nheads=h, ngroups=g, buffer_len=length), b)
             for h, g in ((64, 8), (96, 8), (16, 1)) for length in (4, 12, 16) for b in (1, 3, 22, 300)]
    answers = set()
    for seed in range(4):
        random.Random(seed).shuffle(rows)
        folders.write(rows)
        answers.add(tuple(found(p, b) for p, b in asked))
    assert len(answers) == 1


@pytest.mark.parametrize(("asked", "tuned_on", "serves"), [
    ("NVIDIA_GB200", ["NVIDIA_B200"], "NVIDIA_B200"),
    ("NVIDIA_B300_SXM6_AC", ["NVIDIA_B200", "NVIDIA_GB200"], "NVIDIA_B200"),
    ("NVIDIA_GB300", ["NVIDIA_B200", "NVIDIA_B300_SXM6_AC"], "NVIDIA_B300_SXM6_AC"),
    ("NVIDIA_H100_80GB_HBM3", ["NVIDIA_H200"], "NVIDIA_H200"),
    ("NVIDIA_GH200_480GB", ["NVIDIA_H200", "NVIDIA_H100_80GB_HBM3"], "NVIDIA_H200"),
    ("NVIDIA_H100_PCIe", ["NVIDIA_H200", "NVIDIA_H100_NVL"], "NVIDIA_H100_NVL"),
    ("NVIDIA_H100_PCIe", ["NVIDIA_H100_NVL", "NVIDIA_H100_80GB_HBM3"], "NVIDIA_H100_80GB_HBM3"),
    ("NVIDIA_B200", ["NVIDIA_GB200", "NVIDIA_B300_SXM6_AC", "NVIDIA_H200"], None),
    ("NVIDIA_H200", ["NVIDIA_H100_80GB_HBM3", "NVIDIA_B200"], None),
    ("NVIDIA_H200_MIG_1g.18gb", ["NVIDIA_H200"], None),
    ("NVIDIA_GeForce_RTX_5090", ["NVIDIA_B200"], None),
])
def test_families(asked: str, tuned_on: list[str], serves: str | None) -> None:
    assert devices.nearest(asked, tuned_on) == serves
    assert devices.nearest(asked, [*reversed(tuned_on)]) == serves
    assert devices.nearest(asked, [*tuned_on, asked]) == asked


def test_borrowed_and_predicted_rows_do_not_rank_backends(folders: Folders) -> None:
    folders.write([row()])
    folders.write([row()], device="NVIDIA_B200", predicted=True)
    borrowed = tuned.lookup(OP, problem(), 64, Arch("cuda", (9, 0), "NVIDIA_H100_80GB_HBM3", 132))
    predicted = tuned.lookup(OP, problem(), 64, Arch("cuda", (10, 0), "NVIDIA_B200", 148))
    assert borrowed is not None and borrowed.borrowed and not borrowed.measured
    assert predicted is not None and not predicted.borrowed and not predicted.measured
    assert "borrowed" in borrowed.describe() and "predicted" in predicted.describe()


B200 = Arch("cuda", (10, 0), "NVIDIA_B200", 148)
GB200 = Arch("cuda", (10, 0), "NVIDIA_GB200", 152)


def test_measured_rows_always_win_over_predicted_ones(folders: Folders) -> None:
    """Of the device itself at any batch, and of a donor that was measured; whoever's folder holds them."""
    folders.write([row(batch=1, us=2.0), row(batch=64)], device="NVIDIA_GB200", predicted=True)
    assert found(problem(), 64, GB200) == (64, 8, 16, 64)
    folders.write([row(batch=512)], device="NVIDIA_B200")
    hit = tuned.lookup(OP, problem(), 64, GB200)
    assert hit is not None and hit.batch == 512 and hit.borrowed and not hit.provenance.predicted
    assert tuned.lookup(OP, problem(dstate=64), 64, GB200) is None
    folders.write([row(batch=8)], device="NVIDIA_GB200", user=True)
    hit = tuned.lookup(OP, problem(), 64, GB200)
    assert hit is not None and hit.batch == 8 and hit.measured


def test_a_users_prediction_does_not_replace_a_shipped_measurement(folders: Folders) -> None:
    folders.write([row(us=20.0)], device="NVIDIA_B200")
    folders.write([row(us=1.0), row(batch=1, us=1.0)], device="NVIDIA_B200", user=True, predicted=True)
    assert all(hit is not None and hit.measured and hit.backends["cute"].us == 20.0
               for hit in (tuned.lookup(OP, problem(), batch, B200) for batch in (1, 64)))
    assert tuned.fastest(OP, problem(), B200) is not None


def test_own_rows_shut_out_the_family_whole(folders: Folders) -> None:
    folders.write([row(batch=64)], device="NVIDIA_B200")
    folders.write([row(batch=1)], device="NVIDIA_GB200")
    assert found(problem(), 64, Arch("cuda", (10, 0), "NVIDIA_GB200", 152)) == (64, 8, 16, 1)


def test_user_rows_win_row_by_row(folders: Folders) -> None:
    folders.write([row(batch=1, us=3.0), row(batch=64, us=20.0)])
    only_triton = {"triton": {"config": {"num_warps": 8}, "us": 18.0, "runner_up": None}}
    folders.write([row(batch=64, backends=only_triton), row(batch=256, us=80.0)], user=True,
                  date="2026-12-01")
    shipped, replaced, added = (tuned.lookup(OP, problem(), b, H200) for b in (1, 64, 256))
    assert shipped is not None and shipped.provenance.date == "2026-11-30" and shipped.batch == 1
    assert replaced is not None and replaced.provenance.date == "2026-12-01"
    assert replaced.backends.keys() == {"triton"}  # whole: no backend of the shipped row is left
    assert added is not None and added.batch == 256


def test_missing_user_folder_warns_once(folders: Folders, monkeypatch: pytest.MonkeyPatch,
                                        caplog: pytest.LogCaptureFixture) -> None:
    folders.write([row()])
    monkeypatch.setenv("REPLAYSSM_TUNED_DIR", "/nowhere/at/all")
    tuned.clear_cache()
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        assert found(problem(), 64) == found(problem(), 64) == (64, 8, 16, 64)
    assert [r.getMessage() for r in caplog.records].count(
        "REPLAYSSM_TUNED_DIR=/nowhere/at/all is not a folder; only shipped rows are used") == 1


def test_folders_are_read_once(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.write([row()])
    assert found(problem(), 64) == (64, 8, 16, 64)
    monkeypatch.setattr(tuned, "load_file", lambda path: pytest.fail("a step read a file"))
    monkeypatch.delenv("REPLAYSSM_TUNED_DIR")
    assert found(problem(nheads=32, ngroups=4), 3) == (64, 8, 16, 64)


def break_(path: str, value: Any) -> Callable[[Json], None]:
    """An edit of a file's content: set the dotted path to a value; ``...`` deletes the key."""
    def edit(content: Json) -> None:
        *parents, last = path.split(".")
        at: Any = content
        for key in parents:
            at = at[int(key) if key.isdigit() else key]
        if value is ...:
            del at[last]
        else:
            at[last] = value
    return edit


BROKEN = [
    ("schema", 2, "schema: expected 1"), ("schema", True, "schema"), ("extra", 1, "unknown extra"),
    ("provenance.device", "NVIDIA_B200", "as in the file's name"),
    ("provenance.capability", "10.0", "capability"), ("provenance.predicted", 0, "predicted"),
    ("provenance.date", "30.11.2026", "date"), ("provenance.date", "2026-13-01", "date"),
    ("provenance.sms", ..., "missing sms"), ("provenance.note", "x", "unknown note"),
    ("rows", {}, "rows"), ("rows.0.nheads", 0, "nheads"), ("rows.0.nheads", True, "nheads"),
    ("rows.0.ngroups", 7, "divisor"), ("rows.0.buffer_len", 65, "1..64"), ("rows.0.batch", 1.5, "batch"),
    ("rows.0.note", 1, "unknown note"), ("rows.0.copy_percent", "95", "copy_percent"),
    ("rows.0.backends", {}, "backends"), ("rows.0.backends.cuda", {}, "cuda"),
    ("rows.0.backends.cute.us", -1.0, "us"), ("rows.0.backends.cute.us", ..., "missing us"),
    ("rows.0.backends.cute.config", {"a": [1]}, "config"),
    ("rows.0.backends.cute.runner_up", {"us": 1.0}, "runner_up"),
]


@pytest.mark.parametrize(("path", "value", "complaint"), BROKEN)
def test_malformed_files_are_refused_and_skipped_with_one_warning(
        folders: Folders, caplog: pytest.LogCaptureFixture, path: str, value: Any,
        complaint: str) -> None:
    good = folders.write([row()])
    content = json.loads(good.read_text())
    break_(path, value)(content)
    bad = folders.user / good.name
    bad.write_text(json.dumps(content))
    with pytest.raises(RegistryError) as error:
        tuned.load_file(bad)
    assert str(bad) in str(error.value) and complaint in str(error.value)
    tuned.clear_cache()
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        assert found(problem(), 64) == found(problem(), 1) == (64, 8, 16, 64)
    assert [str(bad) in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.parametrize("text", ["{", "[]", "", "\xff", '{"schema": NaN}'])
def test_text_that_is_no_such_json(folders: Folders, text: str) -> None:
    bad = folders.user / tuned.file_name(OP, 64, 128, "float16", "NVIDIA_H200")
    bad.write_bytes(text.encode("latin-1"))
    with pytest.raises(RegistryError, match="op=mamba2_decode"):
        tuned.load_file(bad)
    assert tuned.lookup(OP, problem(), 64, H200) is None


@pytest.mark.parametrize("name", [
    "config.json", "op=mamba2_decode,headdim=64.json",
    "op=mamba2_decode,headdim=064,dstate=128,state_dtype=float16,device_name=NVIDIA_H200.json",
    "op=mamba2_decode,headdim=64,dstate=128,state_dtype=int8,device_name=NVIDIA_H200.json"])
def test_foreign_names(folders: Folders, name: str) -> None:
    good = folders.write([row()])
    (folders.user / name).write_text(good.read_text())
    with pytest.raises(RegistryError, match="file name"):
        tuned.load_file(folders.user / name)
    tuned.clear_cache()
    assert found(problem(), 64) == (64, 8, 16, 64)


def test_a_row_may_not_occur_twice(folders: Folders) -> None:
    with pytest.raises(RegistryError, match="two rows share"):
        folders.write([row(us=1.0), row(us=2.0)])


def test_written_files_are_canonical(folders: Folders) -> None:
    rows = [row(batch=64), row(batch=1), row(nheads=32, ngroups=4, batch=512)]
    asked = copy.deepcopy(rows)
    first = folders.write(rows).read_bytes()
    assert rows == asked, "the caller's rows were changed"
    assert first == folders.write(rows[::-1]).read_bytes()
    content = json.loads(first)
    assert first.endswith(b"}\n") and [r["batch"] for r in content["rows"]] == [512, 1, 64]
    assert first == folders.write(content["rows"]).read_bytes()


def test_a_refused_write_leaves_the_file_as_it_was(folders: Folders) -> None:
    path = folders.write([row()])
    before = path.read_bytes()
    for bad in ([row(batch=0)], [row(copy_percent=float("nan"))]):
        with pytest.raises(RegistryError):
            tuned.write_rows(path, provenance(), bad)
    assert path.read_bytes() == before and [p.name for p in folders.shipped.iterdir()] == [path.name]


def test_drift_names_a_compiler_of_another_minor_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from replayssm_cute.registry import tuned_file
    monkeypatch.setattr(tuned_file, "_installed", {"triton": "3.7.1", "nvidia-cutlass-dsl": "4.8.2"}.get)
    assert tuned.Provenance(**provenance()).drift() == "triton 3.6.0 then and 3.7.1 now"
    assert tuned.Provenance(**provenance(triton=None)).drift() == ""


def test_shipped_files_are_sound_and_canonical() -> None:
    for path in sorted(tuned.SHIPPED_FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        assert tuned.load_file(path).rows
        rows = [json.dumps(r, sort_keys=True) for r in content["rows"]]
        assert all(line in path.read_text() for line in rows), f"{path} was not written by write_rows"


def test_the_example_of_the_page_is_a_sound_file(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "registry.md").read_text()
    path = tmp_path / next(line.strip() for line in page.splitlines() if line.startswith("    op="))
    path.write_text(page.split("```json\n")[1].split("```")[0])
    example = tuned.load_file(path)
    assert "cute 23.1 us, triton 27.5 us" in example.rows[0].describe()
    content = json.loads(path.read_text())
    before = path.read_bytes()
    tuned.write_rows(path, content["provenance"], content["rows"])
    assert path.read_bytes() == before
