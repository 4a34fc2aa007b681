"""Rate-limited warnings, for what many peers can cause at once."""

from __future__ import annotations

import logging
from time import monotonic

INTERVAL_SECONDS = 10.0
"""Between two warnings of one kind."""

logger = logging.getLogger("paddock.server")


class RateLimitedLog:
    """Logs at most one warning in `INTERVAL_SECONDS`. The next one says how many were suppressed."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._suppressed = 0

    def warning(self, message: str, *arguments: object) -> None:
        now = monotonic()
        if now < self._next_at:
            self._suppressed += 1
            return
        suffix = f" ({self._suppressed} more since the last such line)" if self._suppressed else ""
        self._next_at, self._suppressed = now + INTERVAL_SECONDS, 0
        logger.warning(message + suffix, *arguments)


slow_peer_log = RateLimitedLog()
"""For peers that did not send or read in time."""
