"""`/ws?vector`: each frame is an array of messages, each message names its session."""

from typing import Any

import pytest

from environments import Adder, AsyncScripted, Scripted, Watched
from running import Serve, wait_until
from wire import Socket


def opened(ws: Socket, *keys: str) -> dict[str, str]:
    ws.send([{"type": "open", "session": key} for key in keys])
    tokens: dict[str, str] = {}
    while len(tokens) < len(keys):
        tokens |= {reply["session"]: reply["data"]["token"] for reply in ws.receive() if reply["type"] == "opened"}
    return tokens


def answers(ws: Socket, messages: Any, count: int | None = None) -> list[Any]:
    """The replies to some messages, by session."""
    ws.send(messages)
    collected: list[Any] = []
    while len(collected) < (len(messages) if count is None else count):
        collected += ws.receive()
    return sorted(collected, key=lambda reply: str(reply.get("session")))


def step(key: str, number: int, **action: Any) -> dict[str, Any]:
    return {"type": "step", "session": key, "id": number, "data": action}


@pytest.mark.parametrize("path", ["/ws?vector", "/ws?vector=1"])
def test_one_frame_steps_many_sessions(serve: Serve, path: str) -> None:
    ws = serve(Adder).socket(path)
    opened(ws, "a", "b")
    replies = answers(ws, [step("a", 1, amount=1), step("b", 1, amount=2)])
    assert [(one["session"], one["id"], one["data"]["observation"]["total"]) for one in replies] == [
        ("a", 1, 1),
        ("b", 1, 2),
    ]


def test_a_wrong_message_spoils_only_itself(serve: Serve, lives: list[Watched]) -> None:
    ws = serve(Adder).socket("/ws?vector")
    opened(ws, "a", "b")
    bad = [step("a", 1, amount=-1), step("b", 1, amount=2), 5, {"type": "dance", "session": "a", "id": 2}]
    replies = answers(ws, bad)
    codes = [one["data"].get("code", one["type"]) for one in replies]
    assert sorted(codes) == ["UNKNOWN_TYPE", "VALIDATION_ERROR", "VALIDATION_ERROR", "observation"]
    assert answers(ws, [step("a", 3, amount=1)])[0]["data"]["observation"]["total"] == 1


def test_a_frame_that_is_no_array_is_refused_and_the_connection_kept(serve: Serve) -> None:
    ws = serve(Adder).socket("/ws?vector")
    for frame in ("{", "5", "null", '"x"', b"binary", "[" * 100_000, '{"type":"state"}'):
        (reply,) = ws.ask(frame)
        assert reply["type"] == "error", frame
    assert opened(ws, "a")


def test_a_session_that_is_not_open_is_an_error(serve: Serve) -> None:
    ws = serve(Adder).socket("/ws?vector")
    (reply,) = answers(ws, [step("nobody", 1, amount=1)])
    assert (reply["data"]["kind"], reply["id"]) == ("not_found", 1)
    (reply,) = answers(ws, [{"type": "state"}])
    assert reply["data"]["code"] == "VALIDATION_ERROR"


def test_open_twice_is_an_error(serve: Serve) -> None:
    ws = serve(Adder).socket("/ws?vector")
    opened(ws, "a")
    (reply,) = answers(ws, [{"type": "open", "session": "a"}])
    assert reply["data"]["code"] == "VALIDATION_ERROR"


def test_messages_behind_an_open_in_the_same_frame_are_carried_out(serve: Serve) -> None:
    ws = serve(Adder).socket("/ws?vector")
    replies = answers(ws, [{"type": "open", "session": "a"}, step("a", 1, amount=1)])
    assert [one["type"] for one in replies] == ["opened", "observation"]


