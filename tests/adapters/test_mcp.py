"""What becomes of an MCP server's processes and secrets. The server is a few lines on standard input and output."""

import os
import sys
import time
from pathlib import Path

import pytest

from paddock import SyncClient
from paddock.client.mcp import stdio
from paddock.client.transports import memory
from paddock.errors import TargetError
from paddock.rollouts.loop.environment import EnvironmentSession
from paddock.store.outcome import Outcome
from paddock.targets import load_target
from rollouts.loop.fake_session import played, turns
from rollouts.played import run

SERVER = """
import json, subprocess, sys
def answer(request):
    if request["method"] == "initialize":
        return {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "spawner"}}
    if request["method"] == "tools/list":
        return {"tools": [{"name": "start", "description": "", "inputSchema": {"type": "object", "properties": {}}}]}
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    return {"content": [{"type": "text", "text": str(child.pid)}]}
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": answer(request)}), flush=True)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return f"{sys.executable} {file}"


def test_processes_that_a_server_left_end_with_its_session(target: str) -> None:
    make, _ = load_target(f"mcp:{target}")
    with SyncClient(make) as client:
        client.reset()
        pid = int(client.call_tool("start").value)
        assert Path(f"/proc/{pid}").exists()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}/exe").exists()


def test_values_given_to_a_server_are_known_as_secrets(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "hush-hush-123")
    make, _ = load_target(f"mcp:KEY=$MY_KEY {target}")
    assert make.secrets == ("hush-hush-123",)  # type: ignore[attr-defined]


def test_a_variable_that_is_not_set_is_reported(target: str) -> None:
    assert "NO_SUCH_KEY" not in os.environ
    with pytest.raises(TargetError, match="NO_SUCH_KEY is not set"):
        load_target(f"mcp:KEY=$NO_SUCH_KEY {target}")


HUNG = """
import json, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def answer(request):
    if request["method"] == "initialize":
        return {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "sleeper"}}
    if request["method"] == "tools/list":
        return {"tools": [{"name": "nap", "description": "", "inputSchema": {"type": "object", "properties": {}}}]}
    time.sleep(300)
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": answer(request)}), flush=True)
"""


def test_a_rollout_whose_tool_hangs_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "server.py").write_text(HUNG)
    make, _ = load_target(f"mcp:{sys.executable} {tmp_path / 'server.py'}")
    # A server that hangs is not given the time of one that ends by itself: this would take five minutes.
    monkeypatch.setattr(stdio, "EXIT_SECONDS", 150.0)
    monkeypatch.setattr(memory, "CLOSE_SECONDS", 300.0)
    scene = EnvironmentSession(make, "Take a nap.")
    record, _, store = run(played(tmp_path, scene, turns({"tool": "nap"}), agent_timeout=1.0))
    store.close()
    assert (record.outcome, record.error) == (Outcome.TIMEOUT, "the agent did not finish in time")
    assert "close failed" not in caplog.text
