"""Whole rollouts in a moment: a few lines of shell or Python instead of an agent, a script instead of a model."""

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from paddock.agents.command import CommandAgent
from paddock.limits import MEBIBYTE, Budget, RolloutTimeouts, SandboxLimits
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts.api import run_rollout
from paddock.sandbox import available
from paddock.store import Store
from paddock.store.record import RolloutRecord
from paddock.tasks.task import Task

ResultT = TypeVar("ResultT")

BWRAP_MISSING = available("bwrap")
needs_bwrap = pytest.mark.skipif(BWRAP_MISSING is not None, reason=str(BWRAP_MISSING))

UPSTREAM_KEY = "sk-upstream-9f8e7d6c5b4a"
NOBODY_THERE = Endpoint("http://127.0.0.1:1/v1", "nobody", engine="vllm")
LIMITS = SandboxLimits(memory_bytes=1024 * MEBIBYTE, disk_bytes=64 * MEBIBYTE, processes=128)
TIMEOUTS = RolloutTimeouts(install=20, sandbox=20, setup=10, agent=10, verifier=10, model_call=20)
IS_DONE = """
mkdir -p /logs/verifier
if [ "$(cat answer.txt 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
"""A verifier that trusts nobody: the answer, and nothing else, decides."""

SPEAKING = '''
import http.client, json, os, sys, urllib.parse

place = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def post(body, path="/chat/completions", key=None, **headers):
    """Status and text of the answer. The whole body is read."""
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    shown = "Bearer " + (os.environ["OPENAI_API_KEY"] if key is None else key)
    sent = {"Authorization": shown, "Content-Type": "application/json", **headers}
    connection.request("POST", place.path + path, json.dumps(body), sent)
    response = connection.getresponse()
    return response.status, response.read().decode()


def read(text):
    """The message that a stream adds up to, and its finish; or the error."""
    content, calls, finish = "", {}, None
    for line in text.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            return {"error": chunk["error"]}, None
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            content += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] += part.get("id") or ""
                call["name"] += (part.get("function") or {}).get("name") or ""
                call["arguments"] += (part.get("function") or {}).get("arguments") or ""
            finish = choice.get("finish_reason") or finish
    message = {"role": "assistant", "content": content}
    if calls:
        function = lambda call: {"name": call["name"], "arguments": call["arguments"]}
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": function(call)} for call in calls.values()
        ]
    return message, finish


def converse(most=20, tries=1, stream=True):
    """Let the model work: run each bash command that it calls for, until it stops or the endpoint fails."""
    import subprocess

    messages = [{"role": "user", "content": sys.stdin.read()}]
    for _ in range(most):
        body = {"model": os.environ["PADDOCK_MODEL"], "messages": messages, "tools": TOOLS, "stream": stream}
        for _ in range(tries):
            status, text = post(body)
            if stream and status == 200:
                message, _ = read(text)
            else:
                document = json.loads(text)
                message = document if "error" in document else document["choices"][0]["message"]
            if "error" not in message:
                break
        if "error" in message:
            print("gave up:", message)
            return 1
        messages.append(message)
        for call in message.get("tool_calls") or ():
            try:
                command = json.loads(call["function"]["arguments"])["command"]
                done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True)
                told = done.stdout + done.stderr
            except (ValueError, KeyError) as error:
                told = "no such call: " + repr(error)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
        if not message.get("tool_calls"):
            return 0
    return 0
'''
"""A small agent as source text: `converse` is the loop, `post` is one call."""

SOLVES = {"turns": [{"tool": "bash", "arguments": {"command": "echo 42 > answer.txt"}}, {"text": "Done."}]}


def run(work: Coroutine[Any, Any, ResultT], seconds: float = 40.0) -> ResultT:
    async def bounded() -> ResultT:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(bounded())


def shell(script: str) -> CommandAgent:
    return CommandAgent(shlex.join(["/bin/bash", "-c", script]))


def python(script: str) -> CommandAgent:
    return CommandAgent(shlex.join(["python3", "-c", script]))


def speaker(script: str = "sys.exit(converse())") -> CommandAgent:
    return python(f"{SPEAKING}\n{script}")


def a_task(verifier: str = IS_DONE, instruction: str = "Write 42 to answer.txt.", **changes: Any) -> Task:
    parts = {"id": "answer", "sandbox": LIMITS, "timeouts": TIMEOUTS, **changes}
    return Task(instruction=instruction, verifier=verifier, **parts)


async def roll(
    store: Store | Path, agent: CommandAgent, *, task: Task | None = None, model: Any = NOBODY_THERE, **options: Any
) -> RolloutRecord:
    """One rollout that is not tried again."""
    chosen = {"retries": 0, **options}
    return await run_rollout(task or a_task(), model=model, agent=agent, store=store, **chosen)


def rolled(store: Store | Path, agent: CommandAgent, **options: Any) -> RolloutRecord:
    return run(roll(store, agent, **options))


async def spoken(
    store: Store | Path, script: dict[str, Any], agent: CommandAgent | None = None, **options: Any
) -> tuple[RolloutRecord, ReplayServer]:
    """A rollout whose model plays a script behind a key, and the model with its log."""
    async with ReplayServer(script, api_key=UPSTREAM_KEY) as server:
        endpoint = Endpoint(server.url, "replay", api_key=UPSTREAM_KEY, engine="vllm")
        return await roll(store, agent or speaker(), model=endpoint, **options), server


def budget(**limits: Any) -> Budget:
    return Budget(**limits)


# -- what is left behind ------------------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    """All processes below `pid`, zombies left out."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    collected = list(parents.get(pid, ()))
    for child in collected:
        collected += parents.get(child, ())
    return collected


BEFORE: set[int] = set()
"""Processes that were there when the module began: servers that live as long as the whole run."""


def remember_children() -> None:
    BEFORE.update(children_of(os.getpid()))


def own_children() -> list[int]:
    """Processes that this module's tests have started and that still run."""
    return [pid for pid in children_of(os.getpid()) if pid not in BEFORE]


def working_in(folder: Path) -> list[str]:
    """Processes, whoever their parent is now, that were started in `folder` and have not left it."""
    collected = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(entry / "cwd")) == folder and int(entry.name) != os.getpid():
                state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                collected += [] if state in "ZX" else [f"{entry.name}: {(entry / 'cmdline').read_bytes()[:80]!r}"]
        except OSError:
            continue
    return collected


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
