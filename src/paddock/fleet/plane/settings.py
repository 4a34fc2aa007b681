"""The settings of a plane: where it listens, what it hosts, its limits.

Values only. Nothing here opens a file or a port.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddock.errors import ConfigError
from paddock.loopback import is_loopback

if TYPE_CHECKING:
    from pathlib import Path

KEY_FILE = "api_key"
"""The file of the key in the state folder."""
RESERVED_KEYS = frozenset(("instances", "runs"))
WILDCARDS = frozenset(("", "0.0.0.0", "::"))
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class HostedEnvironment:
    """An environment that the plane offers under `env_key`."""

    env_key: str
    target: str
    """What `paddock.targets.load_target` understands."""
    versions: tuple[str, ...] = ("v1",)
    default_version: str | None = None
    """The version for a request that names none; the last one unless set."""
    name: str | None = None
    description: str | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.env_key) or self.env_key in RESERVED_KEYS:
            raise ConfigError(
                f"{self.env_key!r} cannot be the key of an environment",
                hint="use letters, digits, '.', '_' and '-', and neither 'instances' nor 'runs'",
            )
        if not self.versions or not all(_KEY.fullmatch(version) for version in self.versions):
            raise ConfigError(
                f"{self.env_key} has no usable version: {self.versions!r}", hint="name one, such as 'v1'"
            )
        if self.default_version is not None and self.default_version not in self.versions:
            raise ConfigError(
                f"the default version {self.default_version!r} of {self.env_key} is none of its versions",
                hint=f"choose one of {', '.join(self.versions)}",
            )

    @property
    def current_version(self) -> str:
        return self.default_version or self.versions[-1]

    def find_version(self, requested: str | None) -> str | None:
        """The requested version, or None if it does not exist. `1.0` means `v1.0` where that exists."""
        if not requested:
            return self.current_version
        return next((version for version in (requested, f"v{requested}") if version in self.versions), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSettings:
    state: Path
    """The folder of the database and of the instances. One plane uses it at a time."""
    environments: tuple[HostedEnvironment, ...]
    host: str = "127.0.0.1"
    port: int = 0
    public_host: str | None = None
    """The name in the addresses of instances; by default `host`."""
    api_key: str | None = field(default=None, repr=False)
    """None: one is created and kept in the state folder."""
    instance_limit: int = 100
    gate: bool = False
    """Instances require the runner token for their management API, and the key for their tools."""
    regions: tuple[str, ...] = ("local",)
    team_id: str = "local"
    team_name: str = "Local"
    profile_id: str = "local"
    warm: int = 2
    """How many processes wait, started and imported, for the next instance."""
    parallel_starts: int = field(default_factory=lambda: 2 * (os.cpu_count() or 1))
    default_ttl_seconds: int = 3600
    """The time to live of an instance whose request names none."""
    start_seconds: float = 60.0
    """How long one process may take to serve its instance."""
    end_seconds: float = 3.0
    """How long a process may take to end before it is killed."""
    faults: bool = False
    """Offers `/_lab/faults`, on loopback only."""
    instance_command: tuple[str, ...] = (sys.executable, "-m", "paddock.fleet.instance")

    def __post_init__(self) -> None:
        keys = [environment.env_key for environment in self.environments]
        if not keys or len(set(keys)) != len(keys):
            raise ConfigError(f"the environments of a plane need keys of their own, not {keys!r}")
        if self.instance_limit < 1 or self.parallel_starts < 1 or self.warm < 0 or self.default_ttl_seconds < 1:
            raise ConfigError("limits, parallel starts and times to live are at least 1, and warm at least 0")
        if not self.regions:
            raise ConfigError("a plane needs a region", hint="leave regions out for 'local'")
        if self.api_key is not None and (not self.api_key or not self.api_key.isascii() or " " in self.api_key):
            raise ConfigError("the API key must be plain characters without spaces")
        if not is_loopback(self.host) and not self.gate:
            raise ConfigError(
                f"{self.host} can be reached from other machines, and the instances are not gated",
                hint="switch the gate on, or listen on 127.0.0.1",
            )
        if not is_loopback(self.host) and self.faults:
            raise ConfigError(f"faults are not offered on {self.host}", hint="listen on 127.0.0.1")

    def environment(self, env_key: str) -> HostedEnvironment | None:
        return next((each for each in self.environments if each.env_key == env_key), None)

    @property
    def instance_host(self) -> str:
        """The name of this machine in the addresses that clients get."""
        host = self.public_host or ("127.0.0.1" if self.host in WILDCARDS else self.host)
        return f"[{host}]" if ":" in host else host
