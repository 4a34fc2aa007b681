"""Pausing the model calls of a batch: while a gate is closed, no attempt at a call begins. No IO.

All rollouts of a run share one gate. `pause` closes it and waits until no call is at the inference engine; then the
weights can be changed. Use a gate on one event loop only.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

InFlight = Literal["finish", "abort"]
"""What a pause does with calls that are at the engine. `finish` waits for them. `abort` cuts off those of which the
agent has received nothing, to ask again afterwards. The others finish: tokens that were sent cannot be taken back."""


class AttemptAborted(Exception):
    """A pause cut off an attempt. The call is asked again from its beginning."""


@dataclass(frozen=True, slots=True)
class PauseReport:
    """What a pause did with the calls that were at the engine when it began."""

    in_flight: int
    """Calls that were still there at the timeout. 0: none, so the weights can be changed."""
    finished: int = 0
    aborted: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class RemoteGate(Protocol):
    """The gates of rollouts on other machines."""

    async def pause(self, in_flight: InFlight, timeout: float | None) -> PauseReport:
        """As `CallGate.pause`."""

    def resume(self) -> None:
        """As `CallGate.resume`. It is called once for each pause."""


@dataclass(slots=True, eq=False)
class GatedAttempt:
    """An attempt at a call while it is at the engine."""

    is_aborted: bool = False
    is_committed: bool = False
    """The agent has received a part of the answer."""
    _scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))

    async def commit(self) -> None:
        """Call it before the agent gets the first part of the answer. Does not return in an aborted attempt."""
        if self.is_aborted:
            await asyncio.Event().wait()  # until the cancellation arrives, which is on its way
        self.is_committed = True

    def abort(self) -> bool:
        """Cut it off, unless the agent has received a part of the answer. True if it will be asked again."""
        if not self.is_committed and not self.is_aborted:
            self.is_aborted = True
            self._scope.reschedule(0.0)
        return self.is_aborted


class CallGate:
    """Open unless it is paused. It may be paused several times; it opens when each pause was resumed."""

    def __init__(self, pauses: int = 0) -> None:
        self.pauses = pauses
        """How many pauses have not been resumed."""
        self.remotes: set[RemoteGate] = set()
        """The gates of runs that have rollouts on other machines."""
        self._open = asyncio.Event()
        if not pauses:
            self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._attempts: set[GatedAttempt] = set()

    @property
    def is_paused(self) -> bool:
        return self.pauses > 0

    @property
    def in_flight(self) -> int:
        """Calls of this process that are at the engine now."""
        return len(self._attempts)

    async def pause(self, in_flight: InFlight = "finish", timeout: float | None = None) -> PauseReport:
        """Hold back new attempts, and wait until no call is at the engine, at most `timeout` seconds.

        Without a timeout, the timeouts of the calls limit the wait. The gate is paused afterwards in any case, unless
        this is cancelled."""
        if in_flight not in get_args(InFlight):
            raise ConfigError(f"in_flight is {in_flight!r}", hint="use finish or abort")
        self.pauses += 1
        self._open.clear()
        try:
            remote = [each.pause(in_flight, timeout) for each in self.remotes]
            return add_reports(await asyncio.gather(self._wait_idle(in_flight, timeout), *remote))
        except BaseException:
            if self.pauses:
                self.resume()
            raise

    async def _wait_idle(self, in_flight: InFlight, timeout: float | None) -> PauseReport:
        running = set(self._attempts)
        if in_flight == "abort":
            for attempt in running:
                attempt.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        left = running & self._attempts
        aborted = sum(attempt.is_aborted for attempt in running - left)
        return PauseReport(len(left), len(running) - len(left) - aborted, aborted)

    def resume(self) -> None:
        """End one pause. Raises ConfigError if there is none."""
        if not self.pauses:
            raise ConfigError("the calls are not paused", hint="call pause first; each pause is resumed once")
        self.pauses -= 1
        for remote in self.remotes:
            remote.resume()
        if not self.pauses:
            self._open.set()

    async def wait_open(self) -> None:
        while not self._open.is_set():
            await self._open.wait()

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[GatedAttempt]:
        """An attempt at a call, once the gate is open. Raises AttemptAborted if a pause cuts it off."""
        await self.wait_open()
        attempt = GatedAttempt()
        self._attempts.add(attempt)
        self._idle.clear()
        try:
            async with attempt._scope:
                yield attempt
        except TimeoutError:
            if not attempt.is_aborted:
                raise
            raise AttemptAborted from None
        finally:
            self._attempts.discard(attempt)
            if not self._attempts:
                self._idle.set()


def add_reports(reports: Iterable[PauseReport]) -> PauseReport:
    total = PauseReport(in_flight=0)
    for each in reports:
        total = PauseReport(
            total.in_flight + each.in_flight, total.finished + each.finished, total.aborted + each.aborted
        )
    return total
