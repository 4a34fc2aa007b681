"""What a trainer written for the `fleet_env` package calls, as it calls it."""

import asyncio
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from paddock import fleet
from paddock.errors import ConfigError, TaskError
from paddock.fleet import CallToolAction, FleetEnvClient, FleetTaskEnv, ListToolsAction
from paddock.fleet.client import events, jobs
from paddock.fleet.client.settings import DEFAULT_BASE_URL

from .plane import KEY, lab

EXPORTED = (
    *("FleetEnvClient", "FleetMCPTools", "ListToolsAction", "CallToolAction", "FleetTaskEnv", "make_fleet_task_env"),
    *("TaskEvaluator", "evaluate_task", "ContextManager", "CONTEXT_TOOLS", "CONTEXT_TOOL_NAMES"),
    *("configure_fleet_telemetry", "set_task_context", "clear_task_context", "create_trace_job", "upload_trace"),
)


@pytest.mark.parametrize("name", EXPORTED)
def test_every_name_of_the_package_is_there(name: str) -> None:
    assert name in fleet.__all__
    assert getattr(fleet, name) is not None


def test_actions_take_parameters_and_metadata() -> None:
    action = CallToolAction(tool_name="add", parameters={"title": "milk"}, metadata={"turn": 1})
    assert (action.parameters, action.arguments, action.metadata) == ({"title": "milk"},) * 2 + ({"turn": 1},)
    assert CallToolAction("add", {"a": 1}) == CallToolAction(tool_name="add", arguments={"a": 1})
    assert (ListToolsAction(metadata={"turn": 1}).tools, ListToolsAction().metadata) == ([], {})
    with pytest.raises(TypeError, match="same"):
        CallToolAction("add", {"a": 1}, arguments={"a": 2})


def test_skip_mcp_is_the_ninth_argument_and_gives_no_tools() -> None:
    async def main(url: str) -> Any:
        orchestrator, tools = await FleetEnvClient.from_fleet_async(
            KEY, "notes", None, None, None, None, 60, None, True, base_url=url
        )
        async with orchestrator:
            return tools

    with lab() as plane:
        assert asyncio.run(main(plane.url)) is None
        assert plane.running == []


def test_the_task_context_is_all_optional() -> None:
    fleet.set_task_context()
    assert events.ambient_context() == events.TaskContext()
    fleet.set_task_context(task_key="t-1")
    assert events.ambient_context() == events.TaskContext(task_key="t-1")
    fleet.clear_task_context()


# -- telemetry ----------------------------------------------------------------------------------------


def test_a_token_without_logfire_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "logfire", None)
    monkeypatch.setenv("LOGFIRE_TOKEN", "secret-token")
    with caplog.at_level(logging.WARNING):
        fleet.configure_fleet_telemetry()
        fleet.configure_fleet_telemetry("secret-token")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "pip install logfire" in caplog.text
    assert "secret-token" not in caplog.text


def test_without_a_token_logfire_looks_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    configured: list[dict[str, Any]] = []
    stand_in = types.SimpleNamespace(configure=lambda **options: configured.append(options), log=lambda *_: None)
    monkeypatch.setitem(sys.modules, "logfire", stand_in)
    fleet.configure_fleet_telemetry()
    events._unsubscribe()
    monkeypatch.setattr(events, "_unsubscribe", None)
    assert [(each["token"], each["send_to_logfire"]) for each in configured] == [(None, "if-token-present")]


# -- task files ---------------------------------------------------------------------------------------

TASKS = [{"task_key": "t-1", "env_key": "notes"}, {"key": "t-2", "env_id": "notes"}]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(TASKS),
        json.dumps({"tasks": TASKS}),
        "\n".join(json.dumps(task) for task in TASKS),
        "\n" + "\n\n".join(json.dumps(task) for task in TASKS) + "\n",
    ],
    ids=["list", "object", "lines", "lines with gaps"],
)
def test_tasks_are_read_in_every_form(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    assert [env.task_key for env in FleetTaskEnv.from_json_file_all(path, api_key=KEY)] == ["t-1", "t-2"]
    assert FleetTaskEnv.from_json_file(str(path), "t-2", api_key=KEY).env_key == "notes"


def test_a_file_with_one_line_holds_one_task(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text(json.dumps(TASKS[0]) + "\n")
    assert [env.task_key for env in FleetTaskEnv.from_json_file_all(path, api_key=KEY)] == ["t-1"]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(TASKS[0]) + "\n{\n")
    with pytest.raises(TaskError, match="line 2"):
        FleetTaskEnv.from_json_file(path, "t-1", api_key=KEY)


# -- traces -------------------------------------------------------------------------------------------


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each request of a trace would go."""
    sent: list[str] = []

    class Recorder:
        def __init__(self, address: Any) -> None:
            self.host = address.base_url

        async def post(self, path: str, body: dict[str, Any], *, seconds: float) -> dict[str, str]:
            sent.append(f"{self.host}{path}")
            return {"job_id": "job-1", "session_id": "session-1"}

    for variable in (*jobs.JOBS_VARIABLES, *jobs.INGEST_VARIABLES):
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setattr(jobs, "PlaneClient", Recorder)
    return sent


def send_both() -> None:
    assert asyncio.run(fleet.create_trace_job(KEY, "run")) == "job-1"
    assert asyncio.run(fleet.upload_trace(KEY, "job-1", "t-1", "m", [])) == "session-1"


def test_jobs_and_conversations_have_two_hosts(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    send_both()
    assert hosts == [f"{jobs.JOBS_BASE_URL}/v1/traces/jobs", f"{DEFAULT_BASE_URL}/v1/sessions/ingest"]
    monkeypatch.setenv("FLEET_TRACE_JOBS_BASE_URL", "http://jobs")
    monkeypatch.setenv("FLEET_TRACE_INGEST_BASE_URL", "http://ingest")
    send_both()
    assert hosts[2:] == ["http://jobs/v1/traces/jobs", "http://ingest/v1/sessions/ingest"]


@pytest.mark.parametrize("variable", ["FLEET_TRACE_BASE_URL", "FLEET_BASE_URL"])
def test_one_plane_takes_both(variable: str, hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "http://own")
    send_both()
    assert hosts == ["http://own/v1/traces/jobs", "http://own/v1/sessions/ingest"]


def test_a_trace_without_a_key_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    assert asyncio.run(fleet.create_trace_job(None, "run")) is None


# -- evaluation ---------------------------------------------------------------------------------------


def test_an_evaluation_needs_models() -> None:
    with pytest.raises(ConfigError, match="models"):
        fleet.TaskEvaluator(KEY)
