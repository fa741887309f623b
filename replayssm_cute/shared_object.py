"""Cache entries as shared libraries, which load without the DSL.

Only the DSL can load the object file that it exports, and to import it takes seconds. Linked into a shared library, the
same code needs ``tvm_ffi`` and the DSL's runtime library, which the dynamic loader finds by the path that it was linked
with. The C compiler of the machine links: ``$CC``, else ``cc``, ``gcc``, ``g++`` or ``clang``.

The file ends in the SHA-256 of all before it: the dynamic loader does not notice a truncated library, and crashes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("replayssm_cute")


def beside(entry: Path) -> Path:
    """Where the library of an object file is kept; the name holds where the DSL is installed, as its code does."""
    return entry.with_suffix(f".{_installation()}.so")


@functools.cache
def _installation() -> str:
    spec = importlib.util.find_spec("cutlass")
    return hashlib.sha256(str(spec and spec.origin).encode()).hexdigest()[:8]


def load(library: Path, symbol: str) -> Callable[..., Any]:
    """The function ``symbol`` of a library; its code stays mapped as long as the process lives.

    Raises:
        OSError: there is no such file.
        Exception: it is damaged, or does not load.
    """
    content = library.read_bytes()
    if _seal(content[:-32]) != content[-32:]:
        raise ValueError("its checksum differs")
    import tvm_ffi
    return getattr(tvm_ffi.load_module(str(library)), symbol)


def link(entry: Path, library: Path, symbol: str) -> Callable[..., Any] | None:
    """Link an object file into a library and load it. Imports the DSL.

    The library appears by atomic rename, after it has been loaded.

    Returns:
        The function; None, logged once, where that fails: the object file then still has to be loaded.
    """
    try:
        with tempfile.TemporaryDirectory(dir=library.parent, suffix=".tmp") as folder:
            linked = Path(folder, "linked.so")
            subprocess.run(_command(entry, linked), check=True, capture_output=True, text=True, timeout=60)
            content = linked.read_bytes()
            linked.write_bytes(content + _seal(content))
            found = load(linked, symbol)
            os.replace(linked, library)
            return found
    except Exception as error:
        log.debug("no shared library of %s: %s %s", entry, error, getattr(error, "stderr", None) or "")
        _say(type(error).__name__)
        return None


@functools.cache
def _say(reason: str) -> None:
    log.info("shared libraries of the kernels cannot be made (%s): the DSL loads them, seconds later", reason)


def _command(entry: Path, library: Path) -> list[str]:
    """What links; every symbol must resolve now, and in the libraries that the DSL's own loader would take."""
    compiler = shlex.split(os.environ.get("CC", "")) or [
        name for name in ("cc", "gcc", "g++", "clang") if shutil.which(name)][:1]
    if not compiler:
        raise FileNotFoundError("no C compiler")
    from cutlass.cute.runtime import find_runtime_libraries
    libraries = find_runtime_libraries(enable_tvm_ffi=True)
    paths = [word for path in libraries for word in ("-rpath", str(Path(path).parent))]
    # An rpath of the old kind precedes LD_LIBRARY_PATH, which may hold the runtime of another version.
    options = ["--disable-new-dtags", "-Bsymbolic", "-z", "defs", "-z", "now", *paths]
    return [*compiler, "-shared", "-o", str(library), str(entry), *libraries,
            *(word for option in options for word in ("-Xlinker", option))]


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
