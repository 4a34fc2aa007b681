"""Claude Code (`claude -p --output-format stream-json`): Anthropic's agent, which speaks Anthropic's Messages.

It loads the settings of its own folder only, and no MCP servers, skills or commands, so that nothing in the work
folder starts a program or leads it to another model; `CLAUDE.md` reaches it through its own folder.
"""

from __future__ import annotations

import signal
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

from paddock.rollouts.agents.base import Agent, AgentRun, Assignment, Installed, Report
from paddock.rollouts.agents.install import Said, fetch_npm_binary, npm_platform
from paddock.rollouts.agents.notes import carry_notes, plain_words
from paddock.rollouts.agents.stream_json import StreamJsonRun, block_text
from paddock.rollouts.sandbox.base import Command, Mount
from paddock.rollouts.trace import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.rollouts.sandbox.base import Sandbox

INSIDE = PurePosixPath("/opt/claude-code")
PROGRAM = str(INSIDE / "claude")
MINUTES_15 = "900000"
TOOLS = ("Task", "Bash", "Edit", "Glob", "Grep", "NotebookEdit", "Read", "Write")
"""What works without a network, a person and another day; all of them would fill half of a small context."""
ARGUMENTS = (
    *("-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"),
    *("--setting-sources", "user", "--strict-mcp-config", "--disable-slash-commands", "--no-session-persistence"),
    *("--tools", ",".join(TOOLS)),
)
NOTES = ("CLAUDE.md", ".claude/CLAUDE.md")
SUMMARY = "Your task is to create a detailed summary of"
SWITCHES = (
    "IS_SANDBOX",
    "DISABLE_AUTOUPDATER",
    "DISABLE_ERROR_REPORTING",
    "DISABLE_TELEMETRY",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS",
    "CLAUDE_CODE_DISABLE_BUNDLED_SKILLS",
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY",
    "CLAUDE_CODE_DISABLE_WORKFLOWS",
    "CLAUDE_CODE_DISABLE_CRON",
    "CLAUDE_CODE_DISABLE_TERMINAL_TITLE",
)
"""The first says that it may do as it likes, whoever runs it; the others end what is not the agent's work."""


class ClaudeCode(Agent):
    name: ClassVar[str] = "claude-code"
    dialect: ClassVar[str] = "anthropic"
    version: ClassVar[str] = "2.1.197"
    size_mb: ClassVar[int] = 245
    live_events: ClassVar[bool] = True
    clean_abort: ClassVar[bool] = True

    async def install(self, log: Callable[[str], None], *, timeout: float) -> Installed:
        said = Said(log)
        package = f"@anthropic-ai/claude-code-{npm_platform()}"
        folder = await fetch_npm_binary(package, self.version, "claude", said, timeout=timeout)
        return Installed(self.version, (Mount(folder, INSIDE),), str(said))

    async def begin(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        folder = sandbox.home / ".paddock" / "claude"
        await sandbox.write(folder / "settings.json", b"{}")
        await carry_notes(sandbox, NOTES, folder / "CLAUDE.md")
        env = {"HOME": str(sandbox.home), "CLAUDE_CONFIG_DIR": str(folder), **environment(assignment)}
        stdin = plain_words(assignment.instruction)
        job = await sandbox.start(Command([PROGRAM, *ARGUMENTS], cwd=sandbox.workdir, env=env, stdin=stdin))
        return ClaudeCodeRun(job, assignment.instruction, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """A conversation is summed up with all tools in hand; only what is asked last gives it away."""
        if SUMMARY in block_text(last_message(body).get("content")):
            return Role.COMPACTION
        if "x-claude-code-agent-id" in headers:
            return Role.SUBAGENT
        return Role.AGENT if body.get("tools") else Role.TITLE


class ClaudeCodeRun(StreamJsonRun):
    stop_signal: ClassVar[signal.Signals] = signal.SIGINT


def last_message(body: dict[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return last if isinstance(last, dict) else {}


def environment(assignment: Assignment) -> dict[str, str]:
    """One model for everything that it does, how large that is, and nothing that reaches out."""
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    # Both sizes are needed: by the first alone it does not sum up, and the second alone is raised to 100,000.
    sizes = ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW")
    return {
        **dict.fromkeys(SWITCHES, "1"),
        **dict.fromkeys(models, assignment.model),
        **dict.fromkeys(sizes, str(assignment.context_tokens)),
        "ANTHROPIC_BASE_URL": assignment.root_url,
        "ANTHROPIC_API_KEY": assignment.api_key,
        "API_TIMEOUT_MS": MINUTES_15,
        "CLAUDE_CODE_MAX_RETRIES": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(assignment.max_tokens),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
