"""The real Fleet client, unmodified, on a plane of ours: gated and not, sync and async."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .messages import TAKES_A_MESSAGE
from .processes import HERE, Server, free_port, run_client, serving
from .shapes import Including, Matching

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True)]

KEY = "key-of-the-plane"
TOOLS = [["add_note", "list_notes"], {"id": 2}, False]
PRINTED = "titles ['welcome', 'milk']\n"
CLOSED = ["FleetBadRequestError", Matching("Instance already terminated")]


@contextmanager
def plane_process(folder: Path, *options: str) -> Iterator[Server]:
    """Ends with code 0 and leaves nothing behind: that is part of every claim here."""
    port = free_port()
    command = [sys.executable, HERE / "servers" / "fleet_plane.py", str(port), folder / "state", KEY, *options]
    with serving("paddock", command, port, folder / "log", ends_with=0) as server:
        yield server
    assert list((folder / "state" / "instances").iterdir()) == []


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with plane_process(tmp_path_factory.mktemp("plane")) as server:
        yield server


@pytest.fixture(scope="module")
def sync(plane: Server) -> dict[str, Any]:
    return run_client("fleet", "fleet_sync.py", plane.url, KEY, "all")


@pytest.fixture(scope="module")
def asynchronous(plane: Server) -> dict[str, Any]:
    return run_client("fleet", "fleet_async.py", plane.url, KEY, "all")


def ask(plane: Server, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(plane.url + path, data, headers, method=method)) as answer:
        return json.loads(answer.read())


WHOLE = {
    "reset": True,
    "tools": TOOLS,
    "rows": [["welcome"], ["milk"]],
    "graded": [True, 1.0, PRINTED, True],
    "beat": [True, 60],
    "closed": "stopped",
    "closed_twice": CLOSED,
}
WHOLE_SYNC = {
    **WHOLE,
    "made": ["notes", "v2", "running", True],
    "again": 0.25,
    "after_reset": [[1]],
    "other_app": "healthy",
    "found": "running",
    "verified_when_closed": ["RuntimeError", Matching("is not running")],
}


def test_the_whole_sequence(sync: dict[str, Any], asynchronous: dict[str, Any]) -> None:
    assert sync["whole_sequence"] == WHOLE_SYNC
    assert asynchronous["whole_sequence"] == WHOLE


def test_the_whole_sequence_behind_the_gate(tmp_path: Path) -> None:
    with plane_process(tmp_path, "gate") as plane:
        answers = run_client("fleet", "fleet_sync.py", plane.url, KEY, "whole_sequence")
        assert answers["whole_sequence"] == WHOLE_SYNC
        answers = run_client("fleet", "fleet_async.py", plane.url, KEY, "whole_sequence")
        assert answers["whole_sequence"] == WHOLE


def test_what_there_is_can_be_listed(sync: dict[str, Any], asynchronous: dict[str, Any]) -> None:
    shared = {"envs": ["notes", "echo"], "regions": ["local"], "account": 6}
    assert asynchronous["listing"] == shared
    assert sync["listing"] == {
        **shared,
        "environment": ["v1", ["v1", "v2"]],
        "instances": [True],
        "runs": [["listing", 1]],
        "closed_all": ["stopped"],
        "left": [],
    }


def test_the_variables_are_enough_to_point_the_client_here(sync: dict[str, Any]) -> None:
    assert sync["module_functions"] == ["running", "stopped"]


def test_another_app_of_an_instance_is_the_same_instance(asynchronous: dict[str, Any]) -> None:
    assert asynchronous["apps"] is True


def test_tasks_are_imported_loaded_and_verified(sync: dict[str, Any]) -> None:
    assert sync["tasks"] == {
        "imported": 200,
        "loaded": ["milk", "notes", "v1", True],
        "by_project": ["milk"],
        "score": 1.0,
        "got": ["Note milk, please.", 1],
    }


def test_sessions_are_logged_and_read(sync: dict[str, Any], asynchronous: dict[str, Any]) -> None:
    assert asynchronous["traces"] == 2
    assert sync["traces"] == Including(
        transcript=[["user", "hi"], ["assistant", "hello"], ["user", "bye"], ["assistant", "goodbye"]],
        sessions=[["m", "completed", 2]],
        streamed=3,
        job=["job-1", "pending", "completed"],
    )


def test_refusals_become_the_errors_that_they_mean(sync: dict[str, Any]) -> None:
    assert sync["refusals"] == {
        "environment": ["FleetEnvironmentNotFoundError", Matching("'nothing' not found")],
        "version": ["FleetVersionNotFoundError", Matching("'v9' not found for 'notes'")],
        "region": ["FleetRegionError", Matching("mars")],
        "key": ["FleetAuthenticationError", Matching("key")],
        "judge": ["FleetBadRequestError", Matching("not configured")],
    }


def test_the_limit_is_an_error_of_its_own(sync: dict[str, Any], asynchronous: dict[str, Any]) -> None:
    assert sync["limit"] == [True, [6, 6], 0]
    assert asynchronous["many_at_once"] == {
        "origins": 6,
        "resets": True,
        "closed": ["stopped"],
        "refused": "FleetInstanceLimitError",
    }


def test_answers_that_are_lost_cost_nothing(sync: dict[str, Any], asynchronous: dict[str, Any]) -> None:
    assert sync["lost_answers"] == ["running", 1, True, 0.25, 2, "stopped"]
    assert asynchronous["lost_create"] == ["running", 1]


CLIENTS = {"mcp 1": ["mcp1", "mcp1_client.py"], "mcp 2": ["mcp2", "mcp2_client.py"]}


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS.keys())
def test_ordinary_mcp_clients_use_an_instance(plane: Server, client: list[str]) -> None:
    made = ask(plane, "POST", "/v1/env/instances", {"env_key": "echo"})
    peer, script = client
    mode = ["auto"] if peer == "mcp2" else []
    answers = run_client(peer, script, f"{made['urls']['root']}mcp", *mode)
    assert answers["tools"] == {"echo_message": TAKES_A_MESSAGE, "echo_with_length": TAKES_A_MESSAGE}
    assert [call[2] for call in answers["calls"]] == [False, False]
    assert answers["calls"][0][0] == "hi"
    assert ask(plane, "DELETE", f"/v1/env/instances/{made['instance_id']}")["status"] == "stopped"
