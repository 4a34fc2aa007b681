"""Finding the environment that a TARGET names.

A target is a shipped name (`echo`), a class in a module (`pkg.mod:Class`), a class in a file
(`path/to/file.py:Class`), or an environment of another ecosystem (`gymnasium:ID`, `openenv:…`, `mcp:…`).
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from paddock import adapters
from paddock.envs import SHIPPED
from paddock.errors import TargetError
from paddock.loading import class_in_file, class_in_module, missing_class

if TYPE_CHECKING:
    from collections.abc import Callable

FORMS = ", ".join(
    ["a shipped name", "pkg.mod:Class", "path/to/file.py:Class", *(form for _, form in adapters.TARGETS.values())]
)


def load_target(target: str) -> tuple[Callable[[], Any], str]:
    """The class or factory that `target` names, and the name to serve it under."""
    if target in SHIPPED:
        return class_in_module(SHIPPED[target]), target
    if adapters.is_target(target):
        return adapters.load(target)
    place, colon, attribute = target.rpartition(":")
    if target.endswith(".py"):
        raise missing_class(target)
    if not colon or not place:
        close = difflib.get_close_matches(target, SHIPPED, 1)
        suggestion = f"did you mean {close[0]!r}? " if close else ""
        shipped = ", ".join(SHIPPED)
        raise TargetError(
            f"no environment is called {target!r}", hint=f"{suggestion}shipped: {shipped}; or give {FORMS}"
        )
    if place.endswith(".py"):
        return class_in_file(place, attribute), attribute.lower()
    return class_in_module(target), attribute.lower()


def environment_of(target: str) -> Callable[[], Any]:
    """The class or factory alone: for a process that needs the same environment. Raises TargetError."""
    return load_target(target)[0]
