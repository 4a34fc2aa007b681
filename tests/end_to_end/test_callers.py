"""Real OpenCode, whose shell makes calls of its own with the agent's key."""

import asyncio
import json
from pathlib import Path

import pytest

from paddock.store import Store
from rollouts.played import needs_bwrap

from .test_rollouts import paddock
from .test_vendor_agents import make_task

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True), needs_bwrap]

FIND_KEY = "K=$(grep -rahoE 'paddock-[A-Za-z0-9_-]{32}' ~ /proc/[0-9]*/environ 2>/dev/null | head -1)"
BODY = json.dumps({"messages": [{"role": "user", "content": "stolen"}]})
CURL = f"{FIND_KEY}; curl -s -H \"Authorization: Bearer $K\" -d '{BODY}' http://127.0.0.1:7000/v1/chat/completions"
NESTED = "timeout 30 /proc/$PPID/exe run nested < /dev/null; echo 42 > answer.txt"


def test_what_opencodes_shell_asks_is_not_trained_on(tmp_path: Path) -> None:
    turns = [{"tool": "bash", "arguments": {"command": line, "description": "x"}} for line in (CURL, NESTED)]
    script = tmp_path / "script.json"
    tasks = [{"when": "stolen", "turns": [{"text": "Taken."}]}, {"when": "nested", "turns": [{"text": "Within."}]}]
    script.write_text(json.dumps({"tasks": [*tasks, {"when": "", "turns": [*turns, {"text": "Done."}]}]}))
    words = ("rollout", str(make_task(tmp_path / "task")), "--agent", "opencode", "--model", f"replay:{script}")
    ran = asyncio.run(paddock(tmp_path / "store", *words, "--retries", "0"))
    (record,) = ran.lines
    assert (record["outcome"], record["reward"]) == ("ok", 1.0), ran.words
    with Store.open(tmp_path / "store", read_only=True) as store:
        calls = store.calls(record["rollout_id"])
    reply = [(str(call.message.get("content") or ""), str(call.caller), call.trainable) for call in calls]
    assert ("Taken.", "foreign", False) in reply
    assert [each for each in reply if each[0] == "Within."] in ([], [("Within.", "foreign", False)])
    assert ("Done.", "agent", True) in reply
    assert [call.trainable for call in calls if call.caller == "agent"] == [True, True, True]
