"""Several processes behind one port, with one capacity over all of them."""

import json
import os
import signal
import threading
import time
from typing import Any

import pytest

from paddock.server.workers import SharedSlotCount, WorkerTable
from running import wait_until
from server.worker_processes import StartServer, WorkerServer
from wire import Answer, Http, Socket


def add(ws: Socket, amount: int = 1) -> dict[str, Any]:
    answer = ws.step(tool_name="add", arguments={"amount": amount})
    result: dict[str, Any] = answer["data"]["observation"]["result"]["data"]
    return result


def test_one_capacity_over_all_workers(worker_server: StartServer) -> None:
    server = worker_server(capacity=4)
    sockets = [server.socket() for _ in range(4)]
    processes = {add(ws)["process"] for ws in sockets}
    assert len(processes) == 2
    late = server.socket()
    refused = late.receive()["data"]
    assert (refused["code"], refused["active_sessions"], refused["max_sessions"]) == ("CAPACITY_REACHED", 4, 4)
    assert late.end() == 1013
    health = server.health()
    assert (health["sessions"], health["capacity"], health["available"]) == (4, 4, 0)


def test_every_connection_finds_its_session(worker_server: StartServer) -> None:
    server = worker_server(capacity=8)
    tokens = [server.http().rpc("openenv/session/create")["result"]["session_id"] for _ in range(8)]
    for round_ in (1, 2, 3):
        for token in tokens:
            params = {"name": "add", "arguments": {"amount": 1}, "session_id": token}
            assert server.http().rpc("tools/call", params)["result"]["data"]["count"] == round_
    for token in tokens:
        ws = server.socket(f"/ws?session_id={token}")
        assert add(ws)["count"] == 4


def test_http_episodes_find_their_worker(worker_server: StartServer) -> None:
    server = worker_server(capacity=8)
    tokens = [server.http()("POST", "/reset").headers["Session-Id"] for _ in range(6)]
    action = {"action": {"tool_name": "add", "arguments": {"amount": 2}}}
    for round_ in (1, 2):
        for token in tokens:
            answer = server.http()("POST", "/step", action, session_id=token)
            assert answer.json["observation"]["result"]["data"]["count"] == 2 * round_
    assert server.http()("POST", "/step", action, session_id="ff" + tokens[0][2:]).status == 404


def test_mcp_sessions_find_their_worker(worker_server: StartServer) -> None:
    server = worker_server(capacity=8)
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    begin = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    tokens = [server.http()("POST", "/mcp", begin).headers["Mcp-Session-Id"] for _ in range(6)]
    params = {"name": "add", "arguments": {"amount": 2}}
    for token in tokens:
        answers = [server.http().rpc("tools/call", params, mcp_session_id=token) for _ in range(2)]
        assert [answer["result"]["data"]["count"] for answer in answers] == [2, 4]
        assert server.http()("DELETE", "/mcp", mcp_session_id=token).status == 204
    assert server.health()["sessions"] == 0


def test_a_dropped_client_comes_back_to_its_worker(worker_server: StartServer) -> None:
    server = worker_server(capacity=8)
    for _ in range(6):
        first = server.socket(Session_Resume="new")
        process = add(first)["process"]
        first.connection.socket.shutdown(2)
        again = server.socket(Session_Resume=str(first.token))
        assert add(again) == {"count": 2, "process": process}


def test_health_counts_who_waits_in_all_workers(worker_server: StartServer) -> None:
    server = worker_server(2, 1)
    server.socket().ask({"type": "state"})
    for _ in range(6):
        server.socket(Queue_Timeout="20")
    wait_until(lambda: server.health()["waiting"] == 6)
    assert {server.health()["waiting"] for _ in range(12)} == {6}


