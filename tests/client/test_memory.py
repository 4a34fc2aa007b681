"""The client without a wire: the environment lives in this process."""

import asyncio
import math
import threading
from typing import Any

import numpy as np
import pytest

from environments import Add, Adder, Alone, AsyncScripted, Did, Kit, Scripted, SlowToBuild, Sum, Total, Watched
from paddock import Action, Client, Environment, Observation, State, SyncClient, ToolEnvironment, tool
from paddock.client.client import UnknownResetArgument
from paddock.client.reconnect import Reconnect
from paddock.client.transports import memory
from paddock.errors import (
    ClientError,
    ConfigError,
    DeadlineExceeded,
    EnvironmentFailure,
    FactoryError,
    InvalidMessage,
    InvalidToolArguments,
    NotSupported,
    StepTimeout,
    ToolFailure,
    ToolNotFound,
)

from .conftest import until

pytestmark = pytest.mark.anyio


async def test_an_episode_is_typed_by_itself(lives: list[Watched]) -> None:
    async with Client(Adder) as env:
        assert (await env.reset(seed=2)).observation == Total(total=2)
        result = await env.step(Add(amount=3))
        assert (result.observation.total, result.reward) == (5, 3.0)
        assert await env.state() == Sum(total=5, step_count=1)
    assert [life.closes for life in lives] == [1]


async def test_a_dict_will_do_for_an_action() -> None:
    async with Client(Adder) as env:
        assert (await env.step({"amount": "3"})).observation.total == 3


async def test_a_factory_will_do_for_a_class(lives: list[Watched]) -> None:
    async with Client(lambda: Adder()) as env:
        assert (await env.reset()).observation.total == 0
    await until(lambda: all(life.closes == 1 for life in lives))


async def test_a_class_that_cannot_share_will_do(lives: list[Watched]) -> None:
    async with Client(Alone) as env:
        await env.reset()


async def test_tools_work() -> None:
    async with Client(Kit) as env:
        await env.reset()
        assert "add" in [tool.name for tool in await env.tools()]
        assert (await env.call_tool("add", amount=2)).value == 2
        with pytest.raises(ToolFailure, match="it broke"):
            await env.call_tool("fail", text="it broke")
        with pytest.raises(ToolNotFound) as caught:
            await env.call_tool("nope")
        assert "add" in str(caught.value.hint)
        with pytest.raises(InvalidToolArguments):
            await env.call_tool("add")


async def test_a_class_without_tools_says_so() -> None:
    async with Client(Adder) as env:
        with pytest.raises(NotSupported):
            await env.tools()
        with pytest.raises(NotSupported):
            await env.call_tool("add")


async def test_a_deadline_holds_for_building_too(lives: list[Watched]) -> None:
    env: Client[Any] = Client(SlowToBuild)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(env.reset(timeout=0.1), 1)
    await env.close()
    await until(lambda: lives and lives[0].closes == 1)


async def test_errors_are_those_of_the_wire() -> None:
    async with Client(Scripted) as env:
        with pytest.raises(InvalidMessage) as refused:
            await env.step({"sleep": "x"})
        assert refused.value.data["errors"][0]["loc"] == ["sleep"]
        with pytest.raises(InvalidMessage):
            await env.reset(seed=-1)
        with pytest.raises(EnvironmentFailure, match="password=\\*\\*\\*"):
            await env.step({"fail": "password=hunter2"})
        assert (await env.step({"value": 1})).observation.value == 1


class Trade(Action):
    open: float


class Market(Environment[Trade, Observation, State]):
    def reset(self, **_: Any) -> Observation:
        return Observation()

    def step(self, action: Trade) -> Observation:
        return Observation()


async def test_a_field_may_be_called_like_a_message() -> None:
    async with Client(Market) as env:
        with pytest.raises(InvalidMessage) as refused:
            await env.step({"open": "x"})
        assert refused.value.data["errors"][0]["loc"] == ["open"]


async def test_an_action_that_json_cannot_say_is_a_clear_error() -> None:
    async with Client(Scripted) as env:
        with pytest.raises(InvalidMessage):
            await env.step({"sleep": object()})


async def test_values_are_what_a_wire_would_bring() -> None:
    class Odd(Scripted):
        def step(self, action: Any) -> Did:
            return Did(value={"nan": math.nan, "array": np.arange(2), "set": {1}, 5: "five"})

    async with Client(Odd) as env:
        value = (await env.step({})).observation.value
        assert value == {"nan": None, "array": [0, 1], "set": [1], "5": "five"}


async def test_a_deadline_holds() -> None:
    async with Client(AsyncScripted) as env:
        with pytest.raises(StepTimeout):
            await env.step({"hang": True}, timeout=0.2)
        assert (await env.step({"value": 1})).observation.value == 1


