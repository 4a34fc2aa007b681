"""Serves from several processes, for the tests of workers: `worker_server.py FOLDER WORKERS CAPACITY [OPTIONS…]`.

With `child` the parent has another child besides its workers, which ends soon, and with `short-lived-child` one that
ends before there are workers. With `hasty` an answer that takes a moment begins as a stream.
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from paddock import ToolEnvironment, serve, tool
from paddock.config import Limits, ServerConfig
from paddock.server import keepalive

FOLDER = Path(sys.argv[1])


class Noted(ToolEnvironment):
    """Writes down in which process it was built and closed."""

    concurrent_sessions = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        note(f"built {os.getpid()} {id(self)}")

    @tool
    def add(self, amount: int) -> dict[str, Any]:
        self.count += amount
        return {"count": self.count, "process": os.getpid()}

    @tool
    def pause(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    @tool
    async def hang(self) -> str:
        note("began to hang")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            note("cancelled")
            raise
        return "never"

    def close(self) -> None:
        note(f"closed {os.getpid()} {id(self)}")


def note(line: str) -> None:
    with (FOLDER / "notes").open("a") as notes:
        notes.write(line + "\n")


def have_a_child(seconds: float) -> None:
    if os.fork() == 0:
        time.sleep(seconds)
        note("child ended")
        os._exit(0)


if __name__ == "__main__":
    if "child" in sys.argv[4:]:
        have_a_child(0.2)
    if "short-lived-child" in sys.argv[4:]:
        have_a_child(0.0)
    if "hasty" in sys.argv[4:]:
        keepalive.SILENT_SECONDS = 0.1
    limits = Limits(max_sessions=int(sys.argv[3]), give_way_after=0.5, drain_grace=3)
    serve(
        Noted,
        port=0,
        workers=int(sys.argv[2]),
        config=ServerConfig(limits=limits),
        announce=lambda url: (FOLDER / "url").write_text(url),
    )
