"""Getting one task onto a node: submitted to Ray, waited for, submitted again if its node is lost before it began.

Ray chooses the node. What is added is what Ray learns too late: a node that is gone is avoided at once, and what was
lost with a worker is not put beside the same trouble again, if there is another node that fits.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.scale.cluster import ray_module
from paddock.scale.head import Head, in_time

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.scale.desk import Desk
    from paddock.scale.link import Link

AVOID_SECONDS = 60.0
"""By then Ray knows that a node is dead, or it was not."""
STUCK_SECONDS = 600.0
"""Nothing of the batch has run for so long: nobody will have room."""
LOOK_EVERY = 2.0
SUBMISSIONS = 5
PROBE_SECONDS = 1.0
ASK_SECONDS = 2.0
SUBMIT_SECONDS = 8.0
WORDS_SECONDS = 1.0
END_SECONDS = 2.0
NODE_LABEL = "ray.io/node-id"


@dataclass(slots=True)
class Nodes:
    """The nodes as a driver knows them: what they have, and which of them to avoid."""

    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost_until: dict[str, float] = field(default_factory=dict)
    shunned: dict[str, set[str]] = field(default_factory=dict)
    """Nodes on which a member's earlier attempt was lost."""
    running: int = 0
    moved_at: float = field(default_factory=time.monotonic)
    """When a rollout last began or ended."""
    head: Head | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def known(cls, head: Head) -> Nodes:
        nodes = cls(head=head)
        await nodes.refresh()
        return nodes

    async def refresh(self) -> None:
        """Ask the head for them. A head that is away, or goes meanwhile, changes nothing: it would not answer."""
        if self.head is not None and not self.head.is_there:
            return
        with suppress(TimeoutError):
            found = await in_time(ray_module().nodes, ASK_SECONDS)
            self.members = {node["NodeID"]: node for node in found if node["Alive"]}

    async def wait_for_head(self) -> None:
        """Until something can be placed."""
        while self.head is not None and not self.head.is_there:
            await self.head.change()

    def fitting(self, bundle: Mapping[str, float]) -> set[str]:
        """Nodes that could ever hold this much."""
        return {
            name
            for name, node in self.members.items()
            if all(node["Resources"].get(kind, 0.0) >= amount for kind, amount in bundle.items())
        }

    def avoided(self, member: str, bundle: Mapping[str, float], *, now: float) -> set[str]:
        """Where not to put a member, as far as there is another place for it."""
        lost = {name for name, until in self.lost_until.items() if until > now}
        both = lost | self.shunned.get(member, set())
        fitting = self.fitting(bundle)
        return next((each for each in (both, lost) if fitting - each), set())

    def lose(self, name: str, *, now: float) -> None:
        """All that wait are submitted again, without this node."""
        self.lost_until[name] = now + AVOID_SECONDS
        news, self._news = self._news, asyncio.Event()
        news.set()

    def shun(self, name: str, member: str) -> None:
        self.shunned.setdefault(member, set()).add(name)

    @property
    def news(self) -> asyncio.Event:
        """Set when the next node is lost."""
        return self._news

    def started(self) -> None:
        self.running += 1
        self.moved_at = time.monotonic()

    def ended(self) -> None:
        self.running -= 1
        self.moved_at = time.monotonic()

    def stuck(self, *, now: float) -> bool:
        return self.running == 0 and now - self.moved_at > STUCK_SECONDS

    async def is_there(self, name: str) -> bool:
        """Whether somebody still listens where the node's raylet does."""
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


