"""MCP over the standard input and output of a child process: one JSON-RPC message per line.

What the server writes to stderr goes to ours. It ends, with all that it started, when the transport is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import uuid
from typing import Any

from paddock.child_process import ChildProcess
from paddock.client.mcp.client import McpAnswerLost, McpError, McpUnreachable, McpUnsendable
from paddock.processes import SANDBOX_VARIABLE, end_marked_processes
from paddock.protocol.codec import decode_any, encode_any
from paddock.protocol.mcp import client_answer

logger = logging.getLogger(__name__)

EXIT_SECONDS = 2.0
HUNG_EXIT_SECONDS = 0.2
"""For a server that has written nothing since a request was cancelled: it may hang in it."""
EXIT_CODE_SECONDS = 0.5
"""Between the end of its output and its exit code."""
MAX_LINE_BYTES = 64 * 1024 * 1024
INHERITED_VARIABLES = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER", "VIRTUAL_ENV")
"""All others may hold secrets, and are passed only if they are named."""


class McpStdioTransport:
    """One process. Call `close` whatever happened."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        self.name = os.path.basename(command[0])
        self.version: str | None = None
        self.session: str | None = None
        self._command = command
        self._variables = variables
        self._responses: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: ChildProcess | None = None
        self._reader: asyncio.Task[None] | None = None
        self._may_hang = False
        self._mark = f"mcp-{uuid.uuid4().hex}"

    async def open(self) -> None:
        inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        env = {**inherited, **self._variables, SANDBOX_VARIABLE: self._mark}
        try:
            self._process = await ChildProcess.start(self._command, env=env, max_line_bytes=MAX_LINE_BYTES)
        except OSError as error:
            raise McpUnreachable(
                f"the MCP server {self._command[0]!r} cannot be started: {error.strerror}", hint="is it installed?"
            ) from error
        self._reader = asyncio.create_task(self._read(self._process))

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """The response. A caller that is cancelled tells the server so."""
        number = message["id"]
        response: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._responses[number] = response
        try:
            await self.notify(message)
            return await response
        except asyncio.CancelledError:
            self._may_hang = True
            params = {"requestId": number, "reason": "its caller gave it up"}
            with contextlib.suppress(McpError):
                await self.notify({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})
            raise
        finally:
            self._responses.pop(number, None)

    async def notify(self, message: dict[str, Any]) -> None:
        if self._process is None:
            raise self._exited()
        try:
            line = encode_any(message)
        except ValueError as error:
            raise McpUnsendable(f"this cannot be written as JSON: {error}") from error
        try:
            self._process.write_line(line)
            await self._process.drain()
        except ConnectionError:
            raise self._exited() from None

    async def close(self) -> None:
        """End the process and whatever it started: close its stdin, then SIGTERM, then SIGKILL."""
        process, self._process = self._process, None
        if process is None:
            return
        seconds = HUNG_EXIT_SECONDS if self._may_hang else EXIT_SECONDS
        process.close_input()
        try:
            if not await process.wait(seconds):
                process.send_signal(signal.SIGTERM, group=True)
                await process.wait(seconds)
        finally:
            # Also when the caller is cancelled.
            if self._reader is not None:
                self._reader.cancel()
            await process.kill()
            await asyncio.to_thread(end_marked_processes, self._mark)

    async def _read(self, process: ChildProcess) -> None:
        try:
            async for line in process.lines():
                self._may_hang = False
                if line.strip():
                    await self._take_line(line)
            await process.wait(EXIT_CODE_SECONDS)
        except (ValueError, ConnectionError) as error:
            logger.warning("the output of the MCP server %s cannot be read any more: %s", self.name, error)
        finally:
            for response in self._responses.values():
                if not response.done():
                    response.set_exception(self._exited())

    async def _take_line(self, line: bytes) -> None:
        try:
            document = decode_any(line)
        except ValueError:
            logger.warning("the MCP server %s wrote a line that is not JSON", self.name)
            return
        for message in document if isinstance(document, list) else [document]:
            if not isinstance(message, dict):
                continue
            if "method" in message:
                if "id" in message:
                    with contextlib.suppress(McpError):
                        await self.notify(client_answer(message))
                continue
            number = message.get("id")
            response = self._responses.get(number) if isinstance(number, int) else None
            if response is not None and not response.done():
                response.set_result(message)

    def _exited(self) -> McpAnswerLost:
        ended = self._process.ended if self._process is not None else None
        how = f"ended with code {ended.result()}" if ended is not None and ended.done() else "is gone"
        return McpAnswerLost(f"the MCP server {self.name} {how}", hint="reset starts a new one; its log tells why")
