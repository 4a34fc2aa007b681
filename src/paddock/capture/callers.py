"""Which calls the agent's own program made, from the processes that held their connections.

The driver starts one command in the sandbox. A lineage is the list of programs from that command down to a process.
The agent's program is the first program in a lineage that makes model calls, with its forks. Three rules follow:

- What the agent's program executes (a shell, and everything below it) is foreign, even if it is the same binary.
- After the model's first output, a new program counts as the agent's only if its lineage has the same executables as
  one that called before that output. So the model cannot start a second "agent".
- Every other process is foreign.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.capture.trace import Caller
from paddock.sandbox.socket_owners import SocketOwners

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.capture.trace import Call
    from paddock.sandbox.socket_owners import Lineage, Program, SocketOwnerFinder

IDENTIFY_SECONDS = 5.0
"""For the search for the process of a call. It takes about a millisecond on an idle machine."""
NO_FINDER = "which process made the call is unknown"
UNIDENTIFIED = "a process that had ended, or hung up, before it could be identified"
STRAY = "a process that no longer belongs to the agent's command"


@dataclass(frozen=True, slots=True)
class _IdentifiedCall:
    """A call, and the lineages of the processes that may have made it."""

    call: Call
    lineages: tuple[Lineage, ...]


class AgentProgram:
    """The callers of one rollout. Labels may change while calls come in; the final labels do not depend on order."""

    def __init__(self) -> None:
        self._identified: list[_IdentifiedCall] = []
        self._callers: set[Program] = set()
        """Programs that made calls."""
        self._launches: set[tuple[tuple[int, int], ...]] = set()
        """The executables of the lineages that called before the model's first output."""

    def add(self, call: Call, lineages: Sequence[Lineage], *, before_output: bool) -> list[Call]:
        """Label a call by the processes that held its connection. Returns the earlier calls whose label changed.

        `before_output`: the model had sent no output yet when the call began."""
        identified = _IdentifiedCall(call, tuple(lineages))
        before = len(self._callers) + len(self._launches)
        for lineage in identified.lineages:
            if lineage:
                self._callers.add(lineage[-1])
                if before_output:
                    self._launches.add(tuple(program.executable for program in lineage))
        is_new = len(self._callers) + len(self._launches) > before
        changed = [each.call for each in self._identified if self._label(each)] if is_new else []
        self._identified.append(identified)
        self._label(identified)
        return changed

    def _label(self, identified: _IdentifiedCall) -> bool:
        """Whether the label changed."""
        call = identified.call
        before = (call.caller, call.caller_reason)
        reason = UNIDENTIFIED if not identified.lineages else None
        for lineage in identified.lineages:
            reason = reason or self._foreign_reason(lineage)
        call.caller = Caller.AGENT if reason is None else Caller.FOREIGN
        call.caller_reason = reason
        return before != (call.caller, reason)

    def _foreign_reason(self, lineage: Lineage) -> str | None:
        """Why a process is not the agent's program; None if it is."""
        if not lineage:
            return STRAY
        if any(program in self._callers for program in lineage[:-1]):
            return f"{lineage[-1].name}, started by the agent's program"
        launch = tuple(program.executable for program in lineage)
        if len(lineage) > 1 and launch not in self._launches:
            return f"{lineage[-1].name}, started after the model's first answer"
        return None


class CallerLabels:
    """Finds the processes that hold the connection of a call, and labels the call."""

    def __init__(
        self,
        finder: SocketOwnerFinder | None,
        unknown_reason: str,
        *,
        log: Callable[[str], None],
        on_change: Callable[[Call], None],
    ) -> None:
        self._finder = finder
        self._unknown_reason = unknown_reason
        """Why callers are unknown, if there is no finder."""
        self._log = log
        self._on_change = on_change
        self._program = AgentProgram()
        self._connections: list[tuple[asyncio.Transport, SocketOwners]] = []
        """Connections whose owners cannot change."""

    def label(self, call: Call, connection: Any, *, before_output: bool) -> asyncio.Future[None] | None:
        """Label the call by the processes that hold its connection now, while the agent waits for its response.

        The future is done when the label is set; None if it is set already."""
        if self._finder is None:
            call.caller_reason = self._unknown_reason
            return None
        owners = next((owners for other, owners in self._connections if other is connection), None)
        ends: list[Any] = [connection and connection.get_extra_info(name) for name in ("peername", "sockname")]
        if owners is None and None not in ends:
            owners = self._finder.find_cached(ends[0][:2], ends[1][:2])
            if owners is None:
                return asyncio.ensure_future(self._search(self._finder, connection, ends, call, before_output))
        self._set_label(call, owners or SocketOwners(), before_output)
        return None

    async def _search(
        self, finder: SocketOwnerFinder, connection: Any, ends: list[Any], call: Call, before_output: bool
    ) -> None:
        owners = SocketOwners()
        try:
            async with asyncio.timeout(IDENTIFY_SECONDS):
                owners = await asyncio.to_thread(finder.find, ends[0][:2], ends[1][:2])
        except (OSError, TimeoutError) as error:
            self._log(f"{call.id}: its caller could not be identified: {type(error).__name__}: {error}")
        if owners.lineages and owners.is_private:
            self._connections = [each for each in self._connections if not each[0].is_closing()]
            self._connections.append((connection, owners))
        self._set_label(call, owners, before_output)

    def _set_label(self, call: Call, owners: SocketOwners, before_output: bool) -> None:
        for changed in self._program.add(call, owners.lineages, before_output=before_output):
            self._on_change(changed)
        if call.caller is Caller.FOREIGN:
            self._log(f"{call.id} was not made by the agent's program: {call.caller_reason}")
