"""The main job, from nothing: run it with `make demo`.

A real coding agent solves a task in a real sandbox. The model is a replay, so that no GPU is needed;
the last part asks a small real one, on this machine, for real tokens and logprobs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from rich.console import Console

from paddock.models import open_model
from paddock.rollouts import Budget, Store, load_tasks, run_rollout
from paddock.tasks.shipped import replay_file

if TYPE_CHECKING:
    from paddock.capture.trace import Call
    from paddock.rollouts import RolloutRecord
    from paddock.rollouts.rollout import Rollout

console = Console(highlight=False)
TASK = "fix-test"


async def solve(folder: Path) -> RolloutRecord:
    """One rollout: OpenCode in a bwrap sandbox, against the replay model."""
    (task,) = load_tasks(TASK)
    console.print(f"[bold cyan]OpenCode works on the task {task.id!r}, in a sandbox without a network[/]")
    seen: set[str] = set()

    def show(rollout: Rollout) -> None:
        record = rollout.record
        line = f"{record.stage}, {record.call_count} model calls" if record.stage == "agent" else record.stage
        if line not in seen:
            seen.add(line)
            console.print(f"  {line}")

    model = f"replay:{replay_file()}"
    return await run_rollout(task, model=model, store=folder, on_change=show, log=console.print, budget=Budget())


def tell(record: RolloutRecord, calls: list[Call]) -> None:
    console.print("\n[bold cyan]What was captured[/]")
    for call in calls:
        tools = [tool["function"]["name"] for tool in call.message.get("tool_calls") or []]
        logprob = sum(call.logprobs) / len(call.logprobs) if call.logprobs else float("nan")
        console.print(
            f"  {call.id}: {len(call.prompt_token_ids)} prompt tokens, {len(call.completion_token_ids)} sampled, "
            f"mean logprob {logprob:.2f}, {' '.join(tools) or call.finish_reason}"
        )
    console.print(f"  the verifier, in a sandbox of its own, says: {record.verifier_stdout.strip()}", soft_wrap=True)
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in record.stages.items())
    console.print(f"  [bold]outcome {record.outcome}, reward {record.reward}[/] ({stages})", soft_wrap=True)


async def ask_a_real_model() -> None:
    console.print("\n[bold cyan]One call to a real model on this machine (SmolLM2, 135M)[/]")
    question = {"role": "user", "content": "Name one colour."}
    body = {"messages": [question], "max_tokens": 8, "logprobs": True, "top_logprobs": 1, "temperature": 0}
    async with open_model("local", log=console.print) as endpoint, aiohttp.ClientSession() as session:
        url = f"{endpoint.url}/chat/completions"
        async with session.post(url, json={"model": endpoint.name, **body}) as answer:
            choice = (await answer.json())["choices"][0]
    for token in choice["logprobs"]["content"]:
        console.print(f"  {token['id']:>6}  {token['token']!r:<12} logprob {token['logprob']:.4f}")


async def main() -> int:
    folder = Path(tempfile.gettempdir()) / f"paddock-demo-{os.getuid()}"
    record = await solve(folder)
    store = Store.open(folder, read_only=True)
    try:
        tell(record, store.calls(record.rollout_id))
    finally:
        store.close()
    await ask_a_real_model()
    paddock = Path(sys.executable).parent / "paddock"
    console.print("\n[bold green]Look closer[/]")
    console.print(f"  {paddock} trace show {record.rollout_id} --store {folder}", soft_wrap=True)
    console.print(f"  {paddock} view --store {folder}      # the same as a web page", soft_wrap=True)
    console.print(f"  {paddock} rollout shipped --model demo -n 2", soft_wrap=True)
    console.print("  docs/tutorial.md goes on from here, to your own environment, task and agent")
    return 0 if record.outcome == "ok" and record.reward == 1.0 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
