"""Passes the pauses of a batch on to its rollouts on other nodes, over their links.

Each node has a gate of its own. It answers a pause when no call of its rollout is at the inference engine. A node
that is lost has no call.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paddock.capture.gate import CallGate, PauseReport, add_reports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paddock.capture.gate import InFlight
    from paddock.models.weight_version import Weights
    from paddock.scale.node_link import LinkMessage, NodeLink

ANSWER_SECONDS = 10.0
"""For the answer of a node after the timeout of a pause."""
Reports = dict["NodeLink", "asyncio.Future[PauseReport]"]


class RemotePauses:
    """On the driver. A `RemoteGate` of the batch's gate."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._links: set[NodeLink] = set()
        self._numbers = itertools.count()
        self._pending: dict[int, Reports] = {}

    @contextmanager
    def attached(self, link: NodeLink) -> Iterator[None]:
        """Pauses go to this node, too. Its gate has been told of earlier ones with its job."""
        self._links.add(link)
        try:
            yield
        finally:
            self._links.discard(link)
            for reports in self._pending.values():
                if (report := reports.get(link)) is not None and not report.done():
                    report.set_result(PauseReport(in_flight=0))

    async def pause(self, in_flight: InFlight, timeout: float | None) -> PauseReport:
        number, loop = next(self._numbers), asyncio.get_running_loop()
        reports: Reports = {link: loop.create_future() for link in self._links}
        if not reports:
            return PauseReport(in_flight=0)
        self._pending[number] = reports
        try:
            for link in reports:
                link.send("pause", {"number": number, "in_flight": in_flight, "timeout": timeout})
            seconds = None if timeout is None else timeout + ANSWER_SECONDS
            await asyncio.wait(reports.values(), timeout=seconds)
        finally:
            del self._pending[number]
        silent = PauseReport(in_flight=1)
        return add_reports(report.result() if report.done() else silent for report in reports.values())

    def resume(self) -> None:
        for link in self._links:
            link.send("weights", self._weights.current())
            link.send("resume")

    def record_report(self, link: NodeLink, message: LinkMessage) -> None:
        """A node has answered a pause."""
        report = self._pending.get(message.value["number"], {}).get(link)
        if report is not None and not report.done():
            report.set_result(PauseReport(**message.value["report"]))


async def pause_on_node(link: NodeLink, gate: CallGate, order: dict[str, Any]) -> None:
    """Carry out a pause of the driver, and answer it."""
    report = await gate.pause(order["in_flight"], order["timeout"])
    link.send("paused", {"number": order["number"], "report": report.to_json()})
