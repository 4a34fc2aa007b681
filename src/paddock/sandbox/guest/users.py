"""Users of an image, as its `/etc/passwd` and `/etc/group` name them."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

NO_USER = "there is no such user or group in the image"


def become_user(name: str, home: str, owned: list[str], env: dict[str, str]) -> None:
    """In a new process: change to the user `NAME[:GROUP]` or `UID[:GID]`, and set HOME. Raises OSError.

    HOME is `home`, or else the one that the image names. The paths `owned` belong to the user afterwards."""
    user, _, group = name.partition(":")
    entry = find_entry("/etc/passwd", user)
    if entry is None and not user.isdigit():
        raise OSError(errno.EINVAL, NO_USER)
    uid = int(entry[2]) if entry else int(user)
    gid = int(entry[3]) if entry else 0
    groups = find_groups(entry[0]) if entry else []
    if group:
        group_entry = find_entry("/etc/group", group)
        if group_entry is None and not group.isdigit():
            raise OSError(errno.EINVAL, NO_USER)
        gid, groups = int(group_entry[2]) if group_entry else int(group), []
    for path in owned:
        with suppress(FileNotFoundError):
            os.chown(path, uid, gid, follow_symlinks=False)
    os.setgroups([gid, *groups])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    own_home = entry[5] if entry and entry[5] else "/"
    env["HOME"] = home or (env["HOME"] if uid == 0 else own_home)


def read_entries(path: str) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n").split(":") for line in file if not line.startswith("#")]
    except OSError:
        return []


def find_entry(path: str, name: str) -> list[str] | None:
    """The line for a name, or for an id."""
    fields = 7 if path.endswith("passwd") else 4
    entries = [entry for entry in read_entries(path) if len(entry) >= fields and entry[2].isdigit()]
    by_name = next((entry for entry in entries if entry[0] == name), None)
    return by_name or next((entry for entry in entries if entry[2] == name), None)


def find_groups(user: str) -> list[int]:
    entries = [entry for entry in read_entries("/etc/group") if len(entry) >= 4 and entry[2].isdigit()]
    return [int(entry[2]) for entry in entries if user in entry[3].split(",")]
