"""The nodes of a cluster, and the placement of rollouts: submit to Ray, wait, submit again if the node is lost.

Ray chooses the node. This module adds what Ray learns too late: a node that is gone is avoided at once, and a rollout
whose worker died is not placed on the same node again, if another one fits.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.scale.cluster import ClusterHead, call_ray, ray_module

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.scale.node_link import NodeLink
    from paddock.scale.rollout_service import RolloutService

AVOID_SECONDS = 60.0
"""After this time Ray knows whether the node is dead."""
STUCK_SECONDS = 600.0
"""If no rollout of the batch has started or ended for so long, none will find room."""
WATCH_SECONDS = 2.0
SUBMISSIONS = 5
PROBE_SECONDS = 1.0
ASK_SECONDS = 2.0
SUBMIT_SECONDS = 8.0
REASON_SECONDS = 1.0
END_SECONDS = 2.0
NODE_LABEL = "ray.io/node-id"


@dataclass(slots=True)
class ClusterNodes:
    """The nodes that Ray lists, their resources, and which of them to avoid."""

    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost_until: dict[str, float] = field(default_factory=dict)
    avoided_by_member: dict[str, set[str]] = field(default_factory=dict)
    """Nodes on which an earlier attempt of a member was lost."""
    running: int = 0
    last_change: float = field(default_factory=time.monotonic)
    """When a rollout last started or ended."""
    head: ClusterHead | None = None
    _node_lost: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def load(cls, head: ClusterHead) -> ClusterNodes:
        nodes = cls(head=head)
        await nodes.refresh()
        return nodes

    async def refresh(self) -> None:
        """Request the list from the head. While the head is away, the old list stays."""
        if self.head is not None and not self.head.is_reachable:
            return
        with suppress(TimeoutError):
            nodes = await call_ray(ray_module().nodes, ASK_SECONDS)
            self.members = {node["NodeID"]: node for node in nodes if node["Alive"]}

    async def wait_for_head(self) -> None:
        """Wait until something can be placed."""
        while self.head is not None and not self.head.is_reachable:
            await self.head.wait_for_change()

    def fitting(self, bundle: Mapping[str, float]) -> set[str]:
        """Nodes that have these resources in total, free or not."""
        return {
            name
            for name, node in self.members.items()
            if all(node["Resources"].get(kind, 0.0) >= amount for kind, amount in bundle.items())
        }

    def avoided(self, member: str, bundle: Mapping[str, float], *, now: float) -> set[str]:
        """Nodes to avoid for a member, unless no other node fits."""
        lost = {name for name, until in self.lost_until.items() if until > now}
        both = lost | self.avoided_by_member.get(member, set())
        fitting = self.fitting(bundle)
        return next((each for each in (both, lost) if fitting - each), set())

    def mark_lost(self, name: str, *, now: float) -> None:
        """Avoid the node, and wake all placements that wait: they are submitted again without it."""
        self.lost_until[name] = now + AVOID_SECONDS
        node_lost, self._node_lost = self._node_lost, asyncio.Event()
        node_lost.set()

    def avoid_for(self, name: str, member: str) -> None:
        self.avoided_by_member.setdefault(member, set()).add(name)

    @property
    def node_lost(self) -> asyncio.Event:
        """Set when the next node is marked lost."""
        return self._node_lost

    def record_start(self) -> None:
        self.running += 1
        self.last_change = time.monotonic()

    def record_end(self) -> None:
        self.running -= 1
        self.last_change = time.monotonic()

    def is_stuck(self, *, now: float) -> bool:
        return self.running == 0 and now - self.last_change > STUCK_SECONDS

    async def is_reachable(self, name: str) -> bool:
        """Whether the raylet of the node still accepts connections."""
        node = self.members.get(name)
        if node is None:
            return False
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                _, writer = await asyncio.open_connection(node["NodeManagerAddress"], node["NodeManagerPort"])
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True


class RolloutPlacement:
    """One rollout on its way to a node, and on it. Always `end` it."""

    def __init__(
        self,
        task: Any,
        service: RolloutService,
        nodes: ClusterNodes,
        rollout_id: str,
        *,
        member: str,
        bundle: Mapping[str, float],
    ) -> None:
        self.worker: dict[str, Any] | None = None
        """The node, its address and the process, once the rollout has started."""
        self.finished = False
        """It has reported everything: its worker ends by itself."""
        self._task = task
        self._service = service
        self._nodes = nodes
        self._rollout_id = rollout_id
        self._member = member
        self._bundle = bundle
        self._ref: Any = None
        self._result: asyncio.Future[Any] | None = None
        self._arrival: asyncio.Future[NodeLink] | None = None

    async def start(self) -> NodeLink:
        """Place it. Returns the link to its worker. Raises SandboxError."""
        arrival = self._arrival = self._service.expect(self._rollout_id)
        for _ in range(SUBMISSIONS):
            reason = await self._submit_and_wait(arrival)
            if arrival.done():
                return arrival.result()
            self._cancel()
        raise SandboxError(f"it could not be placed on a node: {reason}", hint="look at `ray status`")

    async def _submit_and_wait(self, arrival: asyncio.Future[NodeLink]) -> str:
        """Submit it, and wait until it connects (returns "") or must be submitted again (returns why)."""
        from ray.exceptions import RayTaskError

        await self._submit()
        lost = asyncio.ensure_future(self._nodes.node_lost.wait())
        assert self._result is not None
        try:
            while True:
                await asyncio.wait(
                    (arrival, self._result, lost), timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if arrival.done():
                    return ""
                if self._result.done():
                    error = self._result.exception()
                    if isinstance(error, RayTaskError):
                        raise SandboxError(f"its node could not run it: {last_line(error)}")
                    return "it ended before it began" if error is None else last_line(error)
                if lost.done():
                    return "its node was lost"
                if self._nodes.is_stuck(now=time.monotonic()):
                    resources = ", ".join(f"{amount:g} {kind}" for kind, amount in self._bundle.items())
                    raise SandboxError(f"no node had room for {resources} within {STUCK_SECONDS:g} s")
        finally:
            lost.cancel()

    async def _submit(self) -> None:
        await self._nodes.wait_for_head()
        avoided = self._nodes.avoided(self._member, self._bundle, now=time.monotonic())
        task = self._task
        if avoided:
            task = task.options(label_selector={NODE_LABEL: f"!in({','.join(sorted(avoided))})"})
        ticket = self._service.ticket(self._rollout_id)
        try:
            # The first submission of a batch waits until the head has stored the function.
            self._ref = await call_ray(lambda: task.remote(ticket), SUBMIT_SECONDS)
        except TimeoutError:
            raise SandboxError(
                f"Ray did not take it within {SUBMIT_SECONDS:g} s", hint="is its head there?"
            ) from None
        self._result = asyncio.wrap_future(self._ref.future())
        self._result.add_done_callback(_retrieve_exception)

    async def explain_loss(self, reason: str) -> str:
        """After the link broke: whether only the worker or its whole node is gone. Marks the node accordingly."""
        if self.worker is None:
            return f"its worker ended before it began: {reason}"
        name, address = self.worker["node"], self.worker["address"]
        if name not in self._nodes.members:
            await self._nodes.refresh()
        if await self._nodes.is_reachable(name):
            self._nodes.avoid_for(name, self._member)
            return f"its worker on node {address} is gone ({await self._ray_reason() or reason})"
        self._nodes.mark_lost(name, now=time.monotonic())
        return f"its node {address} is gone ({reason})"

    async def _ray_reason(self) -> str:
        """Ray's reason for the loss, if it comes soon."""
        assert self._result is not None
        with suppress(TimeoutError, Exception):
            async with asyncio.timeout(REASON_SECONDS):
                await asyncio.shield(self._result)
        if self._result.done() and not self._result.cancelled() and (error := self._result.exception()) is not None:
            return last_line(error)
        return ""

    async def end(self) -> None:
        """Remove it from Ray's queue, or end its worker."""
        self._service.forget(self._rollout_id)
        if self._arrival is not None and self._arrival.done() and not self._arrival.cancelled():
            self._arrival.result().close()
        if self._result is None or self._result.done() or self.finished:
            return
        if self.worker is not None:
            await asyncio.wait((self._result,), timeout=END_SECONDS)
        self._cancel(force=self.worker is not None)

    def _cancel(self, *, force: bool = False) -> None:
        """Cancel the Ray task. A worker that has started is only killed with `force`."""
        ray = ray_module()
        # `ray.cancel` without a connection would start a cluster first.
        if self._result is not None and not self._result.done() and ray.is_initialized():
            with suppress(Exception):
                ray.cancel(self._ref, force=force)


def last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _retrieve_exception(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()
