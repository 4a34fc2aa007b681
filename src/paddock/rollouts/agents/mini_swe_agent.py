"""mini-swe-agent: one tool (`bash`), a short prompt, and a loop of a hundred lines.

It is its own agent, prompts, tool and local environment that run, started by `mini_swe_agent_inside.py`. Its model
classes are LiteLLM's and a few of services'; of the latter we take one and give it our address, so that the install
needs neither LiteLLM nor what its terminal interface and its benchmarks need: 25 MB instead of 520.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.rollouts.agents.base import Agent, AgentRun, Assignment, Installed, Report
from paddock.rollouts.agents.headless import HeadlessRun, read_object
from paddock.rollouts.agents.install import Said, fetch_python_tool, program_text, tool_python
from paddock.rollouts.sandbox.base import Command, Mount

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.rollouts.sandbox.base import Sandbox

INSIDE = PurePosixPath("/opt/mini-swe-agent")
SUBMITTED = "Submitted"
PINS = (
    "annotated-types==0.8.0",
    "certifi==2026.10.18",
    "charset-normalizer==3.5.2",
    "idna==3.20",
    "jinja2==3.1.6",
    "markdown-it-py==4.3.0",
    "markupsafe==3.0.4",
    "mdurl==0.1.2",
    "platformdirs==4.14.5",
    "pydantic-core==2.50.4",
    "pydantic==2.14.3",
    "pygments==2.21.0",
    "python-dotenv==1.2.4",
    "pyyaml==6.0.3",
    "requests==2.34.2",
    "rich==15.0.0",
    "tenacity==9.2.1",
    "typing-extensions==4.16.0",
    "typing-inspection==0.4.5",
    "urllib3==2.8.0",
)
"""What it imports on the way that we go through it."""


class MiniSweAgent(Agent):
    name: ClassVar[str] = "mini-swe-agent"
    version: ClassVar[str] = "2.4.6"
    size_mb: ClassVar[int] = 35
    live_events: ClassVar[bool] = True

    async def install(self, log: Callable[[str], None], *, timeout: float) -> Installed:
        said = Said(log)
        folder = await fetch_python_tool("mini-swe-agent", self.version, PINS, said, timeout=timeout)
        return Installed(self.version, (Mount(folder, INSIDE), *tool_python().mounts), str(said))

    async def begin(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        words = [tool_python().program, "-I", "-S", "-c", program_text("mini_swe_agent_inside"), str(INSIDE)]
        env = {
            "HOME": str(sandbox.home),
            "MSWEA_GLOBAL_CONFIG_DIR": str(sandbox.home / ".paddock" / "mini-swe-agent"),
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        }
        given = {
            "instruction": assignment.instruction,
            "url": f"{assignment.base_url}/chat/completions",
            "key": assignment.api_key,
            "model": assignment.model,
            "max_tokens": assignment.max_tokens,
        }
        job = await sandbox.start(Command(words, cwd=sandbox.workdir, env=env, stdin=orjson.dumps(given)))
        return MiniSweAgentRun(job, assignment.instruction, report)


class MiniSweAgentRun(HeadlessRun):
    """Each event is a message that was added to the conversation, in chat form."""

    _count = 0

    def take(self, event: dict[str, Any]) -> None:
        role, content = event.get("role"), event.get("content")
        if role == "assistant":
            self._assistant(event)
        elif role == "tool":
            self.end_tool(str(event.get("tool_call_id")), content, failed=event.get("returncode") not in (0, None))
        elif role == "exit":
            for call in self.open_tools:
                self.end_tool(call, content)
            if event.get("exit_status") != SUBMITTED:
                self.fail(f"{event.get('exit_status')}: {content}")

    def _assistant(self, event: dict[str, Any]) -> None:
        self._count += 1
        name = f"turn-{self._count}"
        self.add_text(name, event.get("reasoning_content") or event.get("reasoning"), kind="reasoning")
        self.add_text(name, event.get("content"))
        for call in event.get("tool_calls") or ():
            function = call.get("function") or {}
            given = read_object(str(function.get("arguments")).encode())
            self.start_tool(name, str(call.get("id")), function.get("name"), given)
