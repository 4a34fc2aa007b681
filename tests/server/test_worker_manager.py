"""Workers that die: who goes on, who takes their place, and when that is given up."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from running import wait_until
from server.worker_processes import StartServer

BROKEN_AT_START = """
import os, sys
from paddock.envs.echo import Echo
from paddock.server import worker_manager
from paddock import create_app, serve

worker_manager.FIRST_PAUSE_SECONDS, worker_manager.LONGEST_PAUSE_SECONDS = 0.01, 0.02
worker_manager.MAX_EARLY_ENDS = 3
worker_manager.run = lambda app, sockets: os._exit(7)
serve(Echo, port=0, workers=2)
"""


STANDS_STILL = """
import os, signal
from paddock.config import Limits, ServerConfig
from paddock.envs.echo import Echo
from paddock.server import worker_manager
from paddock import serve

worker_manager.EXIT_SECONDS = 0.5
def stand_still(app, sockets):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.write(1, b"here\\n")
    os.kill(os.getpid(), signal.SIGSTOP)
worker_manager.run = stand_still
serve(Echo, port=0, workers=2, config=ServerConfig(limits=Limits(drain_grace=0.1)))
"""
FORK_FAILS = """
import os
from paddock.envs.echo import Echo
from paddock.server import worker_manager
from paddock import serve

worker_manager.LONGEST_PAUSE_SECONDS = 0.05
worker_manager.run = lambda app, sockets: os.write(1, b"here\\n")
fork, failures = os.fork, [OSError(11, "none left")] * 2
def fork_or_fail():
    if failures:
        raise failures.pop()
    return fork()
os.fork = fork_or_fail
serve(Echo, port=0, workers=2, announce=lambda _: None)
"""


def test_a_stopped_worker_does_not_keep_the_server_from_ending() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STANDS_STILL], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert [server.stdout.readline() for _ in range(2)] == [b"here\n"] * 2
        server.terminate()
        _, log = server.communicate(timeout=10)
    assert server.returncode == 1
    assert log.count(b"it is killed") == 2


def test_a_worker_that_cannot_be_forked_is_started_later() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORK_FAILS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert [server.stdout.readline() for _ in range(2)] == [b"here\n"] * 2
        server.terminate()
        _, log = server.communicate(timeout=10)
    assert log.count(b"could not be started") == 2


def test_workers_that_cannot_start_are_given_up() -> None:
    ended = subprocess.run([sys.executable, "-c", BROKEN_AT_START], capture_output=True, text=True, timeout=30)
    assert ended.returncode != 0
    assert "no worker could be kept running" in ended.stderr
    assert ended.stderr.count("exit code 7") == 8
    assert ended.stderr.count("it is given up") == 2


def test_the_others_serve_while_one_is_replaced(worker_server: StartServer) -> None:
    server = worker_server(3, 8)
    victims = server.processes()[:2]
    for victim in victims:
        os.kill(victim, signal.SIGSEGV)
    assert server.socket().ask({"type": "state"}, 15)["type"] == "state"
    wait_until(lambda: len(server.processes()) == 3 and not set(victims) & set(server.processes()), 10)
    assert Path(server.folder / "log").read_text().count("SIGSEGV") == 2
    assert server.stop() == 0
