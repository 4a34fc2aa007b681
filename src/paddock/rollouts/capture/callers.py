"""Which calls were made by the agent's own program, told from the processes that held their connections. No IO.

The agent's program is, on each line from the command that the driver started downwards, the first program that makes
model calls: a launcher and what it launched, with their forks. What such a program executes (a shell, and all below
it) is not the agent's program, even if it is the same binary again. After the model has said something, a new program
counts only if it was started the way the callers before that were: the same executables from the command down.
Whatever is not shown to be the agent's program is foreign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.rollouts.trace import Caller

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.rollouts.sandbox.callers import Lineage, Program
    from paddock.rollouts.trace import Call

UNIDENTIFIED = "a process that had ended, or hung up, before it could be identified"
STRAY = "a process that no longer belongs to the agent's command"


@dataclass(frozen=True, slots=True)
class _Seen:
    call: Call
    lineages: tuple[Lineage, ...]


class AgentProgram:
    """The callers of one rollout. Labels may change while calls come in; the last word is the same in any order."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._callers: set[Program] = set()
        """Programs that made calls."""
        self._launches: set[tuple[tuple[int, int], ...]] = set()
        """The executables of the lineages that called before the model had said anything."""

    def add(self, call: Call, lineages: Sequence[Lineage], *, first: bool) -> list[Call]:
        """Label a call by those who held its connection. Returns the earlier calls whose label changed.

        `first` tells that the model had said nothing when the call began."""
        seen = _Seen(call, tuple(lineages))
        before = len(self._callers) + len(self._launches)
        for lineage in seen.lineages:
            if lineage:
                self._callers.add(lineage[-1])
                if first:
                    self._launches.add(tuple(program.executable for program in lineage))
        is_new = len(self._callers) + len(self._launches) > before
        changed = [each.call for each in self._seen if self._label(each)] if is_new else []
        self._seen.append(seen)
        self._label(seen)
        return changed

    def _label(self, seen: _Seen) -> bool:
        """True if the label is another one than before."""
        before = (seen.call.caller, seen.call.caller_reason)
        reason = UNIDENTIFIED if not seen.lineages else None
        for lineage in seen.lineages:
            reason = reason or self._foreign(lineage)
        seen.call.caller = Caller.AGENT if reason is None else Caller.FOREIGN
        seen.call.caller_reason = reason
        return before != (seen.call.caller, reason)

    def _foreign(self, lineage: Lineage) -> str | None:
        """Why a process is not the agent's program; None if it is."""
        if not lineage:
            return STRAY
        if any(program in self._callers for program in lineage[:-1]):
            return f"{lineage[-1].name}, started by the agent's program"
        launch = tuple(program.executable for program in lineage)
        if len(lineage) > 1 and launch not in self._launches:
            return f"{lineage[-1].name}, started after the model's first answer"
        return None
