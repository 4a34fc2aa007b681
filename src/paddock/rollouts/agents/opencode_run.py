"""`opencode run`: one instruction on standard input, one JSON event a line on standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.agents.headless import HeadlessRun
from paddock.rollouts.agents.opencode import command_line
from paddock.rollouts.sandbox.base import Command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.rollouts.agents.base import Assignment, Report
    from paddock.rollouts.sandbox.base import Sandbox

ARGUMENTS = ("run", "--format", "json", "--title", "rollout")


async def start_run(sandbox: Sandbox, assignment: Assignment, env: Mapping[str, str], report: Report) -> OpenCodeRun:
    # As an argument the instruction would reach the model in quotes; on standard input it arrives as it is.
    stdin = assignment.instruction.encode()
    job = await sandbox.start(Command(command_line(*ARGUMENTS), cwd=sandbox.workdir, env=env, stdin=stdin))
    return OpenCodeRun(job, assignment.instruction, report)


class OpenCodeRun(HeadlessRun):
    """The program prints whole parts, in the form that the transcript has anyway."""

    def take(self, event: dict[str, Any]) -> None:
        self.session = event.get("sessionID") or self.session
        if event.get("type") == "error":
            self.fail(error_text(event.get("error")))
        elif isinstance(part := event.get("part"), dict):
            self.add_part(str(part.get("messageID") or ""), part)


def error_text(error: Any) -> str:
    """OpenCode's error object in one line."""
    if not isinstance(error, dict):
        return str(error)
    data = error.get("data")
    message = data.get("message") if isinstance(data, dict) else None
    return f"{error.get('name', 'error')}: {message}" if message else str(error.get("name", error))
