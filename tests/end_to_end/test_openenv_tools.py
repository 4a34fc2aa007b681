"""Tools of all kinds, in an environment written for OpenEnv: Paddock and OpenEnv answer the same."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
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
    ("wrong", {}),
    ("empty", {}),
    ("numeral", {}),
    ("endless", {}),
    ("no_such_tool", {}),
]


@contextmanager
def sessions(environment: str, folder: Path, *frameworks: str) -> Iterator[list[Socket]]:
    """A session on a server of each framework."""
    with ExitStack() as stack:
        sockets = []
        for framework in frameworks:
            port, log = free_port(), folder / f"{framework}.log"
            command = openenv_command(framework, environment, port)
            server = stack.enter_context(serving(framework, command, port, log))
            sockets.append(stack.enter_context(Socket(server.url)))
            sockets[-1].ask({"type": "reset", "data": {}})
        yield sockets


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Socket]]:
    with sessions("kinds", tmp_path_factory.mktemp("servers"), "openenv", "paddock") as sockets:
        yield sockets


def call(socket: Socket, name: str, arguments: dict[str, Any]) -> Any:
    return socket.ask({"type": "step", "data": {"type": "call_tool", "tool_name": name, "arguments": arguments}})


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(CALLS)])
def test_a_call_is_answered_alike(pair: list[Socket], name: str, arguments: dict[str, Any]) -> None:
    theirs, ours = (call(socket, name, arguments) for socket in pair)
    assert ours == theirs
    assert ours["type"] == "observation"


def test_tools_are_listed_alike(pair: list[Socket]) -> None:
    theirs, ours = (socket.ask({"type": "step", "data": {"type": "list_tools"}}) for socket in pair)
    assert ours == theirs
    assert len(ours["data"]["observation"]["tools"]) == 18


def test_an_action_that_is_no_tool_call_reaches_the_environment(pair: list[Socket]) -> None:
    theirs, ours = (socket.ask({"type": "step", "data": {"metadata": {}}}) for socket in pair)
    assert ours == theirs
    assert ours["data"]["metadata"] == {"took": "Action"}


def test_an_environment_asks_its_client_for_other_things(pair: list[Socket]) -> None:
    theirs, ours = (socket.ask({"type": "step", "data": {"metadata": {"ask": True}}}) for socket in pair)
    assert ours == theirs
    assert ours["data"]["metadata"]["rules"] == "be kind"


def test_a_server_with_a_life_of_its_own_keeps_its_client() -> None:
    answers = run_client("both", "openenv_direct_tools.py")
    assert answers == {
        "direct": {"simple": True, "lifespan": False, "middleware": False, "mounted": False, "strict": False},
        "lived": ["began"],
        "without": True,
    }


def test_a_tool_that_speaks_to_its_caller_has_one(tmp_path: Path) -> None:
    with sessions("speaking", tmp_path, "openenv", "paddock") as pair:
        for name, arguments in [("speaks", {}), ("speaks", {}), ("text", {}), ("fails", {})]:
            theirs, ours = (call(socket, name, arguments) for socket in pair)
            assert ours == theirs


def test_one_that_whispers_is_called_once_each_time_and_has_a_caller_from_then_on(tmp_path: Path) -> None:
    with sessions("whispering", tmp_path, "paddock") as (socket,):
        assert "session is not available" in call(socket, "whispers", {})["data"]["observation"]["error"]["message"]
        assert call(socket, "whispers", {})["data"]["observation"]["result"]["data"] == 2


def test_a_class_that_counts_in_a_step_without_annotations_keeps_its_tools() -> None:
    """Listing is no step, and what went wrong is known by the exception, not by what a tool happens to say."""
    assert run_client("both", "openenv_counting.py") == {
        "tools": ["add", "fail"],
        "steps after listing": 0,
        "sum": 3,
        "steps after a call": 1,
        "not found": "ToolNotFound",
        "bad argument": "InvalidToolArguments",
        "says not found": "ToolFailure",
    }
