"""Compiled CuTe functions, kept in memory and on disk.

A disk entry is an object file that holds the cubin and its host stub. Its folder carries the
fingerprint of everything that shapes the code: the sources of the kernels, the DSL's version and
this package's; its name the architecture and a hash of the kernel's own key. Entries appear by
atomic rename under a lock per entry, so several processes may start at once and one compiles.

``REPLAYSSM_CACHE_DIR`` names the folder (read at first use); by default it is
``$XDG_CACHE_HOME/replayssm_cute`` or ``~/.cache/replayssm_cute``.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    import cutlass

    from replayssm_cute import __version__
    digest = hashlib.sha256(f"{__version__} {cutlass.__version__}".encode())
    for source in sorted(Path(__file__).with_name("kernels").glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


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
    from filelock import FileLock

    path = cache_dir() / f"{target}-{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.o"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(path) + ".lock"):
            loaded = _load(path) if path.exists() else None
            if loaded is None:
                _store(path, build())
                # Load what was stored: it is called with less host work than a fresh compilation.
                loaded = _load(path)
            if loaded is not None:
                return loaded
    except OSError as error:
        log.warning("kernel cache %s cannot be used (%s); compiling for this process only", path, error)
    return build()


def _load(path: Path) -> Callable[..., Any] | None:
    """The function of an entry; None, with a warning, where the file is damaged."""
    from cutlass.cute.runtime import load_module
    try:
        module = load_module(str(path), enable_tvm_ffi=True)
        _modules.append(module)
        return getattr(module, _SYMBOL)
    except Exception as error:
        log.warning("kernel cache entry %s is damaged (%s); compiling it anew", path, error)
        return None


def _store(path: Path, compiled: Any) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp.o")
    os.close(handle)
    try:
        compiled.export_to_c(temporary, _SYMBOL)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
