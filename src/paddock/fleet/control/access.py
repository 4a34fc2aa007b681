"""Who may use the plane: the key as a bearer token, or as a login token with the team's id."""

from __future__ import annotations

import hmac
import os
import secrets
from typing import TYPE_CHECKING

from paddock.fleet.control.answers import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KEY_FILE = "api_key"


def check_key(api_key: str, team_id: str, headers: Mapping[str, str]) -> None:
    """Let a request pass, or raise Refused. Takes the same time whatever key was sent."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    login = headers.get("x-jwt-token", "")
    if _same(bearer.strip(), api_key) and scheme.lower() == "bearer":
        return
    if not _same(login, api_key):
        sent = "This key is not the plane's" if bearer or login else "No key was sent"
        raise Refused(401, f"{sent}. Send 'Authorization: Bearer KEY' (FLEET_API_KEY).")
    team = headers.get("x-team-id")
    if not team:
        raise Refused(401, "X-Team-ID is missing. Send it along with X-JWT-Token.")
    if team != team_id:
        raise Refused(403, f"Team not found. This plane has one team, '{team_id}': send that as X-Team-ID.")


def kept_key(folder: Path) -> str:
    """The key that was made up for this state folder, made up now if there is none."""
    file = folder / KEY_FILE
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        found = file.read_text().strip()
        if found:
            return found
        handle = os.open(file, os.O_WRONLY | os.O_TRUNC)
    with os.fdopen(handle, "w") as opened:
        made = f"pk_{secrets.token_urlsafe(24)}"
        opened.write(made)
    return made


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
