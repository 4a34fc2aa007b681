"""The HTTP routes, request by request, against OpenEnv's server and against Paddock."""

from typing import Any

import pytest

from .messages import (
    NEGATIVE,
    NOT_A_DICTIONARY,
    NOT_A_STRING,
    NOT_AN_INTEGER,
    NOT_PERMITTED,
    REQUIRED,
    TOO_LONG,
    Table,
    body_violation,
    counted,
    exchanges,
    told,
    violation,
)
from .processes import Server
from .shapes import Including, Some
from .wire import request

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(60, func_only=True)]


def http_counted(total: int, reward: float | None, done: bool = False) -> dict[str, Any]:
    return {**counted(total, reward, done)["data"], "metadata": None}


def unprocessable(*errors: dict[str, Any]) -> tuple[int, Any]:
    return 422, {"detail": list(errors)}


NOT_AN_OBJECT = "Input should be a valid dictionary or object to extract fields from"
BROKEN_JSON = unprocessable(
    {
        "type": "json_invalid",
        "loc": ["body", Some(int)],
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": Some(str)},
    }
)
NOTHING_FOUND = told(404, "Not Found")
METHOD_NOT_ALLOWED = told(405, "Method Not Allowed")
ADD_3 = {"action": {"amount": 3}}


def unsupported(method: str) -> tuple[int, Any]:
    return told(501, f"{method} is not supported for this environment")


COUNTER_REQUESTS: Table = {
    "health": (("GET", "/health"), (200, Including(status="healthy"))),
    "environments": (("GET", "/list_environments"), (200, ["counter"])),
    "state": (("GET", "/state"), (200, Including(step_count=0, total=0))),
    "reset": (("POST", "/reset"), (200, http_counted(0, None))),
    "reset with an empty object": (("POST", "/reset", {}), (200, http_counted(0, None))),
    "reset with arguments": (
        ("POST", "/reset", {"seed": 1, "episode_id": "mine"}),
        (200, http_counted(0, None)),
    ),
    "reset with nulls": (
        ("POST", "/reset", {"seed": None, "episode_id": None}),
        (200, http_counted(0, None)),
    ),
    "reset with a seed in a string": (("POST", "/reset", {"seed": "7"}), (200, http_counted(0, None))),
    "reset with a negative seed": (
        ("POST", "/reset", {"seed": -1}),
        unprocessable(body_violation("greater_than_equal", ["body", "seed"], NEGATIVE, -1, ge=0)),
    ),
    "reset with a text seed": (
        ("POST", "/reset", {"seed": "x"}),
        unprocessable(body_violation("int_parsing", ["body", "seed"], NOT_AN_INTEGER, "x")),
    ),
    "reset with a number as episode": (
        ("POST", "/reset", {"episode_id": 3}),
        unprocessable(body_violation("string_type", ["body", "episode_id"], NOT_A_STRING, 3)),
    ),
    "reset with a long episode": (
        ("POST", "/reset", {"episode_id": "x" * 256}),
        unprocessable(body_violation("string_too_long", ["body", "episode_id"], TOO_LONG, "x" * 256, max_length=255)),
    ),
    "reset with a list": (
        ("POST", "/reset", []),
        unprocessable(body_violation("model_attributes_type", ["body"], NOT_AN_OBJECT, [])),
    ),
    "reset with half an object": (("POST", "/reset", "{"), BROKEN_JSON),
    "step": (("POST", "/step", ADD_3), (200, http_counted(3, 3.0))),
    "step to the end": (
        ("POST", "/step", {"action": {"amount": 12}}),
        (200, http_counted(12, 12.0, done=True)),
    ),
    "step with everything": (
        ("POST", "/step", {**ADD_3, "timeout_s": 5, "request_id": "r", "other": 1}),
        (200, http_counted(3, 3.0)),
    ),
    "step without a body": (
        ("POST", "/step"),
        unprocessable(body_violation("missing", ["body"], REQUIRED, None)),
    ),
    "step with a list": (
        ("POST", "/step", []),
        unprocessable(body_violation("model_attributes_type", ["body"], NOT_AN_OBJECT, [])),
    ),
    "step with null": (
        ("POST", "/step", "null"),
        unprocessable(body_violation("model_attributes_type", ["body"], NOT_AN_OBJECT, None)),
    ),
    "step with half an object": (("POST", "/step", '{"action":{"amount":3}'), BROKEN_JSON),
    "step with bytes": (("POST", "/step", b"\xff\xfe"), BROKEN_JSON),
    "step without an action": (
        ("POST", "/step", {}),
        unprocessable(body_violation("missing", ["body", "action"], REQUIRED, {})),
    ),
    "step not wrapped": (
        ("POST", "/step", {"amount": 3}),
        unprocessable(body_violation("missing", ["body", "action"], REQUIRED, {"amount": 3})),
    ),
    "step with a number as action": (
        ("POST", "/step", {"action": 3}),
        unprocessable(body_violation("dict_type", ["body", "action"], NOT_A_DICTIONARY, 3)),
    ),
    "step with an empty action": (
        ("POST", "/step", {"action": {}}),
        unprocessable(violation("missing", ["amount"], REQUIRED, {})),
    ),
    "step below the minimum": (
        ("POST", "/step", {"action": {"amount": -1}}),
        unprocessable(violation("greater_than_equal", ["amount"], NEGATIVE, -1, ge=0)),
    ),
    "step with a field too many": (
        ("POST", "/step", {"action": {"amount": 1, "oops": 2}}),
        unprocessable(violation("extra_forbidden", ["oops"], NOT_PERMITTED, 2)),
    ),
    "step with no time and a number as name": (
        ("POST", "/step", {**ADD_3, "timeout_s": -1, "request_id": 5}),
        unprocessable(
            body_violation("greater_than", ["body", "timeout_s"], "Input should be greater than 0", -1, gt=0.0),
            body_violation("string_type", ["body", "request_id"], NOT_A_STRING, 5),
        ),
    ),
    "step with a text timeout": (
        ("POST", "/step", {**ADD_3, "timeout_s": "x"}),
        unprocessable(
            body_violation(
                "float_parsing",
                ["body", "timeout_s"],
                "Input should be a valid number, unable to parse string as a number",
                "x",
            )
        ),
    ),
    "unknown path": (("GET", "/nope"), NOTHING_FOUND),
    "unknown path to post": (("POST", "/nope", {}), NOTHING_FOUND),
    "reset by GET": (("GET", "/reset"), METHOD_NOT_ALLOWED),
    "step by PUT": (("PUT", "/step", ADD_3), METHOD_NOT_ALLOWED),
    "health by POST": (("POST", "/health"), METHOD_NOT_ALLOWED),
    "state by POST": (("POST", "/state"), METHOD_NOT_ALLOWED),
    "splits": (("GET", "/counter/splits"), unsupported("list_splits")),
    "splits in capitals": (("GET", "/COUNTER/splits"), unsupported("list_splits")),
    "tasks": (("POST", "/counter/tasks", {"split": "train"}), unsupported("list_tasks")),
    "number of tasks": (("POST", "/counter/num_tasks", {"split": "train"}), unsupported("num_tasks")),
    "task": (("POST", "/counter/task", {"split": "train", "index": 0}), unsupported("get_task")),
    "task range": (("POST", "/counter/task_range", {"split": "train"}), unsupported("get_task_range")),
    "tasks without a split": (
        ("POST", "/counter/tasks", {}),
        unprocessable(body_violation("missing", ["body", "split"], REQUIRED, {})),
    ),
    "tasks with a field too many": (
        ("POST", "/counter/tasks", {"split": "train", "extra": 1}),
        unprocessable(body_violation("extra_forbidden", ["body", "extra"], NOT_PERMITTED, 1)),
    ),
    "splits of another environment": (("GET", "/x/splits"), told(404, "unknown environment 'x'")),
    "tasks of another environment": (
        ("POST", "/x/tasks", {"split": "train"}),
        told(404, "unknown environment 'x'"),
    ),
}


