"""Workers that die: who goes on, who takes their place, and when that is given up."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from running import wait_until
from server.crew import Crew

BROKEN_AT_START = """
import os, sys
from paddock.envs.echo import Echo
from paddock.server import supervisor
from paddock import create_app, serve

supervisor.FIRST_PAUSE, supervisor.LONGEST_PAUSE, supervisor.MOST_EARLY_ENDS = 0.01, 0.02, 3
supervisor.run = lambda app, sockets: os._exit(7)
serve(Echo, port=0, workers=2)
"""


def test_workers_that_cannot_start_are_given_up() -> None:
    ended = subprocess.run([sys.executable, "-c", BROKEN_AT_START], capture_output=True, text=True, timeout=30)
    assert ended.returncode != 0
    assert "no worker could be kept running" in ended.stderr
    assert ended.stderr.count("exit code 7") == 8
    assert ended.stderr.count("it is given up") == 2


def test_the_others_serve_while_one_is_replaced(crew: Callable[..., Crew]) -> None:
    server = crew(3, 8)
    victims = server.processes()[:2]
    for victim in victims:
        os.kill(victim, signal.SIGSEGV)
    assert server.socket().ask({"type": "state"}, 15)["type"] == "state"
    wait_until(lambda: len(server.processes()) == 3 and not set(victims) & set(server.processes()), 10)
    assert Path(server.folder / "log").read_text().count("SIGSEGV") == 2
    assert server.stop() == 0
