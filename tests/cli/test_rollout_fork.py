"""What `paddock rollout fork` needs of a record to open the same place again."""

from typing import Any

import pytest

from paddock.cli.rollout_fork import choose_fork, find_recorded_environment
from paddock.envs.counter import Counter
from paddock.errors import ConfigError
from paddock.store.record import RolloutRecord


def recorded(sandbox: str, **values: Any) -> RolloutRecord:
    return RolloutRecord("r1", "t", sandbox=sandbox, **values)


@pytest.mark.parametrize("name", ["counter", "paddock.envs.counter:Counter"])
def test_an_environment_is_found_by_its_recorded_name(name: str) -> None:
    environment = find_recorded_environment(recorded("environment", config={"env": name}), None)
    assert environment == {"env": Counter, "env_name": name}


def test_an_environment_that_was_a_url_is_one_again() -> None:
    record = recorded("environment", run_config={"env": "http://127.0.0.1:8000"}, config={"env": "else"})
    assert find_recorded_environment(record, None) == {"env": "http://127.0.0.1:8000", "env_name": None}
    assert find_recorded_environment(record, "counter")["env"] is Counter


@pytest.mark.parametrize("env", [None, "http://***@127.0.0.1:8000"])
def test_an_environment_that_is_not_known_must_be_given(env: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        find_recorded_environment(recorded("environment", config={"env": env}), None)
    assert "--env" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("sandbox", "options", "hint"),
    [
        ("bwrap", {"env": "counter", "task_spec": None}, "leave --env out"),
        ("fleet", {"env": "counter", "task_spec": None}, "leave --env, --task and --engine out"),
        ("fleet", {"env": None, "task_spec": "fix-test"}, "leave --env, --task and --engine out"),
    ],
)
def test_options_that_do_not_fit_the_rollout_are_refused(sandbox: str, options: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_fork(recorded(sandbox), **options, fields={"engine": "local"})
    assert caught.value.hint == hint
