"""Tasks and verifiers: stored, versioned, found again."""

from typing import Any

from .running_plane import RunningPlane, StartPlane

CODE = "def verify(env):\n    return 1.0\n"


def put(plane: RunningPlane, key: str = "t", query: str = "", **fields: Any) -> Any:
    task = {"key": key, "prompt": "do it", "env_id": "serve", "verifier_func": CODE, **fields}
    return plane.post(f"/v1/tasks{query}", task)


def keys(plane: RunningPlane, query: str) -> list[str]:
    response = plane.get(f"/v1/tasks?{query}")
    assert response["total"] == len(response["tasks"])
    return [task["key"] for task in response["tasks"]]


def test_a_task_comes_back_as_it_was_sent(plane: RunningPlane) -> None:
    sent = {"env_variables": {"A": "1"}, "metadata": {"hard": True}, "output_json_schema": {"type": "object"}}
    made = put(plane, version="v1", data_id="d", data_version="v2", **sent)
    assert plane.get("/v1/tasks/t") == made
    assert {name: made[name] for name in sent} == sent
    assert (made["environment_id"], made["team_id"], made["version"]) == ("serve", "local", "v1")
    assert (made["data_id"], made["data_version"], made["prompt"]) == ("d", "v2", "do it")
    assert isinstance(made["created_at"], str)


def test_a_verifier_is_returned_with_its_task_and_by_id(plane: RunningPlane) -> None:
    made = put(plane)
    verifier = plane.get(f"/v1/verifiers/{made['verifier_id']}")
    assert verifier == made["verifier"]
    assert (verifier["code"], made["verifier_func"], verifier["version"]) == (CODE, CODE, 1)
    assert plane.get(f"/v1/verifiers/check?sha256={verifier['sha256']}")["success"]
    assert plane.refusal("GET", "/v1/verifiers/unknown")[0] == 404


def test_another_code_is_the_next_version(plane: RunningPlane) -> None:
    put(plane)
    assert put(plane)["verifier"]["version"] == 1
    changed = plane("PUT", "/v1/tasks/t", {"verifier_code": "def verify(env): return 0", "prompt": "again"}).json
    assert (changed["verifier"]["version"], changed["prompt"]) == (2, "again")
    assert plane("PUT", "/v1/tasks/t", {"metadata": {"a": 1}}).json["verifier"]["version"] == 2
    assert put(plane)["verifier"]["version"] == 1


def test_a_task_that_is_stored_anew_keeps_its_first_date(plane: RunningPlane) -> None:
    first = put(plane)
    again = put(plane, prompt="other")
    assert (again["created_at"], again["prompt"]) == (first["created_at"], "other")
    assert keys(plane, "") == ["t"]


def test_tasks_are_found_by_every_filter(plane: RunningPlane) -> None:
    put(plane, "a", env_id="one", data_id="d1", data_version="v1")
    put(plane, "b", query="?project_key=p", env_id="two", data_id="d2", data_version="v1", task_project_key="q")
    assert keys(plane, "") == ["a", "b"]
    assert keys(plane, "env_key=one") == keys(plane, "data_id=d1") == keys(plane, "task_keys=a") == ["a"]
    assert keys(plane, "project_key=p") == keys(plane, "task_project_key=q") == ["b"]
    assert keys(plane, "task_keys=a&task_keys=b&task_keys=c") == keys(plane, "data_version=v1") == ["a", "b"]
    assert keys(plane, "env_key=one&data_id=d2") == keys(plane, "team_id=stranger") == []


def test_what_is_missing_is_named(plane: RunningPlane) -> None:
    for task, word in [({}, "'key'"), ({"key": "t"}, "'env_id'"), ({"key": "t", "env_id": "e"}, "'prompt'")]:
        status, detail = plane.refusal("POST", "/v1/tasks", task)
        assert (status, word in detail) == (400, True)
    unknown = {"key": "t", "env_id": "e", "prompt": "p", "verifier_id": "nobody"}
    assert "'verifier_id'" in plane.refusal("POST", "/v1/tasks", unknown)[1]
    assert plane.refusal("GET", "/v1/tasks/t")[0] == plane.refusal("PUT", "/v1/tasks/t", {})[0] == 404


def test_a_key_may_hold_a_slash(plane: RunningPlane) -> None:
    put(plane, "a/b")
    assert plane.get("/v1/tasks/a/b")["key"] == "a/b"


def test_another_version_of_a_task_is_not_found(plane: RunningPlane) -> None:
    put(plane, version="v1")
    assert plane.get("/v1/tasks/t?version_id=v1")["key"] == "t"
    assert plane.refusal("GET", "/v1/tasks/t?version_id=v2")[0] == 404


def test_tasks_outlive_the_plane(start_plane: StartPlane) -> None:
    first = start_plane()
    made = put(first)
    first.stop()
    assert start_plane().get("/v1/tasks/t") == made
