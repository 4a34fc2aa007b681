"""Rollouts over the nodes of a Ray cluster. The driver writes them all into its one store.

Each rollout is one Ray task, which Ray places and never retries. It reports over a socket of its own
(`rollout_service`), so that the driver and the rollout notice at once when the other is gone. Only the driver sets
outcomes: a rollout whose worker or node is lost ends with outcome `sandbox`, and its batch runs the next attempt on
another node. What runs on the node is in `node_rollout`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from paddock.capture.trace import Call, Caller, Event, Level, LogprobsKind, Role
from paddock.errors import ConfigError, SandboxError, StoreError
from paddock.loopback import is_loopback_url
from paddock.rollouts.folder_fidelity import compare_with_source
from paddock.rollouts.judging import Ending
from paddock.scale.cluster import ClusterHead, Resources, connect, disconnect, ray_module
from paddock.scale.node_link import LinkLost, LinkMessage, NodeLink
from paddock.scale.node_rollout import RolloutJob, run_rollout_task
from paddock.scale.placement import ClusterNodes, RolloutPlacement
from paddock.scale.remote_pauses import RemotePauses
from paddock.scale.rollout_service import RolloutService
from paddock.shielded import run_shielded
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from paddock.rollouts.context import RunContext
    from paddock.rollouts.rollout import Rollout

logger = logging.getLogger("paddock.rollout")

PER_NODE_RESOURCE = "paddock_rollouts"
WEIGHTS_POLL_SECONDS = 0.05
CANCEL_SECONDS = 10.0
"""For a node to end a cancelled rollout. Then its worker is killed."""
DRIVER_FIELDS = ("rollout_id", "task_id", "batch_id", "member", "attempt", "store_folder")
"""Fields of a record that only the driver sets."""


@dataclass(frozen=True, slots=True)
class RayBackend:
    """`run_batch(engine=RayBackend(…))`. `engine="ray"` is one with these defaults."""

    address: str | None = None
    """Of the cluster. None: RAY_ADDRESS, or else a cluster is started on this machine."""
    resources: Resources = field(default_factory=Resources)
    """What one rollout takes of its node. `Resources(custom={"sandbox_bwrap": 1})` only uses nodes that have it."""
    per_node: int | None = None
    """The most rollouts at a time on one node, over all drivers with the same value."""

    def __post_init__(self) -> None:
        if self.per_node is not None and not 1 <= self.per_node <= 10_000:
            raise ConfigError(f"per_node is {self.per_node}", hint="give a number from 1 to 10000")
        if self.address is not None and self.address.startswith("ray://"):
            hint = "run this on a node of the cluster (`ray job submit`), with the address HOST:6379"
            raise ConfigError("rollouts cannot report to a driver outside of the cluster", hint=hint)

    @asynccontextmanager
    async def open(self, context: RunContext, log: Callable[[str], None]) -> AsyncIterator[Callable[[], RayRun]]:
        """Joins the cluster, and leaves it again if it was not joined before.

        Raises ClusterError, also when the head has failed for good: then the running rollouts are cancelled.
        """
        ray = ray_module()
        joined_here = not ray.is_initialized()
        with _without_signal_warning():
            await asyncio.to_thread(connect, self.address)
        try:
            head = ClusterHead.current()
            nodes = await ClusterNodes.load(head)
            if not nodes.fitting(self.resources.bundle()):
                log(f"no node has {self._describe_resources()}: waiting for one")
            model = context.endpoint.url if is_loopback_url(context.endpoint.url) else None
            async with RolloutService(ray.util.get_node_ip_address(), model) as service:
                batch_placement = BatchPlacement(
                    ray.remote(**self._options())(run_rollout_task), service, nodes, self, context
                )
                async with batch_placement.publish_changes(), head.cancel_on_failure():
                    yield partial(RayRun, batch_placement)
        finally:
            if joined_here:
                await run_shielded(asyncio.to_thread(disconnect))

    def _options(self) -> dict[str, Any]:
        options = {"max_retries": 0, "scheduling_strategy": "SPREAD", **self.resources.options()}
        if self.per_node is not None:
            # Ray gives every node one of each resource with this prefix.
            prefix = ray_module()._raylet.IMPLICIT_RESOURCE_PREFIX
            limit = {f"{prefix}{PER_NODE_RESOURCE}": int(10_000 / self.per_node) / 10_000}
            options["resources"] = {**self.resources.custom, **limit}
        return options

    def _describe_resources(self) -> str:
        return ", ".join(f"{amount:g} {name}" for name, amount in self.resources.bundle().items())


class BatchPlacement:
    """What the rollouts of one batch share on the driver."""

    def __init__(
        self, task: Any, service: RolloutService, nodes: ClusterNodes, engine: RayBackend, context: RunContext
    ) -> None:
        self.service = service
        self.nodes = nodes
        self.engine = engine
        self.context = context
        self._task = task
        self._links: set[NodeLink] = set()
        self._weights = context.weights
        self.pauses = RemotePauses(context.weights)

    def place(self, record: RolloutRecord) -> RolloutPlacement:
        member = f"{record.task_id}/{record.member}"
        bundle = self.engine.resources.bundle()
        return RolloutPlacement(self._task, self.service, self.nodes, record.rollout_id, member=member, bundle=bundle)

    async def make_job(self, rollout: Rollout) -> RolloutJob:
        context, fork = self.context, rollout.fork
        return RolloutJob(
            context.config,
            rollout.task,
            rollout.record,
            context.endpoint,
            context.config.env,
            context.secrets,
            fork,
            None if fork is None else await rollout.read_recorded(fork),
        )

    def describe_state(self) -> dict[str, Any]:
        """What changes while a rollout runs."""
        return {"weight_version": self._weights.current(), "pauses": self.context.gate.pauses}

    @contextmanager
    def attached(self, link: NodeLink) -> Iterator[None]:
        """While a rollout runs: it gets the updates that go to all rollouts."""
        self._links.add(link)
        self.nodes.record_start()
        try:
            with self.pauses.attached(link):
                yield
        finally:
            self._links.discard(link)
            self.nodes.record_end()

    @asynccontextmanager
    async def publish_changes(self) -> AsyncIterator[None]:
        """New weights and pauses go to all nodes."""
        polling = asyncio.ensure_future(self._poll_weights())
        self.context.gate.remotes.add(self.pauses)
        try:
            yield
        finally:
            self.context.gate.remotes.discard(self.pauses)
            polling.cancel()

    async def _poll_weights(self) -> None:
        published = self._weights.current()
        while True:
            await asyncio.sleep(WEIGHTS_POLL_SECONDS)
            version = self._weights.current()
            if version != published:
                published = version
                for link in self._links:
                    link.send("weights", version)


class RayRun:
    """The stages of one rollout, on some node. Its reports go into the driver's record and store."""

    def __init__(self, batch_placement: BatchPlacement) -> None:
        self._batch = batch_placement
        self._rollout: Rollout
        self._link: NodeLink | None = None
        self._finished = asyncio.Event()
        self._chunks: list[bytes] = []
        self._store_error: str | None = None

    async def abort(self, reason: str) -> bool:
        if self._link is None:
            return False
        self._link.send("abort", reason)
        try:
            await asyncio.wait_for(self._finished.wait(), CANCEL_SECONDS)
        except TimeoutError:
            return False
        return True

    async def run(self, rollout: Rollout) -> Ending:
        self._rollout = rollout
        record = rollout.record
        placement = self._batch.place(record)
        try:
            link = self._link = await placement.start()
            async with link.keep_alive():
                await self._run_on_node(link, placement)
        except asyncio.CancelledError:
            head = self._batch.nodes.head
            if head is not None and head.failure is not None:
                rollout.cancel_reason = head.failure.message
            raise
        finally:
            self._link = None
            self._finished.set()
            await run_shielded(placement.end())
        if self._store_error is not None:
            record.reward, record.reward_parts = None, {}
            return Ending(Outcome.ENVIRONMENT, f"calls could not be recorded: {self._store_error}")
        assert record.outcome is not None
        return Ending(record.outcome, record.error)

    async def _run_on_node(self, link: NodeLink, placement: RolloutPlacement) -> None:
        try:
            self._rollout.record.metadata["node"] = placement.worker = (await link.receive()).value
            job = await self._batch.make_job(self._rollout)
            raw = await asyncio.to_thread(ray_module().cloudpickle.dumps, job)
            # The job comes with the weights and the pauses of this moment; changes follow it.
            with self._batch.attached(link):
                link.send("job", self._batch.describe_state(), raw)
                await self._store_reports(link)
            placement.finished = True
        except LinkLost as error:
            raise SandboxError(await placement.explain_loss(str(error))) from error
        except asyncio.CancelledError:
            await run_shielded(self._cancel_on_node(link))
            raise

    async def _cancel_on_node(self, link: NodeLink) -> None:
        """Cancel it on its node, and store what it still reports."""
        link.send("cancel")
        with suppress(LinkLost, TimeoutError, SandboxError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await self._store_reports(link)

    async def _store_reports(self, link: NodeLink) -> None:
        """Store what the node reports, to the end. Raises LinkLost, and SandboxError if the node cannot run it."""
        while True:
            message = await link.receive()
            if message.kind == "paused":
                self._batch.pauses.record_report(link, message)
                continue
            try:
                await self._store_report(message)
            except StoreError as error:
                self._record_store_error(message, error)
            if message.kind in ("finish", "failed"):
                link.send("kept")
                with suppress(LinkLost):
                    await link.drain()
            if message.kind == "finish":
                return
            if message.kind == "failed":
                raise SandboxError(f"its node could not run it: {message.value}")

    async def _store_report(self, message: LinkMessage) -> None:
        rollout, record, store = self._rollout, self._rollout.record, self._batch.context.store
        match message.kind:
            case "record":
                self._update_record(message.value)
                await store.run(store.update, record)
                rollout.notify()
            case "finish":
                self._update_record(message.value)
                record.outcome = Outcome(message.value["outcome"])
                await self._compare_files()
            case "event":
                await store.run(store.add_event, rollout.id, Event(**message.value))
            case "call":
                await store.run(store.save_call, rollout.id, decode_call(message.value))
            case "chunk":
                self._chunks.append(message.raw)
            case "blob":
                data, self._chunks = b"".join(self._chunks), []
                await store.run(store.put_blob, data)
            case "snapshot":
                data, self._chunks = b"".join(self._chunks), []
                await store.run(store.put_snapshot, rollout.id, {message.value: data})

    async def _compare_files(self) -> None:
        """Of a fork and the recorded rollout, whose snapshots the node does not have."""
        rollout, store = self._rollout, self._batch.context.store
        fidelity = rollout.record.fork.get("fidelity") or {}
        if "pairs" in (fidelity.get("files") or {}):
            calls = await store.run(store.calls, rollout.id)
            source, pairs = rollout.record.fork["source"], fidelity["files"]["pairs"]
            files = await store.run(compare_with_source, store, source, calls, pairs)
            fidelity["files"] = rollout.recorder.mask.value(files)

    def _record_store_error(self, message: LinkMessage, error: StoreError) -> None:
        """As in a local rollout: a lost call invalidates it, a lost event does not."""
        logger.warning("a %s of %s was not stored: %s", message.kind, self._rollout.id, error)
        if message.kind in ("call", "blob"):
            self._store_error = error.message

    def _update_record(self, values: dict[str, Any]) -> None:
        """Take over the fields of the node's record. The object stays the same: others hold references to it."""
        record, node_record = self._rollout.record, RolloutRecord(**values)
        for each in fields(node_record):
            if each.name not in (*DRIVER_FIELDS, "metadata", "outcome"):
                setattr(record, each.name, getattr(node_record, each.name))
        record.metadata = {**node_record.metadata, **record.metadata}


def decode_call(values: dict[str, Any]) -> Call:
    kinds = {"role": Role, "level": Level, "caller": Caller, "logprobs_kind": LogprobsKind}
    return Call(**{**values, **{name: kind(values[name]) for name, kind in kinds.items()}})


@contextmanager
def _without_signal_warning() -> Iterator[None]:
    """`ray.init` blocks, so it runs on a thread. There Ray cannot install signal handlers, and logs a warning."""
    ray_logger = logging.getLogger("ray._private.worker")

    def advises(record: logging.LogRecord) -> bool:
        return "SIGTERM" not in record.getMessage()

    ray_logger.addFilter(advises)
    try:
        yield
    finally:
        ray_logger.removeFilter(advises)
