"""An MCP server as a child process: JSON-RPC in lines on its stdin and stdout, as small as tool use allows.

Knows no environment. What the server writes to stderr goes to ours; it ends, with all it started, when it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import shlex
import signal
import uuid
from typing import Any

import orjson
from pydantic_core import from_json

from paddock.errors import EnvironmentFailure, TargetError
from paddock.protocol.codec import encode
from paddock.protocol.jsonrpc import METHOD_NOT_FOUND
from paddock.protocol.mcp import SESSION_VERSIONS, STATELESS_VERSION, UNSUPPORTED_VERSION, client_answer
from paddock.protocol.redact import redact
from paddock.rollouts.sandbox.leftovers import MARK, end_marked

logger = logging.getLogger("paddock.adapters")

START_SECONDS = 60.0
PARTING_SECONDS = 2.0
HUNG_PARTING_SECONDS = 0.2
"""For a server that has said nothing since a request was given up: it may well hang in it."""
LONGEST_LINE = 64 * 1024 * 1024
CLIENT = {"name": "paddock", "version": "1"}
INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER", "VIRTUAL_ENV")
"""Variables that a server gets without being named; all others may hold secrets."""
ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)


class McpFailure(EnvironmentFailure):
    """The server answered a request with a JSON-RPC error."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message, rpc_code=number)
        self.number = number


def parse_command(text: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command and the variables in front of it; `NAME=$OTHER` takes the value from our own.

    Raises TargetError.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise TargetError(f"{text!r} is not a command: {error}", hint="check its quotes") from None
    variables: dict[str, str] = {}
    while words and (match := ASSIGNMENT.match(words[0])):
        name, value = match.groups()
        if value.startswith("$") and value[1:] not in os.environ:
            raise TargetError(f"{value[1:]} is not set, and {name} is to have its value", hint=f"export {value[1:]}")
        variables[name] = os.environ[value[1:]] if value.startswith("$") else value
        words = words[1:]
    if not words:
        raise TargetError(f"{text!r} names no program", hint="write mcp:PROGRAM ARGUMENTS")
    return words, variables


class StdioServer:
    """One process. Use `open`, and `close` whatever happened."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        self.command = command
        self.name = os.path.basename(command[0])
        self._variables = variables
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stateless = False
        self._may_hang = False
        self._mark = f"mcp-{uuid.uuid4().hex}"
        """In the environment of all that the server starts, so that it is found when it has left its group."""

    async def open(self) -> None:
        """Start it and agree on how to speak. Raises EnvironmentFailure."""
        kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**kept, **self._variables, MARK: self._mark},
                start_new_session=True,
                limit=LONGEST_LINE,
            )
        except OSError as error:
            raise EnvironmentFailure(
                f"the MCP server {self.command[0]!r} cannot be started: {error.strerror}", hint="is it installed?"
            ) from error
        self._reading = asyncio.create_task(self._read(self._process))
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._initialize()
        except TimeoutError:
            raise EnvironmentFailure(
                f"the MCP server {self.name} did not answer initialize within {START_SECONDS:g} s",
                hint="does it speak MCP on its standard input and output?",
            ) from None

    async def list_tools(self) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        cursor: Any = None
        seen: set[str] = set()
        while True:
            page = await self.request("tools/list", {} if cursor is None else {"cursor": cursor})
            tools += [tool for tool in page.get("tools") or () if isinstance(tool, dict) and tool.get("name")]
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or not cursor or cursor in seen:
                return tools
            seen.add(cursor)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return await self.request("tools/call", {"name": name, "arguments": arguments})

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """The result. Raises McpFailure, or EnvironmentFailure when the server is gone.

        Who stops waiting tells the server so.
        """
        number = next(self._numbers)
        if self._stateless:
            params = {**params, "_meta": {**params.get("_meta", {}), **_introduction()}}
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        try:
            await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            result = await answered
        except asyncio.CancelledError:
            self._may_hang = True
            with contextlib.suppress(EnvironmentFailure):
                told = {"requestId": number, "reason": "its caller gave it up"}
                await self._send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": told})
            raise
        finally:
            self._waiting.pop(number, None)
        return result if isinstance(result, dict) else {}

    async def close(self) -> None:
        """End the process and whatever it started: by closing its stdin, by asking, by force."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await self._leave(process)
        finally:
            # Also for what it started and left behind, and where nobody has the time to wait.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if self._reading is not None:
                self._reading.cancel()
            # Pipes that a grandchild held open do not close by themselves.
            process._transport.close()  # type: ignore[attr-defined]
            await process.wait()
            await asyncio.to_thread(end_marked, self._mark)

    async def _leave(self, process: asyncio.subprocess.Process) -> None:
        seconds = HUNG_PARTING_SECONDS if self._may_hang else PARTING_SECONDS
        for harsher in (None, signal.SIGTERM):
            if harsher is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, harsher)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await process.wait()
                    return

    # -- inside -----------------------------------------------------------------------------------------

    async def _initialize(self) -> None:
        params = {"protocolVersion": SESSION_VERSIONS[1], "capabilities": {}, "clientInfo": CLIENT}
        try:
            told = await self.request("initialize", params)
        except McpFailure as error:
            if error.number not in (METHOD_NOT_FOUND, UNSUPPORTED_VERSION):
                raise
            self._stateless = True
            return
        self.name = str((told.get("serverInfo") or {}).get("name") or self.name)
        await self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def _send(self, document: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None or self._process.returncode is not None:
            raise self._gone()
        try:
            self._process.stdin.write(encode(document) + b"\n")
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise self._gone() from None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._may_hang = False
                if line.strip():
                    await self._take(line)
        except (ValueError, ConnectionError) as error:
            logger.warning("the MCP server %s cannot be understood any more: %s", self.name, error)
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(self._gone())

    async def _take(self, line: bytes) -> None:
        try:
            document = orjson.loads(line)
        except orjson.JSONDecodeError:
            try:
                document = from_json(line)
            except ValueError:
                logger.warning("the MCP server %s wrote a line that is not JSON", self.name)
                return
        for member in document if isinstance(document, list) else [document]:
            if isinstance(member, dict):
                await self._take_one(member)

    async def _take_one(self, message: dict[str, Any]) -> None:
        if "method" in message:
            if "id" in message:
                await self._answer(message)
            return
        number = message.get("id")
        waiting = self._waiting.get(number) if isinstance(number, int) else None
        if waiting is None or waiting.done():
            return
        error = message.get("error")
        if isinstance(error, dict):
            code = error.get("code")
            said = redact(str(error.get("message") or "JSON-RPC error"))
            waiting.set_exception(McpFailure(said, code if isinstance(code, int) else 0))
        else:
            waiting.set_result(message.get("result"))

    async def _answer(self, request: dict[str, Any]) -> None:
        with contextlib.suppress(EnvironmentFailure):
            await self._send(client_answer(request))

    def _gone(self) -> EnvironmentFailure:
        code = self._process.returncode if self._process is not None else None
        how = "is gone" if code is None else f"ended with code {code}"
        return EnvironmentFailure(
            f"the MCP server {self.name} {how}", hint="reset starts a new one; its log tells why"
        )


def _introduction() -> dict[str, Any]:
    prefix = "io.modelcontextprotocol/"
    return {
        f"{prefix}protocolVersion": STATELESS_VERSION,
        f"{prefix}clientInfo": CLIENT,
        f"{prefix}clientCapabilities": {},
    }
