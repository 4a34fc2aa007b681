"""What runs on a node: one rollout, with its capture proxy beside its agent. It reports to its driver.

It gets its job from the driver, and ends when the driver is gone: then the sandbox is closed. The sandboxes of a
worker that is killed end with it. What it leaves in folders is removed by the next rollout on the node.

`NodeStore` records sandboxes on the node. It sends everything else to the driver's store, in batches: messages are
encoded on the store's thread and sent a few times a second. Of several states of a record only the last is sent.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.capture.gate import CallGate
from paddock.capture.upstream import Upstream
from paddock.errors import StoreError
from paddock.loopback import is_loopback_url
from paddock.models.weight_version import Weights
from paddock.rollouts.context import RunContext
from paddock.rollouts.rollout import Rollout
from paddock.rollouts.sandboxes import recover
from paddock.sandbox import find_backend
from paddock.scale.cluster import ray_module
from paddock.scale.driver_images import fetch_driver_images
from paddock.scale.node_link import LinkLost, LinkMessage, NodeLink, connect_to_driver
from paddock.scale.remote_pauses import pause_on_node
from paddock.scale.rollout_service import RolloutTicket, tunnel
from paddock.store import Store
from paddock.store.blobs import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.capture.trace import Call, Event
    from paddock.models.endpoint import Endpoint
    from paddock.rollouts.config import RunConfig
    from paddock.rollouts.fork import ForkPoint, RecordedCalls
    from paddock.sqlite import Database
    from paddock.store.record import RolloutRecord
    from paddock.tasks.task import Task

SEND_INTERVAL_SECONDS = 0.05
CHUNK_BYTES = 1 << 20
LAST_ANSWER_SECONDS = 15.0
"""For the driver to store everything."""


@dataclass(frozen=True, slots=True)
class RolloutJob:
    """What the driver sends over the link, not through Ray.

    A config is pickled without its secrets and without credentials in URLs. Fields with some are sent beside it.
    """

    config: RunConfig
    task: Task
    record: RolloutRecord
    endpoint: Endpoint
    env: str | Callable[[], Any] | None = field(default=None, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    fork: ForkPoint | None = None
    """The recorded rollout that it replays, which is not in the node's store."""
    recorded: RecordedCalls | None = None


def run_rollout_task(ticket: RolloutTicket) -> None:
    """The Ray task: run one rollout in this process. Raises LinkLost if the driver is gone or does not expect it."""
    asyncio.run(_connect_and_run(ticket))


async def _connect_and_run(ticket: RolloutTicket) -> None:
    link = NodeLink(*await connect_to_driver(ticket.host, ticket.port, ticket.token, "rollout", ticket.rollout_id))
    async with link.keep_alive():
        link.send("hello", describe_worker())
        with suppress(LinkLost, TimeoutError):
            message = await link.receive()
            try:
                await _run_job(ticket, link, ray_module().cloudpickle.loads(message.raw), message.value)
            except LinkLost:
                raise
            except Exception as error:
                link.send("failed", f"{type(error).__name__}: {error}")
            # Wait until the driver has everything: closing the socket would drop what is still in transit.
            async with asyncio.timeout(LAST_ANSWER_SECONDS):
                while message.kind != "kept":
                    message = await link.receive()


def describe_worker() -> dict[str, Any]:
    """The node and the process that this is."""
    ray = ray_module()
    node = ray.get_runtime_context().get_node_id()
    return {"node": node, "address": ray.util.get_node_ip_address(), "pid": os.getpid()}


async def _run_job(ticket: RolloutTicket, link: NodeLink, job: RolloutJob, state: dict[str, Any]) -> None:
    buffer = MessageBuffer()
    async with AsyncExitStack() as stack:
        store = await asyncio.to_thread(_open_store, buffer)
        stack.callback(store.close)
        upstream = await stack.enter_async_context(Upstream())
        endpoint = job.endpoint
        if is_loopback_url(endpoint.url):
            endpoint = replace(endpoint, url=await stack.enter_async_context(tunnel(ticket, endpoint.url)))
        weights, gate = Weights(state["weight_version"]), CallGate(state["pauses"])
        config = replace(job.config, env=job.env, weight_version=weights, gate=gate)
        context = RunContext.create(config, endpoint=endpoint, store=store, upstream=upstream, secrets=job.secrets)
        rollout = Rollout(job.task, context, record=job.record, fork=job.fork, recorded=job.recorded)
        running = asyncio.ensure_future(_run_with_images(rollout, ticket))
        orders = asyncio.ensure_future(_handle_orders(link, rollout, running))
        sending = asyncio.ensure_future(buffer.send_forever(link))
        try:
            await asyncio.wait((running, orders, sending), return_when=asyncio.FIRST_COMPLETED)
            # If it was not the rollout that ended, the driver is gone.
            running.cancel()
            await asyncio.wait((running,))
        finally:
            for each in (running, orders, sending):
                each.cancel()
            await asyncio.wait((running, orders, sending))
        failed = next((each for each in (orders, sending) if not each.cancelled()), None)
        if failed is not None:
            failed.result()
        if not buffer.sealed:
            buffer.put(
                "failed", "it was stopped before it began" if running.cancelled() else repr(running.exception())
            )
        await buffer.flush(link)


