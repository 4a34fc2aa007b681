"""Instances of a fleet plane, placed by Ray: `paddock fleet up --engine ray`.

Each is a process on some node that an actor owns (see `keeper`). The actor dials the plane, and that line tells
within seconds that it, or its node, is gone, where Ray would need fifteen. Ray places, and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import paddock
from paddock.errors import ConfigError, VerifierError
from paddock.fleet.control.process import KILLED_SECONDS, HostedProcess, StartFailed
from paddock.fleet.control.verifying import LocalVerifiers
from paddock.scale import cluster
from paddock.scale.head import Head, in_time
from paddock.scale.hosts import LOCAL, node_address
from paddock.scale.keeper import MOST_LINE, OWN_PYTHON, InstanceKeeper, KeeperPlan
from paddock.scale.placement import NODE_LABEL, SUBMISSIONS, Nodes, last_line
from paddock.server.access import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paddock.errors import ClusterError
    from paddock.fleet.control.settings import PlaneSettings
    from paddock.fleet.control.verifying import VerifierCall

logger = logging.getLogger("paddock.scale")

LOOK_EVERY = 0.5
SILENT_FOR = 4.0
"""Seconds without a word after which an instance is given up, with its node."""
HELLO_WITHIN = 5.0
KILL_WITHIN = 5.0
MAKE_WITHIN = 8.0
VERIFY_GRACE = 20.0
LOST = -9
INSTANCE = cluster.Resources(cpus=0.25)


@dataclass(frozen=True, slots=True)
class Placing:
    """How a plane uses the cluster."""

    resources: cluster.Resources = INSTANCE
    """What one instance takes of its node."""
    alone: bool = False
    """The cluster is of this machine only: everything stays on loopback."""


class RayInstances:
    """A `Launcher` over all nodes of the cluster that this process has joined. `verify` runs verifiers there.

    `given_up` hears of it when the cluster's head is gone for good: no instance can be made any more.
    """

    def __init__(
        self,
        settings: PlaneSettings,
        placing: Placing | None = None,
        given_up: Callable[[ClusterError], None] | None = None,
    ) -> None:
        self._settings = settings
        self._placing = placing or Placing()
        self._address = LOCAL if self._placing.alone else node_address()
        if not settings.gate and not self._placing.alone:
            _check_loopback([self._address, *(node.address for node in cluster.nodes() if node.alive)])
        self._expected: dict[str, PlacedProcess] = {}
        self._placed: set[PlacedProcess] = set()
        self._verifiers = LocalVerifiers()
        self._server: asyncio.Server | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._plan: KeeperPlan | None = None
        self._actor: Any = cluster.ray_module().remote(InstanceKeeper)
        self._head = Head.joined()
        self._nodes = Nodes(head=self._head)
        self._head_watcher: asyncio.Task[None] | None = None
        self._given_up = given_up
        self.lost = 0

    async def open(self) -> None:
        await self._nodes.refresh()
        self._server = await asyncio.start_server(self._answer, self._address, 0, limit=MOST_LINE)
        command = self._settings.instance_command
        own = type(self._settings).__dataclass_fields__["instance_command"].default
        self._plan = KeeperPlan(
            command=(OWN_PYTHON, *command[1:]) if command == own else command,
            door=(self._address, self._server.sockets[0].getsockname()[1]),
            end_seconds=self._settings.end_seconds,
            version=paddock.__version__,
            on_this_machine=self._placing.alone,
        )
        self._watcher = asyncio.create_task(self._watch(), name="placed-instances")
        self._head_watcher = asyncio.create_task(self._watch_head(), name="head-of-the-cluster")

    async def close(self) -> None:
        for watcher in (self._watcher, self._head_watcher):
            if watcher is not None:
                watcher.cancel()
        await asyncio.gather(*(process.end(0) for process in list(self._placed)))
        if self._server is not None:
            self._server.close()
        await self._verifiers.close()

    async def start(self, log: Path) -> PlacedProcess:
        """A process on the node that Ray chooses, within the plane's `start_seconds`. Raises StartFailed."""
        process = PlacedProcess()
        self._placed.add(process)
        process.ended.add_done_callback(lambda _: self._forget(process))
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                await self._place(process)
        except TimeoutError:
            await process.end(0)
            each = ", ".join(f"{amount:g} {name}" for name, amount in self._placing.resources.bundle().items())
            why = f"no node took it within {self._settings.start_seconds:g} s: each takes {each}"
            raise StartFailed(why, passing=True) from None
        except BaseException:
            await asyncio.shield(process.end(0))
            raise
        if not self._settings.gate and not is_loopback(process.address or LOCAL):
            await process.end(0)
            raise StartFailed(f"node {process.address} can be reached by others, and there is no gate", passing=False)
        return process

    async def verify(self, call: VerifierCall) -> dict[str, Any]:
        """Run a verifier where the instance is; one without an instance here. Raises VerifierError."""
        named = call.instance_id
        found = next((each for each in self._placed if named is not None and each.instance_id == named), None)
        return await (self._verifiers(call) if found is None else found.verify(call))

    def statistics(self) -> dict[str, Any]:
        nodes: dict[str, dict[str, Any]] = {}
        for process in self._placed:
            if process.joined.done():
                shown = nodes.setdefault(process.node, {"address": process.address, "processes": 0})
                shown["processes"] += 1
        return {"engine": "ray", "nodes": nodes, "lost": self.lost, "head": self._head.shown()}

    # -- actors ---------------------------------------------------------------------------------------

    async def _place(self, process: PlacedProcess) -> None:
        """Have an actor made, until one has joined. A node that is lost meanwhile is avoided. Raises StartFailed."""
        words = ""
        for _ in range(SUBMISSIONS):
            self._require_head()
            token = secrets.token_urlsafe(24)
            self._expected[token] = process
            try:
                # Shielded: an actor that comes to be is an actor that is ended.
                running = await asyncio.shield(asyncio.create_task(self._make(process, token)))
                words = await self._joined(process, running)
            finally:
                self._expected.pop(token, None)
            if process.joined.done():
                return
            await process.kill()
        raise StartFailed(f"its actor ended before it served: {words}", passing=True)

    def _require_head(self) -> None:
        """Raises StartFailed: a start is not kept waiting for a head that is away."""
        if not self._head.is_there:
            raise StartFailed(f"the Ray head at {self._head.address} does not answer", passing=True)

    async def _make(self, process: PlacedProcess, token: str) -> asyncio.Future[None]:
        """The returned future ends with the actor."""
        bundle = self._placing.resources.bundle()
        avoided = self._nodes.avoided("", bundle, now=time.monotonic())
        options = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        if avoided:
            options["label_selector"] = {NODE_LABEL: f"!in({','.join(sorted(avoided))})"}

        def make() -> Any:
            process.actor = self._actor.options(**options, **self._placing.resources.options()).remote(self._plan)
            return process.actor.run.remote(token)

        try:
            reference = await in_time(make, MAKE_WITHIN)
        except Exception as error:
            raise StartFailed(f"Ray places nothing: {last_line(error)}", passing=True) from error
        finally:
            if not process.is_alive:
                await process.kill()
        running = asyncio.wrap_future(reference.future())
        # Nobody may be there any more to hear of a failure.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        return running

    async def _joined(self, process: PlacedProcess, running: asyncio.Future[None]) -> str:
        """Wait until its actor has called, or cannot be expected any more; then why. Raises StartFailed."""
        from ray.exceptions import RayTaskError

        lost = asyncio.ensure_future(self._nodes.news.wait())
        head = asyncio.ensure_future(self._head.change())
        ways: list[asyncio.Future[Any]] = [process.joined, running, lost, head]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            head.cancel()
        if process.joined.done() or not running.done():
            return "a node was lost, or the head"
        error = running.exception()
        if isinstance(error, RayTaskError):
            raise StartFailed(f"its node could not run it: {last_line(error)}", passing=False)
        return "it returned" if error is None else last_line(error)

    # -- lines ----------------------------------------------------------------------------------------

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process: PlacedProcess | None = None
        try:
            async with asyncio.timeout(HELLO_WITHIN):
                hello = json.loads(await reader.readline() or b"{}")
            process = self._expected.pop(str(hello.get("token")), None)
            if process is None or not process.is_alive:
                return
            process.join(hello, writer)
            while line := await reader.readline():
                process.heard(json.loads(line))
        except (OSError, TimeoutError, ValueError) as error:
            logger.debug("the line of an instance broke: %s", error)
        finally:
            writer.close()
            if process is not None:
                await self._lose(process, "its line broke")

    async def _lose(self, process: PlacedProcess, how: str) -> None:
        """Find out what is gone, the actor or its node, and say so. Harmless once the process has ended."""
        if not process.is_alive:
            return
        process.seen = math.inf
        if process.node not in self._nodes.members:
            with suppress(Exception):
                await self._nodes.refresh()
        if await self._nodes.is_there(process.node):
            process.lose(f"its actor on node {process.address} is gone: {how}")
            return
        self._nodes.lose(process.node, now=time.monotonic())
        process.lose(f"its node {process.address} is gone: {how}")

    async def _watch(self) -> None:
        """Give up whoever is silent. Time in which this loop stood still counts for nobody."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY)
            now = time.monotonic()
            late = now - before - LOOK_EVERY
            before = now
            for process in [each for each in self._placed if each.joined.done()]:
                process.seen += late if late > LOOK_EVERY else 0.0
                if now - process.seen > SILENT_FOR:
                    process.losing = asyncio.create_task(self._lose(process, f"silent for {SILENT_FOR:g} s"))
                else:
                    process.say({})

    async def _watch_head(self) -> None:
        error = await self._head.watch()
        if self._given_up is not None:
            self._given_up(error)

    def _forget(self, process: PlacedProcess) -> None:
        self._placed.discard(process)
        self.lost += process.is_lost


class PlacedProcess(HostedProcess):
    """A process on a node, by way of its keeper."""

    def __init__(self) -> None:
        super().__init__()
        self.actor: Any = None
        self.joined: asyncio.Future[None] = self._loop.create_future()
        self.node = ""
        self.seen = 0.0
        self.instance_id: str | None = None
        self.is_lost = False
        self.losing: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._last_words = ""
        self._numbers = itertools.count(1)
        self._verifying: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._killing: asyncio.Task[None] | None = None

    # -- what the plane does with it ------------------------------------------------------------------

    def send(self, line: dict[str, Any]) -> None:
        self.instance_id = line.get("instance_id", self.instance_id)
        self.say({"line": line})

    def move_log(self, place: Path) -> None:
        """Its log stays on its node; the end of it comes with the end of the process."""

    def last_words(self) -> str:
        return self._last_words or "it said nothing"

    def how_it_ended(self, when: str = "") -> str:
        if not self.is_lost:
            return super().how_it_ended(when)
        return f"it was lost{when and ' '}{when}: {self._last_words}"

    async def end(self, seconds: float) -> None:
        if self.is_alive and self.joined.done():
            self.say({"end": seconds})
            await asyncio.wait([self.ended], timeout=seconds + KILLED_SECONDS)
        self.lose("it was ended, and did not answer")
        if self._killing is not None:
            await self._killing

    async def verify(self, call: VerifierCall) -> dict[str, Any]:
        """Raises VerifierError."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._verifying[number] = answer
        told = asdict(call)
        del told["folder"]
        self.say({"verify": number, "call": told})
        if not self.is_alive:
            answer.set_exception(VerifierError(self.how_it_ended()))
        try:
            async with asyncio.timeout(call.timeout + VERIFY_GRACE):
                return await answer
        except TimeoutError:
            raise VerifierError(f"node {self.address} did not run the verifier in time") from None
        finally:
            self._verifying.pop(number, None)

    # -- its line -------------------------------------------------------------------------------------

    def join(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.address, self.node = str(hello["address"]), str(hello["node"])
        self.seen = time.monotonic()
        self._writer = writer
        self.joined.set_result(None)

    def say(self, document: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(document).encode() + b"\n")

    def heard(self, said: dict[str, Any]) -> None:
        self.seen = time.monotonic()
        if "first_line" in said and not self.first_line.done():
            self.first_line.set_result(None if said["first_line"] is None else said["first_line"].encode())
        elif "verified" in said:
            self._verified(said)
        elif "ended" in said:
            self._last_words = str(said["last_words"])
            self._has_ended(int(said["ended"]))

    def lose(self, how: str) -> None:
        """It is gone without a word. Harmless once it has ended."""
        if self.is_alive:
            self.is_lost = self.joined.done()
            self._last_words = how
            self._has_ended(LOST)

    async def kill(self) -> None:
        """End the actor, so that its place is free."""
        actor, self.actor = self.actor, None
        if actor is not None:
            with suppress(Exception):
                await in_time(lambda: cluster.ray_module().kill(actor), KILL_WITHIN)

    def _verified(self, said: dict[str, Any]) -> None:
        answer = self._verifying.get(said["verified"])
        if answer is None or answer.done():
            return
        if "answer" in said:
            answer.set_result(said["answer"])
        else:
            answer.set_exception(VerifierError(str(said["error"])))

    def _has_ended(self, code: int) -> None:
        if not self.first_line.done():
            self.first_line.set_result(None)
        self.ended.set_result(code)
        if self._writer is not None:
            self._writer.close()
        for answer in self._verifying.values():
            if not answer.done():
                answer.set_exception(VerifierError(self.how_it_ended()))
        self._killing = self._loop.create_task(self.kill())


def _check_loopback(addresses: list[str]) -> None:
    open_to_others = sorted({address for address in addresses if not is_loopback(address)})
    if open_to_others:
        raise ConfigError(
            f"instances on {', '.join(open_to_others)} can be reached from other machines, and are not gated",
            hint="switch the gate on (--gate)",
        )
