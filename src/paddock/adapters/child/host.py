"""Runs in the other interpreter: `python host.py LOADER PLACE CONTROL`, the last the number of a descriptor.

LOADER is a file with `load(place)`. What it returns has `describe()`, a JSON object told at the start, and `open()`,
which makes a session: `ask(kind, data)` takes a word and JSON, returns JSON, all as bytes, and `close()` ends it. An
error called `Refused` means that a request was wrong and nothing was done.

Each byte on the control socket brings the socket of a new session. A request is a line `KIND NUMBER JSON`, an answer
`ok|refused|failed NUMBER JSON`. When the control socket ends, so does everything.
"""

import importlib.util
import json
import os
import socket
import sys
import threading
import time
from typing import Any

PARTING_SECONDS = 2.0
PIECE = 1 << 16


def main() -> None:
    loader, place, number = sys.argv[1:4]
    control = socket.socket(fileno=int(number))
    control.set_inheritable(False)
    sys.path[0] = os.getcwd()
    try:
        hosted = load(loader).load(place)
        told: dict[str, Any] = {"about": hosted.describe()}
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}", "hint": getattr(error, "hint", None)}
        control.sendall(json.dumps(told).encode() + b"\n")
        sys.exit(1)
    control.sendall(json.dumps(told).encode() + b"\n")
    threads: list[threading.Thread] = []
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except OSError:
            break
        if not data:
            break
        threads = [thread for thread in threads if thread.is_alive()]
        for descriptor in descriptors:
            thread = threading.Thread(target=serve, args=(hosted, socket.socket(fileno=descriptor)), daemon=True)
            thread.start()
            threads.append(thread)
    deadline = time.monotonic() + PARTING_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    os._exit(0)


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("paddock_hosted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(hosted: Any, link: socket.socket) -> None:
    """One session, on this thread from its beginning to its end."""
    # Plain reads and writes: what buffers and sockets do beside them costs more than most steps.
    session: Any = None
    descriptor, rest = link.fileno(), b""
    try:
        while piece := os.read(descriptor, PIECE):
            if rest:
                piece = rest + piece
            *lines, rest = piece.split(b"\n")
            for line in lines:
                kind, number, data = line.split(b" ", 2)
                try:
                    if kind == b"open":
                        session, answer = hosted.open(), b"null"
                    else:
                        answer = session.ask(kind, data)
                except BaseException as error:
                    tell(link, number, error)
                    continue
                write(link, b"ok %b %b\n" % (number, answer))
    except OSError:
        pass
    finally:
        if session is not None:
            try:
                session.close()
            except BaseException as error:
                print(f"close failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        link.close()


def write(link: socket.socket, answer: bytes) -> None:
    written = os.write(link.fileno(), answer)
    if written < len(answer):
        link.sendall(answer[written:])


def tell(link: socket.socket, number: bytes, error: BaseException) -> None:
    """Tell of a failure."""
    kind = type(error).__name__
    if kind == "Refused":
        told, data = b"refused", error.args[0]
    else:
        told, data = b"failed", {"type": kind, "message": str(error)}
    link.sendall(b"%b %b %b\n" % (told, number, json.dumps(data, default=str).encode()))


if __name__ == "__main__":
    main()
