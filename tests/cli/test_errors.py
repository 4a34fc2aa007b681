"""What a person reads when a command cannot go on: what is wrong, and what to do about it."""

import builtins
import os
import pty
import subprocess
import sys
from typing import Any

import pytest

from paddock.cli import main, plural
from paddock.cli.serve import ServeOptions, print_address
from paddock.config import Limits, ServerConfig


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["sreve", "counter"], "no command 'sreve'", "did you mean paddock serve?"),
        (["rollut"], "no command 'rollut'", "did you mean paddock rollout?"),
        (["rollout", "fix-test", "--modell", "x"], "No such option", "paddock rollout run --help"),
        (["rollout", "fix-test"], "Missing option", "paddock rollout run --help"),
        (["serve", "counter", "--auth-token"], "requires an argument", "paddock serve --help"),
        (["serve", "counter", "--allow-origin"], "requires an argument", "paddock serve --help"),
        (["serve", "counter", "--workers", "0"], "'--workers': 0 is not in the range x>=1", "paddock serve --help"),
        (
            ["serve", "counter", "--max-sessions", "0"],
            "'--max-sessions': 0 is not in the range",
            "paddock serve --help",
        ),
        (["serve", "counter", "--session-timeout", "-1"], "'--session-timeout': -1.0", "paddock serve --help"),
        (["serve", "counter", "--resume-window", "nan"], "resume_window is nan", "give seconds, 0 or more"),
        (["serve", "counter", "--max-message-mb", "-1"], "'--max-message-mb': -1", "paddock serve --help"),
        (["serve", "counter", "--mode", "party"], "'--mode': 'party' is not one of", "paddock serve --help"),
        (["serve", "counter", "--auth-token", " "], "the token is blank", "give --auth-token"),
        (["serve", "counter", "--host", "192.0.2.1"], "cannot listen on '192.0.2.1'", "give --host"),
        (["serve", "counter", "--host", "no host"], "cannot listen on 'no host'", "give --host"),
        (["serve", "os.path:join"], "join() could not be called", "name a class"),
        (["trace", "export", "--to", "nope"], "no form 'nope'", "use atif, jsonl"),
        (["trace", "list", "--outcome", "okay"], "'okay' is not one of 'ok'", "paddock trace list --help"),
    ],
)
def test_an_unknown_command_is_reported_with_a_hint(
    words: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert f"hint: {hint}" in output


def test_a_full_disk_under_stdout_is_reported() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "paddock", "agents", "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the output cannot be written: No space left on device\nhint: ")
    assert "Traceback" not in done.stderr


def test_every_form_of_an_export_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "export", "--to", "nope"])
    assert "verl, html" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["rollout"], ["trace"], ["fleet"], ["e2b"]], ids=" ".join)
def test_a_group_without_a_command_shows_its_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert output.startswith("Usage: paddock")
    assert "hint:" not in output


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}], ids=["usual", "NO_COLOR"])
def test_errors_are_coloured_unless_disabled(variables: dict[str, str]) -> None:
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "paddock", "sreve"]
    subprocess.run(command, stderr=follower, env=environment | variables, timeout=30, check=False)
    os.close(follower)
    output = os.read(leader, 65536).decode()
    os.close(leader)
    assert ("\x1b[" in output) is not bool(variables)


def test_the_command_line_is_ready_for_an_interrupt_before_it_is_loaded() -> None:
    code = "import sys, paddock.cli; print('click' in sys.modules, 'rich' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False False\n"


def test_an_interrupt_while_loading_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "paddock.cli.commands":
            raise KeyboardInterrupt
        return imported(name, *arguments, **keywords)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_one_is_not_many(capsys: pytest.CaptureFixture[str]) -> None:
    config = ServerConfig(limits=Limits(max_sessions=1))
    print_address("counter", config, "http://127.0.0.1:1", plural(1, "worker"), ServeOptions())
    assert "(1 session, 1 worker)" in capsys.readouterr().err
    assert [plural(1, "host"), plural(2, "host")] == ["1 host", "2 hosts"]


def test_a_missing_extra_is_reported_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "paddock.store":
            raise ModuleNotFoundError("No module named 'zstandard'", name="zstandard")
        return imported(name, *arguments, **keywords)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit):
        main(["trace", "list"])
    assert "hint: pip install 'paddock-rl[rollouts]'" in capsys.readouterr().err


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
        (["serve", "counter", "--gateway", "redirect"], "--gateway", "--engine ray"),
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
    reply, hinted = capsys.readouterr().err.splitlines()
    assert reply.startswith(f"error: {option} has no effect: ")
    assert hint in hinted


def test_a_driver_that_the_loop_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*LOOP, "--driver", "serve"])
    assert ended.value.code == 2
    assert "loop has no driver 'serve'" in capsys.readouterr().err
