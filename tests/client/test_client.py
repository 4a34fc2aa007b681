"""The client over a socket: results, errors, deadlines, cancellation."""

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from environments import Add, Adder, AsyncKit, AsyncScripted, Kit, Scripted, Sum, Total, Watched
from paddock import Action, Client, Environment, Observation, State, ToolEnvironment, ToolReturn, tool
from paddock.client.client import UnknownResetArgument
from paddock.client.reconnect import Timeouts
from paddock.config import Access
from paddock.envs.counter import Counter
from paddock.errors import (
    CapacityReached,
    ClientError,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    EnvironmentFailure,
    EpisodeLost,
    InvalidMessage,
    InvalidToolArguments,
    MessageTooBig,
    QueueTimeout,
    ServerError,
    SessionBusy,
    SessionClosed,
    SessionError,
    StepTimeout,
    ToolFailure,
    ToolNotFound,
)
from running import Serve

from .conftest import until

pytestmark = pytest.mark.anyio
TRANSPORTS = ["ws", "http"]


# -- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_episode_in_dicts(serve: Serve, transport: str) -> None:
    async with Client(serve(Counter).url, transport=transport) as env:
        begun = await env.reset(seed=1, episode_id="mine")
        assert (begun.observation["total"], begun.reward, begun.done) == (0, None, False)
        result = await env.step({"amount": 10})
        assert (result.observation["total"], result.reward, result.done) == (10, 10.0, True)
        assert (await env.state())["episode_id"] == "mine"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_episode_in_types(serve: Serve, transport: str) -> None:
    async with Client(serve(Adder).url, observation=Total, state=Sum, transport=transport) as env:
        await env.reset()
        result = await env.step(Add(amount=3))
        assert result.observation == Total(total=3, reward=3.0)
        assert await env.state() == Sum(total=3, step_count=1)


async def test_the_wrong_type_is_a_clear_error(serve: Serve) -> None:
    class Other(Observation):
        colour: str

    class OtherState(State):
        colour: str

    async with Client(serve(Adder).url, observation=Other, state=OtherState) as env:
        with pytest.raises(InvalidMessage, match="observation does not fit Other"):
            await env.reset()
        with pytest.raises(InvalidMessage, match="state does not fit OtherState: colour"):
            await env.state()


class Fetch(Action):
    from_: str = Field(alias="from")


class Fetched(Observation):
    from_: str = Field(alias="from")


class Aliased(Environment[Fetch, Fetched, State]):
    concurrent_sessions = True

    def reset(self, **_: Any) -> Fetched:
        return Fetched(**{"from": "start"})

    def step(self, action: Fetch) -> Fetched:
        return Fetched(**{"from": action.from_})


@pytest.mark.parametrize("where", ["ws", "http", "memory"])
async def test_fields_with_aliases_make_the_round_trip(serve: Serve, where: str) -> None:
    target: Any = Aliased if where == "memory" else serve(Aliased).url
    options = {} if where == "memory" else {"transport": where}
    async with Client(target, observation=Fetched, **options) as env:
        assert (await env.reset()).observation.from_ == "start"
        assert (await env.step(Fetch(**{"from": "here"}))).observation.from_ == "here"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_metadata_arrives(serve: Serve, transport: str) -> None:
    class Talks(Adder):
        def step(self, action: Add) -> Total:
            return Total(total=1, metadata={"note": "hi"})

    async with Client(serve(Talks).url, transport=transport) as env:
        assert (await env.step({"amount": 1})).metadata == {"note": "hi"}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_tools(serve: Serve, transport: str) -> None:
    async with Client(serve(Kit).url, transport=transport) as env:
        await env.reset()
        tools = await env.tools()
        assert [tool.name for tool in tools] == ["add", "pause", "fail", "win", "look"]
        assert tools[0].input_schema["required"] == ["amount"]
        assert [(await env.call_tool("add", amount=2)).value for _ in range(2)] == [2, 4]
        assert (await env.call_tool("look")).value == {"count": 4}


class Scoring(Watched, ToolEnvironment):
    """Tools with a score, and one without."""

    concurrent_sessions = True

    @tool
    def win(self) -> ToolReturn:
        return ToolReturn("won", reward=1.0, done=True)

    @tool
    def look(self) -> str:
        return "nothing"


