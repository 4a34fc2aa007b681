"""A complete driver for a small agent program: one tool, `bash`, and nothing to install but Python.

Copy it to `src/paddock/agents/tiny.py` to make it `--agent tiny`, or pass `Tiny()` as `agent` of a `RunConfig`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from paddock.agents.base import Agent, AgentRun, AgentTools, Assignment, Report
from paddock.agents.headless import HeadlessRun, read_object
from paddock.agents.install import tool_python
from paddock.sandbox.base import Command

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sandbox.base import Mount, Sandbox

PROGRAM = """
import json, os, subprocess, sys, urllib.request
parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "bash", "parameters": parameters}}]
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
messages = [{"role": "user", "content": sys.stdin.read()}]
while messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        answer = json.load(response)["choices"][0]["message"]
    messages.append(answer)
    print(json.dumps(answer), flush=True)
    for call in answer.get("tool_calls") or ():
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
        print(json.dumps(messages[-1]), flush=True)
"""


class Tiny(Agent):
    name: ClassVar[str] = "tiny"
    version: ClassVar[str] = "1"
    live_events: ClassVar[bool] = True
    tools: ClassVar[AgentTools] = AgentTools(
        run=lambda command: ("bash", {"command": command}),
        write=lambda path, text: ("bash", {"command": f"printf %s '{text}' > {path}"}),
    )

    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        return tool_python().mounts

    async def start(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        env = {"OPENAI_BASE_URL": assignment.base_url, "OPENAI_API_KEY": assignment.api_key}
        arguments = [tool_python().program, "-I", "-c", PROGRAM]
        stdin = assignment.instruction.encode()
        job = await sandbox.start(Command(arguments, cwd=sandbox.workdir, env=env, stdin=stdin))
        return TinyRun(job, assignment.instruction, report)


class TinyRun(HeadlessRun):
    """Each event is a message in chat form."""

    def handle_event(self, event: dict[str, Any]) -> None:
        if event.get("role") == "tool":
            self.end_tool(event["tool_call_id"], event["content"])
        elif event.get("role") == "assistant":
            self.add_text("", event.get("content"))
            for call in event.get("tool_calls") or ():
                function = call["function"]
                self.start_tool("", call["id"], function["name"], read_object(function["arguments"].encode()))
