"""The line between a host and a door, as far as it needs neither."""

import asyncio
import json
import socket
import time
from typing import Any

from paddock.scale import heartbeat
from paddock.scale.heartbeat import Pulse, Switchboard
from paddock.scale.roster import Roster

HELLO = {"secret": "s", "key": "000-00000000", "url": "http://127.0.0.1:1", "capacity": 1, "free": 1}


def test_a_door_that_ends_with_hosts_on_the_line_says_nothing() -> None:
    problems: list[Any] = []

    async def live_and_end() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        board = Switchboard(Roster(time.monotonic), "s", lambda: None)
        server = await asyncio.start_server(board.answer, "127.0.0.1", 0)
        host.connect(server.sockets[0].getsockname())
        host.sendall(json.dumps(HELLO).encode() + b"\n")
        async with asyncio.timeout(10):
            while not board.lines:
                await asyncio.sleep(0.01)
        server.close()

    with socket.socket() as host:
        asyncio.run(live_and_end())
    assert problems == []


def test_a_host_is_told_once_that_all_doors_are_gone_for_too_long() -> None:
    told: list[bool] = []
    service: Any = None
    pulse = Pulse(service, {}, [], "s", alone=lambda: told.append(True))
    pulse._look_around()
    assert told == []
    pulse._together_at -= heartbeat.ALONE_FOR + 1
    pulse._look_around()
    pulse._look_around()
    assert told == [True]
