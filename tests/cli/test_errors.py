"""What a person reads when a command cannot go on: what is wrong, and what to do about it."""

import builtins
from typing import Any

import pytest

from paddock.cli import main

from .processes import paddock


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["rollut"], "No such command", "paddock --help"),
        (["rollout", "fix-test", "--modell", "x"], "No such option", "paddock rollout run --help"),
        (["rollout", "fix-test"], "Missing option", "paddock rollout run --help"),
    ],
)
def test_a_wrong_word_is_told_with_a_hint(words: list[str], said: str, hint: str) -> None:
    done = paddock(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert f"hint: {hint}" in done.stderr


def test_a_missing_extra_is_told_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "paddock.rollouts.store":
            raise ModuleNotFoundError("No module named 'zstandard'", name="zstandard")
        return imported(name, *arguments, **keywords)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit):
        main(["trace", "list"])
    assert "hint: pip install 'paddock[rollouts]'" in capsys.readouterr().err
