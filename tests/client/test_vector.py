"""Many sessions at once: one failing never hurts the others."""

import asyncio
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from environments import Add, Adder, AsyncScripted, InlineAdder, Scripted, Watched, alive
from paddock import Action, VectorClient
from paddock.client.reconnect import Reconnect, Timeouts
from paddock.config import Access
from paddock.errors import (
    CapacityReached,
    ClientError,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    EnvironmentFailure,
    EpisodeLost,
    InvalidMessage,
    PaddockError,
    QueueTimeout,
)
from paddock.types import StepResult
from running import Serve

from .conftest import until

pytestmark = pytest.mark.anyio
QUICK = Reconnect(within=5, first_pause=0.01, longest_pause=0.05)
BRIEF = Reconnect(within=0.3, first_pause=0.01, longest_pause=0.05)


def vector(url: str, sessions: int, **options: Any) -> VectorClient:
    return VectorClient(url, sessions, **{"reconnect": QUICK, "timeouts": Timeouts(request=6), **options})


def totals(results: list[Any]) -> list[Any]:
    return [result.observation["total"] if isinstance(result, StepResult) else type(result) for result in results]


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("make", [Adder, InlineAdder])
async def test_many_episodes_side_by_side(serve: Serve, lives: list[Watched], make: Any, connections: int) -> None:
    async with vector(serve(make, max_sessions=20).url, 20, connections=connections) as envs:
        assert totals(await envs.reset_all(seeds=range(20))) == list(range(20))
        assert totals(await envs.step_all([{"amount": n} for n in range(20)])) == [2 * n for n in range(20)]
        assert totals(await envs.step({3: Add(amount=1), 1: Add(amount=1)})) == [7, 3]
        assert len(envs) == 20
    await until(lambda: [life.closes for life in lives] == [1] * 20)


@pytest.mark.parametrize("connections", [1, 2])
async def test_the_wait_for_slots_is_one_for_the_whole_vector(serve: Serve, connections: int) -> None:
    server = serve(InlineAdder, max_sessions=2)
    began = asyncio.get_running_loop().time()
    async with vector(server.url, 850, queue_timeout=0.5, connections=connections) as envs:
        assert asyncio.get_running_loop().time() - began < 1.4
        results = await envs.reset_all(timeout=5)
    assert sum(isinstance(result, StepResult) for result in results) == 2


async def test_a_failing_session_affects_no_other(serve: Serve) -> None:
    async with vector(serve(Scripted).url, 4) as envs:
        await envs.reset_all()
        actions = [{"value": 0}, {"fail": "no"}, {"nonsense": 1}, {"value": 3}]
        first, failed, refused, last = await envs.step_all(actions)
        assert isinstance(first, StepResult)
        assert isinstance(failed, EnvironmentFailure)
        assert isinstance(refused, InvalidMessage)
        assert isinstance(last, StepResult)
        again = await envs.step_all([{"value": n} for n in range(4)])
        assert [one.observation["value"] for one in again] == [0, 1, 2, 3]  # type: ignore[union-attr]


class Odd(Action):
    value: Any


@pytest.mark.parametrize("wrong", [None, 5, {"value": object()}, {"value": "\ud800"}, Odd(value=object())])
async def test_a_wrong_action_affects_no_other_session(serve: Serve, wrong: Any) -> None:
    async with vector(serve(Scripted).url, 3) as envs:
        await envs.reset_all()
        for _ in range(2):
            first, refused, last = await envs.step_all([{"value": 0}, wrong, {"value": 2}])
            assert isinstance(refused, InvalidMessage)
            assert "action: " in str(refused)
            assert [one.observation["value"] for one in (first, last)] == [0, 2]  # type: ignore[union-attr]
        assert isinstance((await envs.step({1: wrong}))[0], InvalidMessage)
        assert isinstance((await envs.step({1: {"value": 1}}))[0], StepResult)