def test_messages_behind_an_open_that_is_refused_are_refused_too(serve: Serve) -> None:
    ws = serve(Adder, max_sessions=1).socket("/ws?vector")
    opened(ws, "a")
    behind = [step("b", 1, amount=1), {"type": "cancel", "session": "b", "data": 1}, step("b", 2, amount=1)]
    replies = answers(ws, [{"type": "open", "session": "b"}, *behind], count=3)
    assert [(one.get("id"), one["data"]["code"]) for one in replies] == [
        (None, "CAPACITY_REACHED"),
        (1, "CAPACITY_REACHED"),
        (2, "CAPACITY_REACHED"),
    ]


def test_more_messages_than_can_wait_behind_an_open_are_refused_as_busy(serve: Serve) -> None:
    ws = serve(Adder).socket("/ws?vector")
    replies = answers(ws, [{"type": "open", "session": "a"}, *(step("a", n, amount=1) for n in range(1, 81))])
    refused = [one["id"] for one in replies if one["data"].get("kind") == "busy"]
    carried_out = [one["id"] for one in replies if one["type"] == "observation"]
    assert (carried_out, refused) == (list(range(1, 65)), list(range(65, 81)))
    assert answers(ws, [step("a", 81, amount=1)])[0]["data"]["observation"]["total"] == 65


def test_larger_messages_than_can_wait_behind_an_open_are_refused_as_busy(serve: Serve) -> None:
    server = serve(Scripted, max_sessions=1, message_bytes=100_000)
    ws = server.socket("/ws?vector")
    opened(ws, "a")
    ws.send([{"type": "open", "session": "b", "queue_timeout": 5}])
    ws.send([step("b", 1, value="x" * 60_000)])
    (reply,) = answers(ws, [step("b", 2, value="x" * 60_000)])
    assert (reply["id"], reply["data"]["kind"]) == (2, "busy")
    replies = answers(ws, [{"type": "close", "session": "a"}], count=2)
    assert [one["type"] for one in replies] == ["opened", "observation"]


def test_a_full_server_refuses_only_who_is_too_many(serve: Serve) -> None:
    ws = serve(Adder, max_sessions=1).socket("/ws?vector")
    replies = answers(ws, [{"type": "open", "session": key} for key in ("a", "b")])
    assert [one["data"].get("code") for one in replies] == [None, "CAPACITY_REACHED"]


def test_close_ends_one_session(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Adder)
    ws = server.socket("/ws?vector")
    opened(ws, "a", "b")
    ws.send([{"type": "close", "session": "a"}])
    wait_until(lambda: server.health()["sessions"] == 1)
    assert answers(ws, [step("b", 1, amount=1)])[0]["data"]["observation"]["total"] == 1


def test_a_goodbye_ends_all_sessions(serve: Serve) -> None:
    server = serve(Adder)
    ws = server.socket("/ws?vector")
    opened(ws, "a", "b")
    ws.connection.close()
    wait_until(lambda: server.health()["sessions"] == 0)


def test_dropped_sessions_are_resumed_and_nothing_runs_twice(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Adder)
    first = server.socket("/ws?vector")
    tokens = opened(first, "a", "b")
    answers(first, [step("a", 1, amount=1), step("b", 1, amount=2)])
    first.connection.socket.shutdown(2)
    wait_until(lambda: not any(info.attached for info in server.service.manager.sessions()))
    second = server.socket("/ws?vector")
    answers(second, [{"type": "open", "session": key, "resume": token} for key, token in tokens.items()])
    replies = answers(second, [step("a", 1, amount=1), step("b", 2, amount=2)])
    assert [one["data"]["observation"]["total"] for one in replies] == [1, 4]


def test_a_session_resumed_elsewhere_leaves_its_old_connection(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Adder)
    old, new = server.socket("/ws?vector"), server.socket("/ws?vector")
    tokens = opened(old, "a", "b")
    answers(new, [{"type": "open", "session": "a", "resume": tokens["a"]}])
    assert answers(new, [step("a", 1, amount=1)])[0]["data"]["observation"]["total"] == 1
    old.connection.close()
    wait_until(lambda: server.health()["sessions"] == 1)
    assert answers(new, [step("a", 2, amount=1)])[0]["data"]["observation"]["total"] == 2


