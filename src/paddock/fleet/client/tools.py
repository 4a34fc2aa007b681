"""The agent's side of an instance: list tools, call tools, nothing else.

A call is retried only when it provably did not run, when the tool declares itself idempotent, or when the server
recognizes the repeated call by its key. Any other lost answer is a `ToolOutcomeUnknown`, which the agent should read.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from paddock.config import FLEET_CALL_TOOL_DEADLINE_S
from paddock.errors import ConfigError
from paddock.fleet.client.errors import (
    FleetError,
    InstanceGone,
    ProtocolError,
    ToolCallFailed,
    ToolOutcomeUnknown,
    ToolsUnavailable,
    UnknownTool,
)
from paddock.fleet.client.events import (
    CallToolExhausted,
    CallToolRetry,
    ListToolsExhausted,
    ListToolsPartial,
    ListToolsRetry,
    TaskContext,
    ToolCollision,
    ambient_context,
)
from paddock.fleet.client.http import FailedRequest, retry_request
from paddock.fleet.client.models import ListToolsAction
from paddock.fleet.client.tool_endpoints import EndpointTools, FleetMcpClient, ToolListing, is_absence
from paddock.fleet.client.tool_format import convert_result, convert_tool_format
from paddock.retry import Backoff, Deadline
from paddock.telemetry.bus import Bus
from paddock.telemetry.bus import bus as process_bus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.fleet.client.instance_handle import InstanceHandle

logger = logging.getLogger(__name__)

Collision = Literal["first", "prefix", "error"]
Partial = Literal["report", "error"]
EXPIRY_MARGIN_SECONDS = 5.0
"""How long past an instance's time to live an operation may go on, to confirm that the instance has ended."""
STATUS_INTERVAL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool and its endpoint."""

    client: FleetMcpClient
    name: str
    """Its name at the endpoint; the agent may see it with a prefix."""
    is_idempotent: bool
    definition: dict[str, Any]
    """The tool in OpenAI format."""


@dataclass
class FleetMCPTools:
    """The tools of one instance, over all its MCP endpoints."""

    api_key: str = field(repr=False)
    mcp_urls: Sequence[str] = ()
    max_retries: int = 8
    """Attempts per operation, not counting those during start-up."""
    initial_wait: float = 8.0
    """For this many seconds an endpoint that does not answer counts as starting, and is polled at short intervals."""
    max_backoff: float = 5.0
    call_deadline_s: float = field(default_factory=FLEET_CALL_TOOL_DEADLINE_S.read)
    list_deadline_s: float = 60.0
    attempt_timeout_s: float = 60.0
    """For one attempt of a call that may be repeated."""
    partial_wait_s: float = 10.0
    """How long a failing endpoint is retried while another has tools already."""
    on_collision: Collision = "first"
    on_partial: Partial = "report"
    context: TaskContext = field(default_factory=ambient_context, repr=False)
    bus: Bus = field(default=process_bus, repr=False)
    handle: InstanceHandle | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.on_collision not in ("first", "prefix", "error"):
            raise ConfigError(f"on_collision is {self.on_collision!r}", hint="use first, prefix or error")
        if self.on_partial not in ("report", "error"):
            raise ConfigError(f"on_partial is {self.on_partial!r}", hint="use report or error")
        self._clients = [FleetMcpClient(url, self.api_key) for url in self.mcp_urls]
        self._tools: dict[str, _Tool] = {}
        self._collided: frozenset[str] = frozenset()
        self._status_checked_at = 0.0

    # -- listing --------------------------------------------------------------------------------------

    async def list_tools(self, wanted: Callable[[str], bool] | None = None) -> ListToolsAction:
        """The tools of all endpoints together, in OpenAI format.

        Waits for endpoints that are starting, and for those that fail as long as no tool is `wanted` (by default,
        every tool is). Raises ToolsUnavailable when there are none, InstanceGone when the instance ended.
        """
        deadline = self._deadline(self.list_deadline_s)
        backoff = Backoff(
            longest_seconds=self.max_backoff, attempts=self.max_retries, startup_seconds=self.initial_wait
        )
        listing = await self._list_endpoints(deadline, backoff, wanted or (lambda name: True))
        count = sum(len(endpoint.tools or ()) for endpoint in listing.endpoints)
        if not count:
            raise self._report_exhausted(listing)
        self._report_partial(listing, count)
        return ListToolsAction(tools=self._merge(listing.endpoints))

    async def _list_endpoints(
        self, deadline: Deadline, backoff: Backoff, wanted: Callable[[str], bool]
    ) -> ToolListing:
        listing = ToolListing(
            self._clients,
            deadline=deadline,
            backoff=backoff,
            partial_wait_seconds=self.partial_wait_s,
            is_wanted=wanted,
            report_failure=self._report_list_retry,
        )
        await listing.run()
        return listing

    async def _report_list_retry(self, client: FleetMcpClient, failed: FailedRequest) -> None:
        if is_absence(failed.error) and failed.attempt == 1:
            return  # Many images lack one of the endpoints.
        self.bus.emit(ListToolsRetry.of_attempt(self.context, failed, endpoint=client.url))
        if time.monotonic() - self._status_checked_at >= STATUS_INTERVAL_SECONDS:
            self._status_checked_at = time.monotonic()
            await self._raise_if_gone(failed.error)

    def _report_exhausted(self, listing: ToolListing) -> ToolsUnavailable:
        errors = [endpoint.error for endpoint in listing.endpoints if endpoint.error is not None]
        message = "; ".join(str(error) for error in errors) or "no endpoint answered in time"
        logger.error("[%s] no tools: %s", self.context.label, message)
        self.bus.emit(
            ListToolsExhausted(
                context=self.context,
                error_type=type(errors[0]).__name__ if errors else "FleetTimeout",
                error_message=message,
            )
        )
        return ToolsUnavailable(f"no tools: {message}", hint="is the instance healthy, and does it serve MCP?")

    def _report_partial(self, listing: ToolListing, count: int) -> None:
        failed = [endpoint for endpoint in listing.endpoints if endpoint.has_failed]
        if not failed:
            return
        message = "; ".join(str(endpoint.error or "no answer yet") for endpoint in failed)
        logger.warning("[%s] tools are incomplete: %s", self.context.label, message)
        self.bus.emit(
            ListToolsPartial(
                context=self.context,
                failed_endpoints=tuple(endpoint.client.url for endpoint in failed),
                tool_count=count,
                error_message=message,
            )
        )
        if self.on_partial == "error":
            raise ToolsUnavailable(
                f"tools are incomplete: {message}", hint='on_partial="report" goes on without them'
            )

    def _merge(self, endpoints: list[EndpointTools]) -> list[dict[str, Any]]:
        tools: dict[str, _Tool] = {}
        collided: set[str] = set()
        for endpoint in endpoints:
            for tool in endpoint.tools or ():
                name = visible_name = tool["name"]
                existing = tools.get(name)
                if existing is not None and existing.client is endpoint.client:
                    continue
                if existing is not None:
                    # An aggregator repeats the tools of the application behind it: the same tool is no collision.
                    if self.on_collision != "first" or existing.definition != convert_tool_format(tool):
                        collided.add(name)
                    if self.on_collision == "first":
                        continue
                    visible_name = f"{_prefix(endpoint.client.url, self.mcp_urls)}__{name}"
                definition = convert_tool_format({**tool, "name": visible_name})
                tools[visible_name] = _Tool(endpoint.client, name, _is_idempotent(tool), definition)
        self._report_collision(frozenset(collided))
        self._tools = tools
        return [tool.definition for tool in tools.values()]

    def _report_collision(self, names: frozenset[str]) -> None:
        if not names:
            return
        sorted_names = tuple(sorted(names))
        if self.on_collision == "error":
            raise ToolsUnavailable(
                f"several endpoints offer {', '.join(sorted_names)}", hint='on_collision="first" or "prefix" decides'
            )
        if names != self._collided:
            self._collided = names
            logger.warning(
                "[%s] several endpoints offer %s: %s", self.context.label, ", ".join(sorted_names), self.on_collision
            )
            self.bus.emit(ToolCollision(context=self.context, tool_names=sorted_names, policy=self.on_collision))

    # -- calling --------------------------------------------------------------------------------------

    async def call_tool(self, tool_name: str, arguments: dict[str, Any] | None = None) -> Any:
        """The result of the tool; `{"error": …}` if it reports an error.

        Raises UnknownTool (a ValueError), ToolOutcomeUnknown, ToolCallFailed (both RuntimeErrors), or InstanceGone.
        """
        deadline = self._deadline(self.call_deadline_s)
        tool = self._tools.get(tool_name) or await self._find_tool(tool_name, deadline)
        try:
            result = await self._call(tool, tool_name, arguments or {}, deadline)
        except FleetError as error:
            raise await self._explain_failure(tool, tool_name, error) from error
        return convert_result(result)

    async def close(self) -> None:
        """Close the MCP sessions."""
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _find_tool(self, tool_name: str, deadline: Deadline) -> _Tool:
        listing = await self._list_endpoints(deadline, self._backoff, lambda name: True)
        self._merge(listing.endpoints)
        tool = self._tools.get(tool_name)
        if tool is not None:
            return tool
        failed = [str(endpoint.error) for endpoint in listing.endpoints if endpoint.has_failed]
        if failed or not self._tools:
            raise ToolCallFailed(f"{tool_name} was not called, its endpoint does not answer: {'; '.join(failed)}")
        names = ", ".join(sorted(self._tools))
        raise UnknownTool(f"there is no tool {tool_name!r}; there are {names}")

    async def _call(self, tool: _Tool, name: str, arguments: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        client, key = tool.client, str(uuid.uuid4())

        async def before_retry(failed: FailedRequest) -> None:
            self.bus.emit(CallToolRetry.of_attempt(self.context, failed, tool_name=name))
            await self._raise_if_gone(failed.error)

        # A failure before the call itself is sent can always be retried.
        await retry_request(
            client.open,
            what=f"connecting to {client.url}",
            deadline=deadline,
            backoff=self._backoff,
            attempt_seconds=self.attempt_timeout_s,
            may_retry=lambda error: error.transient,
            before_retry=before_retry,
        )
        may_repeat = tool.is_idempotent or client.repeats_safely
        return await retry_request(
            lambda: client.call_tool(tool.name, arguments, key),
            what=f"calling {name}",
            deadline=deadline,
            backoff=self._backoff,
            attempt_seconds=self.attempt_timeout_s if may_repeat else None,
            may_retry=lambda error: error.transient and (may_repeat or error.ran is False),
            before_retry=before_retry,
        )

    async def _explain_failure(self, tool: _Tool, name: str, error: FleetError) -> FleetError:
        """The error that the caller of a tool gets."""
        if isinstance(error, InstanceGone):
            return error
        if error.transient and self.handle is not None and await self.handle.is_gone():
            return InstanceGone(f"the instance ended while {name} was called ({error})")
        if error.ran is None and not tool.is_idempotent and not isinstance(error, ProtocolError):
            explained: FleetError = ToolOutcomeUnknown(
                f"outcome unknown: {name} may or may not have taken effect ({error})",
                hint="look at the state before calling it again",
            )
        else:
            explained = ToolCallFailed(f"{name} failed: {error}")
        self.bus.emit(CallToolExhausted.of(self.context, error, tool_name=name))
        return explained

    async def _raise_if_gone(self, error: FleetError) -> None:
        if self.handle is not None and await self.handle.is_gone():
            raise InstanceGone(f"the instance ended ({error})")

    @property
    def _backoff(self) -> Backoff:
        return Backoff(longest_seconds=self.max_backoff, attempts=self.max_retries)

    def _deadline(self, seconds: float) -> Deadline:
        lifetime = self.handle.seconds_left if self.handle is not None else None
        if lifetime is not None:
            seconds = min(seconds, max(lifetime, 0.0) + EXPIRY_MARGIN_SECONDS)
        return Deadline(seconds)


def _is_idempotent(tool: dict[str, Any]) -> bool:
    hints = tool.get("annotations")
    return isinstance(hints, dict) and (hints.get("readOnlyHint") is True or hints.get("idempotentHint") is True)


def _prefix(url: str, urls: Sequence[str]) -> str:
    """The path of an endpoint, without the part that all endpoints share."""
    paths = [urlsplit(each).path.strip("/").split("/") for each in urls]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    return "_".join(urlsplit(url).path.strip("/").split("/")[shared:])
