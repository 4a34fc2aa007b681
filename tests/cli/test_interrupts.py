"""Ctrl-C at any moment of a command's start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollouts.played import needs_bwrap, wait_until

INTERRUPTS = """
import os, signal, sys

class Interrupting:
    '''Sends the signal in the middle of the import of a module, where an exception would be swallowed.'''
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000): pass
            except KeyboardInterrupt:
                print("raised", file=sys.stderr)
        return None

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
sys.argv = {words!r}
from paddock.cli import main
main()
"""


def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "script.json"
    script.write_text('{"turns": [{"text": "Done."}]}')
    options = ("--prompt", "x", "--agent", "command:sleep 20", "--model", f"replay:{script}")
    return [sys.executable, "-m", "paddock", "rollout", *options, "--store", str(tmp_path / "store")]


ROLLOUT = "rollout --prompt x --agent command:true --model replay:script.json"


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (ROLLOUT, "click"),
        (ROLLOUT, "paddock.cli.rollout"),
        (ROLLOUT, "aiohttp"),
        (ROLLOUT, "paddock.rollouts.batch"),
        ("serve counter --port 0", "uvicorn"),
        ("serve counter --port 0", "paddock.envs.counter"),
        ("view --no-open", "paddock.web.app"),
        ("trace export --to trl", "paddock.export.trl"),
        ("fleet run tasks.json --model replay:script.json", "paddock.fleet.run"),
        ("check counter", "rich.progress"),
    ],
)
def test_an_interrupt_in_an_import_ends_the_process_without_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, module: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.json").write_text('{"turns": [{"text": "Done."}]}')
    program = INTERRUPTS.format(module=module, words=["paddock", *words.split()])
    environment = {**os.environ, "PADDOCK_STORE": str(tmp_path / "store")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


@pytest.mark.parametrize("delay", [0.3, 0.6, 0.9, 1.5])
def test_an_interrupt_soon_after_the_start_ends_with_130(tmp_path: Path, delay: float) -> None:
    started = subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, text=True, restore_signals=True)
    time.sleep(delay)
    started.send_signal(signal.SIGINT)
    _, reply = started.communicate(timeout=30)
    assert started.returncode == 130, reply
    assert "Traceback" not in reply


def test_an_interrupt_ends_a_check_that_runs_with_130(tmp_path: Path) -> None:
    """Its loop cancels the work."""
    slow = tmp_path / "slow.py"
    slow.write_text("import time\nprint('here', flush=True)\ndef make():\n    time.sleep(60)\n")
    words = [sys.executable, "-m", "paddock", "check", f"{slow}:make"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        assert started.stderr.readline() == "here\n"
        started.send_signal(signal.SIGINT)
        rest = started.stderr.read()
    assert (started.returncode, rest.strip()) == (130, "error: interrupted")


@needs_bwrap
@pytest.mark.parametrize(
    ("number", "ignored"), [(signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGTERM, "trap '' INT;")]
)
def test_a_stopped_check_leaves_no_sandbox(tmp_path: Path, number: signal.Signals, ignored: str) -> None:
    """A background job of a script ignores SIGINT."""
    task = tmp_path / "task"
    for folder in ("tests", "solution", "temporary"):
        (task / folder).mkdir(parents=True)
    (task / "instruction.md").write_text("Do nothing.")
    (task / "tests" / "test.sh").write_text("sleep 60")
    (task / "solution" / "solve.sh").write_text("sleep 60")
    temporary = task / "temporary"
    environment = {**os.environ, "TMPDIR": str(temporary)}
    words = ["sh", "-c", f'{ignored} exec "$@"', "sh", sys.executable, "-m", "paddock", "check", str(task)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as started:
        wait_until(lambda: any(temporary.glob("paddock-sb-*")))
        started.send_signal(number)
        _, words_of_end = started.communicate(timeout=30)
    assert (started.returncode, words_of_end.strip()) == (130, "error: interrupted")
    assert list(temporary.glob("paddock-sb-*")) == []
