"""Environments of other ecosystems as targets: OpenEnv's classes, MCP servers, verifiers' tasksets.

Each runs as it is, under its own package, in its own virtual environment.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripts.peers import PEERS, peer_python

from adapters.served import serving
from paddock import SyncClient
from paddock.adapters.openenv import can_run_server, exec_in_venv
from paddock.errors import EnvironmentFailure, InvalidMessage, StepTimeout, TargetError, ToolFailure
from paddock.targets import load_target

from .processes import HERE, Server, quiet_environment
from .wire import request

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True)]

SERVERS = HERE / "servers"
HAS_VERIFIERS = (PEERS / "verifiers.ready").exists()


# -- OpenEnv ----------------------------------------------------------------------------------------

FOLDER = {
    "__init__.py": "",
    "openenv.yaml": "spec_version: 1\nname: counter_env\napp: server.app:app\nport: 8000\n",
    "server/__init__.py": "",
    # OpenEnv's own server refuses this one: a plain function does not say that many may live side by side.
    "server/app.py": f"""
import sys
sys.path.insert(0, {str(SERVERS)!r})
from openenv.core.env_server import create_app
from openenv_app import Add, CounterWithTasks, Total
class Counter(CounterWithTasks):
    def step(self, action, timeout_s=None, **kwargs):
        if action.amount == 99:
            raise RuntimeError("the counter is broken: password=hunter2")
        return super().step(action)
def make():
    return Counter()
app = create_app(make, Add, Total, env_name="counter_env", max_concurrent_envs=8)
""",
}


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An environment in a folder, as OpenEnv's are published."""
    python = peer_python("openenv")
    folder = tmp_path_factory.mktemp("envs") / "counter_env"
    for name, text in FOLDER.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    make, name = load_target(f"openenv:{folder}@{python}")
    assert name == "counter_env"
    yield make
    make.process.stop()  # type: ignore[attr-defined]


def test_a_wrong_action_is_refused_by_the_class_itself(counter: Any) -> None:
    with SyncClient(counter) as client:
        client.reset()
        with pytest.raises(InvalidMessage) as caught:
            client.step({"amount": -1})
        assert [problem["loc"] for problem in caught.value.data["errors"]] == [["amount"]]
        with pytest.raises(EnvironmentFailure, match="RuntimeError: the counter is broken") as failed:
            client.step({"amount": 99})
        assert "hunter2" not in str(failed.value)
        assert client.step({"amount": 4}).observation.total == 4


def test_a_process_that_dies_is_reported_and_replaced(counter: Any) -> None:
    with SyncClient(counter) as client:
        client.reset()
        before = counter.process.pid
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: not is_alive(before))
        with pytest.raises(EnvironmentFailure, match="process has ended"):
            client.step({"amount": 0})
        assert client.reset().observation.total == 0
        assert client.step({"amount": 3}).observation.total == 3
        assert counter.process.pid != before


def test_an_openenv_folder_plays_its_episodes_on_our_server(counter: Any) -> None:
    with serving(counter) as server, SyncClient(server.url) as client:
        assert client.reset(seed=1, episode_id="mine").observation["total"] == 0
        results = [client.step({"amount": amount}) for amount in (3, 4, 5)]
        assert [result.observation["total"] for result in results] == [3, 7, 12]
        assert (results[-1].reward, results[-1].done) == (5.0, True)
        assert client.state() == {"episode_id": "mine", "step_count": 3, "total": 12}
        schema = client.schema()
        assert schema["action"]["title"] == "Add"
        assert schema["observation"]["properties"]["total"]["type"] == "integer"
        tasks = request(server.url, "POST", "/counter/num_tasks", {"split": "train"})
        assert tasks.body == {"num_tasks": 3}


