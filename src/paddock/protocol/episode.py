"""The requests that a session accepts, and the state machine of an episode.

Each transport translates its messages into these five requests. `NEXT` has the phase that follows each request in
each phase. Every request is allowed until the session is closed. Knows no transport and no environment.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from paddock.errors import SessionClosed


@dataclass(slots=True)
class Reset:
    """Begin a new episode."""

    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """Apply an action. `action` is already an instance of the environment's action type."""

    action: Any
    extras: dict[str, Any] | None = None
    """Further keyword arguments for `step()`. Those that the method does not accept are dropped."""


@dataclass(slots=True)
class GetState:
    """Read the state. Changes nothing."""


@dataclass(slots=True)
class ListTools:
    """List the tools. Changes nothing."""


@dataclass(slots=True)
class CallTool:
    """Call a tool by name, as MCP clients do, without an action for `step`."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


Request = Reset | Step | GetState | ListTools | CallTool


class Phase(IntEnum):
    """How far an episode is. An IntEnum, because every step looks it up in `NEXT` and a plain Enum hashes slowly."""

    NEW = 0
    """Before the first reset."""
    RUNNING = 1
    DONE = 2
    """An observation had `done`. A reset begins the next episode."""
    CLOSED = 3
    """The session has ended."""


# A step or tool call before the first reset, or after `done`, is allowed: OpenEnv clients rely on both.
# GetState and ListTools never change the phase.
NEXT: dict[tuple[Phase, type], Phase] = {
    (Phase.NEW, Reset): Phase.RUNNING,
    (Phase.NEW, Step): Phase.RUNNING,
    (Phase.NEW, CallTool): Phase.RUNNING,
    (Phase.RUNNING, Reset): Phase.RUNNING,
    (Phase.RUNNING, Step): Phase.RUNNING,
    (Phase.RUNNING, CallTool): Phase.RUNNING,
    (Phase.DONE, Reset): Phase.RUNNING,
    (Phase.DONE, Step): Phase.DONE,
    (Phase.DONE, CallTool): Phase.DONE,
    **{(phase, read): phase for phase in Phase if phase is not Phase.CLOSED for read in (GetState, ListTools)},
}


class Episode:
    """The current episode of a session: its id, its phase and its number of steps."""

    __slots__ = ("id", "phase", "steps", "was_reset")

    def __init__(self) -> None:
        self.id = str(uuid.uuid4())
        self.phase = Phase.NEW
        self.steps = 0
        self.was_reset = False
        """Whether a reset of this session has succeeded."""

    def accept(self, request: Request) -> None:
        """Move to the phase that follows `request`. Raises SessionClosed if the session is closed."""
        try:
            self.phase = NEXT[self.phase, type(request)]
        except KeyError:
            raise SessionClosed("the session is closed") from None

    def record_reset(self, episode_id: str | None, *, done: bool) -> None:
        """Record a reset that succeeded. Without `episode_id` the episode gets a new id."""
        self.id = episode_id or str(uuid.uuid4())
        self.steps = 0
        self.was_reset = True
        self.phase = Phase.DONE if done else Phase.RUNNING

    def record_step(self, done: bool) -> None:
        """Record a step that succeeded."""
        self.steps += 1
        if done:
            self.phase = Phase.DONE
        elif self.phase is Phase.NEW:
            # The fast path (`server/fastpath`) does not call `accept`.
            self.phase = Phase.RUNNING

    def close(self) -> None:
        """Refuse all further requests."""
        self.phase = Phase.CLOSED
