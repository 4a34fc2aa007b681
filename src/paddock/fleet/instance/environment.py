"""The environment of an instance: what to host (`InstanceSpec`), and the one session in which it runs.

Tool calls, resets, the page and database queries never overlap: each holds `InstanceEnvironment.lock`. Sessions and
dispatch are those of the server. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from paddock.config import Limits, ServerConfig
from paddock.errors import ConfigError, EnvironmentFailure
from paddock.fleet.instance.databases import Databases
from paddock.protocol.episode import Reset
from paddock.protocol.redact import redact
from paddock.server.service import Service
from paddock.sessions.session import Origin
from paddock.sessions.spec import EnvironmentSpec
from paddock.targets import load_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sessions.session import Session

logger = logging.getLogger("paddock.fleet.instance")
ResultT = TypeVar("ResultT")
DATABASE_ERRORS = (sqlite3.Error, sqlite3.Warning, OSError, ValueError, OverflowError)
"""What an operation on the databases may raise."""
LIMITS = Limits(session_timeout=None, step_timeout=120.0, drain_grace=1.0, threads=4)
REQUIRED_FIELDS = ("instance_id", "env_key", "target", "folder")


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What the plane wants this process to host: the first line of its standard input."""

    instance_id: str
    env_key: str
    target: str
    folder: Path
    version: str = ""
    image_type: str | None = None
    """`mcp` adds a screen: the `computer` tool."""
    data_key: str | None = None
    data_version: str | None = None
    env_variables: dict[str, str] = field(default_factory=dict)
    runner_token: str | None = field(default=None, repr=False)
    """The `X-Runner-Token` that the management API requires."""
    api_key: str | None = field(default=None, repr=False)
    """The bearer token that the MCP endpoints require."""
    host: str = "127.0.0.1"

    @property
    def has_screen(self) -> bool:
        return self.image_type == "mcp"

    def variables(self) -> dict[str, str]:
        """The environment variables that the environment sees in addition."""
        data = {"PADDOCK_DATA_KEY": self.data_key, "PADDOCK_DATA_VERSION": self.data_version}
        return {**{name: value for name, value in data.items() if value}, **self.env_variables}


def read_spec(line: bytes) -> InstanceSpec:
    """Raises ConfigError that says what is wrong with the line."""
    try:
        document: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"the instance spec is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError("the instance spec is not a JSON object")
    missing = [name for name in REQUIRED_FIELDS if not isinstance(document.get(name), str)]
    if missing:
        raise ConfigError(f"the instance spec has no {', '.join(missing)}")
    variables = document.get("env_variables") or {}
    values = {name: value for name, value in document.items() if name in InstanceSpec.__slots__ and value is not None}
    values["folder"] = Path(document["folder"])
    values["env_variables"] = {str(name): str(value) for name, value in variables.items()}
    return InstanceSpec(**values)


class InstanceEnvironment:
    """The environment and its session. Create it before the loop runs, then `open` it inside."""

    def __init__(self, spec: InstanceSpec) -> None:
        os.environ.update(spec.variables())
        make, _ = load_target(spec.target)
        self.spec = EnvironmentSpec(make, name=spec.env_key)
        if not self.spec.has_tools:
            raise ConfigError(
                f"{self.spec.cls.__name__} has no tools",
                hint="only a ToolEnvironment can be hosted as an instance",
            )
        self.service = Service(self.spec, ServerConfig(limits=LIMITS))
        self.databases = Databases(spec.folder) if hasattr(self.spec.cls, "open_database") else None
        self.has_page = hasattr(self.spec.cls, "page")
        self.lock = asyncio.Lock()
        """Held during every use of the environment and of its databases."""
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    async def open(self) -> None:
        """Build the environment and begin its first episode. Raises PaddockError."""
        self._session = await self.service.manager.open(Origin.CREATED)
        await self.reset({})

    async def reset(self, arguments: dict[str, Any]) -> None:
        """Begin a new episode: `current` is created anew and copied to `seed`.

        Raises PaddockError, or one of DATABASE_ERRORS.
        """
        async with self.lock:
            databases = self.databases
            if databases is not None:
                path = await asyncio.to_thread(databases.clear)
                await self._invoke("open_database", str(path))
            await self.service.dispatch.execute(self.session, Reset(arguments))
            if databases is not None:
                await asyncio.to_thread(databases.keep_seed)

    async def render_page(self) -> str:
        async with self.lock:
            return str(await self._invoke("page"))

    async def read_databases(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work`, which uses the databases, on a thread."""
        async with self.lock:
            return await asyncio.to_thread(work)

    async def _invoke(self, name: str, *arguments: Any) -> Any:
        """Call a method of the environment that is not a tool. Raises EnvironmentFailure."""
        try:
            return await self.session.invoke(name, *arguments)
        except Exception as error:
            logger.exception("%s failed", name)
            raise EnvironmentFailure(redact(f"{name}: {type(error).__name__}: {error}")) from error
