"""Clients that come and go in a hurry leave nothing behind."""

import random
import threading
import time

import pytest

from environments import Kit, Watched, alive
from running import Running, Serve, wait_until

PATHS = {"/ws": "", "/mcp": "", "/ws?vector": '[{"type":"open","session":"a"}]'}


def come_and_go(server: Running, path: str, times: int, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(times):
        ws = server.raw(path)
        if PATHS[path]:
            ws.send(PATHS[path])
        time.sleep(dice.random() * 0.004)
        ws.reset()


@pytest.mark.parametrize("path", PATHS)
def test_sockets_that_come_and_go_leave_no_session(serve: Serve, lives: list[Watched], path: str) -> None:
    server = serve(Kit, max_sessions=1000, resume_window=0.1)
    threads = [threading.Thread(target=come_and_go, args=(server, path, 50, seed)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: server.health()["sessions"] == 0)
    wait_until(lambda: alive() == 0)


def test_requests_that_come_and_go_leave_no_session(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Kit, max_sessions=4)
    dice = random.Random(1)
    for _ in range(100):
        http = server.http()
        http.connection.request("POST", dice.choice(["/step", "/state", "/mcp"]), b'{"action":{"tool_name":"look"}}')
        time.sleep(dice.random() * 0.003)
        http.close()
    wait_until(lambda: server.health()["sessions"] == 0)
    wait_until(lambda: alive() == 0)


def test_who_leaves_the_queue_in_a_hurry_holds_no_slot(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Kit, max_sessions=2, queue_timeout=10)
    threads = [threading.Thread(target=come_and_go, args=(server, "/ws", 40, seed)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: server.health()["sessions"] == server.health()["waiting"] == 0)
    assert [server.socket().ask({"type": "state"})["type"] for _ in range(2)] == ["state", "state"]
