"""What a fleet client takes from environment variables, read when a client is made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from paddock.errors import ConfigError

DEFAULT_BASE_URL = "https://orchestrator.fleetai.com"


@dataclass(frozen=True, slots=True)
class PlaneAddress:
    """Where the control plane is, and the key to it."""

    base_url: str
    api_key: str = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}


def plane_address(api_key: str | None = None, base_url: str | None = None) -> PlaneAddress:
    """The arguments, else `FLEET_API_KEY` and `FLEET_BASE_URL`. Raises ConfigError (a ValueError) without a key."""
    key = api_key or os.environ.get("FLEET_API_KEY")
    if not key:
        raise ConfigError("Fleet API key required", hint="pass api_key or set FLEET_API_KEY")
    address = base_url or os.environ.get("FLEET_BASE_URL") or DEFAULT_BASE_URL
    return PlaneAddress(address.rstrip("/"), key)


def state_folder() -> Path:
    """`$PADDOCK_FLEET`, or `paddock/fleet` where the user's data lives."""
    chosen = os.environ.get("PADDOCK_FLEET")
    if chosen:
        return Path(chosen).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "paddock" / "fleet"


def leases_folder() -> Path:
    """Where processes write down what they hold: `$PADDOCK_FLEET_LEASES`, or `leases` in the state folder."""
    chosen = os.environ.get("PADDOCK_FLEET_LEASES")
    return Path(chosen).expanduser() if chosen else state_folder() / "leases"


def call_deadline() -> float:
    """Seconds one tool call may take, retries included."""
    text = os.environ.get("FLEET_CALL_TOOL_DEADLINE_S", "90")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"FLEET_CALL_TOOL_DEADLINE_S is {text!r}", hint="give seconds above 0")
    return seconds
