"""The agent's side of an instance: list tools, call tools, nothing else.

A call is repeated only when it provably did not run, when the tool says that repeating it does no harm, or when the
server recognises it. Any other lost answer is an `OutcomeUnknown`, which the agent is meant to read.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from paddock.errors import ConfigError
from paddock.fleet.errors import (
    FleetError,
    InstanceGone,
    OutcomeUnknown,
    ProtocolError,
    ToolCallFailed,
    ToolsUnavailable,
    UnknownTool,
)
from paddock.fleet.events import (
    CallToolExhausted,
    CallToolRetry,
    ListToolsExhausted,
    ListToolsPartial,
    ListToolsRetry,
    TaskContext,
    ToolCollision,
    ambient_context,
)
from paddock.fleet.listing import Asked, Listing, is_absence
from paddock.fleet.mcp import McpEndpoint
from paddock.fleet.models import ListToolsAction
from paddock.fleet.results import extract
from paddock.fleet.retry import Backoff, Budget, Failure, retried
from paddock.fleet.schemas import convert_tool_format
from paddock.fleet.settings import call_deadline
from paddock.telemetry.bus import Bus
from paddock.telemetry.bus import bus as process_bus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.fleet.handle import InstanceHandle

logger = logging.getLogger(__name__)

Collision = Literal["first", "prefix", "error"]
Partial = Literal["report", "error"]
AFTER_THE_END = 5.0
"""Seconds past an instance's time to live that an operation still waits, to learn for sure that it ended."""
ASK_AGAIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Owned:
    """A tool under the name an agent sees, and where it is."""

    endpoint: McpEndpoint
    name: str
    is_safe: bool
    """Whether the tool says that running it twice does no harm."""
    form: dict[str, Any]
    """The tool as models are shown it."""


