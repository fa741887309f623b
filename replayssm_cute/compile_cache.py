"""Compiled CuTe functions, kept in memory and on disk.

A disk entry is an object file that holds the cubin and its host stub, and beside it the same as a
shared library (``shared_object``), which loads without the DSL. Its folder carries the
fingerprint of everything that shapes the code: the sources of the kernels, the DSL's version and
this package's; its name the architecture and a hash of the kernel's own key. Entries appear by
atomic rename under a lock per entry, so several processes may start at once and one compiles.

``REPLAYSSM_CACHE_DIR`` names the folder (read at first use); by default it is
``$XDG_CACHE_HOME/replayssm_cute`` or ``~/.cache/replayssm_cute``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replayssm_cute import shared_object

log = logging.getLogger("replayssm_cute")

_SYMBOL = "replayssm_step"
_memory: dict[tuple[Any, ...], Callable[..., Any]] = {}
_modules: list[Any] = []  # loaded code stays mapped as long as the process lives


def cache_dir() -> Path:
    """The folder of this build of the kernels; it may not exist yet."""
    root = os.environ.get("REPLAYSSM_CACHE_DIR")
    if not root:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        root = os.path.join(home, "replayssm_cute")
    return Path(root) / _fingerprint()


@functools.cache
def _fingerprint() -> str:
    """Hash of the kernels' sources and of the versions that turn them into code."""
    from replayssm_cute import __version__
    digest = hashlib.sha256(f"{__version__} {_dsl_version()}".encode())
    for source in sorted(Path(__file__).with_name("kernels").glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _dsl_version() -> str:
    """The version of the DSL that would be imported, read in its source, for to import it takes seconds.

    What is installed by that name need not be what is imported: a folder on ``PYTHONPATH`` comes before it.
    """
    spec = importlib.util.find_spec("cutlass")
    if spec is not None and spec.origin is not None:
        found = re.search(r"""^__version__ = ["'](.+)["']$""", Path(spec.origin).read_text(), re.M)
        if found:
            return found[1]
    import cutlass
    return cutlass.__version__


def get(target: str, key: tuple[Any, ...], build: Callable[[], Any]) -> Callable[..., Any]:
    """The compiled function for ``key`` on ``target``: from memory, from disk, or built now.

    Args:
        target: compilation target, for example ``"sm_100a"``.
        key: everything that distinguishes this function from others of the same sources; its
            ``repr`` must be stable across processes.
        build: compiles it; called at most once per key across processes that share the folder.
    """
    whole = (target, *key)
    found = _memory.get(whole)
    if found is None:
        found = _memory[whole] = _from_disk(target, key, build)
    return found


def _from_disk(target: str, key: tuple[Any, ...], build: Callable[[], Any]) -> Callable[..., Any]:
    entry = cache_dir() / f"{target}-{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.o"
    library = shared_object.beside(entry)
    with contextlib.suppress(Exception):  # what is missing or damaged is made anew under the lock
        return shared_object.load(library, _SYMBOL)
    from filelock import FileLock
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(entry) + ".lock"):
            loaded = _load(shared_object.load, library) or _from_object(entry, library)
            if loaded is None:
                _store(entry, build())
                # Load what was stored: it is called with less host work than a fresh compilation.
                loaded = _from_object(entry, library)
            if loaded is not None:
                return loaded
    except OSError as error:
        log.warning("kernel cache %s cannot be used (%s); compiling for this process only", entry, error)
    return build()


def _from_object(entry: Path, library: Path) -> Callable[..., Any] | None:
    """The function of an object file, through a library where one can be made; None where it is missing or damaged."""
    linked = shared_object.link(entry, library, _SYMBOL) if entry.exists() else None
    return linked or _load(_by_the_dsl, entry)


def _load(loader: Callable[[Path, str], Callable[..., Any]], path: Path) -> Callable[..., Any] | None:
    """The function of a file; None where there is none, or, with a warning, where the file is damaged."""
    if not path.exists():
        return None
    try:
        return loader(path, _SYMBOL)
    except Exception as error:
        log.warning("kernel cache entry %s is damaged (%s); making it anew", path, error)
        return None


def _by_the_dsl(entry: Path, symbol: str) -> Callable[..., Any]:
    """The function of an object file; imports the DSL."""
    from cutlass.cute.runtime import load_module
    module = load_module(str(entry), enable_tvm_ffi=True)
    _modules.append(module)
    return getattr(module, symbol)


def _store(path: Path, compiled: Any) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp.o")
    os.close(handle)
    try:
        compiled.export_to_c(temporary, _SYMBOL)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
