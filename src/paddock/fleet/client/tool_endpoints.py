"""The MCP endpoints of an instance: one client each, and listing the tools of all of them within one deadline.

An endpoint that does not answer yet, or has no tools yet, is polled. Once there are tools that the agent can use, an
endpoint that is empty or answers 404 is ignored, and one that fails otherwise gets a little longer before the others
are used without it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from paddock.client.mcp.client import (
    McpAnswerLost,
    McpClient,
    McpError,
    McpRpcError,
    McpStatusError,
    McpUnreachable,
    McpUnsendable,
)
from paddock.client.mcp.http import McpHttpTransport
from paddock.fleet.client.errors import (
    AnswerLost,
    FleetError,
    InstanceGone,
    PlaneError,
    ProtocolError,
    RpcFailure,
    Unsendable,
)
from paddock.fleet.client.http import (
    FailedRequest,
    FleetReply,
    check_status,
    connection_error,
    retry_request,
    shorten,
)
from paddock.retry import Backoff, Deadline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

ABSENT_STATUSES = frozenset((404, 405, 501))
ATTEMPT_SECONDS = 15.0


class FleetMcpClient:
    """The MCP server at `url`, with `FleetError`s. Each method sends its request once."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url
        self._client = McpClient(McpHttpTransport(url, api_key))

    @property
    def repeats_safely(self) -> bool:
        return self._client.repeats_safely

    async def open(self) -> None:
        await self._run(self._client.open())

    async def list_tools(self) -> list[dict[str, Any]]:
        return await self._run(self._client.list_tools())

    async def call_tool(self, name: str, arguments: dict[str, Any], key: str | None = None) -> dict[str, Any]:
        return await self._run(self._client.call_tool(name, arguments, key))

    async def close(self) -> None:
        await self._client.close()

    async def _run(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except McpError as error:
            raise self._fleet_error(error) from error

    def _fleet_error(self, error: McpError) -> FleetError:
        if isinstance(error, McpStatusError):
            try:
                check_status(FleetReply(error.status, error.headers, error.body), "POST", self.url)
            except FleetError as refusal:
                return refusal
        if isinstance(error, McpRpcError):
            return RpcFailure(shorten(error.message), error.number, error.details)
        if isinstance(error, McpUnsendable):
            return Unsendable(error.message)
        if isinstance(error, McpUnreachable) and error.__cause__ is not None:
            return connection_error(error.__cause__, "POST", self.url)
        if isinstance(error, McpUnreachable | McpAnswerLost):
            return AnswerLost(error.message)
        return ProtocolError(error.message)


class NoTools(FleetError):
    """The endpoint answered without a tool."""

    transient = True


@dataclass(slots=True)
class EndpointTools:
    """One endpoint, and its last answer."""

    client: FleetMcpClient
    tools: list[dict[str, Any]] | None = None
    error: FleetError | None = None

    @property
    def is_absent(self) -> bool:
        return self.error is not None and is_absence(self.error)

    @property
    def has_failed(self) -> bool:
        """Whether it may have tools that it did not list."""
        return self.tools is None and not self.is_absent and not isinstance(self.error, NoTools)


class ToolListing:
    """Lists the tools of all endpoints, once."""

    def __init__(
        self,
        clients: list[FleetMcpClient],
        *,
        deadline: Deadline,
        backoff: Backoff,
        partial_wait_seconds: float,
        is_wanted: Callable[[str], bool],
        report_failure: Callable[[FleetMcpClient, FailedRequest], Awaitable[None]],
    ) -> None:
        self.endpoints = [EndpointTools(client) for client in clients]
        self._deadline = deadline
        self._backoff = backoff
        self._partial_wait_seconds = partial_wait_seconds
        self._is_wanted = is_wanted
        self._report_failure = report_failure
        self._changed = asyncio.Event()

    @property
    def has_wanted_tool(self) -> bool:
        return any(self._is_wanted(tool["name"]) for endpoint in self.endpoints for tool in endpoint.tools or ())

    async def run(self) -> None:
        """Poll until every endpoint has given its final answer, or until the tools that are there suffice.

        Raises InstanceGone as soon as one endpoint reports it.
        """
        tasks = [asyncio.ensure_future(self._list(endpoint)) for endpoint in self.endpoints]
        for task in tasks:
            task.add_done_callback(lambda _: self._changed.set())
        try:
            await self._wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, tasks: list[asyncio.Task[None]]) -> None:
        partial_wait: Deadline | None = None
        while True:
            self._changed.clear()
            pending = [endpoint for endpoint, task in zip(self.endpoints, tasks, strict=True) if not task.done()]
            for task in tasks:
                if task.done():
                    task.result()
            if not pending:
                return
            if all(each.is_absent for each in pending) and any(each.has_failed for each in self.endpoints):
                return  # An existing endpoint has failed for good: the absent ones will not appear either.
            if self.has_wanted_tool:
                partial_wait = partial_wait or Deadline(self._partial_wait_seconds)
                if partial_wait.seconds_left <= 0 or not any(each.has_failed for each in pending):
                    return
            try:
                async with asyncio.timeout(partial_wait.seconds_left if partial_wait is not None else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _list(self, endpoint: EndpointTools) -> None:
        async def list_once() -> list[dict[str, Any]]:
            tools = await endpoint.client.list_tools()
            if not tools:
                raise NoTools(f"{endpoint.client.url} answered without a tool")
            return tools

        async def before_retry(failed: FailedRequest) -> None:
            endpoint.error = failed.error
            self._changed.set()
            await self._report_failure(endpoint.client, failed)

        try:
            endpoint.tools = await retry_request(
                list_once,
                what=f"listing the tools of {endpoint.client.url}",
                deadline=self._deadline,
                backoff=self._backoff,
                attempt_seconds=ATTEMPT_SECONDS,
                # An endpoint that is still starting refuses, fails, or is not known to its router yet.
                may_retry=lambda error: error.transient or is_absence(error),
                before_retry=before_retry,
            )
            endpoint.error = None
        except InstanceGone:
            raise
        except FleetError as error:
            endpoint.error = error


def is_absence(error: FleetError) -> bool:
    return isinstance(error, PlaneError) and error.status in ABSENT_STATUSES
