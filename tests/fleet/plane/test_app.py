"""Who may ask, and what is wrong with a question: every refusal has words."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import ConfigError
from paddock.fleet.plane import HostedEnvironment, PlaneSettings, create_plane
from paddock.protocol.redact import redact
from paddock.server.http_protocol import DeadlineProtocol

from .running_plane import KEY, RunningPlane, StartPlane, plane_settings

INSTANCES = "/v1/env/instances"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlane]:
    """One for all: nothing here changes it."""
    running = RunningPlane(plane_settings(tmp_path_factory.mktemp("plane") / "state"))
    yield running
    running.stop()


# -- the key ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"Authorization": f"bearer {KEY}"}, 200),
        ({"X_JWT_Token": KEY, "X_Team_ID": "local"}, 200),
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"X_JWT_Token": KEY}, 401),
        ({"X_JWT_Token": "wrong", "X_Team_ID": "local"}, 401),
        ({"X_JWT_Token": KEY, "X_Team_ID": "stranger"}, 403),
    ],
)
def test_the_key_opens_the_plane(plane: RunningPlane, headers: dict[str, str], status: int) -> None:
    answer = plane("GET", "/v1/account", **{"Authorization": "", **headers})
    assert answer.status == status
    if status != 200:
        assert isinstance(answer.json["detail"], str)


def test_nothing_but_the_health_is_open(plane: RunningPlane) -> None:
    assert plane("GET", "/health", Authorization="").json["status"] == "healthy"
    for path in ("/status", "/metrics", "/v1/env/", "/v1/tasks", "/nowhere", "/_lab/faults"):
        assert plane("GET", path, Authorization="").status == 401


def every_route(routes: list[Any]) -> list[tuple[str, str]]:
    result = [(method, re.sub(r"{[^}]*}", "x", route.path)) for route in routes for method in route.methods]
    return sorted(pair for pair in result if pair[1] != "/health")


def test_every_route_requires_the_key_first(plane: RunningPlane, tmp_path: Path) -> None:
    routes = every_route(create_plane(plane_settings(tmp_path / "state", faults=True)).routes)
    assert len(routes) > 30
    answers = {pair: plane(*pair, Authorization="") for pair in routes}
    assert {pair: answer.status for pair, answer in answers.items() if answer.status != 401} == {}


def test_the_message_of_a_401_reaches_the_user(plane: RunningPlane) -> None:
    reply = plane("GET", "/v1/account", Authorization="").json["detail"]
    assert reply == "No key was sent. Send 'Authorization: Bearer KEY' (FLEET_API_KEY)."
    assert redact(reply) == reply


@pytest.mark.parametrize("body", [b"", b"content-length: 9\r\n\r\n{"], ids=["headers", "body"])
def test_an_incomplete_request_is_closed(plane: RunningPlane, monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(DeadlineProtocol, "head_seconds", 0.3)
    monkeypatch.setattr(DeadlineProtocol, "body_seconds", 0.3)
    head = f"POST {INSTANCES} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(plane.url.rpartition(":")[2])), timeout=10) as connection:
        connection.sendall(head + body)
        answer = connection.recv(4096)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408")


# -- what is offered ----------------------------------------------------------------------------------


def test_environments_are_listed_with_their_versions(plane: RunningPlane) -> None:
    listed = plane.get("/v1/env/")
    assert listed == plane.get("/v1/env")
    first = listed[0]
    assert (first["env_key"], first["name"], first["default_version"]) == ("serve", "serve", "v1")
    assert list(first["versions"]) == ["v1", "v2"]
    assert plane.get("/v1/env/serve") == first
    assert plane.refusal("GET", "/v1/env/nothing")[0] == 404
    assert plane.get("/v1/regions") == ["local"]


def test_statistics_and_metrics_report_the_plane(start_plane: StartPlane) -> None:
    plane = start_plane()
    plane.make()
    plane.refusal("POST", INSTANCES, {"env_key": "refuse"})
    figures = plane.get("/status")
    assert figures["instances"] == {"pending": 0, "running": 1, "stopped": 0, "error": 1}
    assert (figures["instance_count"], figures["instance_limit"]) == (1, 100)
    assert figures["start_seconds"]["median"] < 1.5
    assert b'paddock_fleet_instances{status="running"} 1' in plane("GET", "/metrics").body


# -- what is wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({}, ["'env_key' is missing"]),
        ({"env_key": 7}, ["'env_key'", "Send a string"]),
        ({"env_key": "nothing"}, ["Environment 'nothing' not found", "serve"]),
        ({"env_key": "serve", "env_version": "v9"}, ["Version 'v9' not found for 'serve'", "v1"]),
        ({"env_key": "serve", "region": "mars"}, ["Region mars not supported", "['local']"]),
        ({"env_key": "serve", "ttl_seconds": 0}, ["'ttl_seconds' is 0", "from 1"]),
        ({"env_key": "serve", "ttl_seconds": "60"}, ["'ttl_seconds' is a string"]),
        ({"env_key": "serve", "ttl_seconds": True}, ["'ttl_seconds' is a boolean"]),
        ({"env_key": "serve", "heartbeat_interval": -1}, ["'heartbeat_interval' is -1"]),
        ({"env_key": "serve", "max_wait_seconds": 1e9}, ["'max_wait_seconds'"]),
        ({"env_key": "serve", "env_variables": ["A=1"]}, ["'env_variables' is a list", "object"]),
        ({"env_key": "serve", "env_variables": {"A": "x" * 70_000}}, ["'env_variables'", "KiB"]),
        ({"env_key": "serve", "image_type": "gif"}, ["'image_type' is 'gif'", "mcp"]),
        ({"env_key": "serve", "run_id": "a\nb"}, ["'run_id'", "control characters"]),
    ],
)
def test_a_wrong_field_is_named_with_what_to_send(plane: RunningPlane, order: Any, words: list[str]) -> None:
    status, detail = plane.refusal("POST", INSTANCES, order)
    assert (status, type(detail)) == (400, str)
    assert all(word in detail for word in words), detail
    assert plane.get(INSTANCES) == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_an_object_is_refused(plane: RunningPlane, body: bytes) -> None:
    status, detail = plane.refusal("POST", INSTANCES, body)
    assert (status, type(detail)) == (400, str)


def test_a_body_that_is_too_big_is_refused(plane: RunningPlane) -> None:
    answer = plane("POST", INSTANCES, b"{}", Content_Length="99999999")
    assert answer.status == 413


def test_unknown_paths_and_methods_get_a_message(plane: RunningPlane) -> None:
    assert plane.refusal("GET", "/v1/nowhere") == (404, "Not Found")
    assert plane.refusal("PATCH", INSTANCES) == (405, "Method Not Allowed")


@pytest.mark.parametrize("query", ["status=strange", "status=running&status=strange"])
def test_an_unknown_status_is_refused(plane: RunningPlane, query: str) -> None:
    assert plane.refusal("GET", f"{INSTANCES}?{query}")[0] == 400


def test_a_very_long_request_id_is_refused(plane: RunningPlane) -> None:
    assert plane.refusal("POST", INSTANCES, {"env_key": "serve"}, X_Request_ID="x" * 2000)[0] == 400


def test_numbers_that_are_no_json_are_refused(plane: RunningPlane) -> None:
    body = json.dumps({"env_key": "serve", "ttl_seconds": float("nan")}).encode()
    assert plane.refusal("POST", INSTANCES, body)[0] == 400


# -- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"environments": ()},
        {"environments": (HostedEnvironment("a", "echo"), HostedEnvironment("a", "echo"))},
        {"instance_limit": 0},
        {"regions": ()},
        {"api_key": "with space"},
        {"host": "0.0.0.0"},
        {"host": "0.0.0.0", "gate": True, "faults": True},
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plane_settings(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes", [{"env_key": "instances"}, {"env_key": "a/b"}, {"versions": ()}, {"default_version": "v9"}]
)
def test_environments_that_cannot_be_hosted_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HostedEnvironment(**{"env_key": "a", "target": "echo", **changes})


def test_addresses_name_a_host_that_can_be_reached(tmp_path: Any) -> None:
    hosted = (HostedEnvironment("a", "echo"),)
    assert PlaneSettings(state=tmp_path, environments=hosted, host="0.0.0.0", gate=True).instance_host == "127.0.0.1"
    assert PlaneSettings(state=tmp_path, environments=hosted, host="::1").instance_host == "[::1]"
    named = PlaneSettings(state=tmp_path, environments=hosted, host="0.0.0.0", gate=True, public_host="box")
    assert named.instance_host == "box"


def test_faults_are_off_by_default(start_plane: StartPlane) -> None:
    assert start_plane().refusal("POST", "/_lab/faults", {"path": ".*"})[0] == 404
