"""The end of a server: whatever its environments still do, it comes soon, and every environment is closed once."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wire import open_socket

LASTING = Path(__file__).with_name("lasting.py")


class Served:
    def __init__(self, folder: Path, kind: str, *options: str) -> None:
        command = [sys.executable, "-m", "paddock", "serve", f"{LASTING}:{kind}", "--port", "0", "--json", *options]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        self.port = int(json.loads(self.process.stdout.readline())["url"].rpartition(":")[2])

    def ends_soon(self) -> None:
        assert self.process.wait(8) == 0
        assert "Traceback" not in self.log.read_text()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    served: list[Served] = []

    def begin(*arguments: str) -> Served:
        served.append(Served(tmp_path, *arguments))
        return served[-1]

    yield begin
    for each in served:
        each.process.kill()
        each.process.communicate()
    assert (tmp_path / "closed").read_text() == "x"


@pytest.mark.parametrize("kind", ["Lasting", "Stubborn", "OnAnotherThread"])
def test_a_step_that_does_not_end_holds_nothing_up_for_long(serve: Callable[..., Served], kind: str) -> None:
    served = serve(kind, "--drain-grace", "0.5")
    with open_socket(served.port) as ws:
        ws.send({"type": "step", "data": {}})
        time.sleep(0.3)
        served.process.terminate()
        served.ends_soon()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_cuts_the_grace_short(serve: Callable[..., Served], second: signal.Signals) -> None:
    served = serve("Lasting", "--drain-grace", "20")
    with open_socket(served.port) as ws:
        ws.send({"type": "step", "data": {}})
        time.sleep(0.3)
        served.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert served.process.poll() is None
        served.process.send_signal(second)
        served.ends_soon()
