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


LOOP = ["rollout", "--prompt", "hi", "--model", "replay:none.json", "--agent", "loop", "--env", "counter"]
OTHER = ["rollout", "--prompt", "hi", "--model", "replay:none.json"]


@pytest.mark.parametrize(
    ("words", "option", "hint"),
    [
        ([*OTHER, "--seed", "3"], "--seed", "--agent loop"),
        ([*OTHER, "--max-steps", "3"], "--max-steps", "--agent loop"),
        ([*OTHER, "--agent", "command:true", "--seed", "0"], "--seed", "--agent loop"),
        ([*OTHER, "--vllm-url", "http://127.0.0.1:1"], "--vllm-url", "vllm://"),
        ([*OTHER, "--mode", "black_box", "--temperature", "1"], "--temperature", "leave it"),
        ([*OTHER, "--mode", "black_box", "--no-thinking"], "--thinking", "leave it"),
        ([*LOOP, "--sandbox", "docker"], "--sandbox", "tests"),
        ([*LOOP, "--context", "100"], "--context", "leave it out"),
        (["serve", "counter", "--hosts", "3"], "--hosts", "--engine ray"),
        (["serve", "counter", "--door", "redirect"], "--door", "--engine ray"),
        (["serve", "counter", "--store", "x"], "--store", "--web"),
        (["serve", "counter", "--engine", "ray", "--web", "--store", "x"], "--store", "PADDOCK_STORE"),
        (["fleet", "up", "--instance-cpus", "1"], "--instance-cpus", "--engine ray"),
        (["fleet", "up", "--store", "x"], "--store", "--web"),
        (["fleet", "run", "x.json", "--model", "local", "--vllm-url", "http://h"], "--vllm-url", "vllm://"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    words: list[str], option: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said, hinted = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {option} has no effect: ")
    assert hint in hinted


def test_a_driver_that_the_loop_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*LOOP, "--driver", "serve"])
    assert ended.value.code == 2
    assert "loop has no driver 'serve'" in capsys.readouterr().err