async def test_reset_arguments_that_json_cannot_encode_affect_no_other_session(serve: Serve) -> None:
    async with vector(serve(Adder).url, 2) as envs:
        begun, refused = await envs.reset({0: {"seed": 3}, 1: {"seed": object()}})
        assert totals([begun, refused]) == [3, InvalidMessage]
        assert "arguments: " in str(refused)
        assert totals(await envs.reset_all(seeds=[4, 5])) == [4, 5]


async def test_an_action_model_may_hold_arrays_and_aliases(serve: Serve) -> None:
    class Aliased(Action):
        what: Any = Field(alias="value")

    async with vector(serve(Scripted).url, 2) as envs:
        results: Any = await envs.step_all([Odd(value=np.arange(2)), Aliased(value=1)])
        assert [one.observation["value"] for one in results] == [[0, 1], 1]


async def test_a_slow_session_delays_only_itself(serve: Serve) -> None:
    async with vector(serve(Scripted).url, 2) as envs:
        slow = asyncio.create_task(envs.step({0: {"sleep": 0.5, "value": "slow"}}))
        (fast,) = await asyncio.wait_for(envs.step({1: {"value": "fast"}}), 0.4)
        assert isinstance(fast, StepResult)
        assert not slow.done()
        await slow


async def test_a_server_that_is_too_small_refuses_the_rest(serve: Serve) -> None:
    async with vector(serve(Adder, max_sessions=2).url, 3) as envs:
        kinds = totals(await envs.reset_all())
        assert sorted(map(str, kinds)) == ["0", "0", str(CapacityReached)]


