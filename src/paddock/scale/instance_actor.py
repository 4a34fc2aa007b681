"""On a node: a Ray actor that owns one instance process of a fleet control plane.

It connects to the plane, passes lines on to the process, reports its state, and runs verifiers beside the instance's
databases. The process and its folder end with the connection, with the actor and with the node, whichever is first.
Requests of clients do not pass through here: they go to the instance directly.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paddock
from paddock.child_process import kill_orphan
from paddock.errors import ClusterError, PaddockError
from paddock.fleet.instance.verifier.runner import VerifierRequest, VerifierRunner
from paddock.fleet.plane.processes import InstanceProcess
from paddock.processes import process_start_time
from paddock.scale.cluster import ray_module
from paddock.scale.host_actor import LOOPBACK_ADDRESS, node_address
from paddock.scale.node_link import LinkLost, NodeLink, connect_to_driver

if TYPE_CHECKING:
    from collections.abc import Coroutine

PLANE_SILENCE_SECONDS = 30.0
"""A plane that sends nothing for so long counts as gone, with its machine."""
EXIT_SECONDS = 2.0
LAST_MESSAGE_SECONDS = 1.0
FOLDER_PREFIX = "paddock-instances"
NODE_PYTHON = "python"


@dataclass(frozen=True, slots=True)
class InstanceActorConfig:
    """The configuration of an actor. It is pickled for the node, so it holds plain values only."""

    command: tuple[str, ...]
    """A first word of `python` stands for the node's own interpreter."""
    plane: tuple[str, int]
    token: str = field(repr=False)
    end_seconds: float
    version: str
    single_machine: bool = False
    """Serve on loopback, not on the node's address."""


class InstanceActor:
    """The Ray actor of one instance process. It has no async method: Ray would run the actor on a loop of its own."""

    def __init__(self, config: InstanceActorConfig) -> None:
        self.config = config

    def run(self, key: str) -> None:
        """Start the process, and stay until its end. `key` identifies it to the plane."""
        if self.config.version != paddock.__version__:
            raise ClusterError(
                f"this node has Paddock {paddock.__version__}, and the plane {self.config.version}",
                hint="install the same version on every node",
            )
        try:
            asyncio.run(run_instance(self.config, key))
        finally:
            # The plane ends this actor too, unless the plane or the head of the cluster is gone.
            threading.Timer(EXIT_SECONDS, os._exit, (0,)).start()


async def run_instance(config: InstanceActorConfig, key: str) -> None:
    streams = await connect_to_driver(*config.plane, config.token, "instance", key)
    link = NodeLink(*streams, silence=PLANE_SILENCE_SECONDS)
    async with link.keep_alive():
        await InstanceOwner(config, link).run()


class InstanceOwner:
    """The process, its folder, and the link to the plane."""

    def __init__(self, config: InstanceActorConfig, link: NodeLink) -> None:
        self._config = config
        self._link = link
        self._address = LOOPBACK_ADDRESS if config.single_machine else node_address()
        self._tasks: set[asyncio.Task[None]] = set()
        self._verifiers = VerifierRunner()
        self._process: InstanceProcess | None = None
        self._folder = Path()

    async def run(self) -> None:
        self._folder = await asyncio.to_thread(_own_folder)
        grace = 0.0
        try:
            python, *rest = self._config.command
            command = [sys.executable if python == NODE_PYTHON else python, *rest]
            self._process = process = await InstanceProcess.start(command, self._folder / "instance.log")
            _record_process(self._folder, process)
            node = ray_module().get_runtime_context().get_node_id()
            self._link.send("hello", {"address": self._address, "node": node, "pid": process.pid})
            self._spawn(self._send_first_line(process))
            orders = asyncio.create_task(self._handle_orders(process))
            futures: list[asyncio.Future[Any]] = [orders, process.ended]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            grace = orders.result() if orders.done() else 0.0
            orders.cancel()
        finally:
            await asyncio.shield(self._shut_down(grace))

    async def _shut_down(self, grace: float) -> None:
        for task in self._tasks:
            task.cancel()
        code, last_words = -1, ""
        if self._process is not None:
            await self._process.end(grace)
            last_words = self._process.log_tail()
            if self._process.ended.done():
                code = self._process.ended.result()
        await self._verifiers.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        # Last of all: the plane closes the link and ends this actor when it reads this.
        self._link.send("ended", {"code": code, "last_words": last_words})
        with suppress(LinkLost, TimeoutError):
            async with asyncio.timeout(LAST_MESSAGE_SECONDS):
                while True:
                    await self._link.receive()

    async def _handle_orders(self, process: InstanceProcess) -> float:
        """Carry out orders until the plane ends the process or is gone. Returns the grace seconds for the end."""
        with suppress(LinkLost):
            while True:
                message = await self._link.receive()
                match message.kind:
                    case "end":
                        return float(message.value)
                    case "line":
                        line = message.value
                        if "instance_id" in line:
                            line |= {"folder": str(self._folder), "host": self._address}
                        process.send(line)
                    case "verify":
                        request = VerifierRequest(**message.value["call"], folder=self._folder)
                        self._spawn(self._verify(message.value["number"], request))
        return self._config.end_seconds

    async def _verify(self, number: int, request: VerifierRequest) -> None:
        try:
            self._link.send("verified", {"number": number, "answer": await self._verifiers.run(request)})
        except PaddockError as error:
            self._link.send("verified", {"number": number, "error": str(error)})

    async def _send_first_line(self, process: InstanceProcess) -> None:
        line = await process.first_line
        self._link.send("first_line", None if line is None else line.decode(errors="replace"))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# -- folders of a node ------------------------------------------------------------------------------------


def _own_folder() -> Path:
    """A folder for this actor. Folders of actors that were killed are removed, with their processes."""
    root = Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    for entry in root.iterdir():
        _remove_leftover(entry)
    folder = root / f"{os.getpid()}-{process_start_time(os.getpid())}"
    folder.mkdir(mode=0o700)
    return folder


def _remove_leftover(folder: Path) -> None:
    pid, _, ticks = folder.name.partition("-")
    if not pid.isdigit() or str(process_start_time(int(pid))) == ticks:
        return
    with suppress(OSError, ValueError):
        instance_pid, began = (folder / "process").read_text().split()
        kill_orphan(int(instance_pid), int(began))
    shutil.rmtree(folder, ignore_errors=True)


def _record_process(folder: Path, process: InstanceProcess) -> None:
    (folder / "process").write_text(f"{process.pid} {process.start_time}")
