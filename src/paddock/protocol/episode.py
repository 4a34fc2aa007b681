"""What may be asked of an episode, and when.

The requests are the whole vocabulary of Paddock: each transport translates its messages into them.
`NEXT` says to which phase each request leads. All of them are allowed until the session is closed.
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
    """Act. `action` is already an instance of the environment's action type."""

    action: Any
    extras: dict[str, Any] | None = None
    """Further keywords for `step()`, as far as it takes them."""


@dataclass(slots=True)
class GetState:
    """Look at the state without acting."""


@dataclass(slots=True)
class ListTools:
    """Ask which tools there are."""


@dataclass(slots=True)
class CallTool:
    """Call a tool past `step`, as MCP clients do."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


Request = Reset | Step | GetState | ListTools | CallTool


class Phase(IntEnum):
    """Where an episode stands. An integer: every step looks it up, and a plain Enum hashes slowly."""

    NEW = 0
    RUNNING = 1
    DONE = 2
    CLOSED = 3


# Acting before the first reset, or after `done`, is allowed: OpenEnv clients rely on both.
# Looking (GetState, ListTools) never changes the phase.
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
    **{(phase, look): phase for phase in Phase if phase is not Phase.CLOSED for look in (GetState, ListTools)},
}


class Episode:
    """The course of one session's current episode: its id, its phase, its steps."""

    __slots__ = ("id", "phase", "steps")

    def __init__(self) -> None:
        self.id = str(uuid.uuid4())
        self.phase = Phase.NEW
        self.steps = 0

    def accept(self, request: Request) -> None:
        """Check that `request` may be carried out now, and move to its phase."""
        try:
            self.phase = NEXT[self.phase, type(request)]
        except KeyError:
            raise SessionClosed("the session is closed") from None

    def begun(self, episode_id: str | None, *, done: bool) -> None:
        """A reset succeeded."""
        self.id = episode_id or str(uuid.uuid4())
        self.steps = 0
        self.phase = Phase.DONE if done else Phase.RUNNING

    def stepped(self, done: bool) -> None:
        """A step succeeded."""
        self.steps += 1
        if done:
            self.phase = Phase.DONE
        elif self.phase is Phase.NEW:
            # The short ways of a plain step (`Session.step_now`, `step_aside`) do not come through `accept`.
            self.phase = Phase.RUNNING

    def close(self) -> None:
        self.phase = Phase.CLOSED
