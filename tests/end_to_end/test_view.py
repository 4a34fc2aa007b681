"""`paddock view` in a process of its own, over a store in which another process runs rollouts."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.store import Store
from paddock.store.outcome import Outcome
from recorded import unpack
from rollouts.played import needs_bwrap, roll, speaker

pytestmark = pytest.mark.end_to_end


class View:
    """The page, and a browser that came in by the printed address."""

    def __init__(self, *words: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paddock", *words, "--no-open", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        assert self.process.stdout is not None
        self.connections: list[http.client.HTTPConnection] = []
        self.address = json.loads(self.process.stdout.readline())["url"]
        parts = urlsplit(self.address)
        self.host, self.port, self.cookie = parts.hostname, parts.port, ""
        status, headers, _ = self.ask("GET", f"{parts.path}?{parts.query}")
        assert (status, headers["location"]) == (303, "/web/")
        self.cookie = headers["set-cookie"].partition(";")[0]

    def ask(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        response = self.open(method, path)
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()

    def open(self, method: str, path: str) -> http.client.HTTPResponse:
        assert self.host is not None
        connection = http.client.HTTPConnection(self.host, self.port or 0, timeout=20)
        self.connections.append(connection)
        connection.request(method, path, headers={"cookie": self.cookie})
        return connection.getresponse()

    def api(self, path: str, method: str = "GET") -> Any:
        status, _, body = self.ask(method, f"/web/api/{path}")
        assert status == 200, body
        return json.loads(body)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=10)
        for connection in self.connections:
            connection.close()
        return self.process.returncode


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        yield opened


def test_the_page_over_a_store(tmp_path: Path) -> None:
    view = View("view", "--store", str(unpack(tmp_path)))
    try:
        assert view.api("rollouts")["total"] == 20
        assert view.ask("GET", "/web/")[0] == 200
        listening = view.open("GET", "/web/api/live")
        assert listening.readline() == b"event: hello\n"
    finally:
        began = time.monotonic()
        code = view.end()
    took = time.monotonic() - began
    listening.close()
    assert code == 0
    assert took < 3


def test_a_rollout_opens_at_its_place(tmp_path: Path) -> None:
    folder = unpack(tmp_path)
    with Store.open(folder, read_only=True) as store:
        name = store.list(task_id="drift")[0].rollout_id
    view = View("trace", "view", name[:-2], PADDOCK_STORE=str(folder))
    assert view.address.endswith(f"#/rollouts/{name}")
    assert view.end() == 0
    file = tmp_path / "one.html"
    words = ["trace", "export", name, "--to", "html", "--store", str(folder), "--out", str(file)]
    subprocess.run([sys.executable, "-m", "paddock", *words], check=True, timeout=30, capture_output=True)
    assert f"<title>{name} · drift</title>" in file.read_text()


@needs_bwrap
def test_a_running_rollout_is_followed_and_stopped(store: Store) -> None:
    turns = [{"tool": "bash", "arguments": {"command": f"echo {number}; sleep 0.3"}} for number in range(60)]
    view = View("view", "--store", str(store.path))
    written: dict[str, float] = {}
    arrived: dict[str, float] = {}
    add = store.add_event

    def noted(rollout_id: str, event: Any) -> int:
        if event.kind == "call":
            written[event.data["call"]] = event.at
        return add(rollout_id, event)

    store.add_event = noted  # type: ignore[method-assign]

    def follow(name: str) -> None:
        for line in view.open("GET", f"/web/api/rollouts/{name}/live"):
            if line.startswith(b"data: ") and b'"calls":[{' in line:
                for call in json.loads(line[6:])["calls"]:
                    arrived.setdefault(call["id"], time.time())

    async def play() -> Any:
        async with ReplayServer({"turns": turns}) as server:
            endpoint = Endpoint(server.url, "replay", engine="vllm")
            rolling = asyncio.create_task(roll(store, speaker("sys.exit(converse(most=60))"), model=endpoint))
            async with asyncio.timeout(20):
                while not (result := (await asyncio.to_thread(view.api, "rollouts?running=1"))["rows"]):
                    await asyncio.sleep(0.05)
                name = result[0]["rollout_id"]
                threading.Thread(target=follow, args=(name,), daemon=True).start()
                while len(arrived) < 6:
                    await asyncio.sleep(0.05)
                assert await asyncio.to_thread(view.api, f"rollouts/{name}/abort", "POST") == {"asked": True}
                return await rolling

    record = asyncio.run(play())
    try:
        assert (record.outcome, record.error) == (Outcome.CANCELLED, "stopped from the page")
        delays = sorted(arrived[name] - written[name] for name in [*arrived][2:6])
        assert delays[1] < 0.25
        assert view.api(f"rollouts/{record.rollout_id}")["outcome"] == "cancelled"
    finally:
        assert view.end() == 0
