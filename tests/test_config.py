from typing import Any

import pytest

from paddock.config import Access, Limits, Variables, parse_mode, read_variables
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
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Limits(**wrong)


def test_no_limit_is_none() -> None:
    assert Limits(session_timeout=None, step_timeout=None).step_timeout is None


def test_limits_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Limits().max_sessions = 3  # type: ignore[misc]


def test_without_variables_there_are_defaults() -> None:
    assert read_variables({}) == Variables()


def test_variables_are_read() -> None:
    read = read_variables({"PADDOCK_AUTH_TOKEN": "t", "PADDOCK_MODE": "production", "PADDOCK_MAX_SESSIONS": "7"})
    assert (read.auth_token, read.mode, read.max_sessions) == ("t", "production", 7)


def test_openenvs_variables_are_read_too() -> None:
    read = read_variables({"OPENENV_MODE": "Production", "MAX_CONCURRENT_ENVS": "3"})
    assert (read.mode, read.max_sessions) == ("production", 3)


WRONG = [
    ("PADDOCK_MODE", "party"),
    ("PADDOCK_MAX_SESSIONS", "many"),
    ("PADDOCK_MAX_WAITING", "many"),
    ("PADDOCK_MAX_SESSIONS", "-1"),
    ("MAX_CONCURRENT_ENVS", "²"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_variable_is_a_clear_error(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_variables({name: value})
    assert refused.value.hint


def test_an_empty_token_is_no_token() -> None:
    assert read_variables({"PADDOCK_AUTH_TOKEN": ""}).auth_token is None


def test_secrets_are_not_shown() -> None:
    assert "secret" not in repr(Access(token="secret"))
    assert "secret" not in repr(read_variables({"PADDOCK_AUTH_TOKEN": "secret"}))


@pytest.mark.parametrize("given", ["simulation", "SIMULATION", "Production"])
def test_a_mode_may_be_written_in_any_case(given: str) -> None:
    assert parse_mode(given) == given.lower()
