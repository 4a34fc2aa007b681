"""Environments written for OpenEnv run on Paddock; the import of `create_app` is all that changes."""

from collections.abc import Iterator
from typing import Any

import pytest

from .messages import REQUIRED, Table, body_violation, exchanges, told
from .processes import Server, free_port, openenv_command, run_client, serving
from .shapes import Including, Matching
from .wire import request

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True)]


@pytest.fixture(scope="module", params=["paddock", "openenv"])
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def counter(framework: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("servers") / "counter.log"
    with serving(framework, openenv_command(framework, "tasks", port), port, log) as server:
        yield server


@pytest.fixture(scope="module")
def echo(framework: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("servers") / "echo.log"
    with serving(framework, openenv_command(framework, "echo", port), port, log) as server:
        yield server


def test_an_environment_plays_its_episodes(counter: Server) -> None:
    answers = run_client("openenv", "openenv_counter.py", counter.url)
    last = {"observation": {"metadata": {}, "total": 12}, "reward": 5.0, "done": True}
    assert answers["generic_async"] == answers["generic_sync"]
    assert answers["generic_async"]["steps"][-1] == last
    assert answers["generic_async"]["state"] == {"episode_id": "mine", "step_count": 3, "total": 12}
    assert answers["typed"] == [0, 12, 12.0, True, 12]
    assert answers["refused_action"] == {"refusal": Matching("VALIDATION_ERROR"), "total_after": 3}
    assert answers["no_free_slot"] == Including(refusal=Matching("CAPACITY_REACHED"))


def test_an_mcp_environment_offers_its_tools(echo: Server) -> None:
    answers = run_client("openenv", "openenv_echo.py", echo.url)
    assert list(answers["tools"]) == ["echo_message", "echo_with_length"]
    assert answers["calls"] == ["hi", {"message": "hello", "length": 5}]
    assert answers["episode"] == {
        "reset": [0.0, False, True],
        "listed": ["echo_message", "echo_with_length"],
        "called": "hi",
        "missed": "tool_not_found",
        "state": ["mine", 3],
    }


def test_its_models_are_in_the_schema(counter: Server) -> None:
    schema = request(counter.url, "GET", "/schema").body
    assert schema == Including(
        action=Including(title="Add"),
        observation=Including(title="Total"),
        state=Including(title="CounterState"),
        reset_observation=Including(title="Total"),
    )


def test_its_metadata_is_served(counter: Server) -> None:
    assert request(counter.url, "GET", "/metadata").body == {
        "name": "CounterWithTasks",
        "description": "CounterWithTasks environment",
        "readme_content": None,
        "version": "1.0.0",
        "author": None,
        "documentation_url": None,
    }


GOALS = [{"goal": 10}, {"goal": 20}, {"goal": 30}]
SPLITS = [{"name": "train", "type": "train"}, {"name": "hard", "type": "validation"}]

TASK_REQUESTS: Table = {
    "splits": (("GET", "/tasks/splits"), (200, SPLITS)),
    "splits in capitals": (("GET", "/TASKS/splits"), (200, SPLITS)),
    "tasks": (("POST", "/tasks/tasks", {"split": "train"}), (200, {"tasks": GOALS, "env_name": "tasks"})),
    "number": (("POST", "/tasks/num_tasks", {"split": "train"}), (200, {"num_tasks": 3})),
    "task": (("POST", "/tasks/task", {"split": "train", "index": 1}), (200, {"task": GOALS[1]})),
    "last task": (("POST", "/tasks/task", {"split": "train", "index": -1}), (200, {"task": GOALS[2]})),
    "task that is not there": (
        ("POST", "/tasks/task", {"split": "train", "index": 99}),
        told(400, "Invalid task index"),
    ),
    "task without index": (
        ("POST", "/tasks/task", {"split": "train"}),
        (422, {"detail": [body_violation("missing", ["body", "index"], REQUIRED, {"split": "train"})]}),
    ),
    "range": (("POST", "/tasks/task_range", {"split": "train"}), (200, {"tasks": GOALS})),
    "range from": (
        ("POST", "/tasks/task_range", {"split": "train", "start": 1}),
        (200, {"tasks": GOALS[1:]}),
    ),
    "range within": (
        ("POST", "/tasks/task_range", {"split": "train", "start": 1, "stop": 2}),
        (200, {"tasks": GOALS[1:2]}),
    ),
    "range to the last but one": (
        ("POST", "/tasks/task_range", {"split": "train", "start": None, "stop": -1}),
        (200, {"tasks": GOALS[:-1]}),
    ),
}


@exchanges(TASK_REQUESTS)
def test_its_tasks_can_be_asked_for(counter: Server, sent: Any, answer: Any) -> None:
    reply = request(counter.url, *sent)
    assert (reply.status, reply.body) == answer
