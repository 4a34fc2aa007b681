"""A stand-in for the `fleet` package, which verifiers import from and which is not needed to run them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

PACKAGE = "fleet"


def verifier(*given: Any, **_options: Any) -> Any:
    """The `@verifier` of the SDK, with or without arguments: the function stays what it is."""
    return given[0] if given and callable(given[0]) else lambda function: function


def install(names: dict[str, Any]) -> None:
    """Let `import fleet` and everything below it succeed, and find `names` there."""
    sys.meta_path.insert(0, _Finder(names))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(
            {name: value for name, value in self._names.items() if not isinstance(value, ModuleType)}
        )


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        """A type to annotate with, for every name that verifiers do not need."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