@contextmanager
def moved(place: str, *options: str) -> Iterator[tuple[str, list[bytes]]]:
    """A server of an OpenEnv environment, its address and its command line, under the interpreter of the peer."""
    target = f"openenv:{place}@{peer_python('openenv')}"
    command = [sys.executable, "-m", "paddock", "serve", target, "--port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=SERVERS)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        yield url, Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_the_whole_server_moves_to_the_interpreter_that_has_the_environment(counter: Any) -> None:
    folder = counter.process.name
    with moved(folder) as (url, words), SyncClient(url) as client:
        assert words[0].decode() == str(peer_python("openenv"))
        assert words.count(f"openenv:{folder}".encode()) == 1
        client.reset()
        assert client.step({"amount": 4}).observation["total"] == 4
        with pytest.raises(InvalidMessage):
            client.step({"amount": -1})


@pytest.mark.parametrize("options", [(), ("--isolation", "process"), ("--isolation", "process", "--workers", "2")])
def test_a_class_with_tools_needs_no_app_to_name_its_actions(options: tuple[str, ...]) -> None:
    with moved("openenv_kinds:Kinds", *options) as (url, _), SyncClient(url) as client:
        client.reset()
        assert client.call_tool("listed").value == [3, 1, 2]
        called = client.step({"type": "call_tool", "tool_name": "ratio", "arguments": {"a": 1, "b": 2}})
        assert called.observation["result"]["data"] == 0.5
        assert client.step({"metadata": {}}).observation["metadata"] == {"took": "Action"}


def test_an_interpreter_that_cannot_carry_a_server_is_left_alone() -> None:
    assert can_run_server(sys.executable, {**os.environ, "PADDOCK_IMPORT_PATHS": "/nowhere"}) is False
    assert can_run_server("/bin/false", dict(os.environ)) is False
    assert can_run_server("/no/such/python", dict(os.environ)) is False
    exec_in_venv("openenv:pkg.mod:Class@/bin/sh", ["serve", "openenv:pkg.mod:Class@/bin/sh"])
    exec_in_venv("counter", ["serve", "counter"])


def test_an_openenv_class_with_tools_offers_them() -> None:
    before = Path.cwd()
    os.chdir(SERVERS)
    try:
        make, name = load_target(f"openenv:openenv_app:Echo@{peer_python('openenv')}")
    finally:
        os.chdir(before)
    try:
        assert name == "echo"
        with SyncClient(make) as client:
            client.reset(episode_id="mine")
            assert [tool.name for tool in client.tools()] == ["echo_message", "echo_with_length"]
            assert client.call_tool("echo_with_length", message="hello").value == {"message": "hello", "length": 5}
            with pytest.raises(ToolFailure, match="Unknown tool"):
                client.call_tool("nope")
            assert client.state()["episode_id"] == "mine"
    finally:
        make.process.stop()  # type: ignore[attr-defined]


# -- MCP --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notes() -> Any:
    return notes_of("mcp1")


def notes_of(peer: str) -> Any:
    script = SERVERS / "stdio_notes.py"
    make, name = load_target(f"mcp:GREETING=hello FASTMCP_CHECK_FOR_UPDATES=off {peer_python(peer)} {script}")
    assert name == "notes"
    return make


@pytest.mark.parametrize("peer", ["mcp1", "mcp2", "fastmcp"])
def test_an_mcp_server_is_an_environment(peer: str) -> None:
    with SyncClient(notes_of(peer)) as client:
        client.reset()
        tools = {tool.name: tool for tool in client.tools()}
        assert tools["add_note"].input_schema["required"] == ["text"]
        assert "Keep a note" in tools["add_note"].description
        assert [client.call_tool("add_note", text=text).value for text in ("a", "b")] == [["a"], ["a", "b"]]
        with pytest.raises(ToolFailure, match="fail"):
            client.call_tool("fail")
        with pytest.raises(ToolFailure, match="text"):
            client.call_tool("add_note", words="a")
        with pytest.raises(ToolFailure, match="Unknown tool"):
            client.call_tool("nope")
        seen = client.step({"type": "call_tool", "tool_name": "add_note", "arguments": {"text": "c"}})
        assert seen.observation["result"]["data"] == ["a", "b", "c"]


def test_every_session_has_a_server_that_ends_with_it(notes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with SyncClient(notes) as one, SyncClient(notes) as two:
        pids = [client.call_tool("process").value for client in (one, two)] + [one.call_tool("start_another").value]
        assert len({*pids}) == 3
        assert all(is_alive(pid) for pid in pids)
        assert one.call_tool("variable", name="GREETING").value == "hello"
        assert one.call_tool("variable", name="OPENAI_API_KEY").value == "nothing"
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_server_that_dies_is_reported_and_replaced(notes: Any) -> None:
    with SyncClient(notes) as client:
        first = client.call_tool("process").value
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EnvironmentFailure, match="MCP server notes"):
            client.call_tool("process")
        client.reset()
        assert client.call_tool("process").value != first
        assert client.call_tool("add_note", text="e").value == ["e"]


def test_a_call_that_takes_too_long_is_given_up(notes: Any) -> None:
    with SyncClient(notes) as client:
        client.reset()
        with pytest.raises(StepTimeout):
            client.step({"type": "call_tool", "tool_name": "sleep", "arguments": {"seconds": 60}}, timeout=0.3)


def test_an_mcp_server_over_http_is_an_environment_too(fastmcp_echo: Server) -> None:
    make, _ = load_target(f"mcp+{fastmcp_echo.url}/mcp")
    with SyncClient(make) as client:
        client.reset()
        assert client.call_tool("echo_with_length", message="hello").value == {"message": "hello", "length": 5}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("mcp:/no/such/program", "cannot be started"),
        ("mcp:true", "MCP server true"),
        ("mcp:'oops", "not a command"),
        ("mcp:A=b", "names no program"),
        ("mcp+http://127.0.0.1:1/mcp", "127.0.0.1:1"),
    ],
)
def test_what_is_no_mcp_server_is_reported(target: str, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        load_target(target)


# -- verifiers --------------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_VERIFIERS, reason="python scripts/peers.py verifiers builds what this needs")
def test_a_taskset_of_verifiers_gives_prompt_tools_and_reward() -> None:
    make, name = load_target(f"verifiers:{SERVERS / 'sums.py'}@{PEERS / 'verifiers'}")
    try:
        assert name == "sums"
        with SyncClient(make) as client:
            visible = client.reset(index=1).observation["messages"]
            assert [message["content"] for message in visible] == ["Add.", "What is 1 + 2?"]
            assert [tool.name for tool in client.tools()] == ["add", "submit_answer"]
            assert client.call_tool("add", a=1, b=2).value == {"result": 3}
            ended = client.step({"type": "call_tool", "tool_name": "submit_answer", "arguments": {"answer": "3"}})
            assert (ended.reward, ended.done) == (1.0, True)
            assert ended.metadata == {"rewards": {"right": 1.0}, "metrics": {"calls": 1.0}}
            client.reset(index=2)
            ended = client.step({"type": "call_tool", "tool_name": "submit_answer", "arguments": {"answer": "3"}})
            assert (ended.reward, ended.done) == (0.0, True)
    finally:
        make.process.stop()  # type: ignore[attr-defined]


# -- the loop, on all of them -----------------------------------------------------------------------


def rolled(folder: Path, env: str, *script: dict[str, Any]) -> dict[str, Any]:
    """What `paddock rollout --agent loop` prints about a rollout with a model that plays the script."""
    played = folder / "script.json"
    played.write_text(json.dumps({"turns": list(script)}))
    command = [sys.executable, "-m", "paddock", "rollout", "--prompt", "Do it.", "--agent", "loop", "--env", env]
    options = ["--model", f"replay:{played}", "--store", str(folder / "store"), "--json"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=60, env=quiet_environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_the_loop_calls_the_tools_of_an_mcp_server(tmp_path: Path) -> None:
    env = f"mcp:{peer_python('mcp1')} {SERVERS / 'stdio_notes.py'}"
    calls = [{"tool": "add_note", "arguments": {"text": "milk"}}, {"text": "Noted."}]
    summary = rolled(tmp_path, env, *calls)
    assert (summary["outcome"], summary["reward"], summary["trainable_calls"]) == ("ok", None, 2)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