async def _run_with_images(rollout: Rollout, ticket: RolloutTicket) -> None:
    if find_backend(rollout.context.config.sandbox).supports_dockerfiles:
        await fetch_driver_images(rollout.task, ticket)
    await rollout.run()


def _open_store(buffer: MessageBuffer) -> NodeStore:
    store = NodeStore.open(node_folder())
    assert isinstance(store, NodeStore)
    store.buffer = buffer
    recover(store)
    return store


async def _handle_orders(link: NodeLink, rollout: Rollout, running: asyncio.Future[Any]) -> None:
    """Carry out what the driver sends while the rollout runs. Raises LinkLost when the driver is gone."""
    tasks: set[asyncio.Task[None]] = set()
    gate = rollout.context.gate
    while True:
        message = await link.receive()
        match message.kind:
            case "abort":
                tasks.add(asyncio.ensure_future(rollout.abort(message.value)))
            case "cancel":
                running.cancel()
            case "weights":
                rollout.context.weights.set(message.value)
            case "pause":
                tasks.add(asyncio.ensure_future(pause_on_node(link, gate, message.value)))
            case "resume":
                gate.resume()


# -- the store --------------------------------------------------------------------------------------------


def node_folder() -> Path:
    """The folder of the store in which this machine records the sandboxes of placed rollouts."""
    folder = Path(tempfile.gettempdir()) / f"paddock-node-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise StoreError(f"{folder} belongs to another user", hint="remove it, or set TMPDIR for this node")
    return folder


class MessageBuffer:
    """Messages that wait to be sent. Any thread may add some, until it is sealed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, bytes]] = []
        self.sealed = False
        """Whether the last message has been added."""
        self._filled = asyncio.Event()

    def put(self, kind: str, value: Any = None, raw: bytes = b"") -> None:
        frame = LinkMessage(kind, value, raw).frame()
        with self._lock:
            if self.sealed:
                return
            if kind == "record":
                self._waiting = [waiting for waiting in self._waiting if waiting[0] != kind]
            self._waiting.append((kind, frame))
        self._loop.call_soon_threadsafe(self._filled.set)

    def seal(self) -> None:
        with self._lock:
            self.sealed = True

    def take(self) -> list[bytes]:
        with self._lock:
            frames = [frame for _, frame in self._waiting]
            self._waiting = []
        self._filled.clear()
        return frames

    async def send_forever(self, link: NodeLink) -> None:
        """Send what is added, forever. Raises LinkLost."""
        while True:
            await self._filled.wait()
            await asyncio.sleep(SEND_INTERVAL_SECONDS)
            await self.flush(link)

    async def flush(self, link: NodeLink) -> None:
        for frame in self.take():
            link.send_frames([frame])
            await link.drain()


class NodeStore(Store):
    """Sends what is written to the driver. Set `buffer` before anything is written."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.buffer: MessageBuffer | None = None
        self._events = 0

    def begin(self, record: RolloutRecord) -> None:
        """The driver has recorded the start already."""
        self.update(record)

    def update(self, record: RolloutRecord) -> None:
        self._put("record", field_values(record))

    def finish(self, record: RolloutRecord) -> bool:
        self._put("finish", field_values(record))
        assert self.buffer is not None
        self.buffer.seal()
        return True

    def save_call(self, rollout_id: str, call: Call) -> None:
        self._put("call", field_values(call))

    def add_event(self, rollout_id: str, event: Event) -> int:
        self._put("event", field_values(event))
        self._events += 1
        return self._events

    def put_blob(self, data: bytes) -> str:
        digest = digest_of(data)
        self._put_data("blob", digest, data)
        return digest

    def put_snapshot(self, rollout_id: str, contents: Mapping[str, bytes]) -> None:
        for digest, data in contents.items():
            self._put_data("snapshot", digest, data)

    def expire_snapshots(self, max_age_seconds: float) -> int:
        """The driver has done it."""
        return 0

    def _put_data(self, kind: str, digest: str, data: bytes) -> None:
        for start in range(0, len(data), CHUNK_BYTES):
            self._put("chunk", None, data[start : start + CHUNK_BYTES])
        self._put(kind, digest)

    def _put(self, kind: str, value: Any, raw: bytes = b"") -> None:
        assert self.buffer is not None, "the buffer is not set"
        self.buffer.put(kind, value, raw)


def field_values(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}
