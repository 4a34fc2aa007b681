"""`command:PROGRAM …`: any program that reads the model's base URL and key from its environment.

The program runs in the work folder. It gets the instruction on standard input and in the file that
`PADDOCK_INSTRUCTION_FILE` names, and the model in `OPENAI_BASE_URL` (and `OPENAI_API_BASE`), `OPENAI_API_KEY` and
`PADDOCK_MODEL`. If the first word is a file on the host, its folder is mounted read-only as `/opt/agent`. After an
interpreter (`python3 -I ./agent.py`), so is the first word that begins with `./` or `../`.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Self

import orjson

from paddock.agents.base import Agent, AgentExit, AgentRun, Assignment, Report
from paddock.agents.equipment import mcp_entries
from paddock.errors import ConfigError
from paddock.sandbox.base import Command, Mount

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sandbox.base import Job, Sandbox
    from paddock.tasks.settings import McpTransport

FOLDER = PurePosixPath("/opt/agent")
SDK_ANSWER_SECONDS = 600.0
"""How long OpenAI's and Anthropic's SDKs wait for an answer. What the program waits is not known."""


class CommandAgent(Agent):
    name: ClassVar[str] = "command"
    requires_model_call: ClassVar[bool] = False
    answer_timeout: ClassVar[float] = SDK_ANSWER_SECONDS
    mcp_transports: ClassVar[tuple[McpTransport, ...]] = ("stdio", "sse", "streamable-http")
    supports_skills: ClassVar[bool] = True

    def __init__(self, line: str) -> None:
        super().__init__()
        self._argument = line
        try:
            self.words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"agent 'command:{line}' cannot be read: {error}", hint="close its quotes") from error
        if not self.words:
            raise ConfigError("agent 'command' needs a program", hint="write --agent 'command:./agent.py --fast'")
        self.host_file: Path | None = None
        for position, word in enumerate(self.words):
            is_program = position == 0
            if is_program or word.startswith(("./", "../")):
                self.host_file = find_host_file(word, is_program=is_program)
            if self.host_file is not None:
                self.words[position] = str(FOLDER / self.host_file.name)
                break

    @classmethod
    def from_spec(cls, argument: str, driver: str) -> Self:
        return cls(argument)

    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        return () if self.host_file is None else (Mount(self.host_file.parent, FOLDER),)

    async def start(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        instruction = sandbox.home / ".paddock" / "instruction.md"
        text = assignment.instruction.encode()
        await sandbox.write(instruction, text)
        env = {
            "OPENAI_BASE_URL": assignment.base_url,
            "OPENAI_API_BASE": assignment.base_url,
            "OPENAI_API_KEY": assignment.api_key,
            "PADDOCK_MODEL": assignment.model,
            "PADDOCK_INSTRUCTION_FILE": str(instruction),
        }
        if assignment.mcp_servers:
            servers = sandbox.home / ".paddock" / "mcp.json"
            await sandbox.write(servers, orjson.dumps({"mcpServers": mcp_entries(assignment.mcp_servers)}))
            env["PADDOCK_MCP_FILE"] = str(servers)
        if assignment.skills_dir:
            env["PADDOCK_SKILLS_DIR"] = assignment.skills_dir
        words = [sandbox.localize(word) for word in self.words]
        job = await sandbox.start(Command(words, cwd=sandbox.workdir, env=env, stdin=text))
        return CommandRun(job)

    @property
    def spec(self) -> str:
        return f"{self.name}:{self._argument}"

    def describe(self) -> dict[str, Any]:
        return {"agent": self.name, "command": self.words}


class CommandRun(AgentRun):
    def __init__(self, job: Job) -> None:
        self._job = job

    async def wait(self, timeout: float) -> AgentExit:
        done = await self._job.wait(timeout)
        return AgentExit(done.exit_code, timed_out=done.timed_out)

    async def messages(self) -> list[dict[str, Any]]:
        return []

    async def abort(self) -> None:
        await self._job.kill()

    def log_tail(self, count: int = 4096) -> str:
        return self._job.tail(count)


def find_host_file(word: str, *, is_program: bool) -> Path | None:
    """The file on the host that a path names; None for a bare name, which is looked up inside the sandbox.

    Raises ConfigError for a program that cannot be executed."""
    path = Path(word)
    if "/" not in word or not path.is_file() or path.is_relative_to("/usr") or path.is_relative_to("/bin"):
        return None
    if is_program and not os.access(path, os.X_OK):
        raise ConfigError(f"{word} cannot be executed", hint=f"chmod +x {word}, or name its interpreter first")
    return path.resolve()