def test_the_queue_is_one_queue(worker_server: StartServer) -> None:
    server = worker_server(capacity=2)
    holders = [server.raw() for _ in range(2)]
    for ws in holders:
        ws.send('{"type":"state"}')
        ws.answer()
    waiting = [server.socket(Queue_Timeout="20", Session_Resume="new") for _ in range(3)]
    for place, ws in enumerate(waiting, start=1):
        assert ws.receive()["type"] == "queued", place
    for ws, leaving in zip(waiting, holders, strict=False):
        leaving.reset()
        ws.send({"type": "state"})
        while (answer := ws.receive(15))["type"] == "queued":
            pass
        assert answer["type"] == "state"


def test_a_worker_that_dies_gives_its_slots_back(worker_server: StartServer) -> None:
    server = worker_server(capacity=4)
    sockets = [server.socket() for _ in range(4)]
    victim = add(sockets[0])["process"]
    processes = [add(ws)["process"] for ws in sockets]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(server.processes()) == 2 and victim not in server.processes(), 10)
    assert server.health()["sessions"] == sum(process != victim for process in processes)
    survivors = [ws for ws, process in zip(sockets, processes, strict=True) if process != victim]
    assert [add(ws)["count"] for ws in survivors] == [3 if ws is sockets[0] else 2 for ws in survivors]
    assert add(server.socket())["count"] == 1


def test_sigterm_ends_a_server_that_is_about_to_replace_a_worker(worker_server: StartServer) -> None:
    server = worker_server()
    os.kill(server.processes()[0], signal.SIGKILL)
    wait_until(lambda: "a new one takes its place" in (server.folder / "log").read_text())
    assert server.stop() == 0


@pytest.mark.parametrize("kind", ["child", "short-lived-child"])
def test_a_child_that_is_no_worker_may_end(worker_server: StartServer, kind: str) -> None:
    server = worker_server(2, 4, kind)
    wait_until(lambda: server.notes("child ended"))
    victim = server.processes()[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(server.processes()) == 2 and victim not in server.processes(), 10)
    assert server.stop() == 0


def test_sigterm_closes_every_environment_once(worker_server: StartServer) -> None:
    server = worker_server(capacity=8)
    for _ in range(4):
        add(server.socket())
    for _ in range(2):
        server.http().rpc("openenv/session/create")
    busy = server.socket()
    busy.send({"type": "step", "data": {"tool_name": "pause", "arguments": {"seconds": 0.7}}})
    time.sleep(0.2)
    answers: list[Any] = []
    reader = threading.Thread(target=lambda: answers.append(busy.receive()))
    reader.start()
    assert server.stop() == 0
    reader.join()
    assert answers[0]["type"] == "observation"
    assert sorted(server.notes("built")) == sorted(server.notes("closed"))


def begun(server: WorkerServer, token: str, way: str) -> Http:
    """A client whose call hangs in a session that another worker keeps."""
    call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "hang"}}
    path, document, headers = {
        "step": ("/step", {"action": {"tool_name": "hang"}}, {"Session-Id": token}),
        "header": ("/mcp", call, {"Mcp-Session-Id": token}),
        "parameter": ("/mcp", {**call, "params": {"name": "hang", "session_id": token}}, {}),
    }[way]
    client = server.http_elsewhere(token)
    client.connection.request("POST", path, json.dumps(document), headers)
    wait_until(lambda: server.notes("began"))
    return client


@pytest.mark.parametrize("way", ["step", "header", "parameter"])
def test_who_leaves_takes_its_call_back_from_another_worker(worker_server: StartServer, way: str) -> None:
    server = worker_server()
    token = server.http().rpc("openenv/session/create")["result"]["session_id"]
    begun(server, token, way).close()
    wait_until(lambda: server.notes("cancelled"))


@pytest.mark.parametrize(("way", "status"), [("step", 410), ("header", 404), ("parameter", 200)])
def test_a_worker_that_dies_during_a_call_is_reported(worker_server: StartServer, way: str, status: int) -> None:
    server = worker_server()
    token = server.http().rpc("openenv/session/create")["result"]["session_id"]
    named = {"name": "add", "arguments": {"amount": 1}, "session_id": token}
    keeper = server.http().rpc("tools/call", named)["result"]["data"]["process"]
    client = begun(server, token, way)
    os.kill(keeper, signal.SIGKILL)
    answer = Answer(client.connection.getresponse())
    assert answer.status == status
    reply = answer.json["error"]["message"] if way != "step" else answer.json["detail"]
    assert "may have been carried out" in reply
    assert way == "step" or answer.json["id"] == 7


