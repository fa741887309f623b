"""Rebind functions of another package: all of them or none, at the right moment, and back."""

from __future__ import annotations

import importlib
import importlib.abc
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from replayssm_cute.types import SUPPORTED, Support

Function = Callable[..., Any]


@dataclass(frozen=True)
class Patch:
    """One function to replace.

    Attributes:
        module: module in which the name is rebound; imported if it is not yet.
        name: the function's name there.
        replace: makes the replacement, given the original. What it returns must have the
            original's signature: that is what is compared.
        importers: modules that import the name from ``module``; where one is loaded, the name is
            rebound there too.
    """

    module: str
    name: str
    replace: Callable[[Function], Function]
    importers: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Applied:
    patch: Patch
    original: Function
    replacement: Function

    def rebind(self, old: Function, new: Function) -> None:
        """Replace ``old`` by ``new`` in every loaded module that holds it under this name."""
        for module in (self.patch.module, *self.patch.importers):
            holder = sys.modules.get(module)
            if getattr(holder, self.patch.name, None) is old:
                setattr(holder, self.patch.name, new)


class Patches:
    """Patches that stand or fall together."""

    def __init__(self) -> None:
        self._applied: list[_Applied] = []

    def apply(self, patches: Sequence[Patch]) -> Support:
        """Rebind every name, or none and say why. A second call while applied changes nothing."""
        if self._applied:
            return SUPPORTED
        checked = []
        for patch in patches:
            original = getattr(importlib.import_module(patch.module), patch.name, None)
            if original is None:
                return Support(False, f"{patch.module} has no function {patch.name}")
            replacement = patch.replace(original)
            same = same_signature(original, replacement)
            if not same:
                return Support(False, f"the signature of {patch.name} differs: {same.reason}")
            checked.append(_Applied(patch, original, replacement))
        for a in checked:
            a.rebind(a.original, a.replacement)
        self._applied = checked
        return SUPPORTED

    def revert(self) -> None:
        """Put every original back, except where someone else has rebound the name since."""
        for a in self._applied:
            a.rebind(a.replacement, a.original)
        self._applied = []


def same_signature(theirs: Function, ours: Function) -> Support:
    """Whether both take the same parameters: names, order, kinds and defaults."""
    a, b = ([(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
            for f in (theirs, ours))
    if a == b:
        return SUPPORTED
    return Support(False, f"expected {_bare(ours)}, got {_bare(theirs)}")


def _bare(function: Function) -> str:
    """The signature without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(parameters))


class OnImport(importlib.abc.MetaPathFinder):
    """Call ``action`` as soon as a module is loaded: now, or right after somebody imports it.

    So a plugin neither pays for an import that its process may never make, nor makes it earlier
    than the host wants it. ``action`` must not raise: it would break the host's import.
    """

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module, self.action = module, action
        if module in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Forget the action if it has not run."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec the other finders give, its loader extended by the action."""
        if fullname != self.module:
            return None
        others = (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self)
        spec = next((s for s in others if s is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: importlib.abc.Loader) -> None:
        # On the instance, not in a loader of our own: the module keeps its loader's type, by which
        # inspect and the debuggers find the source.
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                self.cancel()
                self.action()

        loader.exec_module = exec_module  # type: ignore[method-assign]
