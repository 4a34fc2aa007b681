"""The line between a host and a gateway, as far as it needs neither."""

import asyncio
import json
import socket
import time
from typing import Any

from paddock.scale import host_connection
from paddock.scale.host_connection import HostListener, HostReporter
from paddock.scale.host_registry import HostRegistry

HELLO = {"secret": "s", "key": "000-00000000", "url": "http://127.0.0.1:1", "capacity": 1, "free": 1}


def test_a_gateway_that_ends_with_hosts_on_the_line_says_nothing() -> None:
    problems: list[Any] = []

    async def live_and_end() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        listener = HostListener(HostRegistry(time.monotonic), "s", lambda: None)
        server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
        host.connect(server.sockets[0].getsockname())
        host.sendall(json.dumps(HELLO).encode() + b"\n")
        async with asyncio.timeout(10):
            while not listener.connections:
                await asyncio.sleep(0.01)
        server.close()

    with socket.socket() as host:
        asyncio.run(live_and_end())
    assert problems == []


def test_a_host_is_calls_once_that_all_gateways_are_gone_for_too_long() -> None:
    calls: list[bool] = []
    service: Any = None
    reporter = HostReporter(service, {}, [], "s", on_no_gateway=lambda: calls.append(True))
    reporter._check_gateways()
    assert calls == []
    reporter._gateway_seen_at -= host_connection.NO_GATEWAY_SECONDS + 1
    reporter._check_gateways()
    reporter._check_gateways()
    assert calls == [True]
