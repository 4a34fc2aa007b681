"""`filesystem.Filesystem`: what is there, moved, removed and watched."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.rollouts.e2b.connect import ConnectError
from paddock.rollouts.e2b.guest import Watcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.rollouts.e2b.guest import Guest

TYPES = {
    "file": "FILE_TYPE_FILE",
    "directory": "FILE_TYPE_DIRECTORY",
    "symlink": "FILE_TYPE_SYMLINK",
    "other": "FILE_TYPE_UNSPECIFIED",
}


async def stat(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    return {"entry": entry(guest, await guest.ask("stat", {"path": place(guest, asked)}))}


async def list_dir(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    arguments = {"path": place(guest, asked), "depth": int(asked.get("depth") or 1)}
    return {"entries": [entry(guest, found) for found in await guest.ask("entries", arguments)]}


async def make_dir(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    return {"entry": entry(guest, await guest.ask("make_dir", {"path": place(guest, asked)}))}


async def move(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    source, destination = place(guest, asked, "source"), place(guest, asked, "destination")
    arguments = {"source": source, "destination": destination}
    return {"entry": entry(guest, await guest.ask("move", arguments, said=str(asked["source"])))}


async def remove(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    await guest.ask("remove", {"path": place(guest, asked)})
    return {}


async def create_watcher(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    return {"watcherId": await begin_watch(guest, asked)}


async def get_watcher_events(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    watcher = guest.watchers.get(str(asked.get("watcherId")))
    if watcher is None:
        raise ConnectError("not_found", f"watcher {asked.get('watcherId')} not found")
    # What has happened by now has been told when this is answered: both go over one line.
    await guest.ask("stat", {"path": watcher.path}, said="the watched folder")
    return {"events": [change(guest, *watcher.events.popleft()) for _ in range(len(watcher.events))]}


async def remove_watcher(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    watch = str(asked.get("watcherId"))
    if guest.watchers.pop(watch, None) is None:
        raise ConnectError("not_found", f"watcher {watch} not found")
    await guest.ask("unwatch", {"watch": watch})
    return {}


async def watch_dir(guest: Guest, asked: dict[str, Any], timeout: float | None) -> AsyncIterator[dict[str, Any]]:
    """Changes as they happen, until whoever listens leaves."""
    return changes(guest, await begin_watch(guest, asked))


async def changes(guest: Guest, watch: str) -> AsyncIterator[dict[str, Any]]:
    watcher = guest.watchers[watch]
    try:
        yield {"start": {}}
        while guest.alive:
            while watcher.events:
                yield {"filesystem": change(guest, *watcher.events.popleft())}
            watcher.news.clear()
            await watcher.news.wait()
    finally:
        if guest.watchers.pop(watch, None) is not None:
            guest.channel.tell("unwatch", {"watch": watch})


async def begin_watch(guest: Guest, asked: dict[str, Any]) -> str:
    watch, path = secrets.token_hex(8), place(guest, asked)
    guest.watchers[watch] = Watcher(path)
    arguments = {
        "watch": watch,
        "path": path,
        "recursive": bool(asked.get("recursive")),
        "entries": bool(asked.get("includeEntry")),
    }
    try:
        await guest.ask("watch", arguments)
    except BaseException:
        del guest.watchers[watch]
        raise
    return watch


def change(guest: Guest, name: str, kind: str, about: dict[str, Any] | None) -> dict[str, Any]:
    told: dict[str, Any] = {"name": name, "type": f"EVENT_TYPE_{kind}"}
    return told if about is None else {**told, "entry": entry(guest, about)}


def place(guest: Guest, asked: dict[str, Any], name: str = "path") -> str:
    path = asked.get(name)
    if not isinstance(path, str) or not path:
        raise ConnectError("invalid_argument", f"which {name}?")
    return guest.inside(path)


def entry(guest: Guest, found: dict[str, Any]) -> dict[str, Any]:
    path = guest.shown(found["path"])
    modified = datetime.fromtimestamp(found["modified"] / 1e9, UTC)
    told = {
        "name": PurePosixPath(path).name or "/",
        "type": TYPES[found["type"]],
        "path": path,
        "size": str(found["size"]),
        "mode": found["mode"],
        "permissions": found["permissions"],
        "owner": "user",
        "group": "user",
        "modifiedTime": modified.isoformat().replace("+00:00", "Z"),
        "metadata": found["metadata"],
    }
    if found["target"] is not None:
        told |= {"symlinkTarget": guest.shown(found["target"]), "isSymlink": True}
    return told


UNARY = {
    "Stat": stat,
    "ListDir": list_dir,
    "MakeDir": make_dir,
    "Move": move,
    "Remove": remove,
    "CreateWatcher": create_watcher,
    "GetWatcherEvents": get_watcher_events,
    "RemoveWatcher": remove_watcher,
}
STREAMS = {"WatchDir": watch_dir}
