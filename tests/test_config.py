from pathlib import Path
from typing import Any

import pytest

from paddock import config
from paddock.config import Access, Limits, parse_mode
from paddock.errors import ConfigError


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_sessions": 0},
        {"max_sessions": -1},
        {"queue_timeout": -1},
        {"session_timeout": 0},
        {"step_timeout": -1},
        {"resume_window": -1},
        {"drain_grace": -0.1},
        {"message_bytes": 0},
        {"threads": 0},
        {"ping_interval": 0},
        {"ping_timeout": -1},
        {"step_timeout": float("nan")},
        {"max_sessions": "3"},
        {"step_timeout": "5"},
        {"threads": 2.5},
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Limits(**wrong)


def test_hosts_are_a_collection_and_no_text() -> None:
    assert "a.example" in Access(hosts={"a.example"}).hosts  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hosts has a value of type str"):
        Access(hosts="a.example")  # type: ignore[arg-type]


def test_no_limit_is_none() -> None:
    assert Limits(session_timeout=None, step_timeout=None).step_timeout is None


def test_limits_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Limits().max_sessions = 3  # type: ignore[misc]


# -- environment variables ---------------------------------------------------------------------------


@pytest.mark.parametrize("variable", config.VARIABLES, ids=lambda variable: variable.name)
def test_an_unset_or_empty_variable_has_its_default(variable: config.Variable[Any]) -> None:
    assert variable.read({}) == variable.read({variable.name: ""}) == variable.default
    assert variable.help.endswith(".")


@pytest.mark.parametrize("variable", config.VARIABLES, ids=lambda variable: variable.name)
def test_the_documentation_lists_every_variable(variable: config.Variable[Any]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "variables.md").read_text()
    names = f"`{variable.name}`" + (f", `{variable.also}`" if variable.also else "")
    assert f"| {names} | {variable.help} |" in text


def test_variables_are_parsed() -> None:
    assert config.PADDOCK_AUTH_TOKEN.read({"PADDOCK_AUTH_TOKEN": "t"}) == "t"
    assert config.PADDOCK_MODE.read({"PADDOCK_MODE": "production"}) == "production"
    assert config.PADDOCK_MAX_SESSIONS.read({"PADDOCK_MAX_SESSIONS": "7"}) == 7
    assert config.PADDOCK_STORE.read({"PADDOCK_STORE": "~/s"}) == Path.home() / "s"
    assert config.FLEET_CALL_TOOL_DEADLINE_S.read({"FLEET_CALL_TOOL_DEADLINE_S": "0.5"}) == 0.5


def test_openenvs_variables_are_read_too() -> None:
    environ = {"OPENENV_MODE": "Production", "MAX_CONCURRENT_ENVS": "3"}
    assert config.PADDOCK_MODE.read(environ) == "production"
    assert config.PADDOCK_MAX_SESSIONS.read(environ) == 3
    assert config.PADDOCK_MAX_SESSIONS.read({**environ, "PADDOCK_MAX_SESSIONS": "7"}) == 7


WRONG = [
    (config.PADDOCK_MODE, "PADDOCK_MODE", "party"),
    (config.PADDOCK_MAX_SESSIONS, "PADDOCK_MAX_SESSIONS", "many"),
    (config.PADDOCK_MAX_WAITING, "PADDOCK_MAX_WAITING", "many"),
    (config.PADDOCK_MAX_SESSIONS, "PADDOCK_MAX_SESSIONS", "-1"),
    (config.PADDOCK_MAX_SESSIONS, "MAX_CONCURRENT_ENVS", "²"),
    (config.PADDOCK_UNSAFE, "PADDOCK_UNSAFE", "yes"),
    (config.PADDOCK_MAX_ROLLOUTS, "PADDOCK_MAX_ROLLOUTS", "0"),
    (config.FLEET_CALL_TOOL_DEADLINE_S, "FLEET_CALL_TOOL_DEADLINE_S", "soon"),
    (config.FLEET_CALL_TOOL_DEADLINE_S, "FLEET_CALL_TOOL_DEADLINE_S", "inf"),
    (config.RAY_RECONNECT_SECONDS, "RAY_gcs_rpc_server_reconnect_timeout_s", "soon"),
]


@pytest.mark.parametrize(("variable", "name", "text"), WRONG)
def test_a_wrong_value_names_its_variable(variable: config.Variable[Any], name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is '{text}'") as caught:
        variable.read({name: text})
    assert caught.value.hint


def test_a_secret_is_not_in_a_message() -> None:
    variable = config.Variable("KEY", int, 0, "A number.", secret=True)
    with pytest.raises(ConfigError) as caught:
        variable.read({"KEY": "s3cr3t"})
    assert "s3cr3t" not in caught.value.message
    assert "secret" not in repr(Access(token="secret"))


def test_the_users_folders_follow_the_xdg_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert config.user_cache_folder() == Path("/cache/paddock")
    assert config.user_data_folder() == Path("/home/me/.local/share/paddock")


@pytest.mark.parametrize("written", ["simulation", "SIMULATION", "Production"])
def test_a_mode_may_be_written_in_any_case(written: str) -> None:
    assert parse_mode(written) == written.lower()
