"""What an instance is told to be: the first line of its standard input."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from paddock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Order:
    instance_id: str
    env_key: str
    target: str
    folder: Path
    version: str = ""
    image_type: str | None = None
    """`mcp` adds a screen: the `computer` tool."""
    data_key: str | None = None
    data_version: str | None = None
    env_variables: dict[str, str] = field(default_factory=dict)
    runner_token: str | None = field(default=None, repr=False)
    """Wanted as `X-Runner-Token` by the management paths."""
    api_key: str | None = field(default=None, repr=False)
    """Wanted as a bearer token by the MCP endpoints."""
    host: str = "127.0.0.1"

    @property
    def has_screen(self) -> bool:
        return self.image_type == "mcp"

    def variables(self) -> dict[str, str]:
        """What the environment finds among its environment variables."""
        told = {"PADDOCK_DATA_KEY": self.data_key, "PADDOCK_DATA_VERSION": self.data_version}
        return {**{name: value for name, value in told.items() if value}, **self.env_variables}


def read_order(line: bytes) -> Order:
    """Raises ConfigError that says what is wrong with the line."""
    try:
        given: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"the order is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError("the order is not a JSON object")
    missing = [
        name for name in ("instance_id", "env_key", "target", "folder") if not isinstance(given.get(name), str)
    ]
    if missing:
        raise ConfigError(f"the order does not name {', '.join(missing)}")
    variables = given.get("env_variables") or {}
    known = {name: value for name, value in given.items() if name in Order.__slots__ and value is not None}
    return Order(
        **{
            **known,
            "folder": Path(given["folder"]),
            "env_variables": {str(name): str(value) for name, value in variables.items()},
        }
    )
