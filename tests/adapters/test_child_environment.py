"""Environments in a process of their own, under any interpreter: here ours, with a loader of a few lines."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock import Client, SyncClient
from paddock.adapters.child_environment import environment_class, inline_references
from paddock.errors import EnvironmentFailure, InvalidMessage, StepTimeout, TargetError
from paddock.sessions.isolation.process import HostProcess, find_interpreter

LOADER = """
import json, os, time
class Refused(ValueError):
    pass
def load(place):
    if place == "nowhere":
        error = ImportError("there is nothing here")
        error.hint = "look elsewhere"
        raise error
    if place == "ends":
        os._exit(3)
    return Hosted()
class Hosted:
    def describe(self):
        schema = {"type": "object", "properties": {"do": {"$ref": "#/$defs/Word"}}}
        schema["$defs"] = {"Word": {"type": "string"}}
        schemas = {"action": schema, "observation": {"type": "object", "title": "Seen"}, "state": {"type": "object"}}
        return {"name": "Tiny", "concurrent": True, "methods": ["num_tasks"], "tools": None, "schemas": schemas,
                "metadata": {"name": "tiny", "description": "tiny"}}
    def open(self):
        if os.path.exists("broken"):
            raise RuntimeError("it cannot be built")
        return Session()
class Session:
    count = 0
    def handle(self, kind, data):
        given = json.loads(data)
        if kind == b"reset":
            self.count = given.get("seed") or 0
        elif kind == b"call":
            return json.dumps(given).encode()
        elif kind == b"step":
            self.step(given["do"])
        return json.dumps({"count": self.count, "done": False, "reward": None, "wide": "x" * self.count}).encode()
    def step(self, word):
        if word == "refuse":
            raise Refused([{"loc": ["do"], "msg": "not that"}])
        if word == "exit":
            raise SystemExit("bye")
        if word == "hang":
            time.sleep(30)
        if word == "die":
            os._exit(9)
        self.count += 1000 if word == "more" else 1
    def close(self):
        with open("closed", "a") as file:
            file.write("x")
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loader.py").write_text(LOADER)
    return tmp_path


@pytest.fixture
def tiny(place: Path) -> Iterator[Any]:
    process = HostProcess(sys.executable, place / "loader.py", "tiny")
    yield environment_class(process, process.start())
    process.stop()


def test_requests_are_carried_out_there(tiny: Any, place: Path) -> None:
    with SyncClient(tiny) as client:
        assert client.reset(seed=3).observation.count == 3
        assert client.step({"do": "go"}).observation.count == 4
        assert client.state().count == 4
        assert client.schema()["action"]["properties"] == {"do": {"type": "string"}}
        assert client.schema()["observation"]["title"] == "Seen"
        assert client.metadata()["name"] == "tiny"
    wait_until_closed(place)


def test_an_answer_larger_than_a_pipe_arrives_whole(tiny: Any) -> None:
    with SyncClient(tiny) as client:
        seen = client.reset(seed=3_000_000).observation
        assert len(seen.wide) == 3_000_000
        assert client.step({"do": "go"}).observation.count == 3_000_001


def test_what_is_refused_there_is_refused_here(tiny: Any) -> None:
    with SyncClient(tiny) as client:
        client.reset()
        with pytest.raises(InvalidMessage) as caught:
            client.step({"do": "refuse"})
        assert caught.value.data["errors"] == [{"loc": ["do"], "msg": "not that"}]
        with pytest.raises(EnvironmentFailure, match="SystemExit: bye"):
            client.step({"do": "exit"})
        assert client.step({"do": "go"}).observation.count == 1


def test_a_hanging_call_delays_no_other_session(tiny: Any) -> None:
    async def play() -> int:
        async with Client(tiny) as hung, Client(tiny) as other:
            await asyncio.gather(hung.reset(), other.reset())
            with pytest.raises(StepTimeout):
                await hung.step({"do": "hang"}, timeout=0.2)
            return int((await other.step({"do": "go"})).observation.count)

    assert asyncio.run(play()) == 1


def test_sessions_do_not_mix(tiny: Any) -> None:
    async def play() -> list[int]:
        clients = [Client(tiny) for _ in range(8)]
        await asyncio.gather(*(client.reset(seed=seed) for seed, client in enumerate(clients)))
        for _ in range(20):
            results = await asyncio.gather(*(client.step({"do": "more"}) for client in clients))
        await asyncio.gather(*(client.close() for client in clients))
        return [result.observation.count for result in results]

    assert asyncio.run(play()) == [20_000 + seed for seed in range(8)]


def test_a_process_that_ended_is_replaced_by_the_next_reset(tiny: Any) -> None:
    with SyncClient(tiny) as client:
        client.reset()
        with pytest.raises(EnvironmentFailure, match="process has ended"):
            client.step({"do": "die"})
        with pytest.raises(EnvironmentFailure, match="process has ended"):
            client.step({"do": "go"})
        assert client.reset(seed=1).observation.count == 1


def test_an_environment_that_cannot_be_built_is_reported(tiny: Any, place: Path) -> None:
    (place / "broken").touch()
    with SyncClient(tiny) as client:
        with pytest.raises(EnvironmentFailure, match="RuntimeError: it cannot be built"):
            client.reset()
        (place / "broken").unlink()
        assert client.reset(seed=2).observation.count == 2


def test_the_process_ends_with_its_owner(place: Path) -> None:
    process = HostProcess(sys.executable, place / "loader.py", "tiny")
    process.start()
    pid = process.pid
    assert pid is not None
    process.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    process.stop()


def test_a_place_that_cannot_be_loaded_is_reported_with_its_hint(place: Path) -> None:
    with pytest.raises(TargetError, match="there is nothing here") as caught:
        HostProcess(sys.executable, place / "loader.py", "nowhere").start()
    assert caught.value.hint == "look elsewhere"
    with pytest.raises(TargetError, match="ended at once"):
        HostProcess(sys.executable, place / "loader.py", "ends").start()


def test_our_tokens_are_not_passed_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_AUTH_TOKEN", "secret")
    (place / "loader.py").write_text("import os\ndef load(place):\n    raise ImportError(str(dict(os.environ)))\n")
    with pytest.raises(TargetError) as caught:
        HostProcess(sys.executable, place / "loader.py", "x").start()
    assert "PATH" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_interpreter_is_found_by_folder_path_or_name(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    assert find_interpreter(str(tmp_path)) == find_interpreter(str(python)) == str(python)
    with pytest.raises(TargetError, match="no interpreter"):
        find_interpreter(str(tmp_path / "nothing"))


def test_a_schema_that_goes_in_circles_ends() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    reply = inline_references({"$ref": "#/$defs/Node", "$defs": {"Node": node}})
    assert reply == {"type": "object", "properties": {"next": {}}}


def wait_until_closed(place: Path) -> None:
    for _ in range(500):
        if (place / "closed").exists():
            return
        time.sleep(0.01)
    raise AssertionError("the environment was not closed")
