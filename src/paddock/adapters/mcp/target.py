"""`mcp:COMMAND`, `mcp+http://…` and `mcp+https://…`: an MCP server as a target."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from paddock.adapters.mcp.environment import environment_class
from paddock.adapters.mcp.stdio import StdioServer, parse_command
from paddock.config import read_variables
from paddock.errors import EnvironmentFailure, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.adapters.mcp.environment import McpEnvironment, Server

HTTP = ("mcp+http:", "mcp+https:")


def load(rest: str) -> tuple[type[McpEnvironment], str]:
    """The class for a server, which is opened once to see its tools. Raises TargetError."""
    connect: Callable[[], Server]
    secrets: tuple[str, ...] = ()
    if rest.startswith(HTTP):
        from paddock.adapters.mcp.http import HttpServer

        token = read_variables().mcp_token or ""
        connect, secrets = partial(HttpServer, rest.removeprefix("mcp+"), token), (token,)
    else:
        command, variables = parse_command(rest)
        connect, secrets = partial(StdioServer, command, variables), tuple(variables.values())
    try:
        found: type[McpEnvironment] = _run(environment_class(connect))
    except EnvironmentFailure as error:
        raise TargetError(error.message, hint=error.hint or "is it an MCP server?") from error
    if not found.tools:
        raise TargetError(f"the MCP server {found.server_name} offers no tools", hint="an environment needs some")
    found.secrets = secrets
    return found, found.server_name


def _run(work: Any) -> Any:
    """Its result, also where a loop is running already."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
