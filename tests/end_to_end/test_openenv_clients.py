"""OpenEnv's own clients cannot tell Paddock from the server they were written for."""

import json
import subprocess
from typing import Any

import pytest
from scripts.peers import peer_python

from .messages import TAKES_A_MESSAGE
from .processes import Server, quiet_environment, run_client
from .shapes import Matching

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True)]

EPISODE = {
    "reset": {"observation": {"metadata": {}, "total": 0}, "reward": None, "done": False},
    "steps": [
        {"observation": {"metadata": {}, "total": 3}, "reward": 3.0, "done": False},
        {"observation": {"metadata": {}, "total": 7}, "reward": 4.0, "done": False},
        {"observation": {"metadata": {}, "total": 12}, "reward": 5.0, "done": True},
    ],
    "state": {"episode_id": "mine", "step_count": 3, "total": 12},
}


@pytest.fixture(scope="module")
def counted(counter: Server) -> dict[str, Any]:
    return run_client("openenv", "openenv_counter.py", counter.url)


@pytest.fixture(scope="module")
def echoed(echo: Server) -> dict[str, Any]:
    return run_client("openenv", "openenv_echo.py", echo.url)


def test_the_generic_client_plays_an_episode(counted: dict[str, Any]) -> None:
    assert counted["generic_async"] == EPISODE


def test_the_generic_sync_client_plays_an_episode(counted: dict[str, Any]) -> None:
    assert counted["generic_sync"] == EPISODE


def test_a_typed_client_gets_its_own_models(counted: dict[str, Any]) -> None:
    assert counted["typed"] == [0, 12, 12.0, True, 12]


def test_two_clients_have_an_episode_each(counted: dict[str, Any]) -> None:
    assert counted["two_at_once"] == [
        {"episode_id": "one", "step_count": 2, "total": 4},
        {"episode_id": "two", "step_count": 2, "total": 6},
    ]


def test_a_refused_action_leaves_the_episode_as_it_was(counted: dict[str, Any]) -> None:
    assert counted["refused_action"] == {"refusal": Matching("VALIDATION_ERROR"), "total_after": 3}


def test_a_fifth_client_waits_for_one_of_four_slots(counted: dict[str, Any]) -> None:
    step = {"observation": {"metadata": {}, "total": 3}, "reward": 3.0, "done": False}
    assert counted["no_free_slot"] == {"refusal": Matching("CAPACITY_REACHED"), "latecomer": step}


def test_the_tool_client_lists_the_tools(echoed: dict[str, Any]) -> None:
    assert echoed["tools"] == {"echo_message": TAKES_A_MESSAGE, "echo_with_length": TAKES_A_MESSAGE}


def test_the_tool_client_calls_tools(echoed: dict[str, Any]) -> None:
    assert echoed["calls"] == ["hi", {"message": "hello", "length": 5}]


def test_the_sync_tool_client_calls_tools(echoed: dict[str, Any]) -> None:
    assert echoed["calls_sync"] == [["echo_message", "echo_with_length"], "hi"]


def test_the_tool_client_gets_an_error_for_an_unknown_tool(echoed: dict[str, Any]) -> None:
    assert echoed["unknown_tool"] == {"refusal": Matching("nope")}


def test_the_tool_client_plays_an_episode(echoed: dict[str, Any]) -> None:
    assert echoed["episode"] == {
        "reset": [0.0, False, True],
        "listed": ["echo_message", "echo_with_length"],
        "called": "hi",
        "missed": "tool_not_found",
        "state": ["mine", 3],
    }


def test_the_generic_client_calls_tools_by_steps(echoed: dict[str, Any]) -> None:
    assert echoed["generic"] == {"metadata_repeated": True, "data": {"message": "hello", "length": 5}}


def test_two_tool_clients_have_a_session_each(echoed: dict[str, Any]) -> None:
    assert echoed["two_at_once"] == [["one", 1], ["two", 0]]


def test_openenv_validate_accepts_the_counter(counter: Server) -> None:
    assert validation(counter.url)["passed"] is True


def test_openenv_validate_accepts_the_echo_tools(echo: Server) -> None:
    assert validation(echo.url)["passed"] is True


def validation(url: str) -> dict[str, Any]:
    openenv = peer_python("openenv").parent / "openenv"
    finished = subprocess.run(
        [openenv, "validate", "--url", url, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env=quiet_environment(),
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    report: dict[str, Any] = json.loads(finished.stdout)
    return report
