"""Forks and resuming as a user runs them: real agents with sub-agents, environments, and a process that is killed."""

import asyncio
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.forks import find_problems, make_script, read_folder, recorded

from paddock.capture.trace import Role
from paddock.models.replay import ReplayServer
from paddock.store import Store
from rollouts.played import IS_DONE, SPEAKING, needs_bwrap, own_children, remember_children, run

from .processes import quiet_environment
from .test_rollouts import paddock

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(150, func_only=True), needs_bwrap]

BOX = """
import time
from paddock import ToolEnvironment, tool

class Box(ToolEnvironment):
    deterministic = True

    def reset(self, *, seed=None, episode_id=None):
        self.value = seed or 0
        return super().reset(seed=seed, episode_id=episode_id)

    @tool
    def add(self, amount: int) -> str:
        self.value += amount
        return f"{self.value} at {time.time()}"
"""
ADDS = [{"tool": "add", "arguments": {"amount": amount}} for amount in (1, 2, 3)]
COMMANDS = ("date", "echo $RANDOM", "echo 42 > answer.txt")
SOLVES: dict[str, Any] = {
    "turns": [
        *({"tool": "bash", "arguments": {"command": command}} for command in COMMANDS),
        {"text": "Done."},
    ],
    "faults": [{"turn": 2, "hang": 60, "times": 1}],
}


@pytest.mark.parametrize("agent", ["claude-code"])
def test_a_fork_repeats_sub_agents_that_run_at_once(agent: str) -> None:
    async def play() -> None:
        async with recorded(agent, make_script(agent, "helpers")) as one:
            calls = one.store.calls(one.record.rollout_id)
            assert Role.SUBAGENT in {call.role for call in calls}
            folder = read_folder(one, one.record)
            for at in (len(calls) - 2, len(calls)):
                (record,) = await one.forked(at)
                assert find_problems(one, record, at, folder) == []
                assert record.fork["fidelity"]["state"] in ("equal", "tool_output")

    remember_children()
    run(play(), 120)
    assert own_children() == []


def test_the_agent_loop_is_forked_in_its_recorded_environment(tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text(BOX)
    (tmp_path / "script.json").write_text(json.dumps({"turns": [*ADDS, {"text": "Done."}]}))
    (tmp_path / "edit.json").write_text(
        json.dumps({"answer": {"tool_calls": [{"name": "add", "arguments": ADDS[2]["arguments"]}]}})
    )
    place = ("--agent", "loop", "--env", f"{tmp_path}/box.py:Box", "--seed", "5")

    async def play() -> None:
        first = await paddock(
            tmp_path / "store", "rollout", "--prompt", "Add.", *place, "--model", f"replay:{tmp_path}/script.json"
        )
        source = first.lines[0]["rollout_id"]
        edit = ("--edit", str(tmp_path / "edit.json"))
        forks = await paddock(tmp_path / "store", "rollout", "fork", source, "--at", "c1", "-n", "2", *edit)
        assert forks.code == 0, forks.words
        with Store.open(tmp_path / "store", read_only=True) as store:
            for each in forks.lines:
                assert each["fork"]["fidelity"]["state"] == "equal"
                record = store.get(each["rollout_id"])
                assert record is not None
                assert record.config["seed"] == 5
                results = [
                    message["content"].split()[0] for message in record.transcript if message["role"] == "tool"
                ]
                assert results == ["6", "9", "12"]

    run(play(), 60)


def test_a_killed_batch_continues_and_samples_no_recorded_call_again(tmp_path: Path) -> None:
    task = tmp_path / "task"
    (task / "tests").mkdir(parents=True)
    (task / "instruction.md").write_text("Write 42 to answer.txt.")
    (task / "tests" / "test.sh").write_text(IS_DONE)
    program = shlex.join(["python3", "-c", f"{SPEAKING}\nsys.exit(converse())"])
    words = ("rollout", str(task), "--agent", f"command:{program}", "--retries", "0", "--model-name", "replay")

    async def play() -> None:
        async with ReplayServer(SOLVES) as server:
            options = ("--model", server.url, "--store", str(tmp_path / "store"), "--batch-id", "b-killed")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "paddock", *words, *options), env=quiet_environment()
            )
            while len(server.log) < 3:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        async with ReplayServer({**SOLVES, "faults": []}) as server:
            again = await paddock(tmp_path / "store", *words, "--model", server.url, "--resume", "b-killed")
            assert (again.code, again.lines[0]["reward"]) == (0, 1.0), again.words
            assert [served.turn for served in server.log] == [2, 3]

    run(play(), 90)
