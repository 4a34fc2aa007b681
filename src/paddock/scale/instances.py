"""Instances of a fleet plane, placed by Ray: `paddock fleet up --engine ray`.

Each is a process on some node, owned by an actor (`instance_actor`). The actor connects to the plane. When that
connection breaks or falls silent, the plane knows within seconds that the actor or its node is gone, where Ray needs
fifteen. Ray only places.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import paddock
from paddock.errors import ConfigError, VerifierError
from paddock.fleet.instance.verifier.runner import VerifierRunner
from paddock.fleet.plane.processes import HostedProcess, StartFailed
from paddock.loopback import is_loopback
from paddock.processes import KILL_SECONDS
from paddock.scale import cluster
from paddock.scale.cluster import ClusterHead, call_ray
from paddock.scale.host_actor import LOOPBACK_ADDRESS, node_address
from paddock.scale.instance_actor import NODE_PYTHON, InstanceActor, InstanceActorConfig
from paddock.scale.node_link import LinkLost, NodeLink, accept_caller, challenge_caller, listen
from paddock.scale.placement import NODE_LABEL, SUBMISSIONS, ClusterNodes, last_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paddock.errors import ClusterError
    from paddock.fleet.instance.verifier.runner import VerifierRequest
    from paddock.fleet.plane.settings import PlaneSettings
    from paddock.scale.node_link import LinkMessage

SILENCE_SECONDS = 4.0
"""An instance whose actor sends nothing for so long is lost."""
KILL_ACTOR_SECONDS = 5.0
CREATE_ACTOR_SECONDS = 8.0
VERIFY_GRACE_SECONDS = 20.0
LOST_EXIT_CODE = -9
DEFAULT_RESOURCES = cluster.Resources(cpus=0.25)


@dataclass(frozen=True, slots=True)
class InstancePlacement:
    """How a plane uses the cluster."""

    resources: cluster.Resources = DEFAULT_RESOURCES
    """What one instance takes of its node."""
    single_machine: bool = False
    """The cluster has only this machine: everything stays on loopback."""


class RayInstances:
    """A `Launcher` over all nodes of the cluster that this process has joined. `verify` runs verifiers there.

    `on_head_lost` is called when the head of the cluster has failed for good: no instance can be created any more.
    """

    def __init__(
        self,
        settings: PlaneSettings,
        placement: InstancePlacement | None = None,
        on_head_lost: Callable[[ClusterError], None] | None = None,
    ) -> None:
        self._settings = settings
        self._placement = placement or InstancePlacement()
        self._address = LOOPBACK_ADDRESS if self._placement.single_machine else node_address()
        if not settings.gate and not self._placement.single_machine:
            _check_loopback([self._address, *(node.address for node in cluster.nodes() if node.alive)])
        self._expected: dict[str, PlacedProcess] = {}
        self._placed: set[PlacedProcess] = set()
        self._verifiers = VerifierRunner()
        self._token = secrets.token_urlsafe(32)
        self._resources = AsyncExitStack()
        self._actor_config: InstanceActorConfig | None = None
        self._actor: Any = cluster.ray_module().remote(InstanceActor)
        self._head = ClusterHead.current()
        self._nodes = ClusterNodes(head=self._head)
        self._head_watcher: asyncio.Task[None] | None = None
        self._on_head_lost = on_head_lost
        self.lost = 0

    async def open(self) -> None:
        await self._nodes.refresh()
        port = await self._resources.enter_async_context(listen(self._address, self._admit))
        command = self._settings.instance_command
        own = type(self._settings).__dataclass_fields__["instance_command"].default
        self._actor_config = InstanceActorConfig(
            command=(NODE_PYTHON, *command[1:]) if command == own else command,
            plane=(self._address, port),
            token=self._token,
            end_seconds=self._settings.end_seconds,
            version=paddock.__version__,
            single_machine=self._placement.single_machine,
        )
        self._head_watcher = asyncio.create_task(self._watch_head(), name="head-of-the-cluster")

    async def close(self) -> None:
        if self._head_watcher is not None:
            self._head_watcher.cancel()
        await asyncio.gather(*(process.end(0) for process in list(self._placed)))
        await self._resources.aclose()
        await self._verifiers.close()

    async def start(self, log: Path) -> PlacedProcess:
        """Start a process on the node that Ray chooses, within the plane's `start_seconds`. Raises StartFailed."""
        process = PlacedProcess()
        self._placed.add(process)
        process.ended.add_done_callback(lambda _: self._discard(process))
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                await self._place(process)
        except TimeoutError:
            await process.end(0)
            each = ", ".join(f"{amount:g} {name}" for name, amount in self._placement.resources.bundle().items())
            why = f"no node took it within {self._settings.start_seconds:g} s: each takes {each}"
            raise StartFailed(why, transient=True) from None
        except BaseException:
            await asyncio.shield(process.end(0))
            raise
        if not self._settings.gate and not is_loopback(process.address or LOOPBACK_ADDRESS):
            await process.end(0)
            raise StartFailed(
                f"node {process.address} can be reached by others, and there is no gate", transient=False
            )
        return process

    async def verify(self, call: VerifierRequest) -> dict[str, Any]:
        """Run a verifier on the node of its instance; one without an instance here. Raises VerifierError."""
        named = call.instance_id
        process = next((each for each in self._placed if named is not None and each.instance_id == named), None)
        return await (self._verifiers.run(call) if process is None else process.verify(call))

    def statistics(self) -> dict[str, Any]:
        nodes: dict[str, dict[str, Any]] = {}
        for process in self._placed:
            if process.joined.done():
                node = nodes.setdefault(process.node, {"address": process.address, "processes": 0})
                node["processes"] += 1
        return {"engine": "ray", "nodes": nodes, "lost": self.lost, "head": self._head.describe()}

    # -- actors ---------------------------------------------------------------------------------------

    async def _place(self, process: PlacedProcess) -> None:
        """Create an actor, several times if needed, until one has connected. Raises StartFailed."""
        reason = ""
        for _ in range(SUBMISSIONS):
            self._require_head()
            key = secrets.token_hex(16)
            self._expected[key] = process
            try:
                # Shielded: an actor that is created must also be ended.
                running = await asyncio.shield(asyncio.create_task(self._create_actor(process, key)))
                reason = await self._wait_until_joined(process, running)
            finally:
                self._expected.pop(key, None)
            if process.joined.done():
                return
            await process.kill()
        raise StartFailed(f"its actor ended before it served: {reason}", transient=True)

    def _require_head(self) -> None:
        """Raises StartFailed: a start does not wait for a head that is away."""
        if not self._head.is_reachable:
            raise StartFailed(f"the Ray head at {self._head.address} does not answer", transient=True)

    async def _create_actor(self, process: PlacedProcess, key: str) -> asyncio.Future[None]:
        """The returned future ends with the actor."""
        bundle = self._placement.resources.bundle()
        avoided = self._nodes.avoided("", bundle, now=time.monotonic())
        options = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        if avoided:
            options["label_selector"] = {NODE_LABEL: f"!in({','.join(sorted(avoided))})"}

        def make() -> Any:
            process.actor = self._actor.options(**options, **self._placement.resources.options()).remote(
                self._actor_config
            )
            return process.actor.run.remote(key)

        try:
            reference = await call_ray(make, CREATE_ACTOR_SECONDS)
        except Exception as error:
            raise StartFailed(f"Ray places nothing: {last_line(error)}", transient=True) from error
        finally:
            if not process.is_alive:
                await process.kill()
        running = asyncio.wrap_future(reference.future())
        # Retrieve the exception, so that asyncio does not log it when nobody awaits the future any more.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        return running

    async def _wait_until_joined(self, process: PlacedProcess, running: asyncio.Future[None]) -> str:
        """Wait until its actor has connected, or will not any more; returns why not. Raises StartFailed."""
        from ray.exceptions import RayTaskError

        lost = asyncio.ensure_future(self._nodes.node_lost.wait())
        head = asyncio.ensure_future(self._head.wait_for_change())
        futures: list[asyncio.Future[Any]] = [process.joined, running, lost, head]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            head.cancel()
        if process.joined.done() or not running.done():
            return "a node was lost, or the head"
        error = running.exception()
        if isinstance(error, RayTaskError):
            raise StartFailed(f"its node could not run it: {last_line(error)}", transient=False)
        return "it returned" if error is None else last_line(error)

    # -- connections of actors ------------------------------------------------------------------------

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match await challenge_caller(reader, writer, self._token):
            case ["instance", key] if (process := self._expected.pop(key, None)) is not None and process.is_alive:
                accept_caller(writer)
                link = NodeLink(reader, writer, silence=SILENCE_SECONDS)
                async with link.keep_alive():
                    await self._follow(process, link)
            case _:
                writer.close()

    async def _follow(self, process: PlacedProcess, link: NodeLink) -> None:
        try:
            process.join((await link.receive()).value, link)
            while process.is_alive:
                process.handle(await link.receive())
        except LinkLost as error:
            await self._handle_loss(process, str(error))

    async def _handle_loss(self, process: PlacedProcess, how: str) -> None:
        """Find out whether the actor or its node is gone, and record it. Harmless once the process has ended."""
        if not process.is_alive:
            return
        if process.node not in self._nodes.members:
            with suppress(Exception):
                await self._nodes.refresh()
        if await self._nodes.is_reachable(process.node):
            process.mark_lost(f"its actor on node {process.address} is gone: {how}")
            return
        self._nodes.mark_lost(process.node, now=time.monotonic())
        process.mark_lost(f"its node {process.address} is gone: {how}")

    async def _watch_head(self) -> None:
        error = await self._head.watch()
        if self._on_head_lost is not None:
            self._on_head_lost(error)

    def _discard(self, process: PlacedProcess) -> None:
        self._placed.discard(process)
        self.lost += process.is_lost


