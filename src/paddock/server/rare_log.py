"""Warnings that many peers can cause at once, so that none of them fills the log."""

from __future__ import annotations

import logging
from time import monotonic

LOG_EVERY = 10.0
"""Seconds between two warnings of one kind."""

logger = logging.getLogger("paddock.server")


class RareLog:
    """Warnings of one kind, at most one in ten seconds. The next one says how many were left out."""

    def __init__(self) -> None:
        self._again = 0.0
        self._left_out = 0

    def warning(self, message: str, *arguments: object) -> None:
        now = monotonic()
        if now < self._again:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._again, self._left_out = now + LOG_EVERY, 0
        logger.warning(message + more, *arguments)


late_log = RareLog()
"""For peers that did not send or read in time."""