def test_an_unknown_token_is_refused(serve: Serve) -> None:
    ws = serve(Adder).socket("/ws?vector")
    (reply,) = answers(ws, [{"type": "open", "session": "a", "resume": "nope"}])
    assert reply["data"]["kind"] == "not_found"
    assert opened(ws, "a")


def open_as(key: str, token: str, **besides: Any) -> dict[str, Any]:
    return {"type": "open", "session": key, "token": token, **besides}


def test_an_open_that_is_repeated_finds_its_session(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Adder, max_sessions=1)
    first = server.socket("/ws?vector")
    token = f"{first.token}-mine"
    (reply,) = answers(first, [open_as("a", token)])
    assert reply["data"]["token"] == token
    answers(first, [step("a", 1, amount=1)])
    second = server.socket("/ws?vector")
    answers(second, [open_as("b", token)])
    assert answers(second, [step("b", 2, amount=1)])[0]["data"]["observation"]["total"] == 2


def test_an_open_that_is_repeated_while_it_waits_takes_its_place(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    holder, first, second = (server.socket("/ws?vector") for _ in range(3))
    opened(holder, "a")
    token = f"{first.token}-mine"
    first.send([open_as("a", token, queue_timeout=5), step("a", 1, amount=1)])
    wait_until(lambda: server.health()["waiting"] == 1)
    second.send([open_as("a", token, queue_timeout=5)])
    assert [(one["data"]["kind"], one.get("id")) for one in first.receive()] == [("taken", None), ("taken", 1)]
    holder.send([{"type": "close", "session": "a"}])
    assert second.receive()[0]["data"]["token"] == token
    assert server.health()["waiting"] == 0


def test_a_token_that_leads_elsewhere_is_not_taken(serve: Serve) -> None:
    ws = serve(Adder).socket("/ws?vector")
    token = "ff" + str(ws.token)[2:]
    (reply,) = answers(ws, [open_as("a", token)])
    assert reply["type"] == "opened"
    assert reply["data"]["token"] != token


def test_a_running_step_is_cancelled_by_its_number(serve: Serve, lives: list[Watched]) -> None:
    ws = serve(AsyncScripted).socket("/ws?vector")
    opened(ws, "a")
    ws.send([step("a", 1, hang=True)])
    wait_until(lambda: lives[0].steps)
    (reply,) = answers(ws, [{"type": "cancel", "session": "a", "data": 1}])
    assert reply["data"]["code"] == "STEP_CANCELLED"


def test_a_slow_session_delays_no_other(serve: Serve, lives: list[Watched]) -> None:
    ws = serve(Scripted).socket("/ws?vector")
    opened(ws, "a", "b")
    (reply,) = answers(ws, [step("a", 1, hang=True), step("b", 1, value=2)], count=1)
    assert reply["session"] == "b"
    for life in lives:
        life.release.set()
    assert ws.receive()[0]["session"] == "a"


def test_a_client_that_leaves_while_sessions_are_built_leaves_nothing(serve: Serve, lives: list[Watched]) -> None:
    import time

    class Slow(Adder):
        def __init__(self) -> None:
            time.sleep(0.2)
            super().__init__()

    server = serve(Slow)
    ws = server.raw("/ws?vector")
    ws.send('[{"type":"open","session":"a"},{"type":"open","session":"b"}]')
    time.sleep(0.05)
    ws.reset()
    wait_until(lambda: len(lives) == 2 and all(life.closes for life in lives))
    wait_until(lambda: server.health()["sessions"] == 0)


def test_a_server_that_goes_says_so(serve: Serve) -> None:
    server = serve(Adder)
    ws = server.socket("/ws?vector")
    opened(ws, "a")
    server.begin_to_stop()
    assert ws.end() == 1012
