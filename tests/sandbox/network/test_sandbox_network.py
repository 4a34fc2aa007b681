"""A sandbox with a network: real processes inside, a server on the loopback interface of the host."""

import asyncio
import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paddock.sandbox import Command
from paddock.sandbox.network.connections import ConnectionRecord
from paddock.sandbox.network.machine_settings import MachineSettings
from paddock.sandbox.network.policy import NO_NETWORK, NetworkPolicy
from paddock.sandbox.network.registries import Registries
from paddock.sandbox.network.sandbox_network import SandboxNetwork
from sandbox.places import SPEC, both, needs_bwrap, opened

LOOPBACK = NetworkPolicy("allowlist", ("127.0.0.0/8",))
FETCH = """
import os, sys, urllib.error, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": os.environ["http_proxy"]}))
del os.environ["no_proxy"], os.environ["NO_PROXY"]
try:
    print(opener.open(sys.argv[1], timeout=10).read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.reason, error.read().decode())
"""


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def fetch(port: int) -> Command:
    return Command(["python3", "-c", FETCH, f"http://127.0.0.1:{port}/"])


@both
def test_the_policy_of_each_phase_applies(backend: str, port: int) -> None:
    reported: list[ConnectionRecord] = []

    async def scenario() -> tuple[list[str], tuple[ConnectionRecord, ...]]:
        async with await opened(backend, replace(SPEC, network=LOOPBACK, phase="setup")) as sandbox:
            sandbox.on_connection(reported.append)
            texts = [(await sandbox.exec(fetch(port), timeout=20)).stdout.decode()]
            await sandbox.set_network(NO_NETWORK, phase="agent")
            texts.append((await sandbox.exec(fetch(port), timeout=20)).stdout.decode())
        return texts, sandbox.connections

    texts, records = asyncio.run(scenario())
    assert texts[0] == "hello\n"
    assert texts[1].startswith("403 this phase has no network Paddock did not open")
    assert [(record.phase, record.allowed, record.address) for record in records] == [
        ("setup", True, "127.0.0.1"),
        ("agent", False, None),
    ]
    assert records[0].received_bytes > len("hello")
    assert reported == list(records)


@needs_bwrap
def test_a_sandbox_without_a_network_has_no_proxy() -> None:
    async def scenario() -> tuple[bytes, tuple[ConnectionRecord, ...]]:
        async with await opened("bwrap") as sandbox:
            await sandbox.set_network(NO_NETWORK, phase="agent")
            done = await sandbox.exec(Command("env | grep -ic proxy"), timeout=20)
            return done.stdout, sandbox.connections

    assert asyncio.run(scenario()) == (b"0\n", ())


@needs_bwrap
def test_a_registry_on_the_loopback_of_the_host_has_the_same_port_inside(port: int) -> None:
    settings = MachineSettings(pip_index=f"http://localhost:{port}/simple")
    registries = Registries(settings, find_more=lambda _: (set(), True))
    policy = NetworkPolicy("allowlist", ("registries",))
    script = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}/', timeout=5).read())"

    async def scenario() -> tuple[bytes, bytes, dict[str, str]]:
        async with await opened("bwrap") as sandbox:
            network = await SandboxNetwork.start(
                sandbox, policy, "setup", has_certificates=False, registries=registries
            )
            try:
                first = await sandbox.exec(Command(["python3", "-c", script]), timeout=20)
                network.proxy.switch(NO_NETWORK, "agent")
                second = await sandbox.exec(Command(["python3", "-c", script]), timeout=20)
            finally:
                await network.proxy.close()
        return first.stdout, second.stdout, network.env

    first, second, env = asyncio.run(scenario())
    assert first == b"b'hello'\n"
    assert second == b""
    assert env["PIP_INDEX_URL"] == f"http://localhost:{port}/simple"


@needs_bwrap
def test_a_registry_whose_port_is_not_free_inside_is_left_out(port: int) -> None:
    settings = MachineSettings(pip_index="http://localhost/simple", npm_registry=f"http://localhost:{port}/")
    registries = Registries(settings, find_more=lambda _: (set(), True))
    policy = NetworkPolicy("allowlist", ("registries",))

    async def scenario() -> bytes:
        async with await opened("bwrap") as sandbox:
            network = await SandboxNetwork.start(
                sandbox, policy, "setup", has_certificates=False, registries=registries
            )
            try:
                done = await sandbox.exec(Command(["curl", "-s", f"http://localhost:{port}/"]), timeout=20)
            finally:
                await network.proxy.close()
        return bytes(done.stdout)

    assert asyncio.run(scenario()) == b"hello"


@needs_bwrap
def test_what_runs_inside_is_reached_without_the_proxy() -> None:
    hosts = ("localhost", "127.0.0.1", "0.0.0.0", "sandbox")
    script = (
        "python3 -m http.server 8099 >/dev/null 2>&1 &until curl -so /dev/null localhost:8099; do sleep .05; done;"
    )
    script += " ".join(f"curl -sw '%{{http_code}} ' -o /dev/null http://{host}:8099/;" for host in hosts)

    async def scenario() -> tuple[bytes, int]:
        async with await opened("bwrap", replace(SPEC, network=LOOPBACK)) as sandbox:
            done = await sandbox.exec(Command(["bash", "-c", script]), timeout=20)
            return done.stdout, len(sandbox.connections)

    assert asyncio.run(scenario()) == (b"200 200 200 200 ", 0)


@needs_bwrap
def test_closing_ends_a_connection_at_once(port: int) -> None:
    script = (
        f"exec 3<>/dev/tcp/127.0.0.1/7001; printf 'CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n' >&3"
    )

    async def scenario() -> tuple[float, tuple[ConnectionRecord, ...]]:
        async with await opened("bwrap", replace(SPEC, network=LOOPBACK)) as sandbox:
            job = await sandbox.start(Command(["bash", "-c", f"{script}; head -1 <&3; exec sleep 60"]))
            async for _ in job.lines():
                break
            assert sandbox.connections[0].seconds is None
            began = asyncio.get_running_loop().time()
        return asyncio.get_running_loop().time() - began, sandbox.connections

    seconds, records = asyncio.run(scenario())
    assert seconds < 2
    assert [record.seconds is not None for record in records] == [True]
