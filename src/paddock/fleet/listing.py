"""Ask several MCP endpoints for their tools at once, within one budget, and know when to stop waiting.

An endpoint that does not answer yet, or has no tools yet, is polled, not slept for. Once there are tools that are
wanted, one that is empty or answers 404 is left at that, and one that fails otherwise gets a little longer before
the rest is used without it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.fleet.errors import FleetError, InstanceGone, PlaneError
from paddock.fleet.retry import Backoff, Budget, Failure, retried

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paddock.fleet.mcp import McpEndpoint

ABSENT = frozenset((404, 405, 501))
ATTEMPT_SECONDS = 15.0


class NoTools(FleetError):
    """The endpoint answered, and had none."""

    transient = True


@dataclass(slots=True)
class Asked:
    """One endpoint, and what it has said so far."""

    endpoint: McpEndpoint
    tools: list[dict[str, Any]] | None = None
    error: FleetError | None = None

    @property
    def is_absent(self) -> bool:
        return self.error is not None and is_absence(self.error)

    @property
    def has_failed(self) -> bool:
        """Whether it may have tools that it did not tell of."""
        return self.tools is None and not self.is_absent and not isinstance(self.error, NoTools)


class Listing:
    """One round of asking all endpoints."""

    def __init__(
        self,
        endpoints: list[McpEndpoint],
        *,
        budget: Budget,
        backoff: Backoff,
        patience: float,
        wanted: Callable[[str], bool],
        told: Callable[[McpEndpoint, Failure], Awaitable[None]],
    ) -> None:
        self.asked = [Asked(endpoint) for endpoint in endpoints]
        self._budget = budget
        self._backoff = backoff
        self._patience = patience
        self._wanted = wanted
        self._told = told
        self._moved = asyncio.Event()

    @property
    def is_satisfied(self) -> bool:
        return any(self._wanted(tool["name"]) for one in self.asked for tool in one.tools or ())

    async def run(self) -> None:
        """Ask until every endpoint has answered for good, or until what is there will do.

        Raises InstanceGone as soon as one endpoint learns of it.
        """
        tasks = [asyncio.ensure_future(self._ask(one)) for one in self.asked]
        for task in tasks:
            task.add_done_callback(lambda _: self._moved.set())
        try:
            await self._wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, tasks: list[asyncio.Task[None]]) -> None:
        patience: Budget | None = None
        while True:
            self._moved.clear()
            pending = [one for one, task in zip(self.asked, tasks, strict=True) if not task.done()]
            for task in tasks:
                if task.done():
                    task.result()
            if not pending:
                return
            if all(one.is_absent for one in pending) and any(one.has_failed for one in self.asked):
                return  # An endpoint that is there has refused for good: the others are not about to appear.
            if self.is_satisfied:
                patience = patience or Budget(self._patience)
                if patience.left <= 0 or not any(one.has_failed for one in pending):
                    return
            try:
                async with asyncio.timeout(patience.left if patience is not None else None):
                    await self._moved.wait()
            except TimeoutError:
                continue

    async def _ask(self, one: Asked) -> None:
        async def listed() -> list[dict[str, Any]]:
            tools = await one.endpoint.list_tools()
            if not tools:
                raise NoTools(f"{one.endpoint.url} answered without a tool")
            return tools

        async def told(failure: Failure) -> None:
            one.error = failure.error
            self._moved.set()
            await self._told(one.endpoint, failure)

        try:
            one.tools = await retried(
                listed,
                what=f"listing the tools of {one.endpoint.url}",
                budget=self._budget,
                backoff=self._backoff,
                attempt_seconds=ATTEMPT_SECONDS,
                may_retry=_may_come_up,
                before_retry=told,
            )
            one.error = None
        except InstanceGone:
            raise
        except FleetError as error:
            one.error = error


def _may_come_up(error: FleetError) -> bool:
    """An endpoint that is still starting refuses, fails, or is not known to its router yet."""
    return error.transient or is_absence(error)


def is_absence(error: FleetError) -> bool:
    return isinstance(error, PlaneError) and error.status in ABSENT
