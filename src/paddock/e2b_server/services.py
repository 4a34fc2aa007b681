"""The two services of E2B's daemon: `process.Process` and `filesystem.Filesystem`. Knows no HTTP.

Each method takes a sandbox and a message, and returns a message or an iterator of messages.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from paddock.e2b_server.connect_protocol import ConnectError
from paddock.e2b_server.served_sandbox import SIGNALS, FolderWatcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from paddock.e2b_server.served_sandbox import OutputListener, ServedProcess, ServedSandbox


class ConnectService(NamedTuple):
    """The methods of a service, by the way they are called."""

    unary: Mapping[str, Any]
    server_streams: Mapping[str, Any]
    client_streams: Mapping[str, Any]


# -- process.Process ----------------------------------------------------------------------------------


async def start(
    served: ServedSandbox, message: dict[str, Any], timeout: float | None
) -> AsyncIterator[dict[str, Any]]:
    """A command and its output. It goes on when its client leaves, but not beyond the client's deadline."""
    terminal = terminal_size(message["pty"]) if message.get("pty") else None
    process, listener = await served.start(
        message.get("process") or {},
        tag=message.get("tag"),
        # Older clients do not say whether they want an input, and expect one.
        stdin=bool(message.get("stdin", True)),
        terminal=terminal,
        user=message.get("user", ""),
    )
    process.end_within(timeout)
    return process_events(process, listener)


async def connect(
    served: ServedSandbox, message: dict[str, Any], timeout: float | None
) -> AsyncIterator[dict[str, Any]]:
    process = served.select(message.get("process"))
    return process_events(process, process.listen())


async def process_events(process: ServedProcess, listener: OutputListener) -> AsyncIterator[dict[str, Any]]:
    try:
        yield {"event": {"start": {"pid": process.pid}}}
        while (output := await listener.next()) is not None:
            kind, data = output
            yield {"event": {"data": {kind: base64.b64encode(data).decode()}}}
        yield {"event": {"end": process.end}}
    finally:
        listener.leave()


