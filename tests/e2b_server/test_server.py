"""The server, request by request: who is authorized, what is refused, what is stored, what is returned."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from paddock.e2b_server import file_transfer, server
from paddock.e2b_server.connect_protocol import envelope
from paddock.e2b_server.control_api import ControlApi
from paddock.e2b_server.server import E2bServer, E2bServerSettings
from sandbox.places import needs_bwrap

pytestmark = needs_bwrap

KEY = "e2b_test"


class Client:
    def __init__(self, e2b_server: E2bServer, session: aiohttp.ClientSession) -> None:
        self.server, self.session = e2b_server, session

    async def call(self, method: str, path: str, *, key: str = KEY, **options: Any) -> tuple[int, Any]:
        headers = {"X-API-KEY": key, **options.pop("headers", {})}
        async with self.session.request(method, self.server.address.url + path, headers=headers, **options) as answer:
            content = await answer.read()
            is_json = answer.content_type == "application/json" and content
            return answer.status, json.loads(content) if is_json else content

    async def create(self, **options: Any) -> dict[str, Any]:
        status, made = await self.call("POST", "/v2/sandboxes", json={"templateID": "base", **options})
        assert status == 201, made
        created: dict[str, Any] = made
        return created

    async def rpc(self, made: dict[str, Any], path: str, message: dict[str, Any], **headers: str) -> tuple[int, Any]:
        return await self.call("POST", path, json=message, headers={**daemon(made), **headers})

    async def stream(self, made: dict[str, Any], path: str, message: dict[str, Any], **headers: str) -> list[Any]:
        all_headers = {**daemon(made), "Content-Type": "application/connect+json", **headers}
        _, content = await self.call("POST", path, data=envelope(message), headers=all_headers)
        return envelopes(content)


def daemon(made: dict[str, Any]) -> dict[str, str]:
    return {"E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"]}


def envelopes(content: bytes) -> list[Any]:
    envelopes = []
    while content:
        length = int.from_bytes(content[1:5], "big")
        envelopes.append((content[0], json.loads(content[5 : 5 + length])))
        content = content[5 + length :]
    return envelopes


@pytest.fixture(scope="module")
def anywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Callable[[Client], Any]], Any]]:
    """Runs something with a client of one server, which lives as long as the module."""
    folder = tmp_path_factory.mktemp("e2b_server")
    with asyncio.Runner() as runner:
        settings = E2bServerSettings(port=0, api_key=KEY, store=folder / "store", max_sandboxes=4)
        e2b_server = runner.run(entered(E2bServer(settings)))
        yield lambda act: runner.run(with_client(e2b_server, act))
        assert e2b_server.registry.all() == []
        runner.run(e2b_server.__aexit__(None, None, None))


async def entered(e2b_server: E2bServer) -> E2bServer:
    return await e2b_server.__aenter__()


async def with_client(e2b_server: E2bServer, act: Callable[[Client], Any]) -> Any:
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        client = Client(e2b_server, session)
        try:
            return await act(client)
        finally:
            await asyncio.gather(*(e2b_server.registry.kill(served.id) for served in e2b_server.registry.all()))


Anywhere = Callable[[Callable[[Client], Any]], Any]


def test_nothing_is_answered_without_the_key(anywhere: Anywhere) -> None:
    async def act(client: Client) -> None:
        routes = ControlApi(client.server.registry, key=KEY, domain="").routes()
        assert len(routes) > 10
        for method, path in (
            (route.method, route.path.format(id="x")) for route in [*routes, web.get("/nothing", act)]
        ):
            for key in ("", "e2b_wrong", "e2b_\xff"):
                status, error = await client.call("POST" if method == "*" else method, path, key=key, json={})
                assert (status, error["code"]) == (401, 401)
        assert (await client.call("GET", "/nothing"))[0] == 404

    anywhere(act)


def test_a_sandbox_is_opened_only_by_its_own_token(anywhere: Anywhere) -> None:
    async def act(client: Client) -> None:
        made, other = await client.create(), await client.create()
        stolen = {"X-Access-Token": other["envdAccessToken"]}
        status, error = await client.rpc(made, "/filesystem.Filesystem/Stat", {"path": "/"}, **stolen)
        assert (status, error["code"]) == (401, "unauthenticated")
        assert (await client.call("GET", "/files?path=x", headers={**daemon(made), **stolen}))[0] == 401
        assert (await client.rpc(made, "/filesystem.Filesystem/Stat", {"path": "/"}))[0] == 200

    anywhere(act)


def test_a_missing_object_is_refused_with_a_message(anywhere: Anywhere) -> None:
    async def act(client: Client) -> None:
        made = await client.create()
        for name in ("pause", "snapshots", "fork", "logs"):
            status, error = await client.call("POST", f"/sandboxes/{made['sandboxID']}/{name}", json={})
            assert status == 501
            assert "here" in error["message"]
        for wrong in (
            {"autoPause": True},
            {"timeout": -1},
            {"metadata": {"a": 1}},
            {"metadata": {"paddock-limits": "x"}},
        ):
            status, _ = await client.call("POST", "/v2/sandboxes", json={"templateID": "base", **wrong})
            assert status == 400
        status, error = await client.call(
            "POST", "/process.Process/List", data=b"", headers={**daemon(made), "Content-Type": "application/proto"}
        )
        assert (status, error["code"]) == (501, "unimplemented")

    anywhere(act)


def test_a_sandbox_ends_at_its_timeout_and_not_before(anywhere: Anywhere) -> None:
    async def act(client: Client) -> None:
        made = await client.create(timeout=300)
        path = f"/sandboxes/{made['sandboxID']}"
        inside = client.server.registry.find(made["sandboxID"])
        assert inside is not None
        assert (await client.call("POST", f"{path}/connect", json={"timeout": 1}))[0] == 200
        assert inside.end_at - inside.started_at > 200
        assert (await client.call("POST", f"{path}/timeout", json={"timeout": 0}))[0] == 204
        await asyncio.wait_for(inside.has_ended.wait(), 10)
        assert (await client.call("GET", path))[0] == 404
        status, error = await client.rpc(made, "/filesystem.Filesystem/Stat", {"path": "/"})
        assert (status, error["message"]) == (502, "The sandbox was not found")

    anywhere(act)


def test_there_is_room_for_so_many_and_no_more(anywhere: Anywhere) -> None:
    async def act(client: Client) -> None:
        message = [client.call("POST", "/v2/sandboxes", json={"templateID": "base"}) for _ in range(6)]
        statuses = sorted(status for status, _ in await asyncio.gather(*message))
        assert statuses == [201, 201, 201, 201, 429, 429]
        status, page = await client.call("GET", "/v2/sandboxes?limit=3")
        assert (status, len(page)) == (200, 3)
        _, rest = await client.call("GET", "/v2/sandboxes?limit=3&nextToken=3")
        assert len({entry["sandboxID"] for entry in (*page, *rest)}) == 4

    anywhere(act)


def test_a_command_is_killed_at_the_deadline_of_its_client(anywhere: Anywhere) -> None:
    async def act(client: Client) -> None:
        made = await client.create()
        message = {"process": {"cmd": "/bin/sleep", "args": ["100"]}, "stdin": False}
        envelopes = await client.stream(made, "/process.Process/Start", message, **{"Connect-Timeout-Ms": "300"})
        assert "start" in envelopes[0][1]["event"]
        assert envelopes[-1][0] == 2
        served = client.server.registry.find(made["sandboxID"])
        assert served is not None
        async with asyncio.timeout(5):
            while served.processes:
                await asyncio.sleep(0.01)

    anywhere(act)


def test_only_root_writes_below_tests_and_everybody_reads(anywhere: Anywhere) -> None:
    async def act(client: Client) -> None:
        made = await client.create()
        headers = {**daemon(made), "Content-Type": "application/octet-stream", "X-Metadata-Paddock-Mode": "755"}
        script = b"#!/bin/sh\necho tested\n"
        as_root = "/files?path=/tests/a/test.sh&username=root"
        assert (await client.call("POST", as_root, data=script, headers=headers))[0] == 200
        for path in ("/etc/x", "/tests/../etc/x", "/tests"):
            status, _ = await client.call("POST", f"/files?path={path}&username=root", data=b"x", headers=headers)
            assert status == 400
        assert (await client.call("POST", "/files?path=/tests/b", data=b"x", headers=headers))[0] >= 400
        message = {"process": {"cmd": "/bin/sh", "args": ["-c", "/tests/a/test.sh; rm -f /tests/a/test.sh"]}}
        envelopes = await client.stream(made, "/process.Process/Start", message)
        outputs = [message["event"]["data"] for _, message in envelopes if "data" in message.get("event", {})]
        assert outputs[0] == {"stdout": "dGVzdGVkCg=="}
        assert envelopes[-2][1]["event"]["end"]["exitCode"] == 1

    anywhere(act)


def test_a_client_that_leaves_does_not_end_its_command(anywhere: Anywhere) -> None:
    async def act(client: Client) -> None:
        made = await client.create()
        message = {"process": {"cmd": "/bin/sh", "args": ["-c", "echo begun; sleep 100"]}, "tag": "mine"}
        headers = {**daemon(made), "Content-Type": "application/connect+json", "X-API-KEY": KEY}
        url = f"{client.server.address.url}/process.Process/Start"
        async with client.session.post(url, data=envelope(message), headers=headers) as answer:
            await answer.content.readany()
        _, listed = await client.rpc(made, "/process.Process/List", {})
        assert [process["tag"] for process in listed["processes"]] == ["mine"]
        message = {"process": {"tag": "mine"}, "signal": "SIGNAL_SIGTERM"}
        assert (await client.rpc(made, "/process.Process/SendSignal", message))[0] == 200

    anywhere(act)


def test_a_body_that_stops_arriving_is_not_waited_for(anywhere: Anywhere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_transfer, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(file_transfer, "STALL_SECONDS", 0.3)

    async def begun(client: Client, path: str, **headers: str) -> bytes:
        """The first line that comes back for a request whose body breaks off."""
        url = urlsplit(client.server.address.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 100"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", "{"]).encode())
        line = await reader.readline()
        writer.close()
        return line

    async def act(client: Client) -> None:
        made = await client.create()
        assert (await begun(client, "/v2/sandboxes", **{"X-API-KEY": KEY})).startswith(b"HTTP/1.1 408")
        named = {**daemon(made), "Content-Type": "application/json"}
        assert (await begun(client, "/filesystem.Filesystem/Stat", **named)).startswith(b"HTTP/1.1 408")
        raw = {**daemon(made), "Content-Type": "application/octet-stream"}
        assert (await begun(client, "/files?path=/tmp/x", **raw)).startswith(b"HTTP/1.1 408")

    anywhere(act)


def test_headers_that_stop_arriving_are_not_waited_for(
    anywhere: Anywhere, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)

    async def act(client: Client) -> None:
        url = urlsplit(client.server.address.url)
        for head in (b"", b"POST /v2/sandboxes HTTP/1.1\r\nHost:"):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(head)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()

    anywhere(act)
    assert caplog.text.count("the headers of its request did not arrive in time") == 2
