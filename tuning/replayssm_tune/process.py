"""A process that answers JSON requests, one a line, and may crash or hang without harm to who asks.

``Child`` is the asking side: it starts the process in a group of its own, gives every request a time
limit, kills the group where the limit passes, and starts a new one at the next request. ``serve`` is
the answering side. The process ends when its asker does, however that ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from replayssm_cute.errors import ReplayError

STARTUP_SECONDS = 300.0  # a cold import of torch and a compiler from a network drive
LONGEST_REASON = 300     # characters of a failure that are kept


class Lost(Exception):
    """The process failed, died or was killed over a request; the message says which."""


class StartError(ReplayError):
    """The process does not even start, so no request is to blame."""


class Child:
    """The asking side; starts on the first request and again after a loss. Not for two threads."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command, self._environment = list(command), dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._received = b""

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to a request.

        Args:
            timeout: seconds; the process is killed behind them.

        Raises:
            Lost: it reported a failure, crashed or did not answer in time.
            StartError: it cannot be started.
        """
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Lost(self._end()) from None
        reply = self._receive(timeout)
        if reply.get("ends"):
            self.close()
        if "failed" in reply:
            raise Lost(reply["failed"])
        return reply

    def close(self) -> None:
        """Kill the process and its children; the next request would start another."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _start(self) -> None:
        self._errors, self._received = tempfile.TemporaryFile(), b""  # noqa: SIM115  closed in close()
        path = os.pathsep.join(filter(None, sys.path))  # the asker's modules, wherever it found them
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._errors, start_new_session=True,
                                         env={**os.environ, "PYTHONPATH": path, **self._environment})
        try:
            self._receive(STARTUP_SECONDS)
        except Lost as loss:
            raise StartError(f"{' '.join(self._command)} does not start: {loss}") from None

    def _receive(self, timeout: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        stream, deadline = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._received:
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise Lost(f"no answer in {timeout:g} s")
            part = os.read(stream, 65536)
            if not part:
                raise Lost(self._end())
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return dict(json.loads(line))

    def _end(self) -> str:
        """How the process ended, with its last words; cleans up behind it."""
        assert self._process is not None and self._errors is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        code = self._process.poll()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        self.close()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return ": ".join([f"its process {how}", *words])[:LONGEST_REASON]


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], healthy: Callable[[], bool] = lambda: True) -> None:
    """Answer requests from standard input until it is closed.

    Args:
        answer: its exceptions become failures of the request.
        healthy: asked after a failure; where it is False the process ends, because the next request
            would suffer from this one's.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()

    def send(reply: dict[str, Any]) -> None:
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    send({"ready": True})
    while True:
        request = json.loads(requests.get())
        try:
            send(answer(request))
        except Exception as failure:
            ends = not healthy()
            send({"failed": f"{type(failure).__name__}: {failure}"[:LONGEST_REASON], "ends": ends})
            if ends:
                os._exit(1)


def _listen(requests: queue.SimpleQueue[bytes]) -> None:
    """A thread of its own, so that the end of the asker ends this process in the middle of a request too."""
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(1)
