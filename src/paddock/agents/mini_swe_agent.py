"""mini-swe-agent: one tool (`bash`), a short prompt, and a loop of a hundred lines.

Its own agent, prompts, tool and local environment run, started by `_mini_swe_agent_program.py`. The model class is
its OpenRouter one with another URL, so that the install needs no LiteLLM and nothing of its terminal interface and
its benchmarks: 25 MB instead of 520.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.agents.base import Agent, AgentRun, AgentTools, Assignment, Report, shell_write
from paddock.agents.headless import HeadlessRun, read_object
from paddock.agents.install import fetch_python_tool, program_text, tool_python
from paddock.limits import ANSWER_SECONDS
from paddock.sandbox.base import Command, Mount

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sandbox.base import Sandbox

FOLDER = PurePosixPath("/opt/mini-swe-agent")
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
"""What these parts of it import."""


class MiniSweAgent(Agent):
    name: ClassVar[str] = "mini-swe-agent"
    version: ClassVar[str] = "2.4.6"
    size_mb: ClassVar[int] = 35
    prompt_tokens: ClassVar[int] = 800
    live_events: ClassVar[bool] = True
    tools: ClassVar[AgentTools] = AgentTools(
        run=lambda command: ("bash", {"command": command}),
        write=lambda path, text: ("bash", {"command": shell_write(path, text)}),
        finish=("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    )

    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        folder = await fetch_python_tool("mini-swe-agent", self.version, PINS, log, timeout=timeout)
        return (Mount(folder, FOLDER), *tool_python().mounts)

    async def start(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        python = sandbox.runtime_python or tool_python().program
        arguments = [python, "-I", "-S", "-c", program_text("_mini_swe_agent_program"), str(FOLDER)]
        env = {
            "HOME": str(sandbox.home),
            "MSWEA_GLOBAL_CONFIG_DIR": str(sandbox.home / ".paddock" / "mini-swe-agent"),
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        }
        job_input = {
            "instruction": assignment.instruction,
            "url": f"{assignment.base_url}/chat/completions",
            "key": assignment.api_key,
            "model": assignment.model,
            "max_tokens": assignment.max_tokens,
            "timeout": ANSWER_SECONDS,
        }
        job = await sandbox.start(Command(arguments, cwd=sandbox.workdir, env=env, stdin=orjson.dumps(job_input)))
        return MiniSweAgentRun(job, assignment.instruction, report)


class MiniSweAgentRun(HeadlessRun):
    """Each event is a message that was added to the conversation, in chat form."""

    _count = 0

    def handle_event(self, event: dict[str, Any]) -> None:
        role, content = event.get("role"), event.get("content")
        if role == "assistant":
            self._handle_answer(event)
        elif role == "tool":
            self.end_tool(str(event.get("tool_call_id")), content, failed=event.get("returncode") not in (0, None))
        elif role == "exit":
            for call in self.open_tools:
                self.end_tool(call, content)
            if event.get("exit_status") != SUBMITTED:
                self.fail(f"{event.get('exit_status')}: {content}")

    def _handle_answer(self, event: dict[str, Any]) -> None:
        self._count += 1
        name = f"turn-{self._count}"
        self.add_text(name, event.get("reasoning_content") or event.get("reasoning"), kind="reasoning")
        self.add_text(name, event.get("content"))
        for call in event.get("tool_calls") or ():
            function = call.get("function") or {}
            arguments = read_object(str(function.get("arguments")).encode())
            self.start_tool(name, str(call.get("id")), function.get("name"), arguments)
