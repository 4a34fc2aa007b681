"""Claude Code (`claude -p --output-format stream-json`): Anthropic's agent, which uses the Messages API.

It loads the settings of its own folder only, and no MCP servers, skills or commands, so nothing in the work folder
starts a program or selects another model. `CLAUDE.md` is copied into its own folder.
"""

from __future__ import annotations

import signal
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.agents.base import (
    Agent,
    AgentRun,
    AgentTools,
    Assignment,
    Report,
    copy_notes,
    escape_slash_command,
)
from paddock.agents.equipment import copy_skills, mcp_entries
from paddock.agents.headless import StreamJsonRun, block_text
from paddock.agents.install import fetch_npm_binary, npm_platform, with_bash
from paddock.capture.trace import Role
from paddock.limits import ANSWER_MS
from paddock.sandbox.base import Command, Mount

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.sandbox.base import Sandbox
    from paddock.tasks.settings import McpTransport

FOLDER = PurePosixPath("/opt/claude-code")
PROGRAM = str(FOLDER / "claude")
TOOLS = ("Task", "Bash", "Edit", "Glob", "Grep", "NotebookEdit", "Read", "Write")
"""Those that work without a network and a person. All tools would fill half of a small context."""
ARGUMENTS = (
    *("-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"),
    *("--setting-sources", "user", "--strict-mcp-config", "--no-session-persistence"),
)
NO_SKILLS = "--disable-slash-commands"
SKILL_TOOL = "Skill"
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
"""The first allows everything, also as root; the others turn off what is not the agent's work."""


class ClaudeCode(Agent):
    name: ClassVar[str] = "claude-code"
    dialect: ClassVar[str] = "anthropic"
    version: ClassVar[str] = "2.1.197"
    size_mb: ClassVar[int] = 245
    prompt_tokens: ClassVar[int] = 4900
    live_events: ClassVar[bool] = True
    clean_abort: ClassVar[bool] = True
    mcp_transports: ClassVar[tuple[McpTransport, ...]] = ("stdio", "sse", "streamable-http")
    supports_skills: ClassVar[bool] = True
    tools: ClassVar[AgentTools] = AgentTools(
        run=lambda command: ("Bash", {"command": command, "description": "Runs it"}),
        write=lambda path, text: ("Write", {"file_path": path, "content": text}),
        call_mcp=lambda server, tool: (f"mcp__{server}__{tool}", {}),
    )

    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        package = f"@anthropic-ai/claude-code-{npm_platform()}"
        folder = await fetch_npm_binary(package, self.version, "claude", log, timeout=timeout)
        return (Mount(folder, FOLDER, ("claude",)),)

    async def start(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        folder = sandbox.home / ".paddock" / "claude"
        await sandbox.write(folder / "settings.json", b"{}")
        await copy_notes(sandbox, NOTES, folder / "CLAUDE.md")
        arguments = [*ARGUMENTS, "--tools", ",".join(TOOLS)]
        if assignment.skills_dir:
            await copy_skills(sandbox, assignment.skills_dir, folder / "skills")
            arguments[-1] += f",{SKILL_TOOL}"
        else:
            arguments.append(NO_SKILLS)
        if assignment.mcp_servers:
            servers = folder / "mcp.json"
            await sandbox.write(servers, orjson.dumps({"mcpServers": mcp_entries(assignment.mcp_servers)}))
            arguments += ["--mcp-config", str(servers)]
        env = {"HOME": str(sandbox.home), "CLAUDE_CONFIG_DIR": str(folder), **environment(assignment)}
        stdin = escape_slash_command(assignment.instruction)
        job = await sandbox.start(Command(with_bash(PROGRAM, *arguments), cwd=sandbox.workdir, env=env, stdin=stdin))
        return ClaudeCodeRun(job, assignment.instruction, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """A summary is requested with all tools in the body; only the last message shows it."""
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
    """One model for everything, its sizes, and no traffic but model calls."""
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    # Both sizes are needed: with the first alone it never compacts, and the second alone is raised to 100,000.
    sizes = ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW")
    return {
        **dict.fromkeys(SWITCHES, "1"),
        **dict.fromkeys(models, assignment.model),
        **dict.fromkeys(sizes, str(assignment.context_tokens)),
        "ANTHROPIC_BASE_URL": assignment.root_url,
        "ANTHROPIC_API_KEY": assignment.api_key,
        "API_TIMEOUT_MS": str(ANSWER_MS),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(ANSWER_MS),
        "CLAUDE_CODE_MAX_RETRIES": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(assignment.max_tokens),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
