"""The egress proxy, attacked over real sockets. Servers are on the loopback interface, allowed by their range."""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from paddock.sandbox.network.access import AccessRules
from paddock.sandbox.network.connections import LONGEST_HOST
from paddock.sandbox.network.egress import SPARE_CONNECTIONS, EgressLimits, EgressProxy
from paddock.sandbox.network.machine_settings import MachineSettings
from paddock.sandbox.network.policy import NO_NETWORK, NetworkPolicy
from paddock.sandbox.network.registries import Registries

pytestmark = pytest.mark.anyio

LOOPBACK = NetworkPolicy("allowlist", ("127.0.0.0/8",))
PUBLIC = NetworkPolicy("public")
SECONDS = 5.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def no_registries(urls: tuple[str, ...] = ()) -> Registries:
    return Registries(MachineSettings(apt_urls=urls), find_more=lambda settings: (set(), True))


@asynccontextmanager
async def serving(
    policy: NetworkPolicy = LOOPBACK,
    addresses: str = "",
    limits: EgressLimits | None = None,
    urls: tuple[str, ...] = (),
    send_buffer: int = 0,
) -> AsyncIterator[tuple[EgressProxy, int]]:
    """A proxy and its port. With `addresses`, every name resolves to them, one after the other."""
    answers = iter(addresses.split() * 100)

    async def resolve(name: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, ...]:
        return (ipaddress.ip_address(next(answers)),)

    proxy = EgressProxy(policy, phase="agent", limits=limits, registries=no_registries(urls), resolve=resolve)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    await proxy.serve(listener)
    try:
        yield proxy, listener.getsockname()[1]
    finally:
        await proxy.close()


@asynccontextmanager
async def upstream(handle: Handler) -> AsyncIterator[int]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def answer_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(OK)
    writer.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write(b"|end")
    writer.close()


