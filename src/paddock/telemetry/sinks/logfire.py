"""Events in Logfire. Needs the `logfire` package."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from paddock.telemetry.bus import Event


class LogfireSink:
    def __init__(self, token: str | None, *, environment: str, service_name: str) -> None:
        try:
            self._logfire: Any = importlib.import_module("logfire")
        except ImportError as error:
            raise ConfigError("logfire is not installed", hint="pip install logfire") from error
        self._logfire.configure(
            token=token,
            send_to_logfire="if-token-present",
            environment=environment,
            service_name=service_name,
            console=False,
        )

    def __call__(self, event: Event) -> None:
        level = "warn" if event.level == "warning" else event.level
        self._logfire.log(level, event.name, event.attributes())
