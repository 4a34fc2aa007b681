"""What runs on a node: one rollout, with its capture beside its agent, reporting to its driver.

It fetches its work from the driver, and ends itself when the driver goes: the sandbox is closed, nothing stays. A
worker that is killed takes its sandboxes along; what it leaves in folders the next rollout on the node puts away.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paddock.rollouts.capture import Upstream
from paddock.rollouts.ledger import recover
from paddock.rollouts.weights import Weights
from paddock.scale.cluster import ray_module
from paddock.scale.desk import Ticket, is_loopback, tunnel
from paddock.scale.link import Link, LinkLost, call
from paddock.scale.node_store import NodeStore, Outbox, node_folder

if TYPE_CHECKING:
    from paddock.rollouts.recipe import Recipe
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.rollout import Rollout
    from paddock.rollouts.task import Task

LAST_WORD_SECONDS = 15.0
"""For the driver to have written everything down."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a driver hands over, whole: nothing of it goes through Ray."""

    recipe: Recipe
    task: Task
    record: RolloutRecord
    weight_version: str | None = None


def perform(ticket: Ticket) -> None:
    """Run one rollout in this process. Raises LinkLost if the driver is not there, or does not expect it."""
    asyncio.run(_perform(ticket))


async def _perform(ticket: Ticket) -> None:
    link = Link(*await call(ticket.host, ticket.port, ticket.token, "rollout", ticket.rollout_id))
    async with link.beating():
        link.post("hello", whereabouts())
        with suppress(LinkLost, TimeoutError):
            message = await link.receive()
            try:
                await _work(ticket, link, ray_module().cloudpickle.loads(message.raw))
            except LinkLost:
                raise
            except Exception as error:
                link.post("failed", f"{type(error).__name__}: {error}")
            # Not before the driver has everything: what is on its way ends with the socket.
            async with asyncio.timeout(LAST_WORD_SECONDS):
                while message.kind != "kept":
                    message = await link.receive()


def whereabouts() -> dict[str, Any]:
    """Which node and which process of it this is."""
    ray = ray_module()
    node = ray.get_runtime_context().get_node_id()
    return {"node": node, "address": ray.util.get_node_ip_address(), "pid": os.getpid()}


async def _work(ticket: Ticket, link: Link, job: Job) -> None:
    outbox = Outbox()
    async with AsyncExitStack() as stack:
        store = await asyncio.to_thread(_open_store, outbox)
        stack.callback(store.close)
        upstream = await stack.enter_async_context(Upstream())
        endpoint = job.recipe.endpoint
        if is_loopback(endpoint.url):
            endpoint = replace(endpoint, url=await stack.enter_async_context(tunnel(ticket, endpoint.url)))
        weights = Weights(job.weight_version)
        recipe = replace(job.recipe, endpoint=endpoint, settings={**job.recipe.settings, "weights": weights})
        batch = recipe.batch([job.task], store=store, upstream=upstream)
        rollout = batch.rollout(job.task, job.record)
        running = asyncio.ensure_future(rollout.run())
        orders = asyncio.ensure_future(_obey(link, rollout, running, weights))
        sending = asyncio.ensure_future(outbox.pump(link))
        try:
            await asyncio.wait((running, orders, sending), return_when=asyncio.FIRST_COMPLETED)
            # If it was not the rollout that ended, nobody listens any more.
            running.cancel()
            await asyncio.wait((running,))
        finally:
            for each in (running, orders, sending):
                each.cancel()
            await asyncio.wait((running, orders, sending))
        broken = next((each for each in (orders, sending) if not each.cancelled()), None)
        if broken is not None:
            broken.result()
        if not outbox.sealed:
            outbox.put(
                "failed", "it was stopped before it began" if running.cancelled() else repr(running.exception())
            )
        await outbox.flush(link)


def _open_store(outbox: Outbox) -> NodeStore:
    store = NodeStore.open(node_folder())
    assert isinstance(store, NodeStore)
    store.outbox = outbox
    recover(store)
    return store


async def _obey(link: Link, rollout: Rollout, running: asyncio.Future[Any], weights: Weights) -> None:
    """What the driver says while the rollout runs. Raises LinkLost when the driver is gone."""
    aborting: set[asyncio.Task[None]] = set()
    while True:
        message = await link.receive()
        match message.kind:
            case "abort":
                aborting.add(asyncio.ensure_future(rollout.abort(message.value)))
            case "cancel":
                running.cancel()
            case "weights":
                weights.set(message.value)
