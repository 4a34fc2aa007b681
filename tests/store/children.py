"""Other processes that use a store: each runs a few lines of Python and says `ready` on its output."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREPARED = """
import sys, os, time
from paddock.errors import StoreError
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.store import SandboxEntry, Store
from paddock.capture.trace import Call, Event
folder = sys.argv[1]
def ready():
    print("ready", flush=True)
    sys.stdin.readline()
"""


def start(code: str, folder: Path, *, before: list[str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*(before or []), sys.executable, "-c", PREPARED + code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def running(code: str, folder: Path, count: int = 1) -> Iterator[list["subprocess.Popen[str]"]]:
    """Children that have said `ready`; whatever is left of them is killed."""
    children = [start(code, folder) for _ in range(count)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def go(children: list["subprocess.Popen[str]"]) -> list[str]:
    """Let all of them go on at the same time; what each printed."""
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    outputs = []
    for child in children:
        output, _ = child.communicate(timeout=30)
        assert child.returncode == 0
        outputs.append(output)
    return outputs
