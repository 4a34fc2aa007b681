"""`command:PROGRAM …`: any program that takes the model's base URL and key from its environment.

The program runs in the work folder. It finds the instruction on standard input and in the file that
`PADDOCK_INSTRUCTION_FILE` names; the model in `OPENAI_BASE_URL` (and `OPENAI_API_BASE`),
`OPENAI_API_KEY` and `PADDOCK_MODEL`. A first word that is a file on the host is taken inside with
its folder, read-only, as `/opt/agent`.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

from paddock.errors import ConfigError
from paddock.rollouts.agents.base import Agent, AgentExit, AgentRun, Assignment, Installed, Report
from paddock.rollouts.sandbox.base import Command, Mount

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.rollouts.sandbox.base import Job, Sandbox

INSIDE = PurePosixPath("/opt/agent")


class CommandAgent(Agent):
    name: ClassVar[str] = "command"
    must_call: ClassVar[bool] = False

    def __init__(self, line: str) -> None:
        super().__init__()
        try:
            self.words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"agent 'command:{line}' cannot be read: {error}", hint="close its quotes") from error
        if not self.words:
            raise ConfigError("agent 'command' needs a program", hint="write --agent 'command:./agent.py --fast'")
        self.host_file = self._on_host(self.words[0])
        if self.host_file is not None:
            self.words[0] = str(INSIDE / self.host_file.name)

    @staticmethod
    def _on_host(word: str) -> Path | None:
        """The file a user means by a path; a bare name is looked for inside the sandbox only."""
        path = Path(word)
        if "/" not in word or not path.is_file() or path.is_relative_to("/usr") or path.is_relative_to("/bin"):
            return None
        if not os.access(path, os.X_OK):
            raise ConfigError(f"{word} cannot be executed", hint=f"chmod +x {word}, or name its interpreter first")
        return path.resolve()

    async def install(self, log: Callable[[str], None], *, timeout: float) -> Installed:
        mounts = () if self.host_file is None else (Mount(self.host_file.parent, INSIDE),)
        return Installed(version="", mounts=mounts)

    async def begin(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
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
        words = [sandbox.localize(word) for word in self.words]
        job = await sandbox.start(Command(words, cwd=sandbox.workdir, env=env, stdin=text))
        return CommandRun(job)

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
