"""What is made of rows: figures, tables, the report page, the archive to contribute."""

from __future__ import annotations

import base64
import html.parser
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from replayssm_cute import dispatch
from replayssm_cute.errors import RegistryError
from replayssm_cute.layout import mamba2_ring_bytes, mamba2_step_bytes
from replayssm_cute.registry import tuned
from replayssm_cute.registry.models import DTYPES, get
from replayssm_cute.types import Mamba2Geometry
from replayssm_tune import cli, figures, rows
from replayssm_tune.measure import row_of
from replayssm_tune.point import Point

TINY = get("granite-4.0-h-tiny").geometry
INFO = {"capability": "9.0", "sms": 132, "torch": "2.13.0", "triton": "3.6.0", "cutlass_dsl": "4.8.0",
        "date": "2026-11-30T10:00:00Z"}
H200 = rows.record("NVIDIA_H200", INFO)
COPY = 4e12


def entry(us: float, runner_up: float | None = None) -> dict[str, Any]:
    return {"config": {"a": 1}, "us": us, "runner_up": runner_up and {"config": {"a": 2}, "us": runner_up}}


def row(batch: int, cute: float, triton: float | None = None, per_step: float | None = 20.0, buffer_len: int = 16,
        geometry: Mamba2Geometry = TINY, state: str = "float16") -> dict[str, Any]:
    entries = {"cute": entry(cute, 1.05 * cute), **({"triton": entry(triton)} if triton else {})}
    return row_of(geometry, DTYPES[state], buffer_len, batch, entries, per_step, COPY)


def write(folder: Path, *found: dict[str, Any], state: str = "float16", geometry: Mamba2Geometry = TINY,
          predicted: bool = False) -> Path:
    path = rows.path_of(folder, geometry, state, "NVIDIA_H200")
    rows.store(path, {**H200, "predicted": predicted}, found)
    return path


def test_figures_tell_bytes_bandwidth_percent_and_speedup(tmp_path: Path) -> None:
    write(tmp_path, row(1, 5.0, 4.0), row(64, 16.0, 25.0), row(8, 10.0, per_step=None))
    small, middle, large = figures.read([str(tmp_path)])
    assert [f.batch for f in (small, middle, large)] == [1, 8, 64]
    nbytes = mamba2_step_bytes(TINY, 16, DTYPES["float16"]) * 64
    assert large.nbytes == nbytes and large.bandwidth == pytest.approx(COPY, rel=1e-3)
    assert large.percent(16.0) == pytest.approx(100 * nbytes / 16e-6 / COPY, rel=1e-3)
    assert large.floor_us == pytest.approx(nbytes / COPY * 1e6, rel=1e-3)
    assert small.fastest == "triton" and large.fastest == "cute" and large.speedup("triton") == 0.8
    assert middle.speedup("cute") is None and middle.per_step_us is None


@pytest.mark.parametrize(("times", "batch"), [((10, 10, 10), 1), ((30, 20, 10), 8), ((30, 10, 30), None),
                                              ((10, 30, 5), 64)])
def test_break_even_is_where_replay_pays_from_then_on(tmp_path: Path, times: tuple[float, ...],
                                                      batch: int | None) -> None:
    write(tmp_path, *(row(b, us) for b, us in zip((1, 8, 64), times, strict=True)))
    assert figures.break_even(figures.read([str(tmp_path)]), "cute") == batch
    assert figures.break_even(figures.read([str(tmp_path)]), "triton") is None


