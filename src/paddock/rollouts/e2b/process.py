"""`process.Process`: commands are started, heard, fed and signalled."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from paddock.rollouts.e2b.connect import ConnectError
from paddock.rollouts.e2b.guest import SIGNALS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.rollouts.e2b.guest import Guest, Listener, Process


async def start(guest: Guest, asked: dict[str, Any], timeout: float | None) -> AsyncIterator[dict[str, Any]]:
    """A command and its output. It goes on when its client leaves, but not beyond the client's deadline."""
    terminal = size_of(asked["pty"]) if asked.get("pty") else None
    process, listener = await guest.start(
        asked.get("process") or {},
        tag=asked.get("tag"),
        # Clients from before the choice was theirs expect an input.
        stdin=bool(asked.get("stdin", True)),
        terminal=terminal,
    )
    process.end_within(timeout)
    return told(process, listener)


async def connect(guest: Guest, asked: dict[str, Any], timeout: float | None) -> AsyncIterator[dict[str, Any]]:
    process = guest.select(asked.get("process"))
    return told(process, process.listen())


async def told(process: Process, listener: Listener) -> AsyncIterator[dict[str, Any]]:
    try:
        yield {"event": {"start": {"pid": process.pid}}}
        while (piece := await listener.next(None)) is not None:
            kind, data = piece
            yield {"event": {"data": {kind: base64.b64encode(data).decode()}}}
        yield {"event": {"end": process.end}}
    finally:
        listener.leave()


async def list_all(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    return {"processes": [info(process) for process in guest.processes.values()]}


def info(process: Process) -> dict[str, Any]:
    named = {name: process.config[name] for name in ("cmd", "args", "envs", "cwd") if process.config.get(name)}
    tag = {"tag": process.tag} if process.tag else {}
    return {"pid": process.pid, "config": named, **tag}


async def update(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    process = guest.select(asked.get("process"))
    if asked.get("pty"):
        if process.terminal is None:
            raise ConnectError("failed_precondition", f"process {process.pid} has no terminal")
        rows, cols = size_of(asked["pty"])
        await guest.ask("resize", {"stream": process.terminal, "rows": rows, "cols": cols})
    return {}


async def send_input(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    await feed(guest.select(asked.get("process")), asked.get("input") or {})
    return {}


async def feed(process: Process, given: dict[str, Any]) -> None:
    for kind in ("stdin", "pty"):
        if kind in given:
            try:
                data = base64.b64decode(given[kind])
            except (binascii.Error, TypeError, ValueError):
                raise ConnectError("invalid_argument", "the input is not base64") from None
            await process.write(data, terminal=kind == "pty")


async def stream_input(guest: Guest, messages: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    process: Process | None = None
    async for message in messages:
        if "start" in message:
            process = guest.select(message["start"].get("process"))
        elif "data" in message:
            if process is None:
                raise ConnectError("invalid_argument", "the first message has to say which process it is")
            await feed(process, message["data"].get("input") or {})
    return {}


async def close_stdin(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    await guest.select(asked.get("process")).close_stdin()
    return {}


async def send_signal(guest: Guest, asked: dict[str, Any]) -> dict[str, Any]:
    number = SIGNALS.get(asked.get("signal", ""))
    if number is None:
        raise ConnectError("invalid_argument", f"the signal {asked.get('signal')} cannot be sent")
    guest.select(asked.get("process")).signal(number)
    return {}


def size_of(terminal: dict[str, Any]) -> list[int]:
    size = terminal.get("size") or {}
    return [int(size.get("rows") or 24), int(size.get("cols") or 80)]


UNARY = {
    "List": list_all,
    "Update": update,
    "SendInput": send_input,
    "CloseStdin": close_stdin,
    "SendSignal": send_signal,
}
STREAMS = {"Start": start, "Connect": connect}
FED = {"StreamInput": stream_input}
