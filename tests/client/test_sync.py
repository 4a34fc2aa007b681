"""The client for code that is not async."""

import asyncio
import gc
import subprocess
import sys
import threading
from typing import Any

import pytest

from environments import Add, Adder, Kit, Scripted, Total, Watched
from paddock import SyncClient
from paddock.client.client import UnknownResetArgument
from paddock.errors import ClientError, ConnectFailed, EnvironmentFailure, InvalidMessage
from running import Serve, wait_until


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_an_episode(serve: Serve, lives: list[Watched]) -> None:
    with SyncClient(serve(Adder).url, observation=Total) as env:
        env.reset(seed=1)
        assert env.step(Add(amount=2)).observation.total == 3
        assert env.state()["total"] == 3
        assert "action" in env.schema()
        assert env.metadata()["name"] == "Adder"
    wait_until(lambda: lives[0].closes == 1)


def test_tools(serve: Serve) -> None:
    with SyncClient(serve(Kit).url) as env:
        assert env.tools()[0].name == "add"
        assert env.call_tool("add", amount=2).value == 2


def test_an_environment_in_memory(lives: list[Watched]) -> None:
    with SyncClient(Adder) as env:
        env.reset()
        assert env.step({"amount": 2}).observation.total == 2
    assert [life.closes for life in lives] == [1]


def test_errors_come_through(serve: Serve) -> None:
    with SyncClient(serve(Scripted).url) as env:
        with pytest.raises(EnvironmentFailure, match="no"):
            env.step({"fail": "no"})
        with pytest.raises(InvalidMessage):
            env.step({"nonsense": 1})
        with pytest.raises(TimeoutError):
            env.step({"sleep": 0.5}, timeout=0.1)


def test_a_failed_connect_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ConnectFailed):
        SyncClient.connect("http://127.0.0.1:9")
    wait_until(lambda: threading.active_count() <= before)


def test_a_client_that_failed_to_connect_can_try_again(serve: Serve) -> None:
    env: SyncClient[Any] = SyncClient("http://127.0.0.1:9")
    for _ in range(2):
        with pytest.raises(ConnectFailed):
            env.__enter__()
    env.close()


def test_connect_and_with_open_one_session(serve: Serve, lives: list[Watched]) -> None:
    with SyncClient.connect(serve(Adder).url) as env:
        env.reset()
    assert len(lives) == 1


def test_closing_ends_the_thread(serve: Serve) -> None:
    url = serve(Adder).url
    before = threading.active_count()
    env: SyncClient[Any] = SyncClient.connect(url)
    env.reset()
    env.close()
    env.close()
    wait_until(lambda: threading.active_count() <= before + 2)


UNCLOSED = {
    "memory": "env = SyncClient(Counter); env.reset()",
    "used_after_close": "env = SyncClient(Counter); env.close(); env.reset()",
    "nobody_there": "env = SyncClient('http://127.0.0.1:9'); env.reset()",
    "busy_loop": "env = SyncClient(Stuck); threading.Thread(target=env.reset, daemon=True).start(); begun.wait()",
}
PROGRAM = """
import threading, time
from paddock import SyncClient
from paddock.envs.counter import Counter

begun = threading.Event()

class Stuck(Counter):
    inline = True

    def reset(self, *, seed=None, episode_id=None):
        begun.set()
        time.sleep(60)

try:
    {}
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("how", UNCLOSED)
def test_a_client_that_is_not_closed_does_not_keep_the_process(how: str) -> None:
    program = PROGRAM.format(UNCLOSED[how])
    subprocess.run([sys.executable, "-c", program], timeout=20, check=True)


def test_a_forgotten_client_ends_its_session_and_its_thread(lives: list[Watched]) -> None:
    before = threading.active_count()
    env: SyncClient[Any] = SyncClient(Adder)
    env.reset()
    del env
    gc.collect()
    wait_until(lambda: [life.closes for life in lives] == [1])
    wait_until(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
def test_a_closed_client_says_so_and_starts_no_thread(used: bool) -> None:
    env: SyncClient[Any] = SyncClient(Adder)
    if used:
        env.reset()
    env.close()
    before = threading.active_count()
    for call in (env.reset, env.state, env.schema, lambda: env.step({"amount": 1})):
        with pytest.raises(ClientError, match="the client is closed"):
            call()
    assert threading.active_count() <= before


def test_a_closed_client_may_be_entered_again() -> None:
    env: SyncClient[Any] = SyncClient(Adder)
    for _ in range(2):
        with env:
            env.reset()


@pytest.mark.anyio
async def test_it_works_inside_a_running_loop(serve: Serve) -> None:
    with SyncClient(serve(Adder).url) as env:
        assert env.reset().observation["total"] == 0
        assert env.step({"amount": 2}).observation["total"] == 2


@pytest.mark.anyio
async def test_it_works_from_many_threads(serve: Serve) -> None:
    with SyncClient(serve(Adder).url) as env:
        env.reset()
        results = await asyncio.gather(*(asyncio.to_thread(env.step, {"amount": 1}) for _ in range(8)))
        assert sorted(result.observation["total"] for result in results) == list(range(1, 9))


def test_an_unknown_reset_argument_is_warned_of(serve: Serve) -> None:
    with SyncClient(serve(Adder).url) as env, pytest.warns(UnknownResetArgument, match="sede"):
        env.reset(sede=7)


def test_it_has_every_method_of_the_client() -> None:
    from paddock import Client

    methods = {name for name in vars(Client) if not name.startswith("_")} - {"transport"}
    assert methods <= {name for name in vars(SyncClient) if not name.startswith("_")}