def test_a_call_that_never_reached_its_worker_was_not_carried_out(worker_server: StartServer) -> None:
    server = worker_server()
    token = server.http()("POST", "/reset").headers["Session-Id"]
    client = server.http_elsewhere(token)
    server.unix_socket(f"{int(token[:2], 16)}.http").unlink()
    answer = client("POST", "/step", {"action": {"tool_name": "add", "arguments": {"amount": 1}}}, session_id=token)
    assert answer.status == 410
    assert "was not carried out" in answer.json["detail"]


def test_a_long_answer_of_another_worker_is_one_stream(worker_server: StartServer) -> None:
    server = worker_server(2, 4, "hasty")
    token = server.http().rpc("openenv/session/create")["result"]["session_id"]
    call = {"name": "pause", "arguments": {"seconds": 0.4}, "session_id": token}
    document = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": call}
    answer = server.http_elsewhere(token)("POST", "/mcp", document, accept="application/json, text/event-stream")
    events = [line for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    assert [json.loads(event.removeprefix("data: "))["result"]["data"] for event in events] == ["done"]


def test_metrics_include_every_worker(worker_server: StartServer) -> None:
    server = worker_server(capacity=32)
    processes: list[int] = []
    while len(set(processes)) < 2:  # The kernel chooses the worker of each connection.
        processes.append(add(server.socket())["process"])
    text = server.http()("GET", "/metrics").body.decode()
    opened = [line for line in text.splitlines() if line.startswith("paddock_sessions_opened_total")]
    assert len(opened) == 2
    assert sum(float(line.rpartition(" ")[2]) for line in opened) == len(processes)
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def test_vector_sessions_share_the_capacity(worker_server: StartServer) -> None:
    server = worker_server(capacity=3)
    ws = server.socket("/ws?vector")
    ws.send([{"type": "open", "session": str(n)} for n in range(5)])
    collected: list[Any] = []
    while len(collected) < 5:
        collected += ws.receive()
    assert sorted(one["type"] for one in collected) == ["error"] * 2 + ["opened"] * 3


def test_a_vector_session_whose_answer_was_lost_is_found_again(worker_server: StartServer) -> None:
    server = worker_server(capacity=2)
    for _ in range(4):
        first = server.socket("/ws?vector")
        token = f"{first.token}-mine"
        request = [{"type": "open", "session": "a", "token": token}]
        (before,) = first.ask(request)
        first.connection.socket.shutdown(2)
        second = server.socket("/ws?vector", Session_Resume=token)
        (again,) = second.ask(request)
        assert (again["type"], again["data"]) == ("opened", before["data"])
        second.connection.close()
        wait_until(lambda: server.health()["sessions"] == 0)


def test_a_place_in_line_does_not_rise() -> None:
    table = WorkerTable(2)
    here, there = SharedSlotCount(table, 0, 1), SharedSlotCount(table, 1, 1)
    first, ours, later = (here.new_ticket() for _ in range(3))
    there.publish(first, 1)
    here.publish(ours, 1)
    assert here.waiting_before(ours) == 1
    there.publish(first, 2)
    assert here.waiting_before(ours) == 1
    there.publish(later, 1)
    assert here.waiting_before(ours) == 0
    table._lock_file.close()


def test_a_detached_session_of_another_worker_gives_way(worker_server: StartServer) -> None:
    server = worker_server(capacity=2)
    for _ in range(2):
        ws = server.raw(headers="Session-Resume: new\r\n")
        ws.send('{"type":"state"}')
        ws.answer()
        ws.reset()
    time.sleep(1.0)
    for _ in range(2):
        assert server.socket().ask({"type": "state"})["type"] == "state"
