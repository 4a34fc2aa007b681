"""How long a client waits, when it reconnects after a dropped connection, and what it reports when that fails.

Knows no connection: `Reconnector` gets a function that makes one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from paddock.errors import ConfigError, ConnectFailed, DeadlineExceeded, EpisodeLost, OutcomeUnknown
from paddock.retry import Backoff, Deadline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds; None waits forever."""

    connect: float | None = 10.0
    """For a connection to be made."""
    request: float | None = 600.0
    """For the answer to a reset, step, state or tool call, connecting and reconnecting included."""

    def __post_init__(self) -> None:
        for name, seconds in (("connect", self.connect), ("request", self.request)):
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"timeout {name} is {seconds}", hint="give seconds above 0, or None for no limit")


@dataclass(frozen=True, slots=True)
class Reconnect:
    """When to reconnect after the connection dropped, and when to give the episode up."""

    within: float = 45.0
    """Seconds without a connection, since the last answer, after which the episode counts as lost.
    0 never reconnects."""
    first_pause: float = 0.05
    """Pauses between attempts grow from this to `longest_pause`, with full jitter."""
    longest_pause: float = 2.0
    """The longest pause between two attempts."""
    replay: bool = False
    """When the session is lost with its host: begin a new one, send it the same seed and actions, and continue if it
    answers the same. Only for environments that declare themselves `deterministic`."""


class Reconnector:
    """The attempts to reconnect since the server last answered.

    A handshake is not an answer: a server that hangs up after it is of no use. So pauses and the deadline continue
    over several connections, until `record_answer` is called, or a connection has held for `Reconnect.within`.
    """

    def __init__(self, policy: Reconnect) -> None:
        self._within = policy.within
        self._backoff = Backoff(policy.first_pause, policy.longest_pause)
        self._attempts = 0
        self._seconds_left = 0.0
        self._held_since = 0.0

    def record_answer(self) -> None:
        """The server answered: earlier attempts do not count any more."""
        self._attempts = 0

    async def connect(self, connect: Callable[[], Awaitable[T]]) -> T:
        """What `connect` returns; the first attempt is made at once. Raises ConnectFailed after the deadline."""
        loop = asyncio.get_running_loop()
        if self._attempts == 0 or loop.time() - self._held_since > self._within:
            self._attempts, self._seconds_left = 0, self._within
        deadline = Deadline(self._seconds_left)
        failure = ConnectFailed("every connection drops before anything is answered", hint="look at the server")
        try:
            while True:
                if self._attempts > 0:
                    pause = self._backoff.pause(self._attempts - 1)
                    if pause > deadline.seconds_left:
                        self._attempts = 0
                        raise failure
                    await asyncio.sleep(pause)
                self._attempts += 1
                try:
                    return await connect()
                except ConnectFailed as error:
                    failure = error
        finally:
            self._held_since, self._seconds_left = loop.time(), deadline.seconds_left


def episode_lost(
    why: str, token: str | None = None, hint: str | None = "call reset() to begin a new one"
) -> EpisodeLost:
    """The error for an episode that cannot continue. The token is masked, because it opens the session to anybody."""
    reason = why.replace(token, "***") if token else why
    return EpisodeLost(f"the episode is lost: {reason}", hint=hint)


def no_answer(message: dict[str, Any], timeout: float | None) -> DeadlineExceeded:
    """The error for a request that was not answered in time."""
    return DeadlineExceeded(
        f"no answer to {message['type']} within {timeout} s",
        hint="it may have been executed; raise timeouts.request, or look at the server",
    )


def outcome_unknown(kind: str, why: str) -> OutcomeUnknown:
    """The error for a request that was sent, whose answer is lost, and that cannot be repeated safely."""
    return OutcomeUnknown(
        f"the answer to this {kind} is lost: the {kind} may have been executed ({why})",
        hint="call state() to see what happened, or reset() to begin a new episode",
        request=kind,
    )
