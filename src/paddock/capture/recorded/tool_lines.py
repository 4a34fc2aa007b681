"""The lines that tools have printed. Agents quote them in other messages, for example when they ask for a summary."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING

from paddock.capture.recorded.tool_results import TOOL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.capture.recorded.conversation import MessageView

LABEL = re.compile(r"^\W{0,4}[\w ]{1,40}\W{0,4}[:>] ?")
"""What an agent writes before a quotation, such as `[Tool result]: `."""


class ToolLines:
    """The lines of all outputs of tools that one rollout has had, masked."""

    def __init__(self) -> None:
        self._unread: dict[MessageView, None] = {}
        """Most rollouts need no line, and masking takes long."""
        self._lines: set[str] = set()
        self._sorted: list[str] = []

    def add(self, view: Iterable[MessageView]) -> None:
        self._unread |= dict.fromkeys(message for message in view if message.role == TOOL)

    def contain(self, lines: Iterable[str]) -> bool:
        """Whether each of these lines is one of them. It may be cut off at its end, and have a label."""
        if self._unread:
            self._lines.update(line for message in self._unread for line in message.text.splitlines())
            self._unread, self._sorted = {}, sorted(self._lines)
        return all(self._has(line) or self._has(LABEL.sub("", line, count=1)) for line in lines)

    def _has(self, line: str) -> bool:
        place = bisect_left(self._sorted, line)
        return place < len(self._sorted) and self._sorted[place].startswith(line)