class Placement:
    """One rollout on its way to a node, and on it. `end` it in any case."""

    def __init__(
        self, task: Any, desk: Desk, nodes: Nodes, rollout_id: str, *, member: str, bundle: Mapping[str, float]
    ) -> None:
        self.where: dict[str, Any] | None = None
        """The node, its address and the process, once it has begun."""
        self.finished = False
        """It has told everything: its worker will be free in a moment."""
        self._task = task
        self._desk = desk
        self._nodes = nodes
        self._rollout_id = rollout_id
        self._member = member
        self._bundle = bundle
        self._ref: Any = None
        self._done: asyncio.Future[Any] | None = None
        self._arrival: asyncio.Future[Link] | None = None

    async def begun(self) -> Link:
        """The link to where it runs. Raises SandboxError if it cannot be placed or begun."""
        arrival = self._arrival = self._desk.expect(self._rollout_id)
        for _ in range(SUBMISSIONS):
            words = await self._submitted(arrival)
            if arrival.done():
                return arrival.result()
            self._cancel()
        raise SandboxError(f"it could not be placed on a node: {words}", hint="look at `ray status`")

    async def _submitted(self, arrival: asyncio.Future[Link]) -> str:
        """Submit, and wait until it calls or has to be submitted again; then why."""
        from ray.exceptions import RayTaskError

        await self._submit()
        lost = asyncio.ensure_future(self._nodes.news.wait())
        assert self._done is not None
        try:
            while True:
                await asyncio.wait(
                    (arrival, self._done, lost), timeout=LOOK_EVERY, return_when=asyncio.FIRST_COMPLETED
                )
                if arrival.done():
                    return ""
                if self._done.done():
                    error = self._done.exception()
                    if isinstance(error, RayTaskError):
                        raise SandboxError(f"its node could not run it: {last_line(error)}")
                    return "it ended before it began" if error is None else last_line(error)
                if lost.done():
                    return "its node was lost"
                if self._nodes.stuck(now=time.monotonic()):
                    asked = ", ".join(f"{amount:g} {kind}" for kind, amount in self._bundle.items())
                    raise SandboxError(f"no node had room for {asked} within {STUCK_SECONDS:g} s")
        finally:
            lost.cancel()

    async def _submit(self) -> None:
        await self._nodes.wait_for_head()
        avoided = self._nodes.avoided(self._member, self._bundle, now=time.monotonic())
        task = self._task
        if avoided:
            task = task.options(label_selector={NODE_LABEL: f"!in({','.join(sorted(avoided))})"})
        ticket = self._desk.ticket(self._rollout_id)
        try:
            # The first of a batch waits for the head to have taken the function.
            self._ref = await in_time(lambda: task.remote(ticket), SUBMIT_SECONDS)
        except TimeoutError:
            raise SandboxError(
                f"Ray did not take it within {SUBMIT_SECONDS:g} s", hint="is its head there?"
            ) from None
        self._done = asyncio.wrap_future(self._ref.future())
        self._done.add_done_callback(_seen)

    async def explain(self, reason: str) -> str:
        """Who is gone, now that the link is: the worker alone or its node. Nodes are avoided accordingly."""
        if self.where is None:
            return f"its worker ended before it began: {reason}"
        name, address = self.where["node"], self.where["address"]
        if name not in self._nodes.members:
            await self._nodes.refresh()
        if await self._nodes.is_there(name):
            self._nodes.shun(name, self._member)
            words = await self._words()
            return f"its worker on node {address} is gone ({words or reason})"
        self._nodes.lose(name, now=time.monotonic())
        return f"its node {address} is gone ({reason})"

    async def _words(self) -> str:
        """What Ray says about the loss, if it says it soon."""
        assert self._done is not None
        with suppress(TimeoutError, Exception):
            async with asyncio.timeout(WORDS_SECONDS):
                await asyncio.shield(self._done)
        if self._done.done() and not self._done.cancelled() and (error := self._done.exception()) is not None:
            return last_line(error)
        return ""

    async def end(self) -> None:
        """Nothing of it runs or waits any more, or is about to."""
        self._desk.dismiss(self._rollout_id)
        if self._arrival is not None and self._arrival.done() and not self._arrival.cancelled():
            self._arrival.result().close()
        if self._done is None or self._done.done() or self.finished:
            return
        if self.where is not None:
            await asyncio.wait((self._done,), timeout=END_SECONDS)
        self._cancel(force=self.where is not None)

    def _cancel(self, *, force: bool = False) -> None:
        """Out of Ray's queue. A worker that has begun is only killed with `force`."""
        ray = ray_module()
        # Asked to cancel while it is not connected, Ray would start a cluster first.
        if self._done is not None and not self._done.done() and ray.is_initialized():
            with suppress(Exception):
                ray.cancel(self._ref, force=force)


def last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _seen(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()
