"""Records the store again: `PYTHONPATH=tests python -m recorded [FOLDER]` leaves it in FOLDER too."""

from __future__ import annotations

import asyncio
import shlex
import sqlite3
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import zstandard

from paddock.agents.command import CommandAgent
from paddock.limits import Budget, RolloutTimeouts
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts import Task
from paddock.rollouts.api import run_batch
from paddock.store import Owner, Store
from recorded import FILE

AGENT_PROGRAM = (Path(__file__).parent / "agent.py").read_text()
TIMEOUTS = RolloutTimeouts(install=20, sandbox=20, setup=10, agent=20, verifier=20, model_call=20)
CHECK = """
mkdir -p /logs/verifier
if [ "$(cat answer.txt 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
PARTS = """
mkdir -p /logs/verifier
echo checking; ls -l
echo '{"reward": 0.75, "style": 0.5, "tests": 1.0}' > /logs/verifier/reward.json
"""
HOSTILE = """<script>document.title = "owned"; fetch("/web/api/about")</script><style>body { display: none }</style>
<img src=x onerror="document.title = 'owned'"><a href="javascript:alert(1)">a link</a>
</script><!-- --><svg onload=alert(1)></svg> \\u001b[31mred\\u001b[0m \\u202egnitirw\\u202c {{7*7}} ${7*7}
"""


def write(text: str) -> dict[str, Any]:
    return {"tool": "write", "arguments": {"filePath": "answer.txt", "content": text}}


def bash(command: str) -> dict[str, Any]:
    return {"tool": "bash", "arguments": {"command": command}}


SOLVED = [
    {**write("41"), "thinking": "I shall write the number first, and look at it afterwards."},
    {"tool": "edit", "arguments": {"filePath": "answer.txt", "oldString": "41", "newString": "42"}},
    bash("cat answer.txt; ls -la"),
    {"text": "The answer is in answer.txt."},
]
SCRIPT: dict[str, Any] = {
    "model": "replay",
    "tasks": [
        {"when": "a haiku", "turns": [{"text": "An old silent pond\nA frog jumps into the pond\nSplash!"}]},
        {"when": "hostile", "turns": [bash("printf '%b' \"$(cat page.txt)\""), {"text": HOSTILE}]},
        {"when": "wrongly", "turns": [write("7"), {"text": "I believe that it is 7."}]},
        {
            "when": "with help",
            "turns": [
                {"tool": "task", "arguments": {"prompt": "Find out what a haiku is: write a haiku."}},
                write("42"),
                {"text": "The helper wrote a poem, and the answer stands."},
            ],
        },
        {"when": "two ways", "turns": [bash("echo one"), write("42"), {"text": "Done, one behaviour or the other."}]},
        {"when": "", "turns": SOLVED},
    ],
    "faults": [{"when": "try hard", "turn": 0, "status": 500}, {"when": "no luck", "status": 400, "times": 50}],
}
INSTRUCTIONS = {
    "solve": "Write 42 to answer.txt.",
    "wrong": "Write 42 to answer.txt, wrongly.",
    "branch": "Write 42 to answer.txt in two ways.",
    "subagent": "Write 42 to answer.txt with help.",
    "compact": "Write 42 to answer.txt, and keep it short.",
    "retry": "Write 42 to answer.txt, and try hard.",
    "drift": "Write 42 to answer.txt from memory.",
    "image": "Look at the picture and write 42 to answer.txt.",
    "hostile": "Show the hostile page <script>alert('task')</script>.",
    "haiku": "Write a haiku.",
    "unlucky": "Write 42 to answer.txt with no luck.",
}


def make_task(name: str, verifier: str = CHECK, **changes: Any) -> Task:
    files = {"README.md": b"# A small task\n\nWrite the answer.\n", "page.txt": HOSTILE.encode()}
    options = {"timeouts": TIMEOUTS, **changes}
    return Task(id=name, instruction=INSTRUCTIONS[name], verifier=verifier, files=files, **options)


def agent(behaviour: str) -> CommandAgent:
    if behaviour == "missing":
        return CommandAgent("no-such-program")
    return CommandAgent(shlex.join(["python3", "-c", AGENT_PROGRAM, behaviour]))


async def record(folder: Path) -> None:
    with Store.open(folder) as store:
        async with ReplayServer(SCRIPT) as server, ReplayServer({**SCRIPT, "engine": "text"}) as plain:
            endpoint = Endpoint(server.url, "replay", engine="vllm")

            async def run(task: Task, behaviour: str, **options: Any) -> None:
                settings: dict[str, Any] = {"model": endpoint, "retries": 0, **options}
                result = await run_batch([task], agent=agent(behaviour), store=store, **settings)
                for record in result.records:
                    line = f"{record.task_id:10} {behaviour:9} {record.outcome} {record.reward} {record.call_count}"
                    print(line, file=sys.stderr)

            await run(make_task("solve"), "solve", n=3, parallel=2, batch_id="b-first")
            await run(make_task("wrong"), "solve", n=2, parallel=2, batch_id="b-first")
            await run(make_task("solve", PARTS), "solve", batch_id="b-second")
            for behaviour in ("branch", "subagent", "compact", "retry", "drift", "image"):
                await run(make_task(behaviour), behaviour)
            await run(make_task("hostile"), "solve")
            await run(make_task("haiku", ""), "solve")
            await run(make_task("solve", "exit 3"), "solve")
            await run(make_task("solve"), "missing")
            await run(make_task("unlucky"), "solve")
            await run(make_task("solve", timeouts=replace(TIMEOUTS, agent=1.5)), "sleep")
            await run(make_task("solve"), "solve", budget=Budget(calls=2))
            await run(make_task("solve"), "solve", model=Endpoint(plain.url, "plain", engine="openai"))
        for name in (each.rollout_id for each in store.list(task_id="drift")):
            add_alternatives(store, name)


def add_alternatives(store: Store, rollout_id: str) -> None:
    """Tokens that the model could have sampled instead, which a script has none of: made up, and always the same."""
    for call in store.calls(rollout_id):
        pieces = sorted(set(call.tokens))
        call.top_logprobs = [
            {text: value, pieces[at % len(pieces)]: value - 0.5 - at % 3, "…": value - 2.5}
            for at, (text, value) in enumerate(zip(call.tokens, call.logprobs, strict=True))
        ]
        store.save_call(rollout_id, call)


def remove_machine(file: Path) -> None:
    """Remove which process on which machine recorded it."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        owner = Owner(1, 1, "recorded", "recorded").to_text()
        connection.execute("UPDATE rollouts SET owner = ?", (owner,))
        connection.execute("DELETE FROM sandboxes")
        connection.execute("VACUUM")


def pack(folder: Path) -> None:
    """The store as one compressed file, without what was deleted from it."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy.db"
        connection = sqlite3.connect(folder / "store.db")
        connection.execute("VACUUM INTO ?", (str(copy),))
        connection.close()
        remove_machine(copy)
        FILE.write_bytes(zstandard.ZstdCompressor(level=19).compress(copy.read_bytes()))
    print(f"{FILE}: {FILE.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        asyncio.run(record(target))
        pack(target)
