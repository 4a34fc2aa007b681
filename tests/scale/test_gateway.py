"""The gateway with real hosts behind it, all in one thread and without Ray."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paddock import Client, SyncClient
from paddock.client.reconnect import Reconnect
from paddock.errors import CapacityReached, EpisodeLost
from paddock.scale import gateway, host_registry, queue_order, websocket_relay
from paddock.sessions import capacity
from running import wait_until
from scale.together import HostHere, Predictable, Together


@pytest.fixture(autouse=True)
def quick_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_registry, gateway):
        monkeypatch.setattr(module, "RECONNECT_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(websocket_relay, "CLOSE_SECONDS", 0.1)


@pytest.fixture(params=["forward", "redirect"])
def two(request: pytest.FixtureRequest) -> Iterator[Together]:
    with Together(2, 1, mode=request.param, token="t" if request.param == "redirect" else None) as there:
        yield there


def client(there: Together, **options: Any) -> SyncClient[Any]:
    return SyncClient(there.url, token=there.config.access.token, **options)


def test_each_new_session_goes_to_the_emptiest_host(two: Together) -> None:
    with client(two) as one, client(two) as other:
        one.reset()
        other.reset()
        tokens = [each._client.transport._token for each in (one, other)]  # type: ignore[attr-defined]
        assert {two.host_of(token).key for token in tokens} == {host.key for host in two.hosts}
        assert one.step({"amount": 2}).observation["total"] == 2
        assert other.step({"amount": 3}).observation["total"] == 3


def test_the_capacity_is_one_over_all_hosts(two: Together) -> None:
    with client(two) as one, client(two) as other, client(two) as third:
        one.reset()
        other.reset()
        with pytest.raises(CapacityReached, match="2/2"):
            third.reset()
        one.close()
        third.reset()


def test_who_waits_is_let_in_where_a_slot_comes_free(two: Together) -> None:
    places: list[int] = []
    with client(two) as one, client(two) as other:
        one.reset()
        other.reset()
        with client(two, queue_timeout=10, on_queue=places.append) as third:
            threading.Timer(0.3, other.close).start()
            assert third.reset().observation["total"] == 0
            assert third.step({"amount": 4}).observation["total"] == 4
    assert places == [1]


def test_the_queue_is_first_come_first_served() -> None:
    with Together(2, 1, queue_timeout=10) as there:
        holders = [client(there) for _ in range(2)]
        for holder in holders:
            holder.__enter__().reset()
        order: list[int] = []

        def wait(number: int) -> None:
            with client(there) as late:
                late.reset()
                order.append(number)

        threads = []
        for number in range(3):
            threads.append(threading.Thread(target=wait, args=(number,)))
            threads[-1].start()
            wait_until(lambda: there.gateway.slots.waiting == len(threads))
        holders[0].close()
        for thread in threads:
            thread.join(10)
        holders[1].close()
    assert order == [0, 1, 2]


def test_a_plain_client_waits_in_the_queue_without_knowing() -> None:
    with Together(1, 1, queue_timeout=10) as there:
        first = there.socket()
        assert first.ask({"type": "reset"})["type"] == "observation"
        second = there.socket()
        second.send({"type": "reset"})
        wait_until(lambda: there.gateway.slots.waiting == 1)
        first.send({"type": "close"})
        assert second.receive()["type"] == "observation"
        assert second.step(amount=2)["data"]["observation"]["total"] == 2


def test_who_leaves_the_queue_leaves_no_slot_behind() -> None:
    with Together(1, 1, queue_timeout=10) as there:
        first = there.socket()
        first.ask({"type": "reset"})
        second = there.socket()
        wait_until(lambda: there.gateway.slots.waiting == 1)
        second.connection.socket.close()
        wait_until(lambda: there.gateway.slots.waiting == 0)
        first.send({"type": "close"})
        third = there.socket()
        assert third.ask({"type": "reset"})["type"] == "observation"


def test_an_http_episode_stays_at_its_host_and_counts() -> None:
    with Together(2, 1) as there:
        http, other = there.http(), there.http()
        token = http("POST", "/reset", {}).headers["session-id"]
        for total in (2, 4):
            answer = http("POST", "/step", {"action": {"amount": 2}}, session_id=token)
            assert answer.json["observation"]["total"] == total
        assert other("POST", "/reset", {}).headers["session-id"][:12] != token[:12]
        assert other("POST", "/reset", {}).status == 503
        assert http("GET", "/health").json["sessions"] == 2


def test_a_session_over_mcp_stays_at_its_host() -> None:
    with Together(2, 2) as there:
        http = there.http()
        made = [http.rpc("openenv/session/create")["result"]["session_id"] for _ in range(2)]
        assert {there.host_of(token).key for token in made} == {host.key for host in there.hosts}
        for token in made:
            socket = there.socket(f"/ws?session_id={token}")
            assert socket.ask({"type": "reset"})["type"] == "observation"
        assert http.rpc("openenv/session/close", {"session_id": made[0]})["result"]["session_id"] == made[0]
        begun = http("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}})
        token = begun.headers["mcp-session-id"]
        assert http.rpc("ping", mcp_session_id=token)["result"] == {}
        assert http("DELETE", "/mcp", mcp_session_id=token).status == 204


def test_an_unknown_session_is_refused_as_by_one_server() -> None:
    with Together(1, 1) as there:
        answer = there.socket("/ws?session_id=nobody").receive()
        assert answer["data"]["code"] == "SESSION_ERROR"
        assert there.http()("POST", "/step", {"action": {"amount": 1}}, session_id="nobody").status == 404


def test_health_metrics_and_sessions_speak_for_all_hosts() -> None:
    with Together(2, 3) as there:
        there.gateway.autoscaler_status = {"hosts": 2}
        sockets = [there.socket() for _ in range(3)]
        for socket in sockets:
            socket.ask({"type": "reset"})
        http = there.http()
        health = http("GET", "/health").json
        assert (health["status"], health["capacity"], health["sessions"]) == ("healthy", 6, 3)
        assert health["available"] == 3
        assert sorted(host["sessions"] for host in health["hosts"]) == [1, 2]
        assert health["autoscaler"] == {"hosts": 2}
        assert len(http("GET", "/sessions").json) == 3
        text = http("GET", "/metrics").body.decode()
        assert all(f'paddock_sessions{{worker="{host.key}"}}' in text for host in there.hosts)
        assert "paddock_hosts 2" in text
        assert text.count("# TYPE paddock_sessions gauge") == 1


def test_the_page_shows_all_hosts_as_one() -> None:
    with Together(3, 2) as there:
        sockets = [there.socket() for _ in range(4)]
        for socket in sockets:
            socket.ask({"type": "reset"})
        response = there.http()("GET", "/web/api/server").json
        assert (len(response["sessions"]), response["health"]["capacity"], response["workers"]) == (4, 6, 3)
        assert there.http()("GET", "/web/").status == 200


def test_the_page_behind_the_gateway_still_wants_the_token() -> None:
    with Together(2, 1, token="t") as there:
        http = there.http()
        assert http("GET", "/web/api/server").status == 401
        assert http("GET", "/web/api/server", authorization="Bearer wrong").status == 401
        assert http("GET", "/web/api/server", authorization="Bearer t").json["workers"] == 2
        assert http("POST", "/web/reset", {}).status == 401


def test_without_its_token_the_gateway_says_little(two: Together) -> None:
    token = two.config.access.token
    if token is None:
        pytest.skip("this one has no token")
    http = two.http()
    assert http("GET", "/health").json == {"status": "healthy"}
    assert http("GET", "/sessions").status == 401
    assert len(http("GET", "/sessions", authorization=f"Bearer {token}").json) == 0


def test_a_lost_host_ends_its_sessions_at_once_and_a_reset_begins_anew(two: Together) -> None:
    with client(two, reconnect=Reconnect(within=10)) as one:
        one.reset()
        one.step({"amount": 2})
        host = two.host_of(one._client.transport._token)  # type: ignore[attr-defined]
        began = time.monotonic()
        two.call(host.die())
        with pytest.raises(EpisodeLost, match=r"gone|could not"):
            one.step({"amount": 2})
        assert time.monotonic() - began < 3
        assert one.reset().observation["total"] == 0
        assert one.step({"amount": 1}).observation["total"] == 1


def test_a_plain_client_gets_the_reason_why_its_socket_ends() -> None:
    with Together(2, 1) as there:
        socket = there.socket()
        socket.ask({"type": "reset"})
        host = next(host for host in there.hosts if host.service.manager.sessions())
        there.call(host.die())
        answer = socket.receive()
        assert (answer["type"], answer["data"]["kind"]) == ("error", "host_lost")
        assert socket.end() == 1011


def test_an_http_episode_on_a_lost_host_is_lost(two: Together) -> None:
    with client(two, transport="http") as one:
        one.reset()
        token: str = one._client.transport._session  # type: ignore[attr-defined]
        two.call(two.host_of(token).die())
        with pytest.raises(EpisodeLost):
            one.step({"amount": 2})
        assert one.reset().observation["total"] == 0


@pytest.mark.parametrize("mode", ["forward", "redirect"])
def test_an_episode_of_a_deterministic_environment_is_replayed(mode: str) -> None:
    policy = Reconnect(within=10, replay=True)
    with Together(2, 1, mode=mode, token="t", make=Predictable) as there, client(there, reconnect=policy) as one:
        one.reset(seed=3)
        one.step({"amount": 2})
        transport = one._client.transport
        token = transport.inner._token  # type: ignore[attr-defined]
        there.call(there.host_of(token).die())
        assert one.step({"amount": 3}).observation["total"] == 3 + 2 + 3
        assert transport.replays == 1  # type: ignore[attr-defined]


def test_an_environment_that_is_not_deterministic_is_not_replayed() -> None:
    with Together(2, 1) as there, client(there, reconnect=Reconnect(replay=True)) as one:
        one.reset(seed=3)
        token = one._client.transport.inner._token  # type: ignore[attr-defined]
        there.call(there.host_of(token).die())
        with pytest.raises(EpisodeLost):
            one.step({"amount": 3})


class Fickle(Predictable):
    """Declares what it does not keep."""

    built = 0

    def step(self, action: Any) -> Any:
        total = super().step(action)
        return total.model_copy(update={"total": total.total + id(self) % 1_000_003})


def test_a_replay_that_goes_another_way_is_a_lost_episode() -> None:
    with Together(2, 1, make=Fickle) as there, client(there, reconnect=Reconnect(replay=True)) as one:
        one.reset(seed=3)
        one.step({"amount": 1})
        token = one._client.transport.inner._token  # type: ignore[attr-defined]
        there.call(there.host_of(token).die())
        with pytest.raises(EpisodeLost, match="another way"):
            one.step({"amount": 3})
        assert one.reset(seed=3).observation["total"] == 3


def test_a_silent_host_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_registry, "HOST_SILENCE_SECONDS", 0.7)
    monkeypatch.setattr(queue_order, "RECONNECT_SECONDS", 60)
    with Together(2, 1) as there:
        socket = there.socket()
        socket.ask({"type": "reset"})
        host = next(host for host in there.hosts if host.service.manager.sessions())
        there.call(host.fall_silent())
        assert socket.receive()["data"]["kind"] == "host_lost"
        assert [each["key"] for each in there.gateway.report()["hosts"]] != [host.key]
        assert there.gateway.report()["lost_hosts"] == [host.key]


def test_sessions_survive_a_crash_of_the_gateway() -> None:
    with Together(2, 2) as there, client(there, reconnect=Reconnect(within=10)) as one:
        one.reset()
        one.step({"amount": 2})
        there.call(there.stop_gateway())
        there.call(there.start_gateway())
        assert one.step({"amount": 2}).observation["total"] == 4
        wait_until(lambda: len(there.gateway.registry.hosts) == 2)
        assert there.http()("GET", "/health").json["sessions"] == 1


def test_a_host_needs_the_secret() -> None:
    with Together(1, 1) as there:
        stranger = HostHere(5, 9, [there.gateways[0].control_address], None, Predictable)
        stranger.reporter._secret = "guessed"
        there.call(stranger.start())
        time.sleep(0.3)
        assert len(there.gateway.registry.hosts) == 1
        there.call(stranger.stop())


def test_a_slot_that_was_asked_for_and_not_used_is_free_again() -> None:
    with Together(1, 1) as there:
        _, lease = there.call(there.gateway.reserve_slot(0))
        assert there.http()("POST", "/reset", {}).status == 503
        there.loop.call_soon_threadsafe(there.gateway.listener.broadcast, {"release": lease})
        wait_until(lambda: there.http()("POST", "/reset", {}).status == 200)


def test_the_slot_of_a_lease_that_runs_out_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "LEASE_SECONDS", 0.3)
    with Together(1, 1) as there:
        there.call(there.gateway.reserve_slot(0))
        assert there.http()("POST", "/reset", {}).status == 503
        wait_until(lambda: there.http()("POST", "/reset", {}).status == 200)


def test_two_gateways_share_the_slots_of_the_hosts() -> None:
    with Together(2, 1, gateways=2) as there:
        gateways = [each.gateway for each in there.gateways]
        for gateway in gateways:
            there.call(gateway.reserve_slot(0))
        for gateway in gateways:
            with pytest.raises(CapacityReached):
                there.call(gateway.reserve_slot(0))


async def many(url: str, count: int) -> int:
    async def one() -> None:
        async with Client(url) as each:
            await each.reset()
            await each.step({"amount": 1})

    await asyncio.gather(*(one() for _ in range(count)))
    return count


def test_many_sessions_share_few_slots() -> None:
    with Together(2, 4, queue_timeout=20) as there:
        assert asyncio.run(many(there.url, 60)) == 60
        wait_until(lambda: there.gateway.registry.in_use() == 0)
