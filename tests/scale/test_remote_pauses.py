"""Pauses of rollouts on nodes: orders and answers over a real link."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from paddock.capture.gate import AttemptAborted, CallGate, PauseReport
from paddock.models.weight_version import Weights
from paddock.scale import remote_pauses
from paddock.scale.node_link import NodeLink
from paddock.scale.remote_pauses import RemotePauses, pause_on_node
from scale.test_node_link import linked, run


class Node:
    """The end of a link on a node. Collects the orders that it carries out."""

    def __init__(self, link: NodeLink) -> None:
        self.gate = CallGate()
        self.orders: list[str] = []
        self._link = link

    async def work(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                message = await self._link.receive()
                self.orders.append(message.kind)
                if message.kind == "pause":
                    tasks.create_task(pause_on_node(self._link, self.gate, message.value))
                elif message.kind == "resume":
                    self.gate.resume()


@asynccontextmanager
async def a_node() -> AsyncIterator[tuple[CallGate, RemotePauses, NodeLink, Node]]:
    """The gate of a driver, and one node."""
    async with linked() as (near, far):
        gate, pauses, node = CallGate(), RemotePauses(Weights(1)), Node(far)
        gate.remotes.add(pauses)

        async def read() -> None:
            while True:
                pauses.record_report(near, await near.receive())

        tasks = [asyncio.create_task(node.work()), asyncio.create_task(read())]
        try:
            yield gate, pauses, near, node
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def test_a_pause_waits_for_the_calls_of_a_node() -> None:
    async def body() -> None:
        async with a_node() as (gate, pauses, link, node):
            with pauses.attached(link):
                async with node.gate.attempt():
                    pausing = asyncio.create_task(gate.pause())
                    while not node.gate.is_paused:
                        await asyncio.sleep(0.001)
                    assert not pausing.done()
                assert await pausing == PauseReport(in_flight=0, finished=1)
                gate.resume()
                await node.gate.wait_open()
                assert node.orders == ["pause", "weights", "resume"]

    run(body())


def test_a_call_on_a_node_is_cut_off() -> None:
    async def body() -> None:
        async with a_node() as (gate, pauses, link, node):
            with pauses.attached(link), pytest.raises(AttemptAborted):
                async with node.gate.attempt():
                    assert await gate.pause("abort") == PauseReport(in_flight=0, aborted=1)
            assert node.gate.is_paused

    run(body())


def test_a_node_that_does_not_answer_counts_as_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pauses, "ANSWER_SECONDS", 0.05)

    async def body() -> None:
        async with linked() as (near, _far):
            pauses = RemotePauses(Weights(1))
            with pauses.attached(near):
                assert await pauses.pause("finish", 0.05) == PauseReport(in_flight=1)

    run(body())


def test_a_node_that_is_lost_has_no_call() -> None:
    async def body() -> None:
        async with linked() as (near, _far):
            pauses = RemotePauses(Weights(1))
            with pauses.attached(near):
                pausing = asyncio.create_task(pauses.pause("finish", None))
                await asyncio.sleep(0)
            assert await pausing == PauseReport(in_flight=0)

    run(body())


def test_a_pause_without_nodes_is_done_at_once() -> None:
    assert run(RemotePauses(Weights(1)).pause("finish", None)) == PauseReport(in_flight=0)
