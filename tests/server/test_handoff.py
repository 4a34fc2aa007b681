"""WebSockets that arrive at another worker than the one that keeps their session."""

import asyncio
import os
import signal
import socket
import time
from typing import Any

import pytest

from paddock import Client
from paddock.client.transports.ws import WebSocketTransport
from paddock.server.handoff import claim
from running import wait_until
from server.worker_processes import StartServer, WorkerServer

CLIENTS, ROUNDS = 200, 5


async def storm(url: str) -> list[Any]:
    """Every client is dropped before every step, all of them at once."""
    clients = [Client(url) for _ in range(CLIENTS)]
    await asyncio.gather(*(client.reset() for client in clients))
    answers: list[Any] = []
    for _ in range(ROUNDS):
        for client in clients:
            transport = client._transport
            assert isinstance(transport, WebSocketTransport)
            transport.drop()
        steps = (client.call_tool("add", amount=1) for client in clients)
        answers += await asyncio.gather(*steps, return_exceptions=True)
    await asyncio.gather(*(client.close() for client in clients))
    return answers


def test_no_episode_is_lost_when_all_clients_drop_at_once(worker_server: StartServer) -> None:
    server = worker_server(2, CLIENTS)
    answers = asyncio.run(storm(f"http://127.0.0.1:{server.port}"))
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    assert len(answers) == CLIENTS * ROUNDS
    wait_until(lambda: server.health()["sessions"] == 0)


def detached_session(server: WorkerServer) -> tuple[str, int]:
    """The token and the process of a session whose client has dropped."""
    ws = server.socket(Session_Resume="new")
    process = ws.step(tool_name="add", arguments={"amount": 1})["data"]["observation"]["result"]["data"]["process"]
    ws.connection.socket.shutdown(2)
    return str(ws.token), process


def test_a_worker_that_hangs_is_tried_again_and_its_sessions_are_not_lost(worker_server: StartServer) -> None:
    server = worker_server()
    token, process = detached_session(server)
    os.kill(process, signal.SIGSTOP)
    try:
        # The kernel gives some of the connections to the worker that stands still, so several try.
        tries = [socket.create_connection(("127.0.0.1", server.port), timeout=15) for _ in range(24)]
        request = (
            f"GET /ws HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            f"Session-Resume: {token}\r\n\r\n"
        )
        for connection in tries:
            connection.sendall(request.encode())
            connection.settimeout(0.1)
        answers: list[bytes] = []
        until = time.monotonic() + 8
        while time.monotonic() < until and len(answers) < 4:
            for connection in list(tries):
                try:
                    answers.append(connection.recv(4096))
                except TimeoutError:
                    continue
                tries.remove(connection)
                connection.close()
    finally:
        os.kill(process, signal.SIGCONT)
    assert answers
    assert all(answer.startswith(b"HTTP/1.1 503") and b"retry-after" in answer for answer in answers)
    for connection in tries:
        # Those that arrived at the worker itself are answered now; the others were told to try again.
        connection.settimeout(10)
        with connection:
            assert connection.recv(4096).startswith((b"HTTP/1.1 101", b"HTTP/1.1 503"))
    again = server.socket(Session_Resume=token)
    answer = again.step(tool_name="add", arguments={"amount": 1})
    assert answer["data"]["observation"]["result"]["data"] == {"count": 2, "process": process}


@pytest.mark.parametrize("withdrawn", [True, False])
def test_a_connection_has_one_owner(withdrawn: bool) -> None:
    sender, receiver = socket.socketpair()
    near, far = socket.socketpair()
    if withdrawn:
        sender.shutdown(socket.SHUT_RD)
    used = claim([far.detach(), receiver.detach()])
    if not withdrawn:
        sender.shutdown(socket.SHUT_RD)
    claimed = sender.recv(1)
    assert (used is None, claimed) == ((True, b"") if withdrawn else (False, b"1"))
    for end in (near, sender, used):
        if end is not None:
            end.close()
