"""Rollouts over the nodes of a Ray cluster. The driver writes them all into its one store.

Each rollout is one Ray task that Ray places and never repeats. It reports over a socket of its own (see `link`), so
that its driver knows within a moment when it is gone, and it knows when the driver is. Only the driver gives
outcomes: a rollout whose worker or node is lost ends with outcome `sandbox`, and its batch runs the next attempt on
another node.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError, SandboxError, StoreError
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.rollout import Rollout
from paddock.rollouts.trace import Call, Caller, Event, Level, LogprobsKind, Role
from paddock.rollouts.unhurried import unhurried
from paddock.rollouts.weights import Weights
from paddock.scale.cluster import Resources, connect, disconnect, ray_module
from paddock.scale.desk import Desk, is_loopback
from paddock.scale.head import Head
from paddock.scale.link import LinkLost
from paddock.scale.node import Job, perform
from paddock.scale.placement import Nodes, Placement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from paddock.rollouts.batch import Place
    from paddock.rollouts.recipe import Recipe
    from paddock.scale.link import Link, Message

logger = logging.getLogger("paddock.rollout")

PER_NODE = "paddock_rollouts"
WEIGHTS_EVERY = 0.05
RECALL_SECONDS = 10.0
"""For a node to end a cancelled rollout in order; then its worker is killed."""
OWN = ("rollout_id", "task_id", "batch_id", "member", "attempt")
"""Fields of a record that nobody but the driver sets."""


@dataclass(frozen=True, slots=True)
class RayEngine:
    """`run_batch(engine=RayEngine(…))`. `engine="ray"` is one with these defaults."""

    address: str | None = None
    """Of the cluster. None: RAY_ADDRESS, or else a cluster is started on this machine."""
    resources: Resources = field(default_factory=Resources)
    """What one rollout takes of its node. `Resources(custom={"sandbox_bwrap": 1})` only uses nodes that have it."""
    per_node: int | None = None
    """The most rollouts at a time on one node, over all drivers that say the same."""

    def __post_init__(self) -> None:
        if self.per_node is not None and not 1 <= self.per_node <= 10_000:
            raise ConfigError(f"per_node is {self.per_node}", hint="give a number from 1 to 10000")
        if self.address is not None and self.address.startswith("ray://"):
            hint = "run this on a node of the cluster (`ray job submit`), with the address HOST:6379"
            raise ConfigError("rollouts cannot report to a driver outside of the cluster", hint=hint)

    @asynccontextmanager
    async def opened(self, recipe: Recipe, log: Callable[[str], None]) -> AsyncIterator[Place]:
        """Joins the cluster, and leaves it again if it was not joined before.

        Raises ClusterError, also when the head is given up: what is under way is cancelled then.
        """
        ray = ray_module()
        joined_here = not ray.is_initialized()
        with _without_advice():
            await asyncio.to_thread(connect, self.address)
        try:
            head = Head.joined()
            nodes = await Nodes.known(head)
            if not nodes.fitting(self.resources.bundle()):
                log(f"no node has {self._asked()}: waiting for one")
            model = recipe.endpoint.url if is_loopback(recipe.endpoint.url) else None
            async with Desk(ray.util.get_node_ip_address(), model) as desk:
                placing = Placing(ray.remote(**self._options())(perform), desk, nodes, self, recipe)
                async with placing.following_weights(), head.watched():
                    yield partial(PlacedRollout, placing=placing)
        finally:
            if joined_here:
                await unhurried(asyncio.to_thread(disconnect))

    def _options(self) -> dict[str, Any]:
        options = {"max_retries": 0, "scheduling_strategy": "SPREAD", **self.resources.options()}
        if self.per_node is not None:
            # Every node has one of each resource with this prefix, without being told.
            prefix = ray_module()._raylet.IMPLICIT_RESOURCE_PREFIX
            limit = {f"{prefix}{PER_NODE}": int(10_000 / self.per_node) / 10_000}
            options["resources"] = {**self.resources.custom, **limit}
        return options

    def _asked(self) -> str:
        return ", ".join(f"{amount:g} {name}" for name, amount in self.resources.bundle().items())


class Placing:
    """What the rollouts of one batch share on the driver."""

    def __init__(self, task: Any, desk: Desk, nodes: Nodes, engine: RayEngine, recipe: Recipe) -> None:
        self.desk = desk
        self.nodes = nodes
        self.engine = engine
        self.recipe = recipe
        self._task = task
        self._links: set[Link] = set()
        told = recipe.settings.get("weights")
        self._weights = told if isinstance(told, Weights) else Weights()

    def place(self, record: RolloutRecord) -> Placement:
        member = f"{record.task_id}/{record.member}"
        bundle = self.engine.resources.bundle()
        return Placement(self._task, self.desk, self.nodes, record.rollout_id, member=member, bundle=bundle)

    def job(self, rollout: Rollout) -> Job:
        settings = {name: value for name, value in self.recipe.settings.items() if name != "weights"}
        recipe = replace(self.recipe, settings=settings)
        return Job(recipe, rollout.task, rollout.record, self._weights.current())

    @contextmanager
    def linked(self, link: Link) -> Iterator[None]:
        """While a rollout runs there: what concerns all of them is told to it too."""
        self._links.add(link)
        self.nodes.started()
        try:
            yield
        finally:
            self._links.discard(link)
            self.nodes.ended()

    @asynccontextmanager
    async def following_weights(self) -> AsyncIterator[None]:
        following = asyncio.ensure_future(self._follow_weights())
        try:
            yield
        finally:
            following.cancel()

    async def _follow_weights(self) -> None:
        told = self._weights.current()
        while True:
            await asyncio.sleep(WEIGHTS_EVERY)
            version = self._weights.current()
            if version != told:
                told = version
                for link in self._links:
                    link.post("weights", version)


class PlacedRollout(Rollout):
    """A rollout whose stages run on some node. It is begun, watched, aborted, ended and kept as any other."""

    def __init__(self, *args: Any, placing: Placing, **options: Any) -> None:
        super().__init__(*args, **options)
        self._placing = placing
        self._link: Link | None = None
        self._over = asyncio.Event()
        self._chunks: list[bytes] = []
        self._unkept: str | None = None

    async def abort(self, reason: str = "aborted") -> None:
        if self._link is None:
            await super().abort(reason)
        elif self._worker is not None and self._aborted is None:
            self._aborted = reason
            self._link.post("abort", reason)
            try:
                await asyncio.wait_for(self._over.wait(), RECALL_SECONDS)
            except TimeoutError:
                if self._worker is not None:
                    self._worker.cancel()

    # -- the stages ---------------------------------------------------------------------------------

    async def _stages(self) -> None:
        placement = self._placing.place(self.record)
        try:
            link = self._link = await placement.begun()
            with self._placing.linked(link):
                async with link.beating():
                    await self._run_there(link, placement)
        finally:
            self._link = None
            self._over.set()
            await unhurried(placement.end())
        if self._unkept is not None:
            self.record.reward, self.record.reward_parts = None, {}
            self._end(Outcome.ENVIRONMENT, f"calls could not be recorded: {self._unkept}")

    async def _run_there(self, link: Link, placement: Placement) -> None:
        try:
            self.record.metadata["node"] = placement.where = (await link.receive()).value
            link.post("job", raw=ray_module().cloudpickle.dumps(self._placing.job(self)))
            await self._follow(link)
            placement.finished = True
        except LinkLost as error:
            raise SandboxError(await placement.explain(str(error))) from error
        except asyncio.CancelledError:
            await unhurried(self._recall(link))
            raise

    async def _recall(self, link: Link) -> None:
        """Have it ended in order, and keep what it still tells."""
        link.post("cancel")
        with suppress(LinkLost, TimeoutError, SandboxError):
            async with asyncio.timeout(RECALL_SECONDS):
                await self._follow(link)

    async def _follow(self, link: Link) -> None:
        """Write down what the node tells, to the end. Raises LinkLost, and SandboxError if the node cannot run it."""
        while True:
            message = await link.receive()
            try:
                await self._keep(message)
            except StoreError as error:
                self._refused(message, error)
            if message.kind in ("finish", "failed"):
                link.post("kept")
                with suppress(LinkLost):
                    await link.drain()
            if message.kind == "finish":
                return
            if message.kind == "failed":
                raise SandboxError(f"its node could not run it: {message.value}")

    async def _keep(self, message: Message) -> None:
        store = self._store
        match message.kind:
            case "record":
                self._adopt(message.value)
                await store.run(store.update, self.record)
                if self._on_change is not None:
                    self._on_change(self)
            case "finish":
                self._adopt(message.value)
                self.record.outcome = Outcome(message.value["outcome"])
            case "event":
                await store.run(store.add_event, self.id, Event(**message.value))
            case "call":
                await store.run(store.save_call, self.id, call_of(message.value))
            case "chunk":
                self._chunks.append(message.raw)
            case "blob":
                data, self._chunks = b"".join(self._chunks), []
                await store.run(store.put_blob, data)

    def _refused(self, message: Message, error: StoreError) -> None:
        """As in a rollout of this process: a call that is lost spoils it, an event does not."""
        logger.warning("a %s of %s was not kept: %s", message.kind, self.id, error)
        if message.kind in ("call", "blob"):
            self._unkept = error.message

    def _adopt(self, values: dict[str, Any]) -> None:
        """The node's record is ours, but for who it is. The object stays: others look at it."""
        told = RolloutRecord(**values)
        for each in fields(told):
            if each.name not in (*OWN, "metadata", "outcome"):
                setattr(self.record, each.name, getattr(told, each.name))
        self.record.metadata = {**told.metadata, **self.record.metadata}

    def _count_calls(self) -> None:
        """The node has counted."""

    def _end(self, outcome: Outcome, error: str | None) -> None:
        head = self._placing.nodes.head
        if outcome is Outcome.CANCELLED and self._aborted is None and head is not None and head.given_up is not None:
            error = head.given_up.message
        super()._end(outcome, error)


def call_of(values: dict[str, Any]) -> Call:
    kinds = {"role": Role, "level": Level, "caller": Caller, "logprobs_kind": LogprobsKind}
    return Call(**{**values, **{name: kind(values[name]) for name, kind in kinds.items()}})


@contextmanager
def _without_advice() -> Iterator[None]:
    """Ray is joined on another thread, since it blocks; there it cannot take the signals over, and says so."""
    ray_logger = logging.getLogger("ray._private.worker")

    def advises(record: logging.LogRecord) -> bool:
        return "SIGTERM" not in record.getMessage()

    ray_logger.addFilter(advises)
    try:
        yield
    finally:
        ray_logger.removeFilter(advises)


def rollouts_per_minute(records: list[RolloutRecord]) -> float:
    """How many ended in a minute, from the first start to the last end."""
    ended = [record for record in records if record.finished_at is not None]
    if not ended:
        return 0.0
    began = min(record.started_at for record in ended)
    seconds = max(record.finished_at or 0.0 for record in ended) - began
    return 60.0 * len(ended) / max(seconds, 1e-9)