async def test_a_server_without_room_raises(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    async with vector(server.url, 1):
        with pytest.raises(CapacityReached):
            await vector(server.url, 2).open()


async def test_opening_that_is_given_up_leaves_nothing(serve: Serve) -> None:
    server = serve(Adder, max_sessions=2)
    opening = asyncio.create_task(vector(server.url, 3, queue_timeout=30).open())
    await until(lambda: server.health()["waiting"] == 1)
    opening.cancel()
    await until(lambda: (server.health()["sessions"], len(server.service.sockets)) == (0, 0))


@pytest.mark.parametrize("hold", [0.0, 0.1])
async def test_a_connection_that_fails_closes_the_others(serve: Serve, through: Any, hold: float) -> None:
    server = serve(Adder)
    proxy = await through(server.port)
    proxy.refuse_after, proxy.hold_answers = 2, hold
    with pytest.raises(ConnectFailed):
        await vector(proxy.url, 3, connections=3).open()
    await until(lambda: proxy.is_idle and not server.service.sockets)


async def test_sessions_may_wait_in_line(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    first = vector(server.url, 1)
    await first.open()
    waiting = asyncio.create_task(_total(vector(server.url, 1, queue_timeout=5)))
    await until(lambda: server.health()["waiting"] == 1)
    await first.close()
    assert await asyncio.wait_for(waiting, 3) == [0]


async def test_a_place_in_line_survives_a_drop(serve: Serve, through: Any) -> None:
    server = serve(Adder, max_sessions=1)
    proxy = await through(server.port)
    first = vector(server.url, 1)
    await first.open()
    waiting = asyncio.create_task(_total(vector(proxy.url, 1, queue_timeout=5)))
    await until(lambda: server.health()["waiting"] == 1)
    before = proxy.connections
    proxy.cut()
    await until(lambda: proxy.connections > before)
    await until(lambda: waiting.done() or server.health()["waiting"] == 1)
    await first.close()
    assert await asyncio.wait_for(waiting, 3) == [0]


async def test_a_drop_does_not_lengthen_the_wait_in_line(serve: Serve, through: Any) -> None:
    server = serve(Adder, max_sessions=1)
    proxy = await through(server.port)
    async with vector(server.url, 1):
        waiting = asyncio.create_task(vector(proxy.url, 1, queue_timeout=0.6).open())
        await until(lambda: server.health()["waiting"] == 1)
        await asyncio.sleep(0.3)
        proxy.cut()
        with pytest.raises(QueueTimeout):
            await asyncio.wait_for(waiting, 0.6)


async def test_an_answer_to_open_that_is_lost_costs_no_slot(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Adder, max_sessions=4).port)
    proxy.cut_answers = 1
    async with vector(proxy.url, 4) as envs:
        assert totals(await envs.reset_all()) == [0] * 4
        assert len({session.token for session in envs._sub_sessions}) == 4
        await until(lambda: alive() == 4)
    assert proxy.connections == 2
    await until(lambda: {life.closes for life in lives} == {1})


async def test_closing_does_not_wait_for_a_peer_that_does_not_read(
    serve: Serve, through: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddock.client.transports.socket.CLOSE_SECONDS", 0.1)
    proxy = await through(serve(Scripted).port)
    envs = vector(proxy.url, 2)
    await envs.open()
    proxy.deaf = True
    assert totals(await envs.step({0: {"value": "x" * 20_000_000}}, timeout=0.3)) == [DeadlineExceeded]
    await asyncio.wait_for(envs.close(), 2)


async def _total(envs: VectorClient) -> list[Any]:
    async with envs:
        return totals(await envs.reset_all())


async def test_a_bad_network_costs_nothing(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Adder, max_sessions=8).port)
    async with vector(proxy.url, 8) as envs:
        await envs.reset_all()
        for n in range(1, 11):
            proxy.cut_requests, proxy.cut_answers = n % 2, n % 3 == 0
            assert totals(await envs.step_all([{"amount": 1}] * 8)) == [n] * 8
    assert [life.steps for life in lives] == [10] * 8


async def test_a_server_that_restarted_has_lost_the_episodes(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with vector(proxy.url, 2) as envs:
        await envs.reset_all()
        tokens = [session.token for session in envs._sub_sessions]
        proxy.upstream = serve(Adder).port
        proxy.cut()
        lost = await envs.step_all([{"amount": 1}] * 2)
        assert totals(lost) == [EpisodeLost] * 2
        assert not any(token in str(error) for token in tokens for error in lost if token)
        assert totals(await envs.reset_all()) == [0, 0]


async def test_a_server_that_hangs_up_on_us_is_tried_again(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with vector(proxy.url, 2) as envs:
        await envs.reset_all()
        proxy.refuse = True
        proxy.cut()
        step = asyncio.create_task(envs.step_all([{"amount": 1}] * 2))
        await asyncio.sleep(0.2)
        proxy.refuse = False
        assert totals(await step) == [1, 1]


async def test_a_server_that_never_answers_is_given_up(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with vector(proxy.url, 2, reconnect=BRIEF) as envs:
        await envs.reset_all()
        before, proxy.cut_requests = proxy.connections, 1_000_000
        assert totals(await asyncio.wait_for(envs.step_all([{"amount": 1}] * 2), 3)) == [EpisodeLost] * 2
        assert proxy.connections - before < 20
        proxy.cut_requests = 0
        assert totals(await envs.reset_all()) == [0, 0]


async def test_a_vector_may_refuse_to_come_back(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with vector(proxy.url, 2, reconnect=Reconnect(within=0)) as envs:
        await envs.reset_all()
        before = proxy.connections
        proxy.cut()
        assert totals(await envs.step_all([{"amount": 1}] * 2)) == [EpisodeLost] * 2
        assert proxy.connections == before
        assert totals(await envs.reset_all()) == [0, 0]


async def test_a_call_may_have_a_deadline_of_its_own(serve: Serve, lives: list[Watched]) -> None:
    async with vector(serve(AsyncScripted).url, 2) as envs:
        await envs.reset_all(timeout=5)
        quick, late = await envs.step_all([{"value": 1}, {"hang": True}], timeout=0.2)
        assert isinstance(quick, StepResult)
        assert isinstance(late, DeadlineExceeded)
        assert "0.2 s" in str(late)
        await envs.reset({1: {}}, timeout=5)
        assert isinstance((await envs.step({1: {"value": 2}}, timeout=5))[0], StepResult)


async def test_a_deadline_is_a_value_too(serve: Serve, lives: list[Watched]) -> None:
    async with vector(serve(AsyncScripted).url, 2, timeouts=Timeouts(request=0.3)) as envs:
        quick, late = await envs.step_all([{"value": 1}, {"hang": True}])
        assert isinstance(quick, StepResult)
        assert isinstance(late, DeadlineExceeded)
        await until(lambda: sum(life.cancelled for life in lives) == 1)
        (again,) = await envs.step({1: {"value": 2}})
        assert isinstance(again, StepResult)


async def test_cancelling_stops_every_step(serve: Serve, lives: list[Watched]) -> None:
    async with vector(serve(AsyncScripted).url, 3) as envs:
        step = asyncio.create_task(envs.step_all([{"hang": True}] * 3))
        await until(lambda: all(life.steps for life in lives))
        step.cancel()
        await until(lambda: [life.cancelled for life in lives] == [1, 1, 1])


async def test_two_steps_at_once_in_one_session_are_refused(serve: Serve) -> None:
    async with vector(serve(Scripted).url, 2) as envs:
        first = asyncio.create_task(envs.step({0: {"sleep": 0.2, "value": 1}}))
        await asyncio.sleep(0.05)
        with pytest.raises(ClientError):
            await envs.step({1: {"value": 2}, 0: {"value": 2}})
        assert isinstance((await first)[0], StepResult)
        assert isinstance((await envs.step({1: {"value": 3}}))[0], StepResult)


async def test_wrong_counts_are_clear_errors(serve: Serve) -> None:
    async with vector(serve(Adder).url, 2) as envs:
        with pytest.raises(ClientError, match="3 actions for 2"):
            await envs.step_all([{"amount": 1}] * 3)
        with pytest.raises(ClientError, match="1 seeds for 2"):
            await envs.reset_all(seeds=[1])
    with pytest.raises(ClientError):
        VectorClient("http://127.0.0.1:9", 0)
    for target in ("http://127.0.0.1:99999", Adder):
        with pytest.raises(ConfigError):
            VectorClient(target, 1)  # type: ignore[arg-type]


async def test_a_refused_connection_is_a_clear_error() -> None:
    with pytest.raises(ConnectFailed):
        await vector("http://127.0.0.1:9", 2).open()


async def test_a_token_is_sent(serve: Serve) -> None:
    server = serve(Adder, access=Access(token="secret"))
    async with vector(server.url, 2, token="secret") as envs:
        assert totals(await envs.reset_all()) == [0, 0]
    with pytest.raises(ConnectFailed):
        await vector(server.url, 2, token="wrong").open()


async def test_a_hundred_sessions_in_one_frame(serve: Serve) -> None:
    async with vector(serve(InlineAdder, max_sessions=300).url, 300) as envs:
        await envs.reset_all()
        for n in range(1, 4):
            assert totals(await envs.step_all([{"amount": 1}] * 300)) == [n] * 300


async def test_a_session_the_server_ended_is_an_error_and_the_others_go_on(serve: Serve) -> None:
    server = serve(Adder)
    async with vector(server.url, 2) as envs:
        await envs.reset_all()
        victim = server.service.manager.sessions()[0].id
        session = next(one for one in server.service.manager._sessions.values() if one.id == victim)
        server.service.manager.loop.call_soon_threadsafe(session.close, "test")
        await until(lambda: server.health()["sessions"] == 1)
        results = await envs.step_all([{"amount": 1}] * 2)
        assert sum(isinstance(result, PaddockError) for result in results) == 1
