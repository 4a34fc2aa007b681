"""Targets of other ecosystems: how they are written, and what is said when one cannot be had."""

import sys
from pathlib import Path
from typing import Any

import pytest

from paddock import Action, Observation, SyncClient, adapters
from paddock.adapters.mcp import parse_command
from paddock.adapters.openenv import with_types
from paddock.adapters.tools import ForeignTool
from paddock.envs.counter import Counter
from paddock.errors import InvalidToolArguments, TargetError
from paddock.targets import FORMS, load_target


@pytest.mark.parametrize("form", [form for _, form in adapters.TARGETS.values()])
def test_every_form_is_listed(form: str) -> None:
    assert form in FORMS
    with pytest.raises(TargetError) as caught:
        load_target("nothing-like-it")
    assert form in (caught.value.hint or "")


@pytest.mark.parametrize("scheme", adapters.TARGETS)
def test_a_form_without_a_name_is_refused(scheme: str) -> None:
    with pytest.raises(TargetError) as caught:
        load_target(f"{scheme}:")
    assert adapters.TARGETS[scheme][1] in (caught.value.hint or "")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("gymnasium", "paddock.adapters.gymnasium"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(TargetError, match="gymnasium") as caught:
        load_target("gymnasium:CartPole-v1")
    assert caught.value.hint == "pip install 'paddock-rl[gymnasium]'"


def test_openenv_that_is_not_here_is_looked_for_elsewhere() -> None:
    with pytest.raises(TargetError, match="openenv package") as caught:
        load_target("openenv:pkg.mod:Class")
    assert "openenv:pkg.mod:Class@PATH/TO/VENV" in (caught.value.hint or "")
    with pytest.raises(TargetError, match="no interpreter"):
        load_target("openenv:pkg.mod:Class@/no/such/venv")


def test_verifiers_needs_a_virtual_environment() -> None:
    with pytest.raises(TargetError) as caught:
        load_target("verifiers:gsm8k")
    assert caught.value.hint == "write verifiers:gsm8k@PATH/TO/VENV"


def test_a_command_may_begin_with_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "t0ken")
    words, variables = parse_command("TOKEN=$MY_TOKEN LEVEL='1 2' server --flag=a 'b c'")
    assert words == ["server", "--flag=a", "b c"]
    assert variables == {"TOKEN": "t0ken", "LEVEL": "1 2"}


class Move(Action):
    to: int


class Seen(Observation):
    at: int


class Annotated:
    """Says its types in its methods alone, as many of OpenEnv's classes do."""

    def reset(self) -> Seen:
        return Seen(at=0)

    def step(self, action: Move) -> Seen:
        return Seen(at=action.to)


def test_types_are_read_off_the_methods_where_a_class_does_not_name_them() -> None:
    made = with_types(Annotated)
    assert (made.action_type, made.observation_type, made.__name__) == (Move, Seen, "Annotated")  # type: ignore[attr-defined]
    with SyncClient(made) as client:
        client.reset()
        assert client.step({"to": 3}).observation.at == 3
    assert with_types(Counter) is Counter


@pytest.mark.parametrize(
    ("arguments", "expected"), [({}, "text: Field required"), ({"text": "a", "odd": 1}, "odd: there is")]
)
def test_the_names_of_a_foreign_tools_arguments_are_checked(arguments: dict[str, object], expected: str) -> None:
    schema = {"type": "object", "properties": {"text": {}}, "required": ["text"], "additionalProperties": False}
    spec = ForeignTool({"name": "add", "inputSchema": schema, "annotations": {"readOnlyHint": True}})
    assert spec.check({"text": "a"}) == {"text": "a"}
    assert spec.options.read_only
    with pytest.raises(InvalidToolArguments, match=expected):
        spec.check(arguments)


OWN = """
import sys
from paddock import Environment
from paddock.envs.counter import Counter, Total

class Mine(Counter):
    pass

def broken():
    raise OSError("no disk")

def number():
    return 1

def working():
    return Mine()

working.observation_type = Total
"""


@pytest.fixture
def own_file(tmp_path: Path) -> str:
    file = tmp_path / "own_targets.py"
    file.write_text(OWN)
    return str(file)


@pytest.mark.parametrize("rest", ["", ":Nope"])
def test_the_environments_of_a_file_are_listed_without_what_it_imports(own_file: str, rest: str) -> None:
    with pytest.raises(TargetError) as caught:
        load_target(own_file + rest)
    assert caught.value.hint in (f"name the class: {own_file}:Mine", "environments there: Mine")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("broken", "broken() could not be called: OSError: no disk"),
        ("number", "number() returned int, which has no reset()"),
    ],
)
def test_a_function_that_makes_no_environment_is_reported(own_file: str, name: str, expected: str) -> None:
    make, _ = load_target(f"{own_file}:{name}")
    with pytest.raises(TargetError) as caught:
        make()
    assert caught.value.message == expected
    assert caught.value.hint


def test_a_function_that_needs_arguments_is_reported() -> None:
    make, _ = load_target("os.path:join")
    with pytest.raises(TargetError, match=r"join\(\) could not be called: TypeError: .*argument"):
        make()


def test_a_function_that_makes_an_environment_is_a_target(own_file: str) -> None:
    make: Any = load_target(f"{own_file}:working")[0]
    assert make.observation_type.__name__ == "Total"
    with SyncClient(make) as env:
        assert env.reset().observation.total == 0


def test_a_file_that_ends_the_process_is_reported(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(TargetError, match=r"sys\.exit\(3\)") as caught:
        load_target(f"{tmp_path}/leaving.py:X")
    assert "__main__" in (caught.value.hint or "")