@pytest.mark.parametrize("way", ["ws", "http", "memory"])
async def test_a_call_has_its_reward_and_whether_it_ended_the_episode(serve: Serve, way: str) -> None:
    env: Any = Client(Scoring) if way == "memory" else Client(serve(Scoring).url, transport=way)
    async with env:
        await env.reset()
        looked, won = await env.call_tool("look"), await env.call_tool("win")
        assert (looked.value, looked.reward, looked.done) == ("nothing", None, False)
        assert (won.value, won.reward, won.done, won.metadata) == ("won", 1.0, True, {})
        assert won.content[0]["text"] == "won"
        with pytest.raises(AttributeError):
            won.value = 2


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_tool_that_fails_raises(serve: Serve, transport: str) -> None:
    async with Client(serve(Kit).url, transport=transport) as env:
        failures: Any = (("fail", {"text": "it broke"}, "it broke"), ("nope", {}, "nope"), ("add", {}, "amount"))
        for name, arguments, text in failures:
            with pytest.raises(ToolFailure, match=text):
                await env.call_tool(name, **arguments)
        assert (await env.call_tool("look")).value == {"count": 0}


async def test_a_session_that_takes_no_call_is_not_the_tool_failing(serve: Serve, lives: list[Watched]) -> None:
    async with Client(serve(Kit, step_timeout=0.2).url) as env:
        with pytest.raises(EnvironmentFailure):
            await env.call_tool("pause", seconds=20)
        with pytest.raises(SessionError):
            await env.call_tool("look")
        lives[0].release.set()


class Answers:
    """A transport that answers every call with one JSON-RPC error."""

    def __init__(self, **error: Any) -> None:
        self.error = error

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def fetch(self, path: str) -> Any: ...

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": message["data"]["id"], "error": self.error}}


NAMED = [
    ({"code": "TOOL_ERROR", "error_type": "tool_not_found"}, ToolNotFound),
    ({"code": "TOOL_ERROR", "error_type": "invalid_args"}, InvalidToolArguments),
    ({"code": "TOOL_ERROR"}, ToolFailure),
    ({"code": "STEP_TIMEOUT"}, StepTimeout),
    ({"code": "EXECUTION_ERROR", "error_type": "KeyError"}, EnvironmentFailure),
    ({"code": "SESSION_ERROR", "kind": "busy"}, SessionBusy),
    ({"code": "SESSION_ERROR", "kind": "closed"}, SessionClosed),
    ({"code": "of somebody else"}, ToolFailure),
]


@pytest.mark.parametrize(("data", "kind"), NAMED)
async def test_an_error_that_the_server_names_is_raised_as_that(data: dict[str, Any], kind: type) -> None:
    transport = Answers(code=-32603, message="it broke", data={**data, "hint": "do this"})
    with pytest.raises(kind, match="it broke") as raised:
        await Client("http://127.0.0.1:9", transport=transport).call_tool("add")
    assert type(raised.value) is kind
    assert getattr(raised.value, "hint", None) == "do this"


NUMBERED = [
    (-32602, ToolFailure, ServerError),
    (-32603, ToolFailure, ServerError),
    (-32600, SessionError, SessionError),
    (-32601, ServerError, ServerError),
    (-32000, ServerError, ServerError),
]


@pytest.mark.parametrize(("number", "of_call", "of_list"), NUMBERED)
async def test_an_error_without_a_name_goes_by_its_number(number: int, of_call: type, of_list: type) -> None:
    env: Client[Any] = Client("http://127.0.0.1:9", transport=Answers(code=number, message="it broke", data=None))
    for calling, kind in ((env.call_tool("add"), of_call), (env.tools(), of_list)):
        with pytest.raises(kind, match="it broke") as raised:
            await calling
        assert type(raised.value) is kind


async def test_a_tool_argument_may_be_called_name(serve: Serve) -> None:
    from paddock import ToolEnvironment, tool

    class Names(ToolEnvironment):
        concurrent_sessions = True

        @tool
        def greet(self, name: str, timeout: int = 0) -> str:
            return f"hello {name} {timeout}"

    async with Client(serve(Names).url) as env:
        assert (await env.call_tool("greet", name="you", timeout=3)).value == "hello you 3"


