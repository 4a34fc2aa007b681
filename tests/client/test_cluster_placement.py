"""Many sessions of one client, placed on the hosts of a cluster."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from environments import InlineAdder
from paddock import VectorClient
from paddock.client.reconnect import Reconnect, Timeouts
from paddock.errors import CapacityReached, EpisodeLost, QueueTimeout
from paddock.scale import gateway, host_registry, websocket_relay
from paddock.types import StepResult
from running import wait_until
from scale.together import HostHere, Together

pytestmark = pytest.mark.anyio
QUICK = Reconnect(within=10, first_pause=0.01, longest_pause=0.05)


@pytest.fixture(autouse=True)
def quick_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_registry, gateway):
        monkeypatch.setattr(module, "RECONNECT_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(websocket_relay, "CLOSE_SECONDS", 0.1)


@pytest.fixture(params=["forward", "redirect"])
def two(request: pytest.FixtureRequest) -> Iterator[Together]:
    """Two hosts with four slots each."""
    with Together(2, 4, mode=request.param, token="t", make=InlineAdder) as there:
        yield there


def vector(there: Together, sessions: int, **options: Any) -> VectorClient:
    options = {"reconnect": QUICK, "timeouts": Timeouts(request=20), **options}
    return VectorClient(there.url, sessions, token=there.config.access.token, **options)


def totals(results: list[Any]) -> list[Any]:
    return [result.observation["total"] if isinstance(result, StepResult) else type(result) for result in results]


def host_of(there: Together, envs: VectorClient, index: int) -> HostHere:
    return there.host_of(envs._sub_sessions[index].token)


def sessions(there: Together) -> list[int]:
    return [len(host.service.manager.sessions()) for host in there.hosts]


async def until(condition: Any) -> None:
    await asyncio.to_thread(wait_until, condition, 20)


async def test_sessions_are_shared_out_among_the_hosts(two: Together) -> None:
    async with vector(two, 6) as envs:
        assert totals(await envs.reset_all(seeds=range(6))) == list(range(6))
        assert sessions(two) == [3, 3]
        assert totals(await envs.step_all([{"amount": n} for n in range(6)])) == [2 * n for n in range(6)]
        assert totals(await envs.step({5: {"amount": 1}, 0: {"amount": 1}})) == [11, 1]
    await until(lambda: sessions(two) == [0, 0])


async def test_what_one_host_has_no_room_for_goes_to_another(two: Together) -> None:
    async with vector(two, 3) as first, vector(two, 5) as second:
        assert sessions(two) == [4, 4]
        await first.reset_all()
        assert totals(await second.reset_all()) == [0] * 5


async def test_more_than_the_cluster_holds_is_refused_and_the_rest_goes_on(two: Together) -> None:
    async with vector(two, 10) as envs:
        results = totals(await envs.reset_all())
        assert Counter(map(str, results)) == {"0": 8, str(CapacityReached): 2}
        assert totals(await envs.step_all([{"amount": 1}] * 10)).count(1) == 8
        with pytest.raises(CapacityReached, match="8/8"):
            await vector(two, 2).open()


@pytest.mark.parametrize("index", [0, 3])
async def test_a_lost_host_affects_only_its_own_sessions(two: Together, index: int) -> None:
    async with vector(two, 4) as envs:
        await envs.reset_all()
        victim = host_of(two, envs, index)
        lost = [host_of(two, envs, each) is victim for each in range(4)]
        assert lost.count(True) == 2
        await asyncio.to_thread(two.call, victim.die())
        results = totals(await envs.step_all([{"amount": 1}] * 4))
        assert results == [EpisodeLost if gone else 1 for gone in lost]
        assert totals(await envs.step_all([{"amount": 1}] * 4)) == [EpisodeLost if gone else 2 for gone in lost]
        assert totals(await envs.reset_all()) == [0] * 4
        assert {host_of(two, envs, each) for each in range(4)} == {host for host in two.hosts if host is not victim}
        assert totals(await envs.step_all([{"amount": 1}] * 4)) == [1] * 4


async def test_a_dropped_connection_costs_nothing(two: Together) -> None:
    async with vector(two, 4) as envs:
        await envs.reset_all()
        for n in range(1, 5):
            envs._connections[n % 2].drop()
            assert totals(await envs.step_all([{"amount": 1}] * 4)) == [n] * 4
        assert sum(connection.reconnects for connection in envs._connections) == 4


async def test_sessions_survive_a_crash_of_the_gateway(two: Together) -> None:
    async with vector(two, 4) as envs:
        await envs.reset_all()
        await asyncio.to_thread(two.call, two.stop_gateway())
        await asyncio.to_thread(two.call, two.start_gateway())
        assert totals(await envs.step_all([{"amount": 1}] * 4)) == [1] * 4


async def test_sessions_wait_in_the_line_of_the_cluster(two: Together) -> None:
    first = vector(two, 8)
    await first.open()
    late = vector(two, 3, queue_timeout=30)
    opening = asyncio.create_task(late.open())
    await until(lambda: two.gateway.waiting() == 1)
    await first.close()
    await opening
    assert totals(await late.reset_all()) == [0] * 3
    await late.close()


async def test_sessions_do_not_overtake_earlier_ones_in_the_queue() -> None:
    with Together(2, 1, gateways=2) as there:
        first = vector(there, 2)
        await first.open()
        waits = there.socket(at=1, session_resume="new", queue_timeout="30")
        await until(lambda: there.gateway.waiting() == 1)
        opening = asyncio.create_task(_opened(vector(there, 2, queue_timeout=2)))
        await until(lambda: there.gateway.waiting() == 2)
        await first.close()
        kinds = [(await asyncio.to_thread(waits.receive))["type"] for _ in range(2)]
        assert kinds == ["queued", "moved"]
        assert await opening == [0, QueueTimeout]


async def _opened(envs: VectorClient) -> list[Any]:
    async with envs:
        return sorted(totals(await envs.reset_all()), key=str)


async def test_who_gives_up_waiting_leaves_the_line(two: Together) -> None:
    async with vector(two, 8):
        opening = asyncio.create_task(vector(two, 3, queue_timeout=30).open())
        await until(lambda: two.gateway.waiting() == 1)
        opening.cancel()
        await until(lambda: two.gateway.waiting() == 0)


async def test_waiting_clients_survive_a_dead_gateway(two: Together) -> None:
    first = vector(two, 8)
    await first.open()
    late = vector(two, 3, queue_timeout=30)
    opening = asyncio.create_task(late.open())
    await until(lambda: two.gateway.waiting() == 1)
    await asyncio.to_thread(two.call, two.stop_gateway())
    await asyncio.to_thread(two.call, two.start_gateway())
    await until(lambda: two.gateway.waiting() == 1)
    await first.close()
    await opening
    assert totals(await late.reset_all()) == [0] * 3
    await late.close()


async def test_hundreds_are_spread_evenly() -> None:
    with Together(3, 200, make=InlineAdder) as there:
        async with vector(there, 450) as envs:
            assert sessions(there) == [150] * 3
            assert len(envs._connections) == 3
            await envs.reset_all()
            assert totals(await envs.step_all([{"amount": 1}] * 450)) == [1] * 450


async def test_a_host_by_itself_is_a_server_like_any_other() -> None:
    with Together(2, 4, make=InlineAdder) as there:
        url = there.hosts[1].url
        async with VectorClient(url, 3, token="for hosts", connections=2, reconnect=QUICK) as envs:
            assert totals(await envs.reset_all()) == [0] * 3
            assert sessions(there) == [0, 3]


async def test_a_wrong_question_for_places_is_refused(two: Together) -> None:
    http = two.http()
    bearer = {"authorization": "Bearer t"}
    assert http("POST", "/places", {"sessions": 1}).status == 401
    for wrong in ({"sessions": 0}, {}, {"sessions": 1, "queue_timeout": -1}, b"{"):
        assert http("POST", "/places", wrong, **bearer).status == 422
    placed = http("POST", "/places", {"sessions": 20}, **bearer).json["places"]
    assert sorted(len(place["leases"]) for place in placed) == [4, 4]


def test_places_that_are_not_used_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from paddock.sessions import capacity

    monkeypatch.setattr(capacity, "LEASE_SECONDS", 0.3)
    with Together(2, 4) as there:
        there.http()("POST", "/places", {"sessions": 8})
        assert there.http()("POST", "/reset", {}).status == 503
        wait_until(lambda: there.http()("POST", "/reset", {}).status == 200)


def test_two_clients_that_open_at_once_fill_all_hosts() -> None:
    collected: list[list[Any]] = []

    def play() -> None:
        async def run() -> None:
            async with vector(there, 50, queue_timeout=20) as envs:
                collected.append(totals(await envs.reset_all()))
                everybody.wait(20)

        asyncio.run(run())

    everybody = threading.Barrier(3)
    with Together(2, 50, gateways=2, make=InlineAdder) as there:
        threads = [threading.Thread(target=play) for _ in range(2)]
        for thread in threads:
            thread.start()
        everybody.wait(20)
        for thread in threads:
            thread.join(20)
    assert collected == [[0] * 50] * 2
