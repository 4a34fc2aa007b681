"""Ctrl-C at any moment of a command's start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
sys.argv = ["paddock", "rollout", "--prompt", "x", "--agent", "command:true", "--model", {model!r}]
from paddock.cli import main
main()
"""


def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "script.json"
    script.write_text('{"turns": [{"text": "Done."}]}')
    options = ("--prompt", "x", "--agent", "command:sleep 20", "--model", f"replay:{script}")
    return [sys.executable, "-m", "paddock", "rollout", *options, "--store", str(tmp_path / "store")]


@pytest.mark.parametrize("module", ["click", "paddock.cli.rollout", "aiohttp", "paddock.rollouts.batch"])
def test_an_interrupt_in_an_import_ends_the_process_without_an_exception(tmp_path: Path, module: str) -> None:
    (tmp_path / "script.json").write_text('{"turns": [{"text": "Done."}]}')
    program = INTERRUPTS.format(module=module, model=f"replay:{tmp_path / 'script.json'}")
    environment = {**os.environ, "PADDOCK_STORE": str(tmp_path / "store")}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, env=environment, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


@pytest.mark.parametrize("delay", [0.3, 0.6, 0.9, 1.5])
def test_an_interrupt_soon_after_the_start_ends_with_130(tmp_path: Path, delay: float) -> None:
    started = subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, text=True, restore_signals=True)
    time.sleep(delay)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=30)
    assert started.returncode == 130, said
    assert "Traceback" not in said
