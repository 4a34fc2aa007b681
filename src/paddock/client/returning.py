"""Coming back after a drop: when to try again, when the time is up, and what is said then. Knows no connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from paddock.errors import ConnectFailed, DeadlineExceeded, EpisodeLost, OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from paddock.client.policy import Reconnect

T = TypeVar("T")


class Tries:
    """The tries to come back since the other side last answered.

    A handshake is no answer: who hangs up after it is not really there. So pauses and time go on over several
    connections, until `begin_anew` is called, or one of them has held for as long as the policy tries.
    """

    def __init__(self, policy: Reconnect) -> None:
        self._policy = policy
        self._pauses: Iterator[float] | None = None
        """Those that are left; None if the next try is the first."""
        self._seconds_left = 0.0
        self._reached_at = 0.0

    def begin_anew(self) -> None:
        """Something was answered: what came before does not count any more."""
        self._pauses = None

    async def reach(self, connect: Callable[[], Awaitable[T]]) -> T:
        """What `connect` returns, at the latest when the time is up: then raises ConnectFailed."""
        loop, pauses = asyncio.get_running_loop(), self._pauses
        is_first = pauses is None or loop.time() - self._reached_at > self._policy.within
        if pauses is None or is_first:
            pauses = self._pauses = self._policy.pauses()
            self._seconds_left = self._policy.within
        deadline = loop.time() + self._seconds_left
        failure = ConnectFailed("every connection drops before anything is answered", hint="look at the server")
        try:
            while True:
                if not is_first:
                    pause = next(pauses)
                    if loop.time() + pause > deadline:
                        self.begin_anew()
                        raise failure
                    await asyncio.sleep(pause)
                is_first = False
                try:
                    return await connect()
                except ConnectFailed as error:
                    failure = error
        finally:
            self._reached_at = loop.time()
            self._seconds_left = deadline - self._reached_at


def episode_lost(
    why: str, token: str | None = None, hint: str | None = "call reset() to begin a new one"
) -> EpisodeLost:
    """The error for an episode that cannot go on. It does not tell the token, which opens the session to anybody."""
    told = why.replace(token, "***") if token else why
    return EpisodeLost(f"the episode is lost: {told}", hint=hint)


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
