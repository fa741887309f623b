"""Processes that answer requests: failures, crashes, hangs, and the end of who asks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayssm_tune.process import Child, Lost, StartError

#: Answers with its process id, or does what the request says.
PROGRAM = """
import os, signal, sys, time, subprocess
from replayssm_tune.process import serve
def answer(request):
    do = request["do"]
    if do == "raise": raise ValueError("no such candidate")
    if do == "crash": sys.stderr.write("last words\\n"); sys.stderr.flush(); os.kill(os.getpid(), signal.SIGSEGV)
    if do == "leave": os._exit(3)
    if do == "hang": time.sleep(1000)
    if do == "spawn": return {"child": subprocess.Popen(["sleep", "1000"]).pid}
    print("libraries print", flush=True)
    return {"pid": os.getpid()}
serve(answer, healthy=lambda: len(sys.argv) == 1)
"""


@pytest.fixture
def child() -> Iterator[Child]:
    process = Child([sys.executable, "-c", PROGRAM])
    yield process
    process.close()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_the_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_it_answers_in_one_process_that_prints_as_it_likes(child: Child) -> None:
    first = child.ask({"do": "work"}, 20)["pid"]
    assert child.ask({"do": "work"}, 20)["pid"] == first != os.getpid()


def test_a_failure_costs_nothing_but_the_request(child: Child) -> None:
    before = child.ask({"do": "work"}, 20)
    with pytest.raises(Lost, match="ValueError: no such candidate"):
        child.ask({"do": "raise"}, 20)
    assert child.ask({"do": "work"}, 20) == before


def test_a_failure_that_made_it_unhealthy_costs_the_process() -> None:
    child = Child([sys.executable, "-c", PROGRAM, "unhealthy"])
    before = child.ask({"do": "work"}, 20)
    with pytest.raises(Lost, match="no such candidate"):
        child.ask({"do": "raise"}, 20)
    wait_for_the_end(before["pid"])
    assert child.ask({"do": "work"}, 20) != before
    child.close()


@pytest.mark.parametrize(("do", "reason"), [("crash", "was killed by signal 11: last words"),
                                            ("leave", "ended with exit code 3"), ("hang", "no answer in 0.5 s")])
def test_a_crash_or_a_hang_costs_the_process_alone(child: Child, do: str, reason: str) -> None:
    before = child.ask({"do": "work"}, 20)["pid"]
    with pytest.raises(Lost, match=reason):
        child.ask({"do": do}, 0.5 if do == "hang" else 20)
    wait_for_the_end(before)
    assert child.ask({"do": "work"}, 20)["pid"] != before


def test_what_it_started_ends_with_it(child: Child) -> None:
    grandchild = child.ask({"do": "spawn"}, 20)["child"]
    assert alive(grandchild)
    child.close()
    wait_for_the_end(grandchild)


def test_a_process_that_does_not_start_is_no_candidates_fault() -> None:
    with pytest.raises(StartError, match=r"does not start: its process ended with exit code 1: .*No module"):
        Child([sys.executable, "-c", "import no_such_module"]).ask({"do": "work"}, 20)


@pytest.mark.parametrize("do", ["work", "hang"])
def test_it_ends_when_its_asker_is_killed_even_in_the_middle_of_a_request(tmp_path: Path, do: str) -> None:
    asker = subprocess.Popen([sys.executable, "-c", f"""
import sys, time
from replayssm_tune.process import Child
child = Child([sys.executable, "-c", {PROGRAM!r}])
print(child.ask({{"do": "work"}}, 20)["pid"], flush=True)
child.ask({{"do": {do!r}}}, 100)
time.sleep(100)
"""], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert asker.stdout is not None
    pid = int(asker.stdout.readline())
    assert alive(pid)
    asker.kill()
    asker.wait()
    asker.stdout.close()
    wait_for_the_end(pid)