async def test_a_tool_without_tools_is_a_clear_error(serve: Serve) -> None:
    async with Client(serve(Adder).url) as env:
        with pytest.raises(Exception, match="MCP"):
            await env.tools()


async def test_schema_and_metadata(serve: Serve) -> None:
    async with Client(serve(Counter).url) as env:
        assert "amount" in (await env.schema())["action"]["properties"]
        assert (await env.metadata())["name"] == "Counter"


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_wrong_action_is_refused_and_the_episode_goes_on(serve: Serve, transport: str) -> None:
    async with Client(serve(Adder).url, transport=transport) as env:
        await env.reset()
        await env.step({"amount": 1})
        for wrong in ({"amount": -1}, {}, {"amount": 1, "more": 2}, {"amount": "x"}):
            with pytest.raises(InvalidMessage) as refused:
                await env.step(wrong)
            (place,) = refused.value.data["errors"][0]["loc"]
            assert place in ("amount", "more")
            assert f"{place}: {refused.value.data['errors'][0]['msg']}" in str(refused.value)
        with pytest.raises(InvalidMessage, match="action: 5 is neither a dict nor an action model"):
            await env.step(5)
        assert (await env.step({"amount": 1})).observation["total"] == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_action_that_json_cannot_say_is_a_wrong_action(serve: Serve, transport: str) -> None:
    class Odd(Action):
        value: Any

    async with Client(serve(Scripted).url, transport=transport) as env:
        await env.reset()
        for wrong in ({"value": object()}, {"value": "\ud800"}, Odd(value=object())):
            with pytest.raises(InvalidMessage, match="action: "):
                await env.step(wrong)
        with pytest.raises(InvalidMessage, match="arguments: "):
            await env.reset(seed=object())
        assert (await env.step(Odd(value=np.arange(2)))).observation["value"] == [0, 1]


async def test_a_wrong_action_does_not_affect_other_sessions(serve: Serve) -> None:
    async with Client(serve(Scripted).url) as env:
        await env.reset()
        slow = asyncio.create_task(env.step({"sleep": 0.2, "value": "slow"}))
        with pytest.raises(InvalidMessage):
            await env.step({"nonsense": 1})
        assert (await slow).observation["value"] == "slow"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_environment_that_fails_is_reported(serve: Serve, transport: str) -> None:
    async with Client(serve(Scripted).url, transport=transport) as env:
        await env.reset()
        with pytest.raises(EnvironmentFailure, match="RuntimeError: no"):
            await env.step({"fail": "no"})
        assert (await env.step({"value": 1})).observation["value"] == 1


