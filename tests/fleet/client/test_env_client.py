import asyncio
import json
from pathlib import Path

import pytest

import paddock.fleet
from paddock.errors import ConfigError
from paddock.fleet import CallToolAction, FleetEnvClient, FleetTaskEnv, ListToolsAction, make_fleet_task_env
from paddock.fleet.client.plane_client import InstanceOptions

from .episodes import task
from .plane import KEY, lab


def test_the_orchestrator_speaks_http_only() -> None:
    with lab() as plane:
        orchestrator, tools = FleetEnvClient.from_fleet(
            KEY, "notes:1.2", "data", "7", "standard", ttl_seconds=60, env_variables={"A": 1}, base_url=plane.url
        )
        with orchestrator:
            assert orchestrator.reset().observation.metadata == {}
            stepped = orchestrator.step({"x": 1})
            assert (stepped.observation.metadata, stepped.reward, stepped.done) == ({"content": "plain"}, 1, True)
            assert orchestrator.state().step_count == 3
            assert orchestrator.describe_db()["success"]
            for action in (ListToolsAction(), CallToolAction("add", {})):
                with pytest.raises(TypeError, match="agent"):
                    orchestrator.step(action)
        body = plane.box.body
        assert (body["env_key"], body["env_version"], body["data_key"], body["data_version"]) == (
            "notes", "v1.2", "data", "v7",
        )  # fmt: skip
        assert "image_type" not in body
        assert body["run_id"].startswith("paddock-")
        assert tools.mcp_urls == (f"{plane.url}/i/{plane.box.id}/mcp", f"{plane.url}/i/{plane.box.id}/api/v1/mcp")


def test_options_name_versions_as_the_plane_does() -> None:
    body = InstanceOptions(env_key="a:v3", data_key="k:2", image_type="mcp", run_id="r").body()
    assert body == {
        "env_key": "a", "env_version": "v3", "data_key": "k", "data_version": "v2", "image_type": "mcp",
        "run_id": "r", "created_from": "sdk",
    }  # fmt: skip


def test_the_address_and_the_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with lab() as plane:
        monkeypatch.setenv("FLEET_BASE_URL", f"{plane.url}/")
        monkeypatch.setenv("FLEET_API_KEY", KEY)
        with FleetTaskEnv(task()) as env:
            env.reset()
            assert env.instance_id == plane.box.id
        assert plane.running == []


def test_without_a_key_there_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="API key"):
        FleetTaskEnv(task())
    assert issubclass(ConfigError, ValueError)


def test_tasks_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"tasks": [task(), task(task_key="t-2", task_modality="computer_use")]}))
    assert [env.ttl_seconds for env in FleetTaskEnv.from_json_file_all(path, api_key=KEY)] == [900, 1800]
    assert FleetTaskEnv.from_json_file(path, "t-2", api_key=KEY).task_key == "t-2"
    with pytest.raises(ValueError, match="t-3"):
        FleetTaskEnv.from_json_file(path, "t-3", api_key=KEY)


def test_a_task_may_use_the_names_of_an_export() -> None:
    env = make_fleet_task_env({"key": "k", "env_id": "e", "version": "v1", "prompt": "p"}, api_key=KEY)
    assert (env.task_key, env.env_key, env.env_version, env.modality) == ("k", "e", "v1", "tool_use")


def test_a_task_without_an_environment_is_refused_at_reset() -> None:
    with pytest.raises(ValueError, match="env_key"):
        asyncio.run(FleetTaskEnv({"task_key": "k"}, KEY).reset_async())


def test_the_exported_names_are_there() -> None:
    assert all(getattr(paddock.fleet, name) is not None for name in paddock.fleet.__all__)
    with pytest.raises(AttributeError, match="FleetTaskEnw"):
        paddock.fleet.FleetTaskEnw  # noqa: B018
