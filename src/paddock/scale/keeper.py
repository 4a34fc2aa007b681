"""On the node: an actor that owns one instance process of a fleet plane.

It dials the plane and is its hand there: passes lines on, tells how the process fares, runs verifiers beside the
instance's databases. Process and folder end with the line, with the actor and with the node, whichever is first.
No request of a client goes through here: those go straight to the instance.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddock
from paddock.errors import ClusterError, PaddockError
from paddock.fleet.control.process import InstanceProcess, kill_left_over, started_ticks
from paddock.fleet.control.verifying import LocalVerifiers, VerifierCall
from paddock.scale.cluster import ray_module
from paddock.scale.hosts import LOCAL, node_address

BEAT_EVERY = 0.5
DIAL_WITHIN = 10.0
PLANE_SILENT_FOR = 30.0
"""Seconds without a word from the plane after which it counts as gone, its machine with it."""
LEAVES_AFTER = 2.0
MOST_LINE = 64 * 1024 * 1024
FOLDERS = "paddock-instances"
OWN_PYTHON = "python"


@dataclass(frozen=True, slots=True)
class KeeperPlan:
    """All that a keeper needs to know. Plain values: it is sent to the node."""

    command: tuple[str, ...]
    """`python` in front means the node's own."""
    door: tuple[str, int]
    end_seconds: float
    version: str
    on_this_machine: bool = False
    """Serve on loopback, not on the node's address."""


class InstanceKeeper:
    """The actor. It lives for one process."""

    def __init__(self, plan: KeeperPlan) -> None:
        self.plan = plan

    def run(self, token: str) -> None:
        """Start the process, and keep it until its end. `token` tells the plane which one this is."""
        if self.plan.version != paddock.__version__:
            raise ClusterError(
                f"this node has Paddock {paddock.__version__}, and the plane {self.plan.version}",
                hint="install the same version on every node",
            )
        try:
            asyncio.run(Keeping(self.plan, token).run())
        finally:
            # The plane ends this actor too, unless it or the cluster's head is gone.
            threading.Timer(LEAVES_AFTER, os._exit, (0,)).start()


class Keeping:
    def __init__(self, plan: KeeperPlan, token: str) -> None:
        self._plan = plan
        self._token = token
        self._address = LOCAL if plan.on_this_machine else node_address()
        self._tasks: set[asyncio.Task[None]] = set()
        self._verifiers = LocalVerifiers()
        self._writer: asyncio.StreamWriter | None = None
        self._process: InstanceProcess | None = None
        self._folder = Path()

    async def run(self) -> None:
        async with asyncio.timeout(DIAL_WITHIN):
            reader, self._writer = await asyncio.open_connection(*self._plan.door, limit=MOST_LINE)
        self._folder = await asyncio.to_thread(_own_folder)
        grace = 0.0
        try:
            python, *rest = self._plan.command
            command = [sys.executable if python == OWN_PYTHON else python, *rest]
            self._process = process = await InstanceProcess.start(command, self._folder / "instance.log")
            _note_process(self._folder, process)
            node = ray_module().get_runtime_context().get_node_id()
            self._say({"token": self._token, "address": self._address, "node": node, "pid": process.pid})
            for work in (self._beat(), self._tell_first_line()):
                self._own(work)
            listening = asyncio.create_task(self._listen(reader))
            ways: list[asyncio.Future[Any]] = [listening, process.ended]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            grace = listening.result() if listening.done() else 0.0
            listening.cancel()
        finally:
            await asyncio.shield(self._wind_up(grace))

    async def _wind_up(self, grace: float) -> None:
        for task in self._tasks:
            task.cancel()
        ended: dict[str, Any] = {}
        if self._process is not None:
            await self._process.end(grace)
            code = self._process.ended.result() if self._process.ended.done() else -1
            ended = {"ended": code, "last_words": self._process.last_words()}
        await self._verifiers.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        # Last of all: the plane ends this actor when it hears of it.
        self._say(ended)
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._writer.wait_closed()

    # -- what the plane says --------------------------------------------------------------------------

    async def _listen(self, reader: asyncio.StreamReader) -> float:
        """Do what the plane says until it wants an end, or is gone; how many seconds the process has for that."""
        with suppress(OSError, ValueError, TimeoutError):
            while True:
                async with asyncio.timeout(PLANE_SILENT_FOR):
                    line = await reader.readline()
                if not line:
                    break
                said = json.loads(line)
                if "end" in said:
                    return float(said["end"])
                self._heard(said)
        return self._plan.end_seconds

    def _heard(self, said: dict[str, Any]) -> None:
        assert self._process is not None
        if "line" in said:
            line = said["line"]
            if "instance_id" in line:
                line |= {"folder": str(self._folder), "host": self._address}
            self._process.send(line)
        elif "verify" in said:
            self._own(self._verify(said["verify"], VerifierCall(**said["call"], folder=self._folder)))

    async def _verify(self, number: int, call: VerifierCall) -> None:
        try:
            self._say({"verified": number, "answer": await self._verifiers(call)})
        except PaddockError as error:
            self._say({"verified": number, "error": str(error)})

    # -- what the plane is told -----------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            self._say({})
            await asyncio.sleep(BEAT_EVERY)

    async def _tell_first_line(self) -> None:
        assert self._process is not None
        line = await self._process.first_line
        self._say({"first_line": None if line is None else line.decode(errors="replace")})

    def _say(self, document: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            # Not orjson: it refuses integers beyond 64 bits, which a verifier may answer with.
            self._writer.write(json.dumps(document).encode() + b"\n")

    def _own(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# -- folders of a node ------------------------------------------------------------------------------------


def _own_folder() -> Path:
    """A folder for one keeper; those of keepers that were killed are removed, with what they left running."""
    root = Path(tempfile.gettempdir()) / f"{FOLDERS}-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    for left in root.iterdir():
        _sweep(left)
    folder = root / f"{os.getpid()}-{started_ticks(os.getpid())}"
    folder.mkdir(mode=0o700)
    return folder


def _sweep(folder: Path) -> None:
    pid, _, ticks = folder.name.partition("-")
    if not pid.isdigit() or str(started_ticks(int(pid))) == ticks:
        return
    with suppress(OSError, ValueError):
        left, began = (folder / "process").read_text().split()
        kill_left_over(int(left), int(began))
    shutil.rmtree(folder, ignore_errors=True)


def _note_process(folder: Path, process: InstanceProcess) -> None:
    (folder / "process").write_text(f"{process.pid} {process.started_ticks}")
