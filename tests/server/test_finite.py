"""NaN and infinity are refused by name where somebody would act on them, whichever way they come."""

import math
from typing import Any

import pytest

from environments import Watched
from paddock import Action, Environment, Observation, State, ToolEnvironment, ToolReturn, tool
from running import Serve

NUMBERS = ["NaN", "-Infinity", "1e999"]


class Move(Action):
    speed: float | None = None
    reward: float | None = None


class Moved(Observation):
    speed: float | None = None


class Mover(Watched, Environment[Move, Moved, State]):
    concurrent_sessions = True
    inline = True

    def reset(self, *, level: float | None = None) -> Moved:
        return Moved()

    def step(self, action: Move) -> Moved:
        self.noted()
        rewards: dict[float, Any] = {1.0: math.nan, 2.0: math.inf}
        reward = rewards.get(action.reward or 0.0, action.reward)
        return Moved(speed=math.nan if action.reward == 3.0 else action.speed, reward=reward)


class ThreadedMover(Mover):
    inline = False


class Kit(Watched, ToolEnvironment):
    concurrent_sessions = True

    @tool
    def move(self, speed: float | None = None) -> Any:
        self.noted()
        return speed

    @tool
    def score(self) -> ToolReturn:
        return ToolReturn("x", reward=math.nan)


@pytest.mark.parametrize("number", [*NUMBERS, '"nan"'])
def test_actions_are_refused(serve_fast: Serve, lives: list[Watched], number: str) -> None:
    server = serve_fast(Mover)
    ws, vector, http = server.socket(), server.socket("/ws?vector"), server.http()
    for extra in ("", ',"id":1'):
        answer = ws.ask(f'{{"type":"step","data":{{"speed":{number}}}{extra}}}')
        assert answer["data"]["code"] == "VALIDATION_ERROR"
        assert answer["data"]["errors"][0]["loc"] == ["speed"]
    vector.ask([{"type": "open", "session": "a"}])
    (answer,) = vector.ask(f'[{{"type":"step","session":"a","id":1,"data":{{"speed":{number}}}}}]')
    assert (answer["id"], answer["data"]["errors"][0]["loc"][-1]) == (1, "speed")
    refused = http("POST", "/step", f'{{"action":{{"speed":{number}}}}}'.encode())
    assert (refused.status, refused.json["detail"][0]["loc"][-1]) == (422, "speed")
    assert sum(life.steps for life in lives) == 0


@pytest.mark.parametrize("number", NUMBERS)
def test_arguments_of_a_reset_are_refused(serve_fast: Serve, number: str) -> None:
    server = serve_fast(Mover)
    answer = server.socket().ask(f'{{"type":"reset","data":{{"level":{number}}}}}')
    assert answer["data"]["errors"][0]["loc"] == ["level"]
    refused = server.http()("POST", "/reset", f'{{"level":{number}}}'.encode())
    assert refused.json["detail"][0]["loc"] == ["body", "level"]


def test_a_number_beside_a_wrong_message_is_not_taken_for_null(serve_fast: Serve, lives: list[Watched]) -> None:
    vector = serve_fast(Mover).socket("/ws?vector")
    vector.ask([{"type": "open", "session": "a"}])
    frame = '{"type":"nonsense","session":"a"},{"type":"step","session":"a","id":1,"data":{"speed":NaN}}'
    assert [answer["type"] for answer in vector.ask(f"[{frame}]")] == ["error", "error"]
    assert lives[0].steps == 0


@pytest.mark.parametrize("number", [*NUMBERS, '"nan"'])
def test_arguments_of_tools_are_refused(serve_fast: Serve, lives: list[Watched], number: str) -> None:
    server = serve_fast(Kit)
    params = f'{{"name":"move","arguments":{{"speed":{number}}}}}'
    call = f'{{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{params}}}'
    over_http = server.http()("POST", "/mcp", call.encode()).json
    over_ws = server.socket().ask(f'{{"type":"mcp","data":{call}}}')["data"]
    for answer in (over_http, over_ws, server.socket("/mcp").ask(call)):
        assert (answer["id"], answer["error"]["code"]) == (5, -32602)
        assert "speed: Input should be a finite number" in answer["error"]["message"]
    action = f'{{"type":"call_tool","tool_name":"move","arguments":{{"speed":{number}}}}}'
    answer = server.socket().ask(f'{{"type":"step","data":{action}}}')
    assert "finite" in str(answer["data"])
    assert sum(life.steps for life in lives) == 0


@pytest.mark.parametrize("make", [Mover, ThreadedMover])
@pytest.mark.parametrize(("which", "text"), [(1.0, "nan"), (2.0, "inf")])
def test_a_reward_is_the_environments_error(serve_fast: Serve, make: Any, which: float, text: str) -> None:
    server = serve_fast(make)
    ws = server.socket()
    answer = ws.step(reward=which)["data"]
    assert answer["code"] == "EXECUTION_ERROR"
    assert f"a reward that is {text}" in answer["message"]
    assert ws.step(reward=0.5)["data"]["reward"] == 0.5
    over_http = server.http()("POST", "/step", {"action": {"reward": which}})
    assert (over_http.status, over_http.json["code"]) == (500, "EXECUTION_ERROR")


def test_the_reward_of_a_tool_is_the_environments_error(serve_fast: Serve) -> None:
    answer = serve_fast(Kit).http().rpc("tools/call", {"name": "score", "arguments": {}})
    assert "a reward that is nan" in answer["error"]["message"]


def test_an_observation_may_hold_what_is_unknown(serve_fast: Serve) -> None:
    answer = serve_fast(Mover).socket().step(reward=3.0)["data"]
    assert (answer["observation"]["speed"], answer["reward"]) == (None, 3.0)
