"""Adapters between Paddock and other ecosystems, in both directions: one module for each ecosystem.

    gymnasium   any Gymnasium environment as a target; `RemoteEnv` and `RemoteVectorEnv` the other way
    openenv     environment classes of OpenEnv, here or in a virtual environment of their own
    verifiers   tasksets of verifiers, in a virtual environment of their own
    mcp         MCP servers, over stdio and HTTP

Each target adapter has `load(rest)`, which gets what stands behind the colon and returns what to serve and its name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paddock.distribution import package_command
from paddock.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable

TARGETS = {
    "gymnasium": ("paddock.adapters.gymnasium.environment", "gymnasium:ID"),
    "openenv": ("paddock.adapters.openenv", "openenv:pkg.mod:Class[@VENV]"),
    "verifiers": ("paddock.adapters.verifiers", "verifiers:ID@VENV"),
    "mcp": ("paddock.adapters.mcp", "mcp:COMMAND"),
    "mcp+http": ("paddock.adapters.mcp", "mcp+http://HOST/PATH"),
    "mcp+https": ("paddock.adapters.mcp", "mcp+https://HOST/PATH"),
}
"""By the word before the colon: the module with `load`, and the form to write."""


def is_target(target: str) -> bool:
    return target.partition(":")[0] in TARGETS


def load(target: str) -> tuple[Callable[[], Any], str]:
    """What to serve for a target of one of these forms, and the name to serve it under. Raises TargetError."""
    scheme, _, rest = target.partition(":")
    module, form = TARGETS[scheme]
    if not rest.strip("/ "):
        raise TargetError(f"{target!r} names nothing", hint=f"write {form}")
    try:
        adapter = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing(error, f"{scheme}: targets") from error
    loaded: tuple[Callable[[], Any], str] = adapter.load(target if scheme.startswith("mcp+") else rest)
    return loaded


def missing(error: ModuleNotFoundError, what: str) -> TargetError:
    """The error for a package that only an extra brings."""
    name = error.name or "a package"
    hint = package_command(name.partition(".")[0])
    return TargetError(f"{what} need {name}, which is not installed", hint=hint)