async def test_a_full_server_is_capacity_reached_and_can_be_tried_again(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    async with Client(server.url) as first:
        await first.reset()
        second: Client[Any] = Client(server.url, timeouts=Timeouts(request=3))
        for _ in range(3):
            with pytest.raises(CapacityReached) as refused:
                await second.reset()
            assert refused.value.data["max_sessions"] == 1
        await first.close()
        assert (await second.reset()).observation["total"] == 0
        await second.close()


async def test_a_client_in_the_queue_gets_its_place(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    places: list[int] = []
    first = await Client.connect(server.url)
    await first.reset()
    async with Client(server.url, queue_timeout=10, on_queue=places.append) as second:
        waiting = asyncio.create_task(second.reset())
        await until(lambda: places)
        await first.close()
        assert (await waiting).observation["total"] == 0
    assert places == [1]


async def test_the_line_has_a_deadline(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    async with Client(server.url) as first:
        await first.reset()
        async with Client(server.url, queue_timeout=0.2, timeouts=Timeouts(request=3)) as second:
            with pytest.raises(QueueTimeout):
                await second.reset()


async def test_a_token_is_needed_and_sent(serve: Serve) -> None:
    server = serve(Adder, access=Access(token="secret"))
    for transport in TRANSPORTS:
        async with Client(server.url, token="secret", transport=transport) as env:
            assert (await env.reset()).observation["total"] == 0
            assert await env.schema()
    with pytest.raises(ConnectFailed) as refused:
        await Client.connect(server.url, token="wrong")
    assert "token" in (refused.value.hint or "")


async def test_a_token_can_come_from_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(Adder, access=Access(token="secret"))
    monkeypatch.setenv("PADDOCK_AUTH_TOKEN", "secret")
    async with Client(server.url) as env:
        assert (await env.reset()).observation["total"] == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://x", "", "ws://127.0.0.1:1", "http://", "http://x:99999", "http://x:0", "http://[::1"],
)
async def test_what_is_no_url_is_a_config_error(url: str, transport: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Client(url, transport=transport)
    assert refused.value.hint


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
async def test_a_timeout_that_leaves_no_time_is_a_config_error(seconds: float) -> None:
    for wrong in ({"connect": seconds}, {"request": seconds}):
        with pytest.raises(ConfigError) as refused:
            Timeouts(**wrong)
        assert refused.value.hint
    assert Timeouts(connect=None, request=None).request is None


async def test_an_unknown_transport_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="pigeon"):
        Client("http://127.0.0.1:1", transport="pigeon")


@asynccontextmanager
async def peer(greeting: bytes | None) -> AsyncIterator[str]:
    """Something on a port that is no environment server: it says this and hangs up, or nothing at all."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(100 if greeting is not None else -1)
            writer.write(greeting or b"")
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    "greeting",
    [b"", b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", b"hello\r\n\r\n", b"\x00" * 100],
    ids=["nothing", "404", "hello", "zeros"],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_peer_that_is_no_server_is_a_clear_error(greeting: bytes, transport: str) -> None:
    async with peer(greeting) as url:
        env: Client[Any] = Client(url, transport=transport, timeouts=Timeouts(2, 2))
        with pytest.raises(ClientError):
            await env.reset()
        await env.close()


async def test_a_peer_that_says_nothing_is_given_up() -> None:
    async with peer(None) as url:
        with pytest.raises(ConnectFailed):
            await Client.connect(url, timeouts=Timeouts(connect=0.2))


# -- deadlines and cancellation -------------------------------------------------------------------


async def test_a_deadline_stops_a_step_on_the_server(serve: Serve, lives: list[Watched]) -> None:
    async with Client(serve(AsyncScripted).url) as env:
        await env.reset()
        with pytest.raises(TimeoutError):
            await env.step({"hang": True}, timeout=0.2)
        await until(lambda: lives[0].cancelled == 1)
        assert (await env.step({"value": 1})).observation["value"] == 1


@pytest.mark.parametrize("arguments", [{}, {"level": 1}])
async def test_a_deadline_holds_for_connecting_too(arguments: dict[str, Any]) -> None:
    async with peer(None) as url:
        env: Client[Any] = Client(url)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(env.reset(timeout=0.2, **arguments), 3)
        await env.close()


async def test_a_call_of_a_tool_has_the_deadline_of_every_request(serve: Serve, lives: list[Watched]) -> None:
    async with Client(serve(AsyncKit).url, timeouts=Timeouts(request=0.2)) as env:
        with pytest.raises(TimeoutError):
            await env.call_tool("hang")
        await until(lambda: lives[0].cancelled == 1)


async def test_a_deadline_for_every_request(serve: Serve) -> None:
    async with Client(serve(AsyncScripted).url, timeouts=Timeouts(request=0.2)) as env:
        await env.reset()
        with pytest.raises((DeadlineExceeded, StepTimeout)):
            await env.step({"hang": True})


async def test_the_servers_deadline_holds_for_clients_with_a_later_one(serve: Serve) -> None:
    async with Client(serve(AsyncScripted, step_timeout=0.2).url) as env:
        await env.reset()
        with pytest.raises(StepTimeout):
            await asyncio.wait_for(env.step({"hang": True}), 3)


async def test_a_hung_step_keeps_the_session_busy_until_it_returns(serve: Serve, lives: list[Watched]) -> None:
    async with Client(serve(Scripted).url) as env:
        await env.reset()
        with pytest.raises(TimeoutError):
            await env.step({"hang": True}, timeout=0.2)
        with pytest.raises(SessionBusy):
            await env.step({"value": 1})
        lives[0].release.set()
        await asyncio.sleep(0.1)
        assert (await env.step({"value": 2})).observation["value"] == 2


async def test_a_cancelled_step_is_cancelled_on_the_server(serve: Serve, lives: list[Watched]) -> None:
    async with Client(serve(AsyncScripted).url) as env:
        await env.reset()
        step = asyncio.create_task(env.step({"hang": True}))
        await until(lambda: lives[0].steps)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await until(lambda: lives[0].cancelled == 1)
        assert (await env.step({"value": 1})).observation["value"] == 1


async def test_a_cancelled_http_step_is_cancelled_on_the_server(serve: Serve, lives: list[Watched]) -> None:
    async with Client(serve(AsyncScripted).url, transport="http") as env:
        await env.reset()
        step = asyncio.create_task(env.step({"hang": True}))
        await until(lambda: lives[0].steps)
        step.cancel()
        await until(lambda: lives[0].cancelled == 1)
        assert (await env.step({"value": 1})).observation["value"] == 1


async def test_a_cancelled_tool_call_is_cancelled_on_the_server(serve: Serve, lives: list[Watched]) -> None:
    async with Client(serve(AsyncKit).url) as env:
        await env.reset()
        call = asyncio.create_task(env.call_tool("hang"))
        await asyncio.sleep(0.2)
        call.cancel()
        await until(lambda: lives[0].cancelled == 1)
        assert (await env.call_tool("add", amount=1)).value == 1


# -- the life of a client -------------------------------------------------------------------------


async def test_a_client_opens_one_session_however_it_is_opened(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Adder)
    async with await Client.connect(server.url) as env:
        await env.reset()
    assert len(lives) == 1
    await until(lambda: server.health()["sessions"] == 0)


async def test_a_client_without_a_with_opens_by_itself(serve: Serve, lives: list[Watched]) -> None:
    env: Client[Any] = Client(serve(Adder).url)
    assert (await env.reset()).observation["total"] == 0
    await env.close()
    await until(lambda: lives[0].closes == 1)


async def test_requests_made_together_on_a_closed_client_open_one_session(serve: Serve, lives: list[Watched]) -> None:
    env: Client[Any] = Client(serve(Adder).url)
    results = await asyncio.gather(*(env.step({"amount": 1}) for _ in range(5)))
    assert sorted(result.observation["total"] for result in results) == [1, 2, 3, 4, 5]
    await env.close()
    assert len(lives) == 1


async def test_close_frees_the_slot_at_once(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    for _ in range(10):
        async with Client(server.url) as env:
            await env.reset()


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 5, 8, 13, 21, 34])
async def test_giving_up_at_any_moment_leaves_no_session(serve: Serve, lives: list[Watched], moment: int) -> None:
    server = serve(Adder, resume_window=0.1)
    for cancel in (True, False):
        env: Client[Any] = Client(server.url)
        begun = asyncio.create_task(env.reset())
        for _ in range(moment):
            await asyncio.sleep(0)
        if cancel:
            begun.cancel()
        await env.close()
        await asyncio.gather(begun, return_exceptions=True)
    await until(lambda: server.health()["sessions"] == 0)


async def test_closing_twice_does_no_harm(serve: Serve) -> None:
    env = await Client.connect(serve(Adder).url)
    await env.close()
    await env.close()


async def test_a_closed_client_says_so(serve: Serve) -> None:
    env = await Client.connect(serve(Adder).url)
    await env.reset()
    await env.close()
    with pytest.raises(ClientError, match="closed"):
        await asyncio.wait_for(env.step({"amount": 1}), 2)


async def test_closing_does_not_wait_for_a_peer_that_does_not_read(
    serve: Serve, through: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddock.client.transports.socket.CLOSE_SECONDS", 0.1)
    proxy = await through(serve(Scripted).port)
    env = await Client.connect(proxy.url)
    proxy.deaf = True
    with pytest.raises(DeadlineExceeded):
        await env.step({"value": "x" * 20_000_000}, timeout=0.3)
    await asyncio.wait_for(env.close(), 2)


async def test_closing_fails_pending_requests(serve: Serve, lives: list[Watched]) -> None:
    env = await Client.connect(serve(AsyncScripted).url)
    await env.reset()
    step = asyncio.create_task(env.step({"hang": True}))
    await until(lambda: lives[0].steps)
    await env.close()
    with pytest.raises(ClientError):
        await asyncio.wait_for(step, 2)
    await until(lambda: lives[0].cancelled == 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_unknown_reset_argument_is_warned_of(serve: Serve, transport: str) -> None:
    async with Client(serve(Adder).url, transport=transport) as env:
        with pytest.warns(UnknownResetArgument, match="sede") as warned:
            assert (await env.reset(sede=7)).observation["total"] == 0
        assert warned[0].filename == __file__


async def test_a_known_reset_argument_is_not_warned_of(serve: Serve) -> None:
    class Levels(Adder):
        def reset(self, *, seed: int | None = None, level: int = 0, **_: Any) -> Total:
            return Total(total=level)

    async with Client(serve(Levels).url) as env:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (await env.reset(level=3)).observation["total"] == 3
            await env.reset(anything=1)


async def test_a_reset_argument_may_be_called_timeout_or_self(serve: Serve) -> None:
    class Takes(Adder):
        def reset(self, **keywords: Any) -> Total:
            return Total(total=len(keywords))

    async with Client(serve(Takes).url) as env:
        assert (await env.reset(**{"self": 1, "session_id": 2, "data": 3})).observation["total"] == 2


async def test_large_answers_arrive(serve: Serve) -> None:
    async with Client(serve(Scripted).url) as env:
        text = "x" * 20_000_000
        assert (await env.step({"value": text})).observation["value"] == text


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_action_over_the_limit_is_a_clear_error(serve: Serve, lives: list[Watched], transport: str) -> None:
    server = serve(Scripted, message_bytes=1_000_000)
    async with Client(server.url, transport=transport, timeouts=Timeouts(request=5)) as env:
        await env.reset()
        with pytest.raises(MessageTooBig):
            await env.step({"value": "x" * 2_000_000})
        assert (await env.step({"value": 1})).observation["value"] == 1
    assert (len(lives), lives[0].steps) == (1, 1)


# -- plain HTTP -----------------------------------------------------------------------------------


async def test_an_http_episode_that_was_lost_can_begin_anew(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    async with Client(server.url, transport="http") as env:
        await env.reset()
        async with Client(server.url) as other:
            await other.reset()
        with pytest.raises(EpisodeLost):
            await env.step({"amount": 1})
        await env.reset()
        await env.step({"amount": 1})
        assert (await env.step({"amount": 1})).observation["total"] == 2


async def test_an_http_episode_that_no_slot_was_left_for_does_not_begin(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    async with Client(server.url) as other, Client(server.url, transport="http") as env:
        await other.reset()
        with pytest.raises(ClientError, match="keeps no episode") as refused:
            await env.reset()
        assert "WebSocket" in (refused.value.hint or "")
        await other.close()
        await env.reset()
        await env.step({"amount": 3})
        assert (await env.step({"amount": 4})).observation["total"] == 7


async def test_an_http_episode_that_was_lost_is_lost_for_tools_too(serve: Serve) -> None:
    server = serve(Kit, max_sessions=1)
    async with Client(server.url, transport="http") as env:
        for ask in (lambda: env.call_tool("look"), env.tools, env.state):
            await env.reset()
            token: str = env.transport._session  # type: ignore[attr-defined]
            async with Client(server.url) as other:
                await other.reset()
            with pytest.raises(EpisodeLost) as lost:
                await ask()
            assert token not in str(lost.value)


async def test_an_http_client_that_closes_frees_its_slot(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    async with Client(server.url, transport="http") as env:
        await env.reset()
        await env.step({"amount": 1})
    async with Client(server.url) as other:
        assert (await other.reset()).observation["total"] == 0


async def test_http_over_a_connection_that_was_closed_while_idle(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with Client(proxy.url, transport="http") as env:
        await env.reset()
        await env.step({"amount": 1})
        proxy.cut()
        await asyncio.sleep(0.1)
        assert (await env.state())["total"] == 1
        proxy.cut()
        await asyncio.sleep(0.1)
        assert (await env.step({"amount": 1})).observation["total"] == 2
