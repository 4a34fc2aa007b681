"""`RunConfig`: its checks, its keywords, and that it keeps secrets to itself."""

import inspect
import math
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from paddock.cli.field_options import field_docs
from paddock.errors import ConfigError
from paddock.limits import Budget
from paddock.models.endpoint import Endpoint
from paddock.models.weight_version import Weights
from paddock.rollouts import RunConfig, Task, run_batch, run_rollout
from paddock.rollouts.config import make_config
from rollouts.played import NOBODY_THERE, run

SECRET = "sk-never-shown-1234"


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "grey_box"},
        {"top_logprobs": 21},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"agent_timeout": 0.0},
        {"stall_timeout": math.inf},
        {"context_tokens": 0},
        {"n": 0},
        {"parallel": 0},
        {"retries": -1},
        {"max_steps": 0},
        {"seed": -1},
        {"engine": "slurm"},
        {"resume": "b1", "batch_id": "b2"},
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RunConfig(model="demo", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": None},
        {"n": "3"},
        {"parallel": 1.5},
        {"retries": True},
        {"temperature": "hot"},
        {"consent": "no"},
        {"snapshots": "no"},
        {"budget": 5},
        {"timeouts": 30},
        {"fork": "r1"},
        {"gate": 5},
        {"api_key": [SECRET]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_value_of_another_type_is_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"^{name} has a value of type") as caught:
        make_config(None, {"model": "demo", **wrong})
    assert "it takes" in (caught.value.hint or "")


def test_whole_numbers_and_objects_are_accepted() -> None:
    def version() -> int:
        return 7

    config = RunConfig(model=NOBODY_THERE, temperature=1, agent_timeout=5, env=object, weight_version=version)
    assert config.temperature == 1


@pytest.mark.parametrize("tasks", [None, Task("x"), 5], ids=str)
def test_tasks_must_be_a_list_or_a_name(tasks: Any) -> None:
    with pytest.raises(ConfigError, match=r"^tasks is"):
        run(run_batch(tasks, model="demo"))


def test_a_config_must_be_a_run_config() -> None:
    with pytest.raises(ConfigError, match="the config has the type dict"):
        run(run_rollout(Task("x"), {"model": "demo"}))  # type: ignore[arg-type]


def test_an_endpoint_takes_no_key_beside_it() -> None:
    with pytest.raises(ConfigError, match="Endpoint already has"):
        RunConfig(model=NOBODY_THERE, api_key=SECRET)


def test_an_unknown_keyword_names_the_closest_field() -> None:
    with pytest.raises(ConfigError, match="temprature") as caught:
        run(run_rollout(Task("x"), model="demo", temprature=0.5))
    assert caught.value.hint == "did you mean 'temperature'?"
    with pytest.raises(ConfigError, match="no field 'paralel'"):
        run(run_batch([Task("x")], RunConfig(model="demo"), paralel=2))


def test_the_name_of_a_task_is_no_task() -> None:
    with pytest.raises(ConfigError, match="'fix-test' is not a Task") as caught:
        run(run_rollout("fix-test", model="demo"))  # type: ignore[arg-type]
    assert "load_tasks" in (caught.value.hint or "")


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="model is missing"):
        run(run_rollout(Task("x")))


def test_keywords_replace_fields_of_a_config() -> None:
    config = make_config(RunConfig(model="demo", n=4), {"n": 2, "agent": "codex"})
    assert (config.model, config.n, config.agent) == ("demo", 2, "codex")


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(model="http://host/v1", api_key=SECRET),
        RunConfig(model="hf-router://org/repo:p", hf_token=SECRET),
        RunConfig(model=f"http://user:{SECRET}@host/v1"),
        RunConfig(model="vllm://org/repo", vllm_url=f"http://user:{SECRET}@host"),
        RunConfig(model="demo", agent="loop", env=f"https://user:{SECRET}@host/"),
        RunConfig(model=Endpoint("http://host/v1", "m", api_key=SECRET, headers={"x": SECRET})),
    ],
    ids=repr,
)
def test_secrets_are_neither_printed_nor_pickled(config: RunConfig) -> None:
    assert SECRET not in repr(config)
    assert SECRET in config.secrets or isinstance(config.model, Endpoint)
    assert SECRET.encode() not in pickle.dumps(config)


def test_a_pickled_config_is_the_same_but_for_secrets_and_what_is_of_this_process(tmp_path: Path) -> None:
    config = RunConfig(model="demo", n=3, budget=Budget(calls=7), thinking=False, agent="codex")
    assert pickle.loads(pickle.dumps(config)) == config
    here = replace(config, api_key=SECRET, store=tmp_path, weight_version=Weights(3))
    assert pickle.loads(pickle.dumps(here)) == config


def test_its_repr_shows_what_was_chosen() -> None:
    assert repr(RunConfig(model="demo", n=4)) == "RunConfig(model='demo', n=4)"


def test_every_field_is_documented() -> None:
    docs = field_docs(RunConfig)
    assert [each.name for each in fields(RunConfig) if not docs.get(each.name)] == []


def test_it_is_immutable_and_takes_keywords_only() -> None:
    parameters = inspect.signature(RunConfig).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(AttributeError):
        RunConfig(model="demo").n = 2  # type: ignore[misc]