@dataclass
class FleetMCPTools:
    """The tools of one instance, over all its MCP endpoints."""

    api_key: str = field(repr=False)
    mcp_urls: Sequence[str] = ()
    max_retries: int = 8
    """How often an operation is tried in all, start-up not counted."""
    initial_wait: float = 8.0
    """For so many seconds an endpoint that does not answer counts as starting, and is asked at short intervals."""
    max_backoff: float = 5.0
    call_deadline_s: float = field(default_factory=call_deadline)
    list_deadline_s: float = 60.0
    attempt_timeout_s: float = 60.0
    """For one try of a call that may be repeated."""
    partial_wait_s: float = 10.0
    """How long a failing endpoint is tried while another has tools already."""
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
        self._endpoints = [McpEndpoint(url, self.api_key) for url in self.mcp_urls]
        self._owners: dict[str, _Owned] = {}
        self._collided: frozenset[str] = frozenset()
        self._asked_at = 0.0

    # -- listing --------------------------------------------------------------------------------------

    async def list_tools(self, wanted: Callable[[str], bool] | None = None) -> ListToolsAction:
        """The tools of all endpoints together, in OpenAI form.

        Waits for endpoints that are starting, and for those that fail as long as no tool is `wanted` (any will do if
        that is not given). Raises ToolsUnavailable when there are none, InstanceGone when the instance ended.
        """
        budget = self._budget(self.list_deadline_s)
        tries = Backoff(longest=self.max_backoff, attempts=self.max_retries, eager_for=self.initial_wait)
        listing = await self._asked(budget, tries, wanted or (lambda name: True))
        names = [tool["name"] for one in listing.asked for tool in one.tools or ()]
        if not names:
            raise self._exhausted(listing)
        self._report_partial(listing, len(names))
        return ListToolsAction(tools=self._united(listing.asked))

    async def _asked(self, budget: Budget, tries: Backoff, wanted: Callable[[str], bool]) -> Listing:
        listing = Listing(
            self._endpoints,
            budget=budget,
            backoff=tries,
            patience=self.partial_wait_s,
            wanted=wanted,
            told=self._list_failed,
        )
        await listing.run()
        return listing

    async def _list_failed(self, endpoint: McpEndpoint, failure: Failure) -> None:
        if is_absence(failure.error) and failure.attempt == 1:
            return  # An image without this endpoint is nothing to tell of; one that stays away is.
        self.bus.emit(
            ListToolsRetry(
                context=self.context,
                error_type=type(failure.error).__name__,
                error_message=str(failure.error),
                attempt=failure.attempt,
                retry_delay_s=failure.pause,
                endpoint=endpoint.url,
            )
        )
        if time.monotonic() - self._asked_at >= ASK_AGAIN_SECONDS:
            self._asked_at = time.monotonic()
            await self._stop_if_gone(failure.error)

    def _exhausted(self, listing: Listing) -> ToolsUnavailable:
        errors = [one.error for one in listing.asked if one.error is not None]
        said = "; ".join(str(error) for error in errors) or "no endpoint answered in time"
        logger.error("[%s] no tools: %s", self.context.label, said)
        self.bus.emit(
            ListToolsExhausted(
                context=self.context,
                error_type=type(errors[0]).__name__ if errors else "FleetTimeout",
                error_message=said,
            )
        )
        return ToolsUnavailable(f"no tools: {said}", hint="is the instance healthy, and does it serve MCP?")

    def _report_partial(self, listing: Listing, count: int) -> None:
        failed = [one for one in listing.asked if one.has_failed]
        if not failed:
            return
        said = "; ".join(str(one.error or "no answer yet") for one in failed)
        logger.warning("[%s] tools are incomplete: %s", self.context.label, said)
        self.bus.emit(
            ListToolsPartial(
                context=self.context,
                failed_endpoints=tuple(one.endpoint.url for one in failed),
                tool_count=count,
                error_message=said,
            )
        )
        if self.on_partial == "error":
            raise ToolsUnavailable(f"tools are incomplete: {said}", hint='on_partial="report" goes on without them')

    def _united(self, asked: list[Asked]) -> list[dict[str, Any]]:
        owners: dict[str, _Owned] = {}
        collided: set[str] = set()
        for one in asked:
            for tool in one.tools or ():
                name = shown = tool["name"]
                known = owners.get(name)
                if known is not None and known.endpoint is one.endpoint:
                    continue
                if known is not None:
                    # An aggregator repeats the tools of the application behind it: the same tool is no surprise.
                    if self.on_collision != "first" or known.form != convert_tool_format(tool):
                        collided.add(name)
                    if self.on_collision == "first":
                        continue
                    shown = f"{_prefix(one.endpoint.url, self.mcp_urls)}__{name}"
                form = convert_tool_format({**tool, "name": shown})
                owners[shown] = _Owned(one.endpoint, name, _is_safe(tool), form)
        self._report_collision(frozenset(collided))
        self._owners = owners
        return [owned.form for owned in owners.values()]

    def _report_collision(self, names: frozenset[str]) -> None:
        if not names:
            return
        listed = tuple(sorted(names))
        if self.on_collision == "error":
            raise ToolsUnavailable(
                f"several endpoints offer {', '.join(listed)}", hint='on_collision="first" or "prefix" decides'
            )
        if names != self._collided:
            self._collided = names
            logger.warning(
                "[%s] several endpoints offer %s: %s", self.context.label, ", ".join(listed), self.on_collision
            )
            self.bus.emit(ToolCollision(context=self.context, tool_names=listed, policy=self.on_collision))

    # -- calling --------------------------------------------------------------------------------------

    async def call_tool(self, tool_name: str, arguments: dict[str, Any] | None = None) -> Any:
        """What the tool answered; `{"error": …}` if it said that it failed.

        Raises UnknownTool (a ValueError), OutcomeUnknown, ToolCallFailed (both RuntimeErrors), or InstanceGone.
        """
        budget = self._budget(self.call_deadline_s)
        owned = self._owners.get(tool_name) or await self._find(tool_name, budget)
        try:
            result = await self._called(owned, tool_name, arguments or {}, budget)
        except FleetError as error:
            raise await self._explained(owned, tool_name, error) from error
        return extract(result)

    async def close(self) -> None:
        """End the sessions that servers keep for us."""
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    async def _find(self, tool_name: str, budget: Budget) -> _Owned:
        tries = Backoff(longest=self.max_backoff, attempts=self.max_retries)
        listing = await self._asked(budget, tries, lambda name: True)
        self._united(listing.asked)
        owned = self._owners.get(tool_name)
        if owned is not None:
            return owned
        failed = [str(one.error) for one in listing.asked if one.has_failed]
        if failed or not self._owners:
            raise ToolCallFailed(f"{tool_name} was not called, its endpoint does not answer: {'; '.join(failed)}")
        known = ", ".join(sorted(self._owners))
        raise UnknownTool(f"there is no tool {tool_name!r}; there are {known}")

    async def _called(self, owned: _Owned, name: str, arguments: dict[str, Any], budget: Budget) -> dict[str, Any]:
        endpoint = owned.endpoint
        key = str(uuid.uuid4())
        tries = Backoff(longest=self.max_backoff, attempts=self.max_retries)

        async def told(failure: Failure) -> None:
            self.bus.emit(
                CallToolRetry(
                    context=self.context,
                    error_type=type(failure.error).__name__,
                    error_message=str(failure.error),
                    attempt=failure.attempt,
                    retry_delay_s=failure.pause,
                    tool_name=name,
                )
            )
            await self._stop_if_gone(failure.error)

        # What goes wrong before the call itself is sent can always be tried again.
        await retried(
            endpoint.ready,
            what=f"connecting to {endpoint.url}",
            budget=budget,
            backoff=tries,
            attempt_seconds=self.attempt_timeout_s,
            may_retry=lambda error: error.transient,
            before_retry=told,
        )
        may_repeat = owned.is_safe or endpoint.repeats_safely
        return await retried(
            lambda: endpoint.call_tool(owned.name, arguments, key),
            what=f"calling {name}",
            budget=budget,
            backoff=tries,
            attempt_seconds=self.attempt_timeout_s if may_repeat else None,
            may_retry=lambda error: error.transient and (may_repeat or error.ran is False),
            before_retry=told,
        )

    async def _explained(self, owned: _Owned, name: str, error: FleetError) -> FleetError:
        """What a failed call means to whoever made it."""
        if isinstance(error, InstanceGone):
            return error
        if error.transient and self.handle is not None and await self.handle.is_gone():
            return InstanceGone(f"the instance ended while {name} was called ({error})")
        if error.ran is None and not owned.is_safe and not isinstance(error, ProtocolError):
            explained: FleetError = OutcomeUnknown(
                f"outcome unknown: {name} may or may not have taken effect ({error})",
                hint="look at the state before calling it again",
            )
        else:
            explained = ToolCallFailed(f"{name} failed: {error}")
        self.bus.emit(
            CallToolExhausted(
                context=self.context,
                error_type=type(error).__name__,
                error_message=str(error),
                tool_name=name,
            )
        )
        return explained

    async def _stop_if_gone(self, error: FleetError) -> None:
        if self.handle is not None and await self.handle.is_gone():
            raise InstanceGone(f"the instance ended ({error})")

    def _budget(self, seconds: float) -> Budget:
        left = self.handle.seconds_left if self.handle is not None else None
        return Budget(seconds if left is None else min(seconds, max(left, 0.0) + AFTER_THE_END))


def _is_safe(tool: dict[str, Any]) -> bool:
    hints = tool.get("annotations")
    return isinstance(hints, dict) and (hints.get("readOnlyHint") is True or hints.get("idempotentHint") is True)


def _prefix(url: str, urls: Sequence[str]) -> str:
    """What tells this endpoint from the others: its path, without the part that they all share."""
    paths = [urlsplit(each).path.strip("/").split("/") for each in urls]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    return "_".join(urlsplit(url).path.strip("/").split("/")[shared:])
