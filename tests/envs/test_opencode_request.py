"""What the tools refuse before anything starts, and what they make of the rest."""

import re
from pathlib import Path
from typing import Any

import pytest

from paddock.envs.opencode.request import RolloutRequest, check_request, choose_model
from paddock.envs.opencode.rollout_service import ServiceSettings
from paddock.errors import ConfigError, InvalidToolArguments

TOKEN = "hf_abcdefghijklmnop"
URL = "http://127.0.0.1:8000"


def request(**changed: Any) -> RolloutRequest:
    values: dict[str, Any] = {
        "model_key": "local",
        "instruction": "Write hello.txt",
        "test_script": "exit 0",
        "vllm_url": None,
        "hf_token": None,
        "thinking": False,
        "task_id": None,
        "setup_shell": None,
        "upload_files": None,
        "mode": None,
        "max_tokens_cap": 4096,
        "agent_timeout_s": 600,
        "idempotency_key": None,
    }
    return check_request(**{**values, **changed})


def test_the_defaults_are_the_documented_ones() -> None:
    checked = request()
    config = checked.config
    assert (config.mode, config.thinking, config.budget.max_tokens_per_call) == ("transparent_proxy", False, 4096)
    assert checked.task.id.startswith("task-")
    assert checked.task.tests == {"test.sh": b"exit 0"}
    assert checked.rollout_id is None


def test_files_go_below_the_work_folder() -> None:
    files = {"a/b.txt": "one", "/home/user/workdir/c.txt": "two"}
    assert request(upload_files=files).task.files == {"a/b.txt": b"one", "c.txt": b"two"}


def test_an_empty_test_script_leaves_the_task_without_a_score() -> None:
    assert not request(test_script="").task.is_scored


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("instruction", "  "),
        ("max_tokens_cap", 0),
        ("agent_timeout_s", 0),
        ("agent_timeout_s", float("nan")),
        ("agent_timeout_s", float("inf")),
        ("mode", "grey_box"),
        ("upload_files", {"../x": ""}),
        ("upload_files", {"/etc/passwd": ""}),
        ("upload_files", {"/home/user/workdir": ""}),
        ("upload_files", {"/home/user/workdir/../.bashrc": ""}),
        ("upload_files", {"a": "", "/home/user/workdir/a": ""}),
        ("vllm_url", "127.0.0.1:8000"),
        ("idempotency_key", "k" * 300),
        ("model_key", "replay:/no/such/file"),
        ("model_key", "gpt-oss"),
        ("model_key", "vllm://"),
    ],
)
def test_a_wrong_argument_is_named_with_what_to_do(argument: str, value: Any) -> None:
    with pytest.raises(InvalidToolArguments, match=f"{argument}.*: .+"):
        request(**{argument: value})


def test_a_task_id_with_spaces_around_it_is_refused() -> None:
    with pytest.raises(InvalidToolArguments, match="' x' cannot be an id"):
        request(task_id=" x")


def test_a_password_in_a_wrong_url_is_not_repeated() -> None:
    with pytest.raises(InvalidToolArguments) as refused:
        request(vllm_url="ftp://me:hunter22@host")
    assert "hunter22" not in refused.value.message


def test_each_way_to_name_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    script = tmp_path / "script.json"
    script.write_text("{}")
    spec_and_name = [
        (chosen["model"], chosen.get("model_name"))
        for chosen in (
            choose_model("", URL, None),
            choose_model("org/model", URL, None),
            choose_model("org/model:tag", URL, None),
            choose_model("vllm://org/model", URL, None),
            choose_model("hf-router://org/model:together", None, TOKEN),
            choose_model(f"replay:{script}", None, None),
            choose_model("local:model.gguf", None, None),
            choose_model(URL, None, None),
        )
    ]
    assert spec_and_name == [
        (URL, None),
        (URL, "org/model"),
        (URL, "org/model:tag"),
        ("vllm://org/model", None),
        ("hf-router://org/model:together", None),
        (f"replay:{script}", None),
        ("local:model.gguf", None),
        (URL, None),
    ]


@pytest.mark.parametrize(
    ("key", "url", "named"),
    [
        ("", None, "model_key"),
        ("vllm://org/model", None, "vllm_url"),
        ("hf-router://org/model:x", None, "hf_token"),
        ("http://one:1", "http://two:2", "vllm_url"),
    ],
)
def test_what_a_model_needs_is_asked_for(key: str, url: str | None, named: str, monkeypatch: Any) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(InvalidToolArguments, match=re.escape(named)):
        choose_model(key, url, None)


def test_a_request_does_not_show_its_token() -> None:
    checked = request(model_key="hf-router://org/model:x", hf_token=TOKEN)
    assert TOKEN not in repr(checked)
    assert checked.config.secrets == (TOKEN,)


def test_the_same_key_is_the_same_rollout_and_other_arguments_are_noticed() -> None:
    one, again, other = (
        request(idempotency_key="k", hf_token="a"),
        request(idempotency_key="k", hf_token="b"),
        request(idempotency_key="k", thinking=True),
    )
    assert one.rollout_id == again.rollout_id == other.rollout_id
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert request(idempotency_key="l").rollout_id != one.rollout_id


def test_the_settings_come_from_variables() -> None:
    values = {"PADDOCK_STORE": "/s", "PADDOCK_SANDBOX": "process", "PADDOCK_UNSAFE": "1", "PADDOCK_MAX_ROLLOUTS": "2"}
    assert ServiceSettings.read(values) == ServiceSettings(Path("/s"), "process", True, 2)
    assert ServiceSettings.read({}) == ServiceSettings(None, "bwrap", False, 4)


@pytest.mark.parametrize("name", ["PADDOCK_MAX_ROLLOUTS", "PADDOCK_UNSAFE"])
@pytest.mark.parametrize("value", ["-1", "many", "1e3", "99999"])
def test_a_setting_that_means_nothing_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ServiceSettings.read({name: value})
