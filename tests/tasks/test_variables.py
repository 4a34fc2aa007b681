import pytest

from paddock.errors import TaskError
from paddock.tasks.variables import expand_defaults


def test_a_default_counts_and_the_machine_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    variables = {"A": "x-${TOKEN:-none}-${B:-}", "C": "$TOKEN"}
    assert expand_defaults(variables, "solution.env") == {"A": "x-none-", "C": "$TOKEN"}


def test_a_variable_of_the_machine_is_refused_by_name() -> None:
    with pytest.raises(TaskError, match=r"solution.env.A needs the variable TOKEN") as caught:
        expand_defaults({"A": "${TOKEN}"}, "solution.env")
    assert caught.value.hint == "give it a default: ${TOKEN:-…}"
