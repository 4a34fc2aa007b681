"""The local engine: a real model in a process of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from paddock.errors import ConfigError, ModelError
from paddock.models import local, open_model
from paddock.models.local import open_local_server

pytest.importorskip("xllamacpp")

ASK = {
    "messages": [{"role": "user", "content": "Say hello in one word."}],
    "max_tokens": 24,
    "temperature": 1.0,
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 1,
}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 55))


def children() -> set[int]:
    """The engine processes that this process started."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


async def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 200
        return dict(await answer.json())


def test_a_missing_engine_is_reported_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ENGINE_MODULE", "no_such_engine")

    async def load() -> None:
        async with open_model("local", log=pytest.fail):
            pass

    with pytest.raises(ConfigError) as caught:
        run(load())
    assert "paddock-rl[local]" in (caught.value.hint or "")


def test_a_broken_file_is_a_model_error_and_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    before = children()

    async def load() -> None:
        async with open_local_server(file, print):
            pass

    with pytest.raises(ModelError, match=r"broken\.gguf"):
        run(load())
    assert children() == before


def test_a_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "slow.gguf"
    os.mkfifo(file)
    before = children()

    async def load() -> None:
        async with open_local_server(file, print):
            pass

    async def cancelled() -> None:
        task = asyncio.create_task(load())
        while children() == before:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert children() == before

    run(cancelled())


@pytest.mark.end_to_end
def test_a_real_model_returns_ids_and_logprobs() -> None:
    async def talk() -> None:
        async with open_model("local") as endpoint:
            assert (endpoint.engine, endpoint.label) == ("llamacpp", "local")
            root = endpoint.url.removesuffix("/v1")
            reply = await post(f"{endpoint.url}/chat/completions", ASK)
            entries = reply["choices"][0]["logprobs"]["content"]
            assert len(entries) == reply["usage"]["completion_tokens"] > 1
            assert all(entry["logprob"] < 0 and isinstance(entry["id"], int) for entry in entries)
            assert reply["choices"][0]["message"]["content"] == "".join(entry["token"] for entry in entries)
            prompt = (await post(f"{root}/apply-template", {"messages": ASK["messages"]}))["prompt"]
            wanted = {"content": prompt, "add_special": True, "parse_special": True}
            tokens = (await post(f"{root}/tokenize", wanted))["tokens"]
            assert len(tokens) == reply["usage"]["prompt_tokens"]
            again = await post(f"{endpoint.url}/chat/completions", ASK)
            assert again["choices"][0]["message"] == reply["choices"][0]["message"]

    run(talk())


@pytest.mark.end_to_end
def test_a_request_with_tools_is_answered() -> None:
    tools = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {}}}}]

    async def talk() -> None:
        async with open_model("local") as endpoint:
            reply = await post(f"{endpoint.url}/chat/completions", {**ASK, "tools": tools, "tool_choice": "auto"})
            assert reply["choices"][0]["message"]["content"]

    run(talk())


@pytest.mark.end_to_end
def test_one_engine_serves_all_and_ends_with_the_last() -> None:
    before = children()

    async def name(_: int) -> str:
        async with open_model("local") as endpoint:
            await post(f"{endpoint.url}/chat/completions", {**ASK, "max_tokens": 2})
            assert len(children() - before) == 1
            return endpoint.url

    async def several() -> set[str]:
        return set(await asyncio.gather(*map(name, range(4))))

    assert len(run(several())) == 1
    assert children() == before


@pytest.mark.end_to_end
def test_an_engine_that_died_is_started_again() -> None:
    before = children()

    async def talk() -> None:
        async with open_model("local") as first:
            (engine,) = children() - before
            os.kill(engine, signal.SIGKILL)
            while children() != before:
                await asyncio.sleep(0.01)
            async with open_model("local") as second:
                assert second.url != first.url
                await post(f"{second.url}/chat/completions", {**ASK, "max_tokens": 2})

    run(talk())


PARENT = """
import asyncio, os, sys
from pathlib import Path
from paddock.models import open_model

async def main():
    async with open_model("local"):
        print(Path(f"/proc/self/task/{os.getpid()}/children").read_text(), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.end_to_end
def test_the_engine_ends_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{engine}").exists() and state(engine) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