async def ask(port: int, request: bytes) -> bytes:
    """The whole answer of the proxy."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(SECONDS):
        answer = await reader.read(-1)
    writer.close()
    return answer


def connect(host: str, port: int = 443) -> bytes:
    return f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()


async def test_a_tunnel_passes_bytes_and_half_closes() -> None:
    async with upstream(echo) as target, serving() as (proxy, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(connect("127.0.0.1", target) + b"early")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"x" * 300_000)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(-1), SECONDS) == b"early" + b"x" * 300_000 + b"|end"
        writer.close()
        await proxy.close()
        (record,) = proxy.connections
        assert (record.host, record.port, record.address) == ("127.0.0.1", target, "127.0.0.1")
        assert (record.sent_bytes, record.received_bytes) == (300_005, 300_009)
        assert record.allowed
        assert record.phase == "agent"
        assert record.seconds is not None


@pytest.mark.parametrize(
    ("policy", "request_bytes", "addresses", "status", "reason"),
    [
        (NO_NETWORK, connect("example.org"), "1.1.1.1", 403, "this phase has no network"),
        (LOOPBACK, connect("1.1.1.1"), "", 403, "1.1.1.1 is not in allowed_hosts"),
        (NetworkPolicy("allowlist", ("a.example",)), connect("b.example"), "1.1.1.1", 403, "b.example is not in"),
        (NetworkPolicy("allowlist", ("a.example",)), connect("a.example"), "127.0.0.1", 403, "a loopback address"),
        (PUBLIC, connect("localhost"), "127.0.0.1", 403, "a loopback address"),
        (PUBLIC, connect("a.example"), "10.0.0.1", 403, "10.0.0.1, a private address"),
        (PUBLIC, connect("a.example"), "::ffff:127.0.0.1", 403, "not in allowed_hosts"),
        (PUBLIC, connect("[::ffff:169.254.169.254]"), "", 403, "metadata"),
        (PUBLIC, connect("[::1]"), "", 403, "a loopback address"),
        (PUBLIC, connect("0.0.0.0"), "", 403, "unspecified"),
        (PUBLIC, connect("2130706433"), "127.0.0.1", 400, "usual form"),
        (PUBLIC, connect("0177.0.0.1"), "127.0.0.1", 400, "usual form"),
        (PUBLIC, connect("127.0.0.1."), "127.0.0.1", 400, "usual form"),
        (PUBLIC, connect("user@a.example"), "1.1.1.1", 400, "HOST:PORT"),
        (PUBLIC, connect("a.example", 0), "1.1.1.1", 400, "0 is no port"),
        (PUBLIC, connect("a.example", 99999), "1.1.1.1", 400, "99999 is no port"),
        (PUBLIC, b"GET /etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", "", 400, "this is a proxy"),
        (PUBLIC, b"GET https://a.example/ HTTP/1.1\r\nHost: a\r\n\r\n", "", 400, "this is a proxy"),
        (PUBLIC, b"GET http://b.example@10.0.0.1/ HTTP/1.1\r\nHost: b.example\r\n\r\n", "", 403, "10.0.0.1 is a"),
        (PUBLIC, b"GET http://b.example\\@a.example/ HTTP/1.1\r\nHost: a\r\n\r\n", "", 400, "a backslash"),
        (PUBLIC, b"GET http://a/ HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "", 400, "multiple Host"),
        (PUBLIC, b"PUT http://a/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x\r\n\r\n", "", 501, "chunked"),
        (PUBLIC, b"GET http://169.254.169.254/latest HTTP/1.1\r\nHost: a\r\n\r\n", "", 403, "metadata"),
        (PUBLIC, b"nonsense\r\n\r\n", "", 400, ""),
        (PUBLIC, b"GET http://a/ HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000, "", 431, ""),
        (
            PUBLIC,
            b"PUT http://a/ HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            "",
            400,
            "",
        ),
    ],
)
async def test_what_is_refused_is_answered_with_the_reason(
    policy: NetworkPolicy, request_bytes: bytes, addresses: str, status: int, reason: str
) -> None:
    async with serving(policy, addresses) as (proxy, port):
        answer = (await ask(port, request_bytes)).decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert reason in head
    assert reason in body
    if status == 403:
        (record,) = proxy.connections
        assert not record.allowed
        assert record.reason is not None
        assert reason in record.reason
        assert str(policy) in body


async def test_a_name_that_changes_its_address_is_connected_to_the_checked_one() -> None:
    """A resolver that answers with an allowed address first, and with another host of this machine afterwards."""
    async with upstream(echo) as target:
        policy = NetworkPolicy("allowlist", ("a.example", "127.0.0.1"))
        async with serving(policy, "127.0.0.1 127.0.0.2") as (proxy, port):
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(connect("a.example", target))
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                writer.close()
        assert {record.address for record in proxy.connections} == {"127.0.0.1"}


async def test_requests_are_written_anew_for_the_host_that_was_checked() -> None:
    received: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"\r\n\r\n"))
        received.append(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: X-Hop\r\nX-Hop: 1\r\nX-Kept: 2\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    async with upstream(answer) as target, serving() as (_, port):
        request = (
            f"POST http://127.0.0.1:{target}/path?q=1 HTTP/1.1\r\nHost: evil.example\r\nConnection: close, X-Secret"
            "\r\nX-Secret: 1\r\nProxy-Authorization: Basic eA==\r\nTransfer-Encoding: chunked\r\n\r\n"
            "3\r\nabc\r\n0\r\n\r\n"
        ).encode()
        reply = await ask(port, request)
    head = received[0].lower()
    assert head.startswith(b"post /path?q=1 http/1.1\r\n")
    assert b"host: 127.0.0.1:%d\r\n" % target in head
    assert not any(word in head for word in (b"evil", b"secret", b"proxy", b"content-length"))
    assert b"abc" in received[1]
    assert reply.endswith(b"ok")
    assert b"x-kept" in reply.lower()
    assert b"x-hop" not in reply.lower()


async def test_a_connection_serves_several_requests() -> None:
    async with upstream(answer_ok) as target, serving() as (proxy, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(f"GET http://127.0.0.1:{target}/ HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            async with asyncio.timeout(SECONDS):
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(2) == b"ok"
        writer.close()
    assert len(proxy.connections) == 3


async def test_a_registry_of_this_machine_may_have_any_address() -> None:
    async with upstream(echo) as target:
        urls = (f"http://packages.example:{target}/debian",)
        for policy in (PUBLIC, *(NetworkPolicy("allowlist", (entry,)) for entry in ("registries", "*.example"))):
            async with serving(policy, "127.0.0.1", urls=urls) as (_, port):
                assert b" 200 " in await first_line(port, connect("packages.example", target))
                assert b" 403 " in await first_line(port, connect("packages.example", target + 1))
                assert b" 403 " in await first_line(port, connect("other.example", target))


async def first_line(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(SECONDS):
        line = await reader.readline()
    writer.close()
    return line


async def test_a_slow_head_is_cut_off() -> None:
    async with serving(limits=EgressLimits(head_seconds=0.1)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"CONNECT a")
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(-1), SECONDS) == b""
        writer.close()


async def test_an_idle_tunnel_is_closed() -> None:
    async with upstream(echo) as target, serving(limits=EgressLimits(idle_seconds=0.1)) as (proxy, port):
        await wait_for_end(port, target)
        await proxy.close()
        assert proxy.connections[0].seconds is not None


@pytest.mark.parametrize("end", ["switch", "end"])
async def test_a_new_policy_and_the_end_cut_connections_at_once(end: str) -> None:
    async with upstream(echo) as target, serving() as (proxy, port):

        async def act() -> None:
            if end == "switch":
                proxy.switch(NO_NETWORK, "verifier")
            else:
                proxy.end()

        await wait_for_end(port, target, act)
        if end == "switch":
            assert b" 403 " in await first_line(port, connect("127.0.0.1", target))
            assert proxy.connections[-1].phase == "verifier"
        else:
            with pytest.raises(ConnectionRefusedError):
                await first_line(port, connect("127.0.0.1", target))


async def wait_for_end(port: int, target: int, act: Callable[[], Awaitable[None]] | None = None) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(connect("127.0.0.1", target))
    await reader.readuntil(b"\r\n\r\n")
    if act is not None:
        await act()
    async with asyncio.timeout(SECONDS):
        with suppress(ConnectionResetError):
            assert await reader.read(-1) == b""
    writer.close()


async def test_too_many_connections_are_refused_with_a_reason() -> None:
    async with upstream(echo) as target, serving(limits=EgressLimits(connections=2)) as (_, port):
        writers = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(connect("127.0.0.1", target))
            await reader.readuntil(b"\r\n\r\n")
            writers.append(writer)
        assert b"503 the sandbox has more than 2 open" in await first_line(port, connect("127.0.0.1", target))
        for writer in writers:
            writer.close()


async def test_a_closed_port_is_a_bad_gateway() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        target = closed.getsockname()[1]
    async with serving() as (proxy, port):
        assert b"HTTP/1.1 502 " in await first_line(port, connect("127.0.0.1", target))
    assert proxy.connections[0].allowed


def ask_for(target: int, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    """The head of a plain request to a server on the loopback interface."""
    lines = (f"{method} http://127.0.0.1:{target}/ HTTP/{version}", "Host: a", *headers, "", "")
    return "\r\n".join(lines).encode()


async def test_what_a_client_got_wrong_is_recorded_as_refused() -> None:
    async with serving(PUBLIC) as (proxy, port):
        for host, number in (("0x7f.1", 80), ("a" * 5000, 80), ("a.example", 0)):
            assert b" 400 " in await first_line(port, connect(host, number))
    assert [record.allowed for record in proxy.connections] == [False] * 3
    assert max(len(record.host) for record in proxy.connections) == LONGEST_HOST


async def test_a_name_that_is_not_allowed_gets_no_answer_of_a_name_server() -> None:
    """Otherwise a program inside could read data from the addresses of a domain of its own."""
    async with serving(NetworkPolicy("allowlist", ("192.0.2.0/24",)), "10.11.12.13") as (_, port):
        answer = await ask(port, connect("data.example"))
    assert b"neither data.example nor an address of it is in allowed_hosts" in answer
    assert b"10.11.12.13" not in answer


async def test_an_unlisted_name_may_resolve_to_a_listed_address() -> None:
    async with upstream(echo) as target, serving(addresses="127.0.0.1") as (_, port):
        assert b" 200 " in await first_line(port, connect("a.example", target))


async def test_what_would_allow_a_refused_connection_is_named() -> None:
    policy = NetworkPolicy("allowlist", ("a.example",))
    async with serving(policy, "10.0.0.1") as (proxy, port):
        unlisted = (await ask(port, connect("b.example"))).decode()
        private = (await ask(port, connect("a.example"))).decode()
        proxy.switch(policy, "verifier")
        later = (await ask(port, connect("b.example"))).decode()
    assert '"b.example" in allowed_hosts, in the table [agent]' in unlisted
    assert "--network allowlist:a.example,b.example" in unlisted
    assert "--network allowlist:a.example,10.0.0.1" in private
    assert "in the table [verifier]" in later
    assert "--network" not in later


async def test_the_proxy_names_what_was_refused() -> None:
    async with serving(NO_NETWORK) as (_, port):
        await ask(port, connect("a.example"))
        answer = (await ask(port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")).decode()
    assert "The network policy of the phase agent is no-network." in answer
    assert "Refused: a.example:443: this phase has no network." in answer


async def test_a_user_name_is_neither_passed_on_nor_recorded() -> None:
    async with upstream(answer_ok) as target, serving() as (proxy, port):
        request = f"GET http://me:secret@127.0.0.1:{target}/?token=hidden HTTP/1.1\r\nHost: a\r\n\r\n"
        assert (await first_line(port, request.encode())).startswith(b"HTTP/1.1 200 ")
    assert "secret" not in str(proxy.connections)
    assert "hidden" not in str(proxy.connections)


@pytest.mark.parametrize(
    ("headers", "body", "framing"),
    [
        (("Connection: content-length", "Content-Length: 3"), b"abc", b"content-length: 3"),
        (
            ("Content-Length: 9", "Transfer-Encoding: chunked"),
            b"0\r\n\r\nGET http://x/",
            b"transfer-encoding: chunked",
        ),
    ],
)
async def test_one_request_is_sent_as_one(headers: tuple[str, ...], body: bytes, framing: bytes) -> None:
    requests: list[bytes] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readuntil(b"\r\n\r\n")).lower())
        requests.append(await reader.read(100))
        writer.write(OK)
        writer.close()

    async with upstream(keep) as target, serving() as (_, port):
        answer = await first_line(port, ask_for(target, *headers, method="POST") + body)
    assert answer.startswith(b"HTTP/1.1 200 ")
    lines = [line for line in requests[0].split(b"\r\n") if line.startswith((b"content-", b"transfer-"))]
    assert lines == [framing]
    assert requests[1] in (b"abc", b"0\r\n\r\n")


async def test_an_answer_before_the_end_of_an_upload_is_passed_on() -> None:
    async def refuse_upload(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        while await reader.read(65536):
            pass
        writer.close()

    async with upstream(refuse_upload) as target, serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ask_for(target, "Content-Length: 9000000", method="POST"))
        for _ in range(20):
            writer.write(b"x" * 100_000)
            await asyncio.sleep(0)
        async with asyncio.timeout(SECONDS):
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_a_slow_reader_gets_the_whole_response() -> None:
    size = 60_000

    async def send_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
        writer.close()

    async with upstream(send_much) as target, serving(send_buffer=4096) as (_, port):
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, ("127.0.0.1", port))
            await loop.sock_sendall(slow, ask_for(target, version="1.0"))
            await asyncio.sleep(0.3)
            count = 0
            async with asyncio.timeout(SECONDS):
                while piece := await loop.sock_recv(slow, 1 << 16):
                    count += piece.count(b"x")
    assert count == size


async def test_a_response_that_breaks_off_does_not_look_whole() -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        writer.close()

    async with upstream(break_off) as target, serving() as (_, port):
        with pytest.raises(ConnectionResetError):
            await ask(port, ask_for(target, version="1.0"))


async def test_a_request_may_switch_to_another_protocol() -> None:
    async def switch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"upgrade: websocket" in (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.write(b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nfirst ")
        await echo(reader, writer)

    async with upstream(switch) as target, serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ask_for(target, "Connection: keep-alive, Upgrade", "Upgrade: websocket"))
        async with asyncio.timeout(SECONDS):
            assert b"upgrade: websocket" in (await reader.readuntil(b"\r\n\r\n")).lower()
            writer.write(b"second")
            writer.write_eof()
            assert await reader.read(-1) == b"first second|end"
        writer.close()


async def test_an_upload_that_goes_on_is_not_idle() -> None:
    async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(OK)
        writer.close()

    async with upstream(read_all) as target, serving(limits=EgressLimits(idle_seconds=0.3)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ask_for(target, "Transfer-Encoding: chunked", method="POST"))
        for _ in range(6):
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.1)
        writer.write(b"0\r\n\r\n")
        async with asyncio.timeout(SECONDS):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_host_that_does_not_answer_is_a_gateway_timeout() -> None:
    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    async with upstream(be_silent) as target, serving(limits=EgressLimits(idle_seconds=0.1)) as (proxy, port):
        answer = await ask(port, ask_for(target))
    assert answer.startswith(b"HTTP/1.1 504 127.0.0.1 did not answer within 0.1 s")
    assert proxy.connections[0].allowed


async def test_a_flood_of_connections_is_cut() -> None:
    """Each connection inside uses a descriptor of this process."""
    most = 4 + SPARE_CONNECTIONS
    async with serving(limits=EgressLimits(connections=4)) as (_, port):
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(most + 5)]
        ends = [asyncio.ensure_future(reader.read(-1)) for reader, _ in connections]
        await asyncio.wait(ends, timeout=0.3)
        assert sum(not end.done() for end in ends) == most
        for _, writer in connections:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_lookups_that_hang_leave_the_threads_of_others_free(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        release.wait(SECONDS)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    rules = AccessRules(PUBLIC, registries=no_registries())
    lookups = [asyncio.ensure_future(rules.admit(f"{number}.example", 443)) for number in range(64)]
    await asyncio.sleep(0.05)
    try:
        async with asyncio.timeout(SECONDS / 2):
            assert await asyncio.to_thread(str) == ""
    finally:
        release.set()
        await asyncio.gather(*lookups, return_exceptions=True)
