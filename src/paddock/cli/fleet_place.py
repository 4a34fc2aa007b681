"""Where the plane is that a `paddock fleet` command talks to, and asking it.

A plane of this machine leaves its address in its state folder, so that the other commands find it without being told.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paddock.fleet.settings import PlaneAddress

ADDRESS_FILE = "plane.json"
KEY_FILE = "api_key"
SECONDS = 20.0


def default_state() -> Path:
    """`$PADDOCK_FLEET`, or `paddock/fleet` where the user's data lives."""
    from paddock.fleet.settings import state_folder

    return state_folder()


state_option = click.option(
    "--state", type=click.Path(path_type=Path), help="The folder of a plane of this machine. Also: PADDOCK_FLEET."
)


def plane_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--url, --api-key and --state: which plane is meant."""
    for option in (
        state_option,
        click.option("--api-key", help="The key of the plane. Better: FLEET_API_KEY."),
        click.option("--url", help="Where the plane is. Also: FLEET_BASE_URL. Default: the plane of this machine."),
    ):
        command = option(command)
    return command


def find_plane(url: str | None, api_key: str | None, state: Path | None) -> PlaneAddress:
    """The plane that is meant: the one named, else the one in FLEET_BASE_URL, else the one of this machine."""
    from paddock.fleet.settings import PlaneAddress, plane_address

    folder = state or default_state()
    local = read_address(folder)
    wanted = url or (None if state is not None else os.environ.get("FLEET_BASE_URL"))
    key = api_key or os.environ.get("FLEET_API_KEY")
    if wanted is None and local is not None:
        wanted = local
    if wanted is not None and local is not None and wanted.rstrip("/") == local:
        key = api_key or read_key(folder) or key
    if wanted is None and (state is not None or key is None):
        raise ConfigError(
            "no plane runs on this machine, and none is named",
            hint="start one with `paddock fleet up`, or set FLEET_BASE_URL and FLEET_API_KEY",
        )
    if wanted is not None and key is None:
        raise ConfigError(f"the key of the plane at {wanted} is not known", hint="set FLEET_API_KEY")
    if wanted is None:
        return plane_address(key)
    assert key is not None
    return PlaneAddress(wanted.rstrip("/"), key)


@contextmanager
def address_left(state: Path, url: str) -> Iterator[None]:
    """While the block runs, other commands find the plane."""
    file = state / ADDRESS_FILE
    file.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def read_address(state: Path) -> str | None:
    try:
        found = json.loads((state / ADDRESS_FILE).read_text())
    except (OSError, ValueError):
        return None
    url = found.get("url") if isinstance(found, dict) else None
    return url if isinstance(url, str) else None


def read_key(state: Path) -> str | None:
    try:
        return (state / KEY_FILE).read_text().strip() or None
    except OSError:
        return None


@contextmanager
def explained(address: PlaneAddress) -> Iterator[None]:
    """Say what to do when the plane does not answer, or does not let us in."""
    from paddock.fleet.errors import FleetError, InstanceGone, PlaneError, Unreachable

    try:
        yield
    except FleetError as error:
        if error.hint is None and isinstance(error, Unreachable):
            error.hint = f"is a plane running at {address.base_url}? `paddock fleet up` starts one"
        elif error.hint is None and isinstance(error, PlaneError) and error.status in (401, 403):
            error.hint = "set FLEET_API_KEY to the key of this plane"
        elif error.hint is None and isinstance(error, InstanceGone):
            error.hint = "`paddock fleet ls --all` lists those it knows"
        raise


async def fetch(address: PlaneAddress, path: str, **params: str | None) -> Any:
    """What the plane answers to a GET."""
    from paddock.fleet.http import send

    asked = {name: value for name, value in params.items() if value is not None}
    reply = await send(
        "GET", f"{address.base_url}{path}", timeout=SECONDS, headers=address.headers, params=asked or None
    )
    return reply.json()
