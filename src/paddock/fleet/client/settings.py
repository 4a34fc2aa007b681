"""The settings of a fleet client: the plane's address and key, and its folders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddock.config import FLEET_API_KEY, FLEET_BASE_URL, PADDOCK_FLEET, PADDOCK_FLEET_LEASES, user_data_folder
from paddock.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_BASE_URL = "https://orchestrator.fleetai.com"


@dataclass(frozen=True, slots=True)
class PlaneAddress:
    """The address of the control plane, and its key."""

    base_url: str
    api_key: str = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}


def plane_address(api_key: str | None = None, base_url: str | None = None) -> PlaneAddress:
    """The arguments, else `FLEET_API_KEY` and `FLEET_BASE_URL`. Raises ConfigError (a ValueError) without a key."""
    key = api_key or FLEET_API_KEY.read()
    if not key:
        raise ConfigError("Fleet API key required", hint="pass api_key or set FLEET_API_KEY")
    address = base_url or FLEET_BASE_URL.read() or DEFAULT_BASE_URL
    return PlaneAddress(address.rstrip("/"), key)


def state_folder() -> Path:
    """`$PADDOCK_FLEET`, or `paddock/fleet` where the user's data lives."""
    return PADDOCK_FLEET.read() or user_data_folder() / "fleet"


def leases_folder() -> Path:
    """The folder of lease journals: `$PADDOCK_FLEET_LEASES`, or `leases` in the state folder."""
    return PADDOCK_FLEET_LEASES.read() or state_folder() / "leases"
