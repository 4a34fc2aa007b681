"""The environment behind a real server: its routes, its gate, and what clients are told."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.capture.trace import Call, Event
from paddock.config import Access
from paddock.envs.opencode import OpenCodeEnvironment
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from running import Running
from wire import Http

AUTH = {"authorization": "Bearer sesame"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with one finished rollout: r00001, three events."""
    monkeypatch.setenv("PADDOCK_STORE", str(tmp_path))
    record = RolloutRecord("r00001", "t1", started_at=1.0, stage="agent", sandbox_id="sb-1")
    with Store.open(tmp_path) as reopened:
        reopened.begin(record)
        reopened.save_call("r00001", Call("c0", 0, prompt_token_ids=[1], completion_token_ids=[2], logprobs=[-0.1]))
        for number, kind in enumerate(("stage", "call", "outcome")):
            reopened.add_event("r00001", Event(float(number), kind, {"n": number}))
        record.outcome, record.reward, record.finished_at = Outcome.OK, 0.5, 2.0
        record.transcript = [{"info": {"role": "user"}, "parts": []}]
        reopened.finish(record)
    return tmp_path


@pytest.fixture
def server(store: Path) -> Iterator[Running]:
    running = Running(OpenCodeEnvironment, "fast", "simulation", Access(token="sesame"), {}, {})
    yield running
    running.stop()


@pytest.fixture
def http(server: Running) -> Http:
    return server.http()


def call(http: Http, name: str, headers: dict[str, str] | None = None, **arguments: Any) -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
    return http("POST", "/mcp", body, **(headers or AUTH)).json


def open_session(http: Http) -> dict[str, str]:
    body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}}
    return {**AUTH, "mcp-session-id": http("POST", "/mcp", body, **AUTH).headers["mcp-session-id"]}


def test_a_finished_rollout_is_the_same_result_again_and_again(http: Http) -> None:
    first = call(http, "finalize_rollout", rollout_id="r00001")["result"]
    assert first["structuredContent"]["reward"] == 0.5
    assert first["structuredContent"]["proxy_turns"][0]["per_token_logps"] == [-0.1]
    assert first["_meta"]["paddock/reward"] == 0.5
    assert call(http, "finalize_rollout", rollout_id="r00001")["result"] == first


def test_state_messages_and_abort_of_a_finished_rollout(http: Http) -> None:
    state = call(http, "get_state", rollout_id="r00001")["result"]["structuredContent"]
    assert (state["status"], state["outcome"], state["task_id"]) == ("finished", "ok", "t1")
    assert call(http, "abort_rollout", rollout_id="r00001")["result"]["structuredContent"] == state
    messages = call(http, "get_messages", rollout_id="r00001")["result"]["structuredContent"]
    assert messages["messages"] == [{"info": {"role": "user"}, "parts": []}]


def test_events_come_in_pages_that_can_be_continued(http: Http) -> None:
    page = call(http, "subscribe_events", rollout_id="r00001", after=1)["result"]["structuredContent"]
    assert [event["seq"] for event in page["events"]] == [2, 3]
    assert (page["next"], page["done"], page["url"]) == (3, True, "/rollouts/r00001/events")
    rest = call(http, "subscribe_events", rollout_id="r00001", after=3)["result"]["structuredContent"]
    assert (rest["events"], rest["next"], rest["done"]) == ([], 3, True)


def test_a_session_counts_what_it_collected(http: Http) -> None:
    session = open_session(http)
    for _ in range(2):
        call(http, "finalize_rollout", session, rollout_id="r00001")
    call(http, "get_state", session, rollout_id="rnope")
    call(http, "get_state", session)
    state = http("GET", "/state", None, **AUTH, **{"session-id": session["mcp-session-id"]}).json
    assert (state["rollouts_completed"], state["last_reward"], state["last_task_id"]) == (1, 0.5, "t1")
    assert (state["last_sandbox_id"], state["step_count"]) == ("sb-1", 3)


def frames(body: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]


def test_the_stream_has_all_events_and_ends_after_the_outcome(http: Http) -> None:
    answer = http("GET", "/rollouts/r00001/events", None, **AUTH)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [frame["kind"] for frame in frames(answer.body.decode())] == ["stage", "call", "outcome"]


@pytest.mark.parametrize(("path", "header"), [("?after=2", {}), ("?after=0", {"last-event-id": "2"})])
def test_a_reader_that_was_cut_off_goes_on(http: Http, path: str, header: dict[str, str]) -> None:
    answer = http("GET", f"/rollouts/r00001/events{path}", None, **AUTH, **header)
    assert [frame["seq"] for frame in frames(answer.body.decode())] == [3]


def test_a_browser_that_has_everything_is_told_not_to_reconnect(http: Http) -> None:
    assert http("GET", "/rollouts/r00001/events", None, **AUTH, **{"last-event-id": "3"}).status == 204


def test_the_stream_is_behind_the_gate_and_knows_its_rollouts(http: Http) -> None:
    assert http("GET", "/rollouts/r00001/events").status == 401
    assert http("GET", "/rollouts/rnope/events", None, **AUTH).status == 404
    assert http("GET", "/rollouts/r00001/events?after=x", None, **AUTH).status == 422


def test_wrong_arguments_start_nothing(http: Http, store: Path) -> None:
    refused = call(http, "run_rollout", instruction="x", model_key="gpt")["error"]
    assert refused["code"] == -32602
    assert "vllm_url" in refused["message"]
    assert "mode" in call(http, "start_rollout", instruction="x", model_key="local", mode="grey")["error"]["message"]
    with Store.open(store, read_only=True) as reopened:
        assert reopened.count() == 1


def test_a_caller_that_leaves_does_not_take_its_rollout_with_it(server: Running, http: Http) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    request = {"instruction": "x", "vllm_url": url, "idempotency_key": "k"}
    leaving = server.http(timeout=0.5)
    with pytest.raises(TimeoutError):
        call(leaving, "run_rollout", **request)
    leaving.close()
    state = call(http, "start_rollout", **request)["result"]["structuredContent"]
    assert state["status"] == "running"
    waiting = call(http, "finalize_rollout", rollout_id=state["rollout_id"], wait_s=0)
    assert "is running (stage model)" in json.dumps(waiting)
    aborted = call(http, "abort_rollout", rollout_id=state["rollout_id"])["result"]["structuredContent"]
    assert (aborted["status"], aborted["error"]) == ("aborted", "aborted")
    listening.close()


def test_each_call_reports_a_store_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PADDOCK_STORE", str(tmp_path / "file"))
    running = Running(OpenCodeEnvironment, "fast", "simulation", Access(token="sesame"), {}, {})
    answer = call(running.http(), "get_state", rollout_id="r00001")
    running.stop()
    assert "no rollout can run here" in json.dumps(answer)
