"""Every path of a gated instance, without what it wants."""

import socket

import pytest

from paddock.fleet.instance.management import FILE_TEXT_PATHS

from .instances import KEY, MANAGER, TOKEN, Instance

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
FOR_THE_KEY = ("/", "/mcp", "/mcp/", "/api/v1/mcp", "/nothing", "/docs", "/metrics")
FOR_THE_RUNNER = [
    *("/reset", "/health", "/resources", "/diff/structured", "/diff/fs", "/fs/file", *FILE_TEXT_PATHS),
    *("/resources/cdp/start", "/resources/cdp/describe", "/execute_verifier_function", "/nothing"),
    *("/resources/sqlite/current/describe", "/resources/sqlite/current/query"),
]
WRONG = ({}, {"authorization": "Bearer wrong"}, {"x_runner_token": "wrong"}, {"cookie": "paddock_page=guess"})


@pytest.mark.parametrize("path", FOR_THE_KEY)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_answered_without_the_key(locked: Instance, method: str, path: str) -> None:
    for headers in (*WRONG, {"x_runner_token": TOKEN}):
        answer = locked.ask(method, path, **headers)
        assert (answer.status, "Bearer KEY" in answer.json["detail"]) == (401, True)


@pytest.mark.parametrize("path", FOR_THE_RUNNER)
@pytest.mark.parametrize("place", [MANAGER, "/api/v1/env"])
def test_nothing_is_there_without_the_runner_token(locked: Instance, place: str, path: str) -> None:
    for method in METHODS:
        for headers in (*WRONG, {"authorization": f"Bearer {KEY}"}):
            answer = locked.ask(method, place + path, **headers)
            assert (answer.status, answer.json) == (404, {"detail": "Not Found"})


def test_a_refusal_does_not_wait_for_the_body(locked: Instance) -> None:
    head = "POST /mcp HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", locked.port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")
