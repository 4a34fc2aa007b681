"""Requests without a reply: numbers, window, deadlines. No connection is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from paddock.client.transports.pending import PendingRequest, PendingRequests
from paddock.errors import ClientError
from paddock.protocol.resume import WINDOW

Make = Callable[..., PendingRequest]


def run(scenario: Callable[[PendingRequests, list[dict[str, Any]], Make], Any]) -> None:
    async def main() -> None:
        sent: list[dict[str, Any]] = []
        requests = PendingRequests(lambda frame: sent.append(orjson.loads(frame)))

        def make(timeout: float | None = None) -> PendingRequest:
            return requests.add(b'{"type":"state"}', timeout, asyncio.get_running_loop(), is_reset=False)

        await scenario(requests, sent, make)
        requests.stop_timer()

    asyncio.run(main())


def test_requests_beyond_the_window_wait_for_a_reply() -> None:
    async def scenario(requests: PendingRequests, sent: list[dict[str, Any]], make: Make) -> None:
        pending = [make() for _ in range(WINDOW + 2)]
        assert [frame["id"] for frame in sent] == list(range(1, WINDOW + 1))
        assert requests.accept_reply({"id": 2})
        assert len(sent) == WINDOW
        assert requests.accept_reply({"id": 1})
        assert [(frame["id"], frame["ack"]) for frame in sent[WINDOW:]] == [(WINDOW + 1, 2), (WINDOW + 2, 2)]
        assert await pending[0].reply == {"id": 1}

    run(scenario)


@pytest.mark.parametrize(("timeout", "member"), [(None, {}), (float("inf"), {}), (5, {"timeout_s": 5.0})])
def test_a_request_carries_its_deadline(timeout: float | None, member: dict[str, float]) -> None:
    async def scenario(requests: PendingRequests, sent: list[dict[str, Any]], make: Make) -> None:
        make(timeout)
        assert sent == [{"type": "state", **member, "id": 1, "ack": 0}]

    run(scenario)


def test_a_deadline_ends_its_own_request_only_and_cancels_it() -> None:
    async def scenario(requests: PendingRequests, sent: list[dict[str, Any]], make: Make) -> None:
        late, early, endless = make(30), make(0.01), make()
        assert await asyncio.wait_for(early.reply, 5) is None
        assert sent[-1] == {"type": "cancel", "data": 2}
        assert not late.reply.done()
        assert not endless.reply.done()

    run(scenario)


def test_a_foreign_server_replies_in_order_and_without_numbers() -> None:
    async def scenario(requests: PendingRequests, sent: list[dict[str, Any]], make: Make) -> None:
        requests.is_foreign = True
        cancelled, answered = make(5), make(5)
        assert sent == [{"type": "state"}] * 2
        requests.cancel(cancelled)
        assert requests.accept_reply({"data": "first"})
        assert requests.accept_reply({"data": "second"})
        assert await answered.reply == {"data": "second"}
        assert not requests.accept_reply({"type": "error"})

    run(scenario)


def test_a_repeated_request_has_the_same_number_and_an_answered_one_is_not_repeated() -> None:
    async def scenario(requests: PendingRequests, sent: list[dict[str, Any]], make: Make) -> None:
        make()
        waiting = make()
        requests.accept_reply({"id": 1})
        requests.resend()
        assert sent[2:] == sent[1:2]
        error = ClientError("closed")
        requests.fail_all(error)
        assert await waiting.reply is error

    run(scenario)