class PlacedProcess(HostedProcess):
    """An instance process on a node, reached through its actor."""

    def __init__(self) -> None:
        super().__init__()
        self.actor: Any = None
        self.joined: asyncio.Future[None] = self._loop.create_future()
        self.node = ""
        self.instance_id: str | None = None
        self.is_lost = False
        self._link: NodeLink | None = None
        self._last_words = ""
        self._numbers = itertools.count(1)
        self._verifying: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._killing: asyncio.Task[None] | None = None

    # -- called by the plane --------------------------------------------------------------------------

    def send(self, line: dict[str, Any]) -> None:
        self.instance_id = line.get("instance_id", self.instance_id)
        self._send("line", line)

    def move_log(self, place: Path) -> None:
        """Its log stays on its node. The last lines come with the end of the process."""

    def log_tail(self) -> str:
        return self._last_words or "it said nothing"

    def describe_end(self, when: str = "") -> str:
        if not self.is_lost:
            return super().describe_end(when)
        return f"it was lost{when and ' '}{when}: {self._last_words}"

    async def end(self, seconds: float) -> None:
        if self.is_alive and self.joined.done():
            self._send("end", seconds)
            await asyncio.wait([self.ended], timeout=seconds + KILL_SECONDS)
        self.mark_lost("it was ended, and did not answer")
        if self._killing is not None:
            await self._killing

    async def verify(self, call: VerifierRequest) -> dict[str, Any]:
        """Raises VerifierError."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._verifying[number] = answer
        call_fields = asdict(call)
        del call_fields["folder"]
        self._send("verify", {"number": number, "call": call_fields})
        if not self.is_alive:
            answer.set_exception(VerifierError(self.describe_end()))
        try:
            async with asyncio.timeout(call.timeout + VERIFY_GRACE_SECONDS):
                return await answer
        except TimeoutError:
            raise VerifierError(f"node {self.address} did not run the verifier in time") from None
        finally:
            self._verifying.pop(number, None)

    # -- its connection -------------------------------------------------------------------------------------

    def join(self, worker: dict[str, Any], link: NodeLink) -> None:
        self.address, self.node = str(worker["address"]), str(worker["node"])
        self._link = link
        self.joined.set_result(None)

    def handle(self, message: LinkMessage) -> None:
        match message.kind:
            case "first_line" if not self.first_line.done():
                self.first_line.set_result(None if message.value is None else message.value.encode())
            case "verified":
                self._resolve_verification(message.value)
            case "ended":
                self._last_words = str(message.value["last_words"])
                self._has_ended(int(message.value["code"]))

    def _send(self, kind: str, value: Any) -> None:
        if self._link is not None:
            self._link.send(kind, value)

    def mark_lost(self, how: str) -> None:
        """It vanished. Harmless once it has ended."""
        if self.is_alive:
            self.is_lost = self.joined.done()
            self._last_words = how
            self._has_ended(LOST_EXIT_CODE)

    async def kill(self) -> None:
        """Kill the actor, which frees its resources."""
        actor, self.actor = self.actor, None
        if actor is not None:
            with suppress(Exception):
                await call_ray(lambda: cluster.ray_module().kill(actor), KILL_ACTOR_SECONDS)

    def _resolve_verification(self, value: dict[str, Any]) -> None:
        answer = self._verifying.get(value["number"])
        if answer is None or answer.done():
            return
        if "answer" in value:
            answer.set_result(value["answer"])
        else:
            answer.set_exception(VerifierError(str(value["error"])))

    def _has_ended(self, code: int) -> None:
        if not self.first_line.done():
            self.first_line.set_result(None)
        self.ended.set_result(code)
        if self._link is not None:
            self._link.close()
        for answer in self._verifying.values():
            if not answer.done():
                answer.set_exception(VerifierError(self.describe_end()))
        self._killing = self._loop.create_task(self.kill())


def _check_loopback(addresses: list[str]) -> None:
    open_to_others = sorted({address for address in addresses if not is_loopback(address)})
    if open_to_others:
        raise ConfigError(
            f"instances on {', '.join(open_to_others)} can be reached from other machines, and are not gated",
            hint="switch the gate on (--gate)",
        )
