"""Tools of all kinds, in an environment written for OpenEnv: Paddock and OpenEnv answer the same."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from .processes import free_port, openenv_command, run_client, serving
from .wire import Socket

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True)]

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("text", {"message": "né"}),
    ("text", {}),
    ("nothing", {}),
    ("ratio", {"a": 1, "b": 2}),
    ("ratio", {"a": "4", "b": 2}),
    ("ratio", {"a": 1, "b": 0}),
    ("ratio", {"a": "x", "b": 2}),
    ("ratio", {"a": 1}),
    ("ratio", {"a": 1, "b": 2, "c": 3}),
    ("plain", {"deep": {"er": [1, {"x": None}]}}),
    ("listed", {}),
    ("point", {}),
    ("report", {}),
    ("days", {}),
    ("unique", {}),
    ("picture", {}),
    ("fails", {}),
    ("leaves", {}),
    ("slow", {"ways": "one"}),
    ("slow", {"ways": "three"}),
    ("pick", {"of": ["a", "b"], "at": 1}),
    ("pick", {"of": [], "at": 1}),
    ("speaks", {}),
    ("speaks", {}),
    ("no_such_tool", {}),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Socket]]:
    """One session on each server, OpenEnv's first."""
    with ExitStack() as stack:
        sockets = []
        for framework in ("openenv", "paddock"):
            port, log = free_port(), tmp_path_factory.mktemp("servers") / f"{framework}.log"
            server = stack.enter_context(serving(framework, openenv_command(framework, "kinds", port), port, log))
            socket = stack.enter_context(Socket(server.url))
            socket.ask({"type": "reset", "data": {}})
            sockets.append(socket)
        yield sockets


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(CALLS)])
def test_a_call_is_answered_alike(pair: list[Socket], name: str, arguments: dict[str, Any]) -> None:
    step = {"type": "step", "data": {"type": "call_tool", "tool_name": name, "arguments": arguments}}
    theirs, ours = (socket.ask(step) for socket in pair)
    assert ours == theirs
    assert ours["type"] == "observation"


def test_tools_are_listed_alike(pair: list[Socket]) -> None:
    theirs, ours = (socket.ask({"type": "step", "data": {"type": "list_tools"}}) for socket in pair)
    assert ours == theirs
    assert len(ours["data"]["observation"]["tools"]) == 15


def test_an_action_that_is_no_tool_call_reaches_the_environment(pair: list[Socket]) -> None:
    theirs, ours = (socket.ask({"type": "step", "data": {"metadata": {}}}) for socket in pair)
    assert ours == theirs
    assert ours["data"]["metadata"] == {"took": "Action"}


def test_an_environment_asks_its_client_for_other_things(pair: list[Socket]) -> None:
    theirs, ours = (socket.ask({"type": "step", "data": {"metadata": {"ask": True}}}) for socket in pair)
    assert ours == theirs
    assert ours["data"]["metadata"]["rules"] == "be kind"


def test_a_server_with_a_life_of_its_own_keeps_its_client() -> None:
    answers = run_client("both", "openenv_inside.py")
    assert answers == {
        "direct": {"simple": True, "lifespan": False, "middleware": False, "mounted": False, "strict": False},
        "lived": ["began"],
        "without": True,
    }
