"""The self-hosted plane: environments of this machine, offered the way Fleet offers its own.

`app` is the door. `hosting` keeps instances alive and ends them, `process` and `pool` are their
processes, `records`, `tasks` and `sessions` what the database remembers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddock.fleet.control.app import create_plane as create_plane
    from paddock.fleet.control.run import run_plane as run_plane
    from paddock.fleet.control.run import serve_plane as serve_plane
    from paddock.fleet.control.settings import HostedEnvironment as HostedEnvironment
    from paddock.fleet.control.settings import PlaneSettings as PlaneSettings

# Imported when first used: every instance imports this package for its faults, and none needs a plane.
_HOMES = {
    "HostedEnvironment": "settings",
    "PlaneSettings": "settings",
    "create_plane": "app",
    "run_plane": "run",
    "serve_plane": "run",
}
__all__ = ["HostedEnvironment", "PlaneSettings", "create_plane", "run_plane", "serve_plane"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
