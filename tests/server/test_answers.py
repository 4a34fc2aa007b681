"""Nothing on `/ws` stays without an answer: whatever goes wrong."""

import json
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from environments import Adder, AsyncScripted, Kit, Script, Scripted, Watched
from odd_frames import frame
from paddock import Environment, Observation, State
from paddock.errors import EnvironmentFailure
from running import Serve, wait_until


def framed(*documents: Any) -> bytes:
    return b"".join(frame(json.dumps(document)) for document in documents)


def test_a_call_that_is_cancelled_before_it_began_is_answered(serve: Serve) -> None:
    ws = serve(Kit).raw()
    ws.send('{"type":"state"}')
    ws.answer()
    called = {"type": "mcp", "id": 2, "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}}
    ws.tcp.sendall(framed(called, {"type": "cancel", "data": 2}, {"type": "state", "id": 3}))
    answers = [ws.answer(), ws.answer()]
    assert [answer["id"] for answer in answers] == [2, 3]
    assert answers[1]["type"] == "state"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Doubtful:
    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")


class Difficult(Watched, Environment[Script, Observation, State]):
    concurrent_sessions = True

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation()

    def step(self, action: Script) -> Observation:
        if action.value == "unspeakable":
            raise Unspeakable
        if action.value == "no text":
            raise EnvironmentFailure(ValueError("x"))  # type: ignore[arg-type]
        return Observation.model_construct(reward=None, done=False, metadata=Doubtful())


class InlineDifficult(Difficult):
    inline = True


@pytest.mark.parametrize("kind", [Difficult, InlineDifficult])
@pytest.mark.parametrize("number", [None, 7])
@pytest.mark.parametrize("value", ["unspeakable", "no text", "doubtful"])
def test_an_observation_that_is_hard_to_encode_is_sent(
    serve: Serve, kind: Any, value: str, number: int | None
) -> None:
    with_number = {} if number is None else {"id": number}
    ws = serve(kind).socket()
    answer = ws.ask({"type": "step", "data": {"value": value}, **with_number})
    assert answer["data"]["code"] == "EXECUTION_ERROR"
    assert ws.ask({"type": "state"})["type"] == "state"


def test_a_deadline_counts_while_a_request_waits_for_its_turn(serve: Serve, lives: list[Watched]) -> None:
    ws = serve(Scripted).raw()
    slow = {"type": "step", "id": 1, "data": {"sleep": 0.3}}
    ws.tcp.sendall(framed(slow, {"type": "step", "id": 2, "timeout_s": 0.1, "data": {}}, {"type": "state", "id": 3}))
    answers = [ws.answer() for _ in range(3)]
    assert [answer["id"] for answer in answers] == [1, 2, 3]
    assert answers[1]["data"]["code"] == "STEP_TIMEOUT"
    assert lives[0].steps == 1


def test_what_was_answered_no_longer_counts_as_waiting(serve: Serve) -> None:
    ws = serve(AsyncScripted, message_bytes=20_000).raw()
    step = framed({"type": "step", "data": {"value": "x" * 5000}})
    ws.tcp.sendall(step * 2)
    for _ in range(20):
        ws.tcp.sendall(step)
        assert ws.answer()["type"] == "observation"


def test_numbers_that_need_no_answer_are_forgotten(serve_fast: Serve) -> None:
    server = serve_fast(Kit)
    ws = server.socket()
    note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    for number in range(1, 6):
        ws.send({"type": "mcp", "id": number, "data": note})
    assert ws.ask({"type": "state", "id": 6})["id"] == 6
    [session] = server.service.manager._sessions.values()
    assert not session.reply_cache._under_way


class Spent(Adder):
    is_spent = True

    def __init__(self) -> None:
        if type(self).is_spent:
            next(iter(()))
        super().__init__()


def test_a_constructor_that_runs_out_of_items_costs_no_slot(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(Spent, max_sessions=1)
    assert server.socket().receive()["data"]["code"] == "FACTORY_ERROR"
    monkeypatch.setattr(Spent, "is_spent", False)
    wait_until(lambda: server.health()["sessions"] == 0)
    assert server.socket().ask({"type": "reset", "data": {}})["type"] == "observation"


def test_mcp_is_the_subprotocol_of_a_client_that_offers_it(serve: Serve) -> None:
    server = serve(Kit)
    with connect(f"ws://127.0.0.1:{server.port}/mcp", subprotocols=[Subprotocol("mcp")], proxy=None) as ws:
        assert ws.subprotocol == "mcp"
    with connect(f"ws://127.0.0.1:{server.port}/mcp", proxy=None) as ws:
        assert ws.subprotocol is None