async def list_all(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    return {"processes": [process_info(process) for process in served.processes.values()]}


def process_info(process: ServedProcess) -> dict[str, Any]:
    named = {name: process.config[name] for name in ("cmd", "args", "envs", "cwd") if process.config.get(name)}
    tag = {"tag": process.tag} if process.tag else {}
    return {"pid": process.pid, "config": named, **tag}


async def update(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    process = served.select(message.get("process"))
    if message.get("pty"):
        if process.terminal is None:
            raise ConnectError("failed_precondition", f"process {process.pid} has no terminal")
        rows, cols = terminal_size(message["pty"])
        await served.ask("resize", {"stream": process.terminal, "rows": rows, "cols": cols})
    return {}


async def send_input(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    await write_input(served.select(message.get("process")), message.get("input") or {})
    return {}


async def write_input(process: ServedProcess, data_by_kind: dict[str, Any]) -> None:
    for kind in ("stdin", "pty"):
        if kind in data_by_kind:
            try:
                data = base64.b64decode(data_by_kind[kind])
            except (binascii.Error, TypeError, ValueError):
                raise ConnectError("invalid_argument", "the input is not base64") from None
            await process.write(data, terminal=kind == "pty")


async def stream_input(served: ServedSandbox, messages: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    process: ServedProcess | None = None
    async for message in messages:
        if "start" in message:
            process = served.select(message["start"].get("process"))
        elif "data" in message:
            if process is None:
                raise ConnectError("invalid_argument", "the first message must name the process")
            await write_input(process, message["data"].get("input") or {})
    return {}


async def close_stdin(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    await served.select(message.get("process")).close_stdin()
    return {}


async def send_signal(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    number = SIGNALS.get(message.get("signal", ""))
    if number is None:
        raise ConnectError("invalid_argument", f"the signal {message.get('signal')} cannot be sent")
    served.select(message.get("process")).signal(number)
    return {}


def terminal_size(terminal: dict[str, Any]) -> list[int]:
    size = terminal.get("size") or {}
    return [int(size.get("rows") or 24), int(size.get("cols") or 80)]


PROCESS_UNARY = {
    "List": list_all,
    "Update": update,
    "SendInput": send_input,
    "CloseStdin": close_stdin,
    "SendSignal": send_signal,
}
PROCESS_SERVER_STREAMS = {"Start": start, "Connect": connect}
PROCESS_CLIENT_STREAMS = {"StreamInput": stream_input}


# -- filesystem.Filesystem ----------------------------------------------------------------------------

ENTRY_TYPES = {
    "file": "FILE_TYPE_FILE",
    "directory": "FILE_TYPE_DIRECTORY",
    "symlink": "FILE_TYPE_SYMLINK",
    "other": "FILE_TYPE_UNSPECIFIED",
}


async def stat(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    return {"entry": to_client_entry(served, await served.ask("stat", {"path": path_inside(served, message)}))}


async def list_dir(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    arguments = {"path": path_inside(served, message), "depth": int(message.get("depth") or 1)}
    return {"entries": [to_client_entry(served, entry) for entry in await served.ask("entries", arguments)]}


async def make_dir(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    return {"entry": to_client_entry(served, await served.ask("make_dir", {"path": path_inside(served, message)}))}


async def move(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    source, destination = path_inside(served, message, "source"), path_inside(served, message, "destination")
    arguments = {"source": source, "destination": destination}
    return {"entry": to_client_entry(served, await served.ask("move", arguments, subject=str(message["source"])))}


async def remove(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    await served.ask("remove", {"path": path_inside(served, message)})
    return {}


async def create_watcher(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    return {"watcherId": await start_watch(served, message)}


async def get_watcher_events(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    watcher = served.watchers.get(str(message.get("watcherId")))
    if watcher is None:
        raise ConnectError("not_found", f"watcher {message.get('watcherId')} not found")
    # Events and answers share one connection: all earlier events have arrived when this is answered.
    await served.ask("stat", {"path": watcher.path}, subject="the watched folder")
    return {"events": [to_client_event(served, *watcher.events.popleft()) for _ in range(len(watcher.events))]}


async def remove_watcher(served: ServedSandbox, message: dict[str, Any]) -> dict[str, Any]:
    watch = str(message.get("watcherId"))
    if served.watchers.pop(watch, None) is None:
        raise ConnectError("not_found", f"watcher {watch} not found")
    await served.ask("unwatch", {"watch": watch})
    return {}


async def watch_dir(
    served: ServedSandbox, message: dict[str, Any], timeout: float | None
) -> AsyncIterator[dict[str, Any]]:
    """Changes as they happen, until the client leaves."""
    return folder_events(served, await start_watch(served, message))


async def folder_events(served: ServedSandbox, watch: str) -> AsyncIterator[dict[str, Any]]:
    watcher = served.watchers[watch]
    try:
        yield {"start": {}}
        while served.alive:
            while watcher.events:
                yield {"filesystem": to_client_event(served, *watcher.events.popleft())}
            watcher.has_events.clear()
            await watcher.has_events.wait()
    finally:
        if served.watchers.pop(watch, None) is not None:
            served.connection.notify("unwatch", {"watch": watch})


async def start_watch(served: ServedSandbox, message: dict[str, Any]) -> str:
    watch, path = secrets.token_hex(8), path_inside(served, message)
    served.watchers[watch] = FolderWatcher(path)
    arguments = {
        "watch": watch,
        "path": path,
        "recursive": bool(message.get("recursive")),
        "entries": bool(message.get("includeEntry")),
    }
    try:
        await served.ask("watch", arguments)
    except BaseException:
        del served.watchers[watch]
        raise
    return watch


def to_client_event(served: ServedSandbox, name: str, kind: str, entry: dict[str, Any] | None) -> dict[str, Any]:
    event: dict[str, Any] = {"name": name, "type": f"EVENT_TYPE_{kind}"}
    return event if entry is None else {**event, "entry": to_client_entry(served, entry)}


def path_inside(served: ServedSandbox, message: dict[str, Any], name: str = "path") -> str:
    path = message.get(name)
    if not isinstance(path, str) or not path:
        raise ConnectError("invalid_argument", f"{name} is missing")
    return served.to_inner_path(path)


def to_client_entry(served: ServedSandbox, entry: dict[str, Any]) -> dict[str, Any]:
    path = served.to_client_path(entry["path"])
    modified = datetime.fromtimestamp(entry["modified"] / 1e9, UTC)
    client_entry = {
        "name": PurePosixPath(path).name or "/",
        "type": ENTRY_TYPES[entry["type"]],
        "path": path,
        "size": str(entry["size"]),
        "mode": entry["mode"],
        "permissions": entry["permissions"],
        "owner": "user",
        "group": "user",
        "modifiedTime": modified.isoformat().replace("+00:00", "Z"),
        "metadata": entry["metadata"],
    }
    if entry["target"] is not None:
        client_entry |= {"symlinkTarget": served.to_client_path(entry["target"]), "isSymlink": True}
    return client_entry


FILESYSTEM_UNARY = {
    "Stat": stat,
    "ListDir": list_dir,
    "MakeDir": make_dir,
    "Move": move,
    "Remove": remove,
    "CreateWatcher": create_watcher,
    "GetWatcherEvents": get_watcher_events,
    "RemoveWatcher": remove_watcher,
}
FILESYSTEM_SERVER_STREAMS = {"WatchDir": watch_dir}
SERVICES = {
    "process.Process": ConnectService(PROCESS_UNARY, PROCESS_SERVER_STREAMS, PROCESS_CLIENT_STREAMS),
    "filesystem.Filesystem": ConnectService(FILESYSTEM_UNARY, FILESYSTEM_SERVER_STREAMS, {}),
}