@exchanges(COUNTER_REQUESTS)
def test_the_counter_answers_a_request(counter: Server, sent: Any, answer: Any) -> None:
    reply = request(counter.url, *sent)
    assert (reply.status, reply.body) == answer
    assert reply.headers.get_content_type() == "application/json"


def test_metadata_names_the_environment(counter: Server) -> None:
    metadata = request(counter.url, "GET", "/metadata").body
    assert metadata.keys() == {
        "name",
        "description",
        "readme_content",
        "version",
        "author",
        "documentation_url",
    }
    assert metadata == Including(name=Some(str), description=Some(str))


def test_the_schema_describes_the_counter(counter: Server) -> None:
    schema = request(counter.url, "GET", "/schema").body
    fields = {part: set(described["properties"]) for part, described in schema.items()}
    assert fields == Including(
        action={"metadata", "amount"},
        observation={"done", "reward", "metadata", "total"},
        state={"episode_id", "step_count", "total"},
        reset_observation={"done", "reward", "metadata", "total"},
    )
    assert schema["action"] == Including(additionalProperties=False, required=["amount"], type="object")
    assert schema["action"]["properties"]["amount"] == Including(type="integer", minimum=0)
    assert schema["observation"] == Including(additionalProperties=False, required=["total"], type="object")
    assert schema["state"] == Including(additionalProperties=True, type="object")


def test_openapi_lists_the_simulation_routes(counter: Server) -> None:
    document = request(counter.url, "GET", "/openapi.json").body
    assert document["info"]["version"] == Some(str)
    assert {"/reset", "/step", "/state", "/health", "/metadata", "/schema"} <= document["paths"].keys()