def test_show_is_a_line_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, row(64, 16.0, 25.0))
    assert cli.main(["show", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"NVIDIA_H200 +48x64x128/1 +float16 +16 +64 +20.00 +16.00 +25.00 +\d+ +1.25x +\+5.0%", said)
    assert "rings MiB" not in said, "one ring length is no comparison"


def test_show_sets_time_against_memory_where_ring_lengths_differ(tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *(row(64, us, buffer_len=n) for n, us in ((8, 18.0), (16, 16.0), (32, 17.0))))
    assert cli.main(["show", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for n, us, word in ((8, "18.00", "+12.5%"), (16, "16.00", "fastest"), (32, "17.00", "+6.2%")):
        mib = f"{mamba2_ring_bytes(TINY, n) / 2**20:.1f}"
        assert re.search(rf"float16 +64 +{n} +{us} +cute +0.8 +{mib} +{re.escape(word)}", said), n


def test_nothing_to_show_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "report"):
        assert cli.main([command, str(tmp_path)]) == 2
        assert f"{tmp_path}: no rows there" in capsys.readouterr().err


class Page(html.parser.HTMLParser):
    """Collects what a page embeds and what it would have to fetch; balanced tags are checked on the way."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[bytes] = []
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and value:
                kind, _, data = value.partition(",")
                if kind == "data:image/png;base64":
                    self.images.append(base64.b64decode(data))
                else:
                    self.fetched.append(value)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_page_with_its_plots_and_they_lie_beside_it(tmp_path: Path,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "rows", row(1, 30.0, 4.0), row(64, 16.0, 25.0))
    write(tmp_path / "rows", row(1, 6.0, None, None), state="float32")
    assert cli.main(["report", str(tmp_path / "rows"), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "report.html")
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    files = {p.name: p.read_bytes() for p in (tmp_path / "out").glob("*.png")}
    assert sorted(files) == [f"NVIDIA_H200-48x64x128-1-L16-{kind}.png"
                             for kind in ("memory", "percent", "roofline", "speedup", "time")]
    assert sorted(page.images) == sorted(files.values()) and all(f.startswith(b"\x89PNG") for f in files.values())
    assert page.fetched == [], "it stands alone"
    assert "granite-4.0-h-tiny" in text
    assert "<tr><td>float16</td><td>64</td><td>none measured</td></tr>" in text, "cute from 64, triton at 1 only"
    assert "<td>float32</td><td>1</td>" in text


def test_the_plots_hold_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from replayssm_tune import plots
    write(tmp_path, row(1, 30.0, 4.0), row(64, 16.0, 25.0))
    found = figures.read([str(tmp_path)])

    def lines(figure: Any) -> dict[str, Any]:
        return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines}

    assert lines(plots.time(found)) == {"cute": ([1, 64], [30.0, 16.0]), "triton": ([1, 64], [4.0, 25.0]),
                                        "per-step": ([1, 64], [20.0, 20.0])}
    assert lines(plots.speedup(found))["triton"] == ([1, 64], [5.0, 0.8])
    assert lines(plots.percent(found))["cute"][1][1] == found[1].percent(16.0)
    roof = lines(plots.roofline(found))
    assert roof["floor: copy of the same bytes"] == ([f.nbytes / 1e6 for f in found], [f.floor_us for f in found])
    memory = lines(plots.memory(Point(TINY, "float16", 16, 1), 36))["float16, with rings"]
    assert memory[1][memory[0].index(16)] == pytest.approx(27.0 + 3.6, abs=0.05)  # docs/models.md


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(tuned, "SHIPPED_FOLDER", folder)
    return folder


def packed(archive: Path) -> dict[int, float]:
    """Microseconds of cute by batch in an archive of one file, which must be readable where it would be shipped."""
    with zipfile.ZipFile(archive) as files:
        [name] = files.namelist()
        assert Path(name).parent == Path("replayssm_cute/tuned")
        target = archive.parent / Path(name).name
        target.write_bytes(files.read(name))
    return {r.batch: r.backends["cute"].us for r in tuned.load_file(target).rows}


def test_export_packs_the_rows_over_the_shipped_ones(tmp_path: Path, shipped: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    write(shipped, row(1, 5.0), row(8, 10.0), row(64, 16.0))
    write(tmp_path / "mine", row(8, 9.0), row(64, 17.0), row(128, 30.0))
    call = ["export", str(tmp_path / "mine"), "--to", str(tmp_path / "rows.zip")]
    assert cli.main(call) == 0
    assert packed(tmp_path / "rows.zip") == {1: 5.0, 8: 9.0, 64: 16.0, 128: 30.0}
    said = capsys.readouterr().out
    assert "batch 64: the row in the file is faster" in said and "4 rows" in said
    first = (tmp_path / "rows.zip").read_bytes()
    assert cli.main([*call, "--force"]) == 0 and packed(tmp_path / "rows.zip")[64] == 17.0
    assert cli.main(call) == 0 and (tmp_path / "rows.zip").read_bytes() == first


def test_export_refuses_what_cannot_be_shipped(tmp_path: Path, shipped: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    call = ["export", str(mine), "--to", str(tmp_path / "rows.zip")]
    mine.mkdir()
    assert cli.main(call) == 2 and "no registry files there" in capsys.readouterr().err
    path = write(mine, row(8, 9.0))
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))
    assert cli.main(call) == 2 and "schema: expected 1, got 2" in capsys.readouterr().err
    tuned.write_rows(path, {**H200, "predicted": True}, [row(8, 9.0)])
    assert cli.main(call) == 2 and "predicted" in capsys.readouterr().err
    tuned.write_rows(path, {**H200, "torch": "2.14.0"}, [row(8, 9.0)])
    write(shipped, row(1, 5.0))
    assert cli.main(call) == 2 and "measured with torch 2.13.0" in capsys.readouterr().err
    assert not (tmp_path / "rows.zip").exists(), "no half an archive"


def test_measured_rows_replace_predicted_ones_whole(tmp_path: Path, shipped: Path) -> None:
    """In a folder that is tuned into, and in what is exported; a prediction is never written over a measurement."""
    write(shipped, row(1, 5.0), row(8, 1.0), predicted=True)
    write(tmp_path / "mine", row(8, 9.0))
    assert cli.main(["export", str(tmp_path / "mine"), "--to", str(tmp_path / "rows.zip")]) == 0
    assert packed(tmp_path / "rows.zip") == {8: 9.0}
    path = write(shipped, row(8, 9.0))
    assert [r.batch for r in tuned.load_file(path).rows] == [8] and not tuned.load_file(path).provenance.predicted
    with pytest.raises(RegistryError, match="measured with predicted False"):
        write(shipped, row(8, 1.0), predicted=True)


def test_predicted_rows_are_marked_wherever_they_are_shown(shipped: Path, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    found = row(1, 5.0)
    found["backends"]["cute"]["config"] = {"design": "bulk", "tile_p": 64, "threads": 128}     # one that serves
    path = write(shipped, found, predicted=True)
    for arguments, said in ((["show", str(path)], "NVIDIA_H200 (predicted)"),
                            (["list", "--op", "mamba2_decode", "--device", "NVIDIA_H200"],
                             "48x64x128/1   36      predicted"),
                            (["explain", "granite-4.0-h-tiny", "--device", "NVIDIA_H200"], "cute 5.0 us (predicted"),
                            (["explain", "granite-4.0-h-tiny", "--device", "NVIDIA_H200"], "were not measured on")):
        tuned.clear_cache()
        dispatch.candidates.cache_clear()
        assert cli.main(arguments) == 0
        assert said in capsys.readouterr().out
    tuned.clear_cache()
    dispatch.candidates.cache_clear()
    assert cli.main(["report", "--out", str(tmp_path)]) == 2, "not in a report that was not asked for them"


def test_list_counts_the_rows_of_the_very_heads(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(shipped, row(1, 5.0), row(8, 10.0))
    tuned.clear_cache()
    try:
        assert cli.main(["list", "--device", "NVIDIA_B200"]) == 0
    finally:
        tuned.clear_cache()
    said = capsys.readouterr().out
    assert re.search(r"granite-4.0-h-tiny +48x64x128/1 +36 +fp32 missing, fp16 2, bf16 missing +missing", said)
    assert re.search(r"granite-4.0-h-small +128x64x128/1 +36 +missing +missing", said), "borrowed rows do not count"


def test_list_counts_rings_in_the_dtype_of_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang allocates the rings of decode so; the shipped rows of an fp32 state are of fp32 rings."""
    tuned.clear_cache()
    assert cli.main(["list", "--op", "gdn_decode", "--device", "NVIDIA_H200"]) == 0
    assert re.search(r"qwen3-next-80b-a3b +32/16x128x128 +36 .*fp32 \d+, ", capsys.readouterr().out)
