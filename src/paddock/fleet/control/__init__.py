"""The self-hosted plane: environments of this machine, offered the way Fleet offers its own.

`app` is the door. `hosting` keeps instances alive and ends them, `process` and `pool` are their
processes, `records`, `tasks` and `sessions` what the database remembers.
"""

from __future__ import annotations

from paddock.fleet.control.app import create_plane
from paddock.fleet.control.run import run_plane, serve_plane
from paddock.fleet.control.settings import HostedEnvironment, PlaneSettings

__all__ = ["HostedEnvironment", "PlaneSettings", "create_plane", "run_plane", "serve_plane"]
