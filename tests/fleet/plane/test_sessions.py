"""Jobs, sessions and traces come back in the shapes that clients parse."""

from typing import Any

import pytest

from .running_plane import RunningPlane, StartPlane
from .test_verifiers import BUNDLE, Verifier, with_bundle


def ingest(plane: RunningPlane, *contents: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content} for content in contents]
    return plane.post("/v1/sessions/ingest", {"messages": messages, **fields})


def transcript(plane: RunningPlane, session_id: str) -> Any:
    return plane.get(f"/v1/sessions/{session_id}/transcript")


def test_a_session_grows(plane: RunningPlane) -> None:
    first = ingest(plane, "one", "two", model="m", metadata={"a": 1})
    assert (first["success"], first["message_count"], first["created_new_session"]) == (True, 2, True)
    second = ingest(plane, "three", session_id=first["session_id"], status="completed")
    assert second == {**first, "message_count": 3, "created_new_session": False}
    transcript_page = transcript(plane, first["session_id"])
    assert [message["content"] for message in transcript_page["transcript"]] == ["one", "two", "three"]
    assert (transcript_page["model"], transcript_page["metadata"], transcript_page["status"]) == (
        "m",
        {"a": 1},
        "completed",
    )


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v1/sessions/ingest", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/traces/logs", {"history": [{"role": "user", "content": "x"}], "response": None}),
        ("/v1/traces/jobs", {"name": "j"}),
        ("/v1/jobs", {"models": ["m"]}),
    ],
)
def test_a_repeated_request_counts_once(plane: RunningPlane, path: str, document: Any) -> None:
    first = plane.post(path, document, X_Request_ID="one")
    assert plane.post(path, document, X_Request_ID="one") == first
    assert plane.post(path, document, X_Request_ID="two") != first


def test_a_trace_is_kept_message_by_message(plane: RunningPlane) -> None:
    job = plane.post("/v1/traces/jobs", {"name": "run-{i}"})
    assert (job["name"], job["status"]) == ("run-1", "running")
    log = {"history": [{"role": "user", "content": "hi"}], "response": "hello", "job_id": job["job_id"], "model": "m"}
    first = plane.post("/v1/traces/logs", log)
    assert (first["message_count"], first["created_new_session"]) == (2, True)
    more = {"history": [{"role": "tool", "content": "4", "tool_call_id": "c"}], "response": {"parts": ["done"]}}
    plane.post("/v1/traces/logs", {**more, "session_id": first["session_id"]})
    ended = {"session_id": first["session_id"], "status": "completed", "ended_at": "2026-01-01T00:00:00"}
    assert plane.post("/v1/traces/logs", ended)["message_count"] == 4
    transcript_page = transcript(plane, first["session_id"])["transcript"]
    assert [(message["role"], message["content"]) for message in transcript_page] == [
        ("user", "hi"),
        ("assistant", "hello"),
        ("tool", "4"),
        ("assistant", {"parts": ["done"]}),
    ]
    assert transcript_page[2]["tool_call_id"] == "c"


def test_the_answer_of_a_model_api_is_read_as_its_message(plane: RunningPlane) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    logged = plane.post("/v1/traces/logs", {"history": ["go"], "response": {"choices": [{"message": message}]}})
    assert transcript(plane, logged["session_id"])["transcript"] == [{"role": "user", "content": "go"}, message]


def test_the_sessions_of_a_job_are_grouped_by_task_and_graded(start_plane: StartPlane) -> None:
    plane = start_plane(verify=Verifier())
    plane.post("/v1/tasks", {"key": "t", "prompt": "p", "env_id": "serve"})
    made = plane.make()["instance_id"]
    run = plane.post("/v1/verifiers/execute", with_bundle(BUNDLE))["execution_id"]
    job = plane.post("/v1/jobs", {"models": ["m"], "name": "j-{sid}", "byok_keys": {"x": "secret"}})["job_id"]
    log = {"history": ["go"], "response": "ok", "job_id": job}
    graded = plane.post("/v1/traces/logs", {**log, "task_key": "t", "model": "m", "instance_id": made})
    finish = {"session_id": graded["session_id"], "status": "completed", "verifier_execution_id": run}
    plane.post("/v1/traces/logs", finish)
    assert plane.get(f"/v1/jobs/{job}")["status"] == "completed"
    plane.post("/v1/traces/logs", log)
    response = plane.get(f"/v1/sessions/job/{job}")
    assert (response["job_id"], response["total_sessions"], len(response["tasks"])) == (job, 2, 2)
    group = response["tasks"][0]
    assert (group["task_id"], group["task"]["env_id"], group["total_sessions"]) == ("t", "serve", 1)
    assert (group["passed_sessions"], group["pass_rate"], group["average_score"]) == (0, 0.0, 0.5)
    session = group["sessions"][0]
    assert (session["model"], session["status"], session["step_count"]) == ("m", "completed", 1)
    assert (session["verifier_execution"]["score"], session["instance"]["instance_id"]) == (0.5, made)
    assert response["tasks"][1]["sessions"][0]["model"] == "unknown"
    assert plane.get(f"/v1/jobs/{job}")["status"] == "running"


def test_jobs_are_listed(plane: RunningPlane) -> None:
    names = [
        plane.post("/v1/jobs", {"models": ["m"], "name": name})["name"] for name in ("a", "b-{i}", "b-{i}", None)
    ]
    assert names[:3] == ["a", "b-1", "b-2"]
    listed = plane.get("/v1/jobs")
    assert listed["total"] == 4
    assert [job["name"] for job in listed["jobs"]] == names[::-1]
    assert {job["status"] for job in listed["jobs"]} == {"pending"}


@pytest.mark.parametrize(
    ("method", "path", "document", "status", "words"),
    [
        ("POST", "/v1/sessions/ingest", {"messages": []}, 400, "'messages'"),
        ("POST", "/v1/sessions/ingest", {"messages": [{"content": "x"}]}, 400, "'messages[0]'"),
        ("POST", "/v1/sessions/ingest", {"messages": [{"role": "a"}], "status": "odd"}, 400, "'status'"),
        ("POST", "/v1/sessions/ingest", {"messages": [{"role": "a"}], "session_id": "x"}, 400, "Session 'x'"),
        ("POST", "/v1/traces/logs", {}, 400, "'history'"),
        ("POST", "/v1/traces/logs", {"history": {}}, 400, "'history'"),
        ("POST", "/v1/jobs", {"models": []}, 400, "'models'"),
        ("POST", "/v1/jobs", {"models": [1]}, 400, "'models'"),
        ("GET", "/v1/jobs/x", None, 404, "Job 'x'"),
        ("GET", "/v1/sessions/job/x", None, 404, "Job 'x'"),
        ("GET", "/v1/sessions/x/transcript", None, 404, "Session 'x'"),
    ],
)
def test_what_is_wrong_is_named(
    plane: RunningPlane, method: str, path: str, document: Any, status: int, words: str
) -> None:
    refused, detail = plane.refusal(method, path, document)
    assert refused == status
    assert words in detail
    assert plane.get("/v1/jobs")["total"] == 0


def test_sessions_outlive_the_plane(start_plane: StartPlane) -> None:
    first = start_plane()
    session_id = ingest(first, "one")["session_id"]
    first.stop()
    second = start_plane()
    assert ingest(second, "two", session_id=session_id)["message_count"] == 2
