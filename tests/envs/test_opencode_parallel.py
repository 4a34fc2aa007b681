"""Calls of one session overlap: whoever waits for a rollout can watch and stop it meanwhile."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from running import Running

from .test_opencode_environment import call, open_session, server, store  # noqa: F401


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a model server that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_session_that_waits_for_a_rollout_can_abort_it(server: Running, silent: str) -> None:  # noqa: F811
    http, other = server.http(), server.http()
    session = open_session(http)
    request = {"instruction": "x", "vllm_url": silent, "idempotency_key": "k"}
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(call(other, "run_rollout", session, **request)))
    waiting.start()
    state = call(http, "start_rollout", session, **request)["result"]["structuredContent"]
    aborted = call(http, "abort_rollout", session, rollout_id=state["rollout_id"])["result"]["structuredContent"]
    waiting.join(10)
    assert aborted["status"] == "aborted"
    assert answers[0]["result"]["structuredContent"]["outcome"] == "cancelled"
