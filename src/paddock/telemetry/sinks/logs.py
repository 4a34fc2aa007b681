"""Events as log lines: the name, then the values as `key=value`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddock.telemetry.bus import Event

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class LogSink:
    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("paddock.events")

    def __call__(self, event: Event) -> None:
        level = LEVELS[event.level]
        if self._logger.isEnabledFor(level):
            values = " ".join(f"{key}={value!r}" for key, value in event.attributes().items() if value is not None)
            self._logger.log(level, "%s %s", event.name, values)