async def test_a_cancelled_step_is_cancelled(lives: list[Watched]) -> None:
    async with Client(AsyncScripted) as env:
        await env.reset()
        step = asyncio.create_task(env.step({"hang": True}))
        await until(lambda: lives[0].steps)
        step.cancel()
        await until(lambda: lives[0].cancelled == 1)


async def test_an_unknown_reset_argument_is_warned_of() -> None:
    async with Client(Adder) as env:
        with pytest.warns(UnknownResetArgument, match="sede"):
            await env.reset(sede=7)


async def test_metadata_and_schema() -> None:
    async with Client(Adder) as env:
        assert "amount" in (await env.schema())["action"]["properties"]
        assert (await env.metadata())["name"] == "Adder"


@pytest.mark.parametrize(
    "option",
    [{"token": "x"}, {"headers": {"x": "y"}}, {"queue_timeout": 5}, {"reconnect": Reconnect()}, {"on_queue": print},
     {"transport": "http"}],
)  # fmt: skip
async def test_options_that_have_no_effect_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))) as refused:
        Client(Adder, **option)
    assert refused.value.hint


async def test_a_factory_that_fails_is_reported() -> None:
    class Broken(Adder):
        def __init__(self) -> None:
            raise RuntimeError("no database")

    with pytest.raises(FactoryError, match="no database"):
        await Client.connect(Broken)


async def test_a_factory_that_fails_leaves_no_threads() -> None:
    class Broken(Adder):
        def __init__(self) -> None:
            raise RuntimeError("no database")

    before = set(threading.enumerate())
    for _ in range(3):
        with pytest.raises(FactoryError):
            await Client.connect(Broken)
    await until(lambda: set(threading.enumerate()) <= before)


async def test_a_build_that_is_given_up_leaves_no_threads(
    lives: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowToBuild, "seconds", 0.3)
    before = set(threading.enumerate())
    with pytest.raises(DeadlineExceeded):
        await Client(SlowToBuild).reset(timeout=0.1)
    await until(lambda: set(threading.enumerate()) <= before)
    assert [life.closes for life in lives] == [1]


async def test_one_session_however_it_is_opened(lives: list[Watched]) -> None:
    async with await Client.connect(Adder) as env:
        await env.reset()
    assert [life.closes for life in lives] == [1]


async def test_requests_made_together_open_one_session(lives: list[Watched]) -> None:
    env: Client[Any] = Client(Adder)
    await asyncio.gather(*(env.step({"amount": 1}) for _ in range(5)))
    await env.close()
    assert [life.closes for life in lives] == [1]


async def test_a_closed_client_says_so(lives: list[Watched]) -> None:
    env = await Client.connect(Adder)
    await env.close()
    with pytest.raises(ClientError, match="closed"):
        await env.step({"amount": 1})
    assert len(lives) == 1


async def test_it_is_not_reaped_while_it_is_used(lives: list[Watched]) -> None:
    env = await Client.connect(Adder)
    transport: Any = env.transport
    session = transport._session
    session.last_active -= 100_000
    await asyncio.sleep(1.3)
    assert (await env.step({"amount": 1})).observation.total == 1
    await env.close()


class Slow(ToolEnvironment):
    """Its call cannot be stopped, and its `close` takes a while."""

    called = threading.Event()
    freed = threading.Event()
    closed = 0

    @tool
    def nap(self) -> None:
        self.called.set()
        self.freed.wait(60)

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(2)
        type(self).closed += 1


async def test_closing_waits_for_close_and_for_no_call_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "DRAIN_SECONDS", 1000.0)
    env: Client[Any] = Client(Slow)
    await env.reset()
    call = asyncio.create_task(env.call_tool("nap"))
    await asyncio.to_thread(Slow.called.wait, 30)
    call.cancel()
    await asyncio.wait([call])
    await env.close()
    assert Slow.closed == 1
    Slow.freed.set()


class SetsUpInReset(Environment[Add, Total, State]):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Total:
        self.total = 0
        return Total(total=0)

    def step(self, action: Add) -> Total:
        self.total += action.amount
        return Total(total=self.total)


async def test_an_attribute_that_reset_sets_is_hinted_at_only_before_it() -> None:
    async with Client(SetsUpInReset) as env:
        with pytest.raises(EnvironmentFailure, match="no attribute 'total'") as early:
            await env.step({"amount": 1})
        assert "reset was not called" in str(early.value.hint)
        await env.reset()
        assert (await env.step({"amount": 2})).observation.total == 2


def test_a_client_shows_its_target_without_secrets() -> None:
    assert repr(Client("http://me:key@127.0.0.1:1/?token=x")) == "<Client http://***@127.0.0.1:1/>"
    assert repr(SyncClient(Adder)) == "<SyncClient of <Client Adder>>"
