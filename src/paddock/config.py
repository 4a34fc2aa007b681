"""Limits, timeouts and settings as values, and the one place where environment variables are read."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Mode = Literal["simulation", "production"]
IsolationKind = Literal["thread", "process"]
MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server grants. Times are in seconds; None means no limit."""

    max_sessions: int = 1
    queue_timeout: float = 0.0
    """How long a newcomer waits for a slot when the server is full. 0 refuses at once."""
    max_waiting: int = 10_000
    """How many may wait for a slot, in each process. More are refused at once."""
    max_waiting_per_connection: int = 1000
    """How many sessions of one connection may wait for a slot."""
    session_timeout: float | None = 1800.0
    """A session without an attached socket is closed after this long without a request."""
    resume_window: float = 60.0
    """How long the session of a dropped socket waits for its client."""
    give_way_after: float = 5.0
    """When the server is full, a session whose socket dropped this long ago makes room."""
    step_timeout: float | None = 300.0
    """How long reset, step, state or a tool call may take, unless the request asks for less."""
    drain_grace: float = 10.0
    """How long running steps may go on after SIGTERM."""
    message_bytes: int = 100 * MEBIBYTE
    threads: int = 80
    """Threads that run sync environments."""
    ping_interval: float = 20.0
    ping_timeout: float = 20.0
    header_timeout: float = 20.0
    """The head of a request, or of a handshake, has to be complete after this long."""
    body_timeout: float = 30.0
    """How long a body may take, beside a second for every 8 KiB of it, and a vector until it opens a session."""
    max_connections: int | None = None
    """Open connections, in each process. None: the system's limit of descriptors, less a reserve."""
    unread_timeout: float = 60.0
    """A peer that reads nothing of what waits for it is disconnected after this long."""

    def __post_init__(self) -> None:
        if self.max_sessions < 1:
            raise ConfigError(f"max_sessions is {self.max_sessions}", hint="allow at least one session")
        for name in ("session_timeout", "step_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}", hint="give seconds above 0, or None for no limit")
        for name in ("queue_timeout", "resume_window", "give_way_after", "drain_grace"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give seconds, 0 or more")
        for name in ("ping_interval", "ping_timeout", "header_timeout", "body_timeout", "unread_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give seconds above 0")
        if self.max_connections is not None and self.max_connections < 1:
            raise ConfigError(f"max_connections is {self.max_connections}", hint="give at least 1, or None")
        for name in ("max_waiting", "max_waiting_per_connection", "message_bytes", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give at least 1")


@dataclass(frozen=True, slots=True)
class ConcurrencyConfig:
    """OpenEnv's form of the two limits it knows; `create_app` takes it."""

    max_concurrent_envs: int = 1
    session_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Who may talk to the server."""

    token: str | None = field(default=None, repr=False)
    """Bearer token that every request must carry. None lets everybody on this machine in."""
    hosts: frozenset[str] = frozenset()
    """Values of the Host header that are ours, beside the loopback names. Empty with a token: any."""
    origins: frozenset[str] = frozenset()
    """Browser origins allowed beside our own."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All that `create_app` decides, in one value."""

    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
    mode: Mode = "simulation"
    isolation: IsolationKind | None = None
    """Where environments run: on threads of the server, or in child processes. None leaves it to the class."""
    sessions_per_process: int | None = None
    """With child processes: how many sessions share one. None leaves it to the class."""
    find_environment: Callable[[], Any] | None = field(default=None, repr=False)
    """Finds the class or factory in a child process, where that cannot import it by its name."""

    def __post_init__(self) -> None:
        if self.isolation not in (None, *get_args(IsolationKind)):
            raise ConfigError(f"isolation is {self.isolation!r}", hint="give 'thread' or 'process'")
        if self.sessions_per_process is not None and self.sessions_per_process < 1:
            raise ConfigError(f"sessions_per_process is {self.sessions_per_process}", hint="give at least 1")


@dataclass(frozen=True, slots=True)
class Variables:
    """The environment variables Paddock knows, read once."""

    auth_token: str | None = field(default=None, repr=False)
    mode: Mode = "simulation"
    max_sessions: int | None = None
    max_waiting: int | None = None
    max_connections: int | None = None
    web: bool = False
    mcp_token: str | None = field(default=None, repr=False)
    """Opens the MCP server of an `mcp+http:` target."""


def read_variables(environ: Mapping[str, str] | None = None) -> Variables:
    """Read `PADDOCK_*`, and the variables OpenEnv gives the same meaning to."""
    source = os.environ if environ is None else environ
    mode = source.get("PADDOCK_MODE") or source.get("OPENENV_MODE") or "simulation"
    return Variables(
        auth_token=source.get("PADDOCK_AUTH_TOKEN") or None,
        mode=parse_mode(mode),
        max_sessions=_whole_number(source, "PADDOCK_MAX_SESSIONS", "MAX_CONCURRENT_ENVS"),
        max_waiting=_whole_number(source, "PADDOCK_MAX_WAITING"),
        max_connections=_whole_number(source, "PADDOCK_MAX_CONNECTIONS"),
        mcp_token=source.get("PADDOCK_MCP_TOKEN") or None,
        web=source.get("ENABLE_WEB_INTERFACE", "").strip().lower() in ("true", "1", "yes"),
    )


def _whole_number(source: Mapping[str, str], *names: str) -> int | None:
    """The value of the first of these variables that is set."""
    name = next((name for name in names if source.get(name)), None)
    if name is None:
        return None
    value = source[name]
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{name} is {value!r}", hint="give a whole number")
    return int(value)


def parse_mode(value: str) -> Mode:
    """`simulation` (reset, step and state over HTTP) or `production` (agents only)."""
    lowered = value.lower()
    if lowered == "simulation":
        return "simulation"
    if lowered == "production":
        return "production"
    raise ConfigError(f"mode is {value!r}", hint="use simulation or production")
