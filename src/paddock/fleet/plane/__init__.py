"""The self-hosted control plane: environments of this machine, offered over the HTTP API of Fleet.

`app` is the ASGI application. Each resource has a module with its routes and its tables: `instances`, `environments`,
`tasks`, `verifiers`, `sessions`. `instance_manager` starts and ends instances in `processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.lazy import lazy_exports

if TYPE_CHECKING:
    from paddock.fleet.plane.app import create_plane as create_plane
    from paddock.fleet.plane.app import run_plane as run_plane
    from paddock.fleet.plane.app import serve_plane as serve_plane
    from paddock.fleet.plane.settings import HostedEnvironment as HostedEnvironment
    from paddock.fleet.plane.settings import PlaneSettings as PlaneSettings

# Lazy: every instance imports this package for its faults, and none needs a plane.
_MODULES = {
    "HostedEnvironment": "paddock.fleet.plane.settings",
    "PlaneSettings": "paddock.fleet.plane.settings",
    "create_plane": "paddock.fleet.plane.app",
    "run_plane": "paddock.fleet.plane.app",
    "serve_plane": "paddock.fleet.plane.app",
}
__all__ = list(_MODULES)
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
