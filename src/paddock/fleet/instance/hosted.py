"""The one environment of an instance: every use of it takes its turn.

Tools, resets, the page and questions to the databases never overlap. The machinery is that of the server, with a
single session that lasts as long as the instance.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from typing import TYPE_CHECKING, Any, TypeVar

from paddock.config import Limits, ServerConfig
from paddock.errors import ConfigError, EnvironmentFailure
from paddock.fleet.instance.databases import Databases
from paddock.protocol.episode import Reset
from paddock.protocol.redact import redact
from paddock.server.service import Service
from paddock.sessions.blueprint import Blueprint
from paddock.sessions.session import Door
from paddock.targets import load_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.fleet.instance.order import Order
    from paddock.sessions.session import Session

logger = logging.getLogger("paddock.fleet.instance")
ResultT = TypeVar("ResultT")
FAILURES = (sqlite3.Error, sqlite3.Warning, OSError, ValueError, OverflowError)
"""What a question to the databases may raise."""
LIMITS = Limits(session_timeout=None, step_timeout=120.0, drain_grace=1.0, threads=4)


class HostedEnvironment:
    """Make it before the loop runs, `open` it inside."""

    def __init__(self, order: Order) -> None:
        os.environ.update(order.variables())
        make, _ = load_target(order.target)
        self.blueprint = Blueprint(make, name=order.env_key)
        if not self.blueprint.has_tools:
            raise ConfigError(
                f"{self.blueprint.cls.__name__} has no tools",
                hint="only a ToolEnvironment can be hosted as an instance",
            )
        self.service = Service(self.blueprint, ServerConfig(limits=LIMITS))
        self.databases = Databases(order.folder) if hasattr(self.blueprint.cls, "open_database") else None
        self.has_page = hasattr(self.blueprint.cls, "page")
        self.turn = asyncio.Lock()
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    async def open(self) -> None:
        """Build the environment and begin its first episode. Raises PaddockError."""
        self._session = await self.service.manager.open(Door.CREATED)
        await self.reset({})

    async def reset(self, arguments: dict[str, Any]) -> None:
        """Begin a new episode: `current` is made anew, and kept as `seed`.

        Raises PaddockError, or one of FAILURES.
        """
        async with self.turn:
            databases = self.databases
            if databases is not None:
                path = await asyncio.to_thread(databases.clear)
                await self._invoke("open_database", str(path))
            await self.service.dispatch.ask(self.session, Reset(arguments))
            if databases is not None:
                await asyncio.to_thread(databases.keep_seed)

    async def page(self) -> str:
        async with self.turn:
            return str(await self._invoke("page"))

    async def ask_databases(self, ask: Callable[[], ResultT]) -> ResultT:
        """Look into the databases, on a thread."""
        async with self.turn:
            return await asyncio.to_thread(ask)

    async def _invoke(self, name: str, *arguments: Any) -> Any:
        """Call a method of the environment that is no tool. Raises EnvironmentFailure."""
        try:
            return await self.session.invoke(name, *arguments)
        except Exception as error:
            logger.exception("%s failed", name)
            raise EnvironmentFailure(redact(f"{name}: {type(error).__name__}: {error}")) from error
