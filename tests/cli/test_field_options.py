"""Options, generated from the fields of config classes."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import click
import pytest
from click.testing import CliRunner

from paddock.cli.commands import paddock
from paddock.cli.field_options import _option, field_options, read_field_options
from paddock.config import Access, Limits, ServerConfig
from paddock.limits import MEBIBYTE, Budget
from paddock.rollouts.config import RunConfig

ConfigT = TypeVar("ConfigT")


def parse(*arguments: str, **changes: Any) -> RunConfig:
    return parse_as(RunConfig, *arguments, **changes)


def parse_as(kind: type[ConfigT], *arguments: str, **changes: Any) -> ConfigT:
    made: list[ConfigT] = []

    @click.command()
    @field_options(kind, **changes)
    def command(**options: Any) -> None:
        made.append(read_field_options(kind, options))
        assert options == {}

    CliRunner().invoke(command, arguments, standalone_mode=False, catch_exceptions=False)
    return made[0]


def test_without_options_everything_is_at_its_default() -> None:
    assert parse("--model", "demo") == RunConfig(model="demo")
    assert parse("--model", "demo", defaults={"parallel": 8}) == RunConfig(model="demo", parallel=8)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (["-n", "4"], {"n": 4}),
        (["--repeat", "4"], {"n": 4}),
        (["--unsafe"], {"consent": True}),
        (["--no-thinking"], {"thinking": False}),
        (["--context", "100"], {"context_tokens": 100}),
        (["--weight-version", "12"], {"weight_version": "12"}),
        (["--store", "folder"], {"store": Path("folder")}),
        (["--temperature", "0"], {"temperature": 0.0}),
        (["--max-calls", "3", "--max-tokens", "9"], {"budget": Budget(calls=3, max_tokens_per_call=9)}),
        (["--driver", "serve", "--seed", "3"], {"driver": "serve", "seed": 3}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_sets_its_field(written: list[str], expected: dict[str, Any]) -> None:
    assert parse("--model", "demo", *written) == RunConfig(model="demo", **expected)


def test_the_type_of_a_field_decides_the_type_of_its_option() -> None:
    at_least_one: Any = dataclasses.field(default=2.5, metadata={"minimum": 1})
    config = dataclasses.make_dataclass(
        "config", [("seconds", "float", at_least_one), ("tags", "tuple[str, ...]", dataclasses.field(default=()))]
    )
    seconds, tags = dataclasses.fields(config)
    assert isinstance(_option(seconds, "")["type"], click.FloatRange)
    with pytest.raises(TypeError, match="tags"):
        _option(tags, "")


def test_secrets_are_no_options() -> None:
    for flag in ("--api-key", "--hf-token"):
        with pytest.raises(click.NoSuchOption):
            parse("--model", "demo", flag, "x")


def test_a_command_may_leave_options_out_and_rename_them() -> None:
    with pytest.raises(click.NoSuchOption):
        parse("--model", "demo", "--agent", "codex", without=("agent",))
    renamed = parse("--model", "demo", "--timeout", "5", flags={"agent_timeout": ("--timeout",)})
    assert renamed.agent_timeout == 5.0


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([], ServerConfig()),
        (["--step-timeout", "0", "--session-timeout", "5"], Limits(step_timeout=None, session_timeout=5.0)),
        (["--max-message-mb", "2"], Limits(message_bytes=2 * MEBIBYTE)),
        (["--allow-host", "a.lan", "--allow-host", "b.lan"], Access(hosts=frozenset(("a.lan", "b.lan")))),
        (["--auth-token", "t"], Access(token="t")),
        (["--mode", "Production", "--isolation", "process"], ServerConfig(mode="production", isolation="process")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_sets_the_field_of_an_inner_config(written: list[str], expected: Any) -> None:
    config = parse_as(ServerConfig, *written)
    by_type = {Limits: config.limits, Access: config.access, ServerConfig: config}
    assert by_type[type(expected)] == expected


def test_a_variable_is_read_when_its_option_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_MAX_WAITING", "7")
    monkeypatch.setenv("PADDOCK_AUTH_TOKEN", "s3cr3t")
    assert parse_as(ServerConfig).limits.max_waiting == 7
    assert parse_as(ServerConfig, "--max-waiting", "8").limits.max_waiting == 8
    output = CliRunner().invoke(paddock, ["serve", "--help"]).output
    assert "Also: PADDOCK_MAX_WAITING" in " ".join(output.split())
    assert "s3cr3t" not in output
