"""Gemini CLI (`gemini --output-format stream-json`): Google's agent, which uses generateContent.

It reads its settings before its arguments. At that time it does not trust the work folder, so it takes no settings,
hooks, MCP servers or `.env` files from there. Afterwards `--skip-trust` allows its tools.
"""

from __future__ import annotations

import signal
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.agents.base import Agent, AgentRun, AgentTools, Assignment, Report, escape_slash_command
from paddock.agents.equipment import copy_skills, mcp_entries
from paddock.agents.headless import HeadlessRun, block_text
from paddock.agents.install import NODE_COMMAND, fetch_npm_bundle, with_bash
from paddock.capture.trace import Role
from paddock.sandbox.base import Command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.sandbox.base import Job, Mount, Sandbox
    from paddock.tasks.settings import McpTransport

PACKAGE = "@google/gemini-cli"
FOLDER = PurePosixPath("/opt/gemini-cli")
PROGRAM = str(FOLDER / "node_modules" / PACKAGE / "bundle" / "gemini.js")
BUNDLED_FILES = ("package.json", "bundle/*.js", "bundle/*.json", "bundle/builtin", "bundle/policies", "bundle/worker")
"""What runs here; the rest is documentation and a browser's tools."""
ARGUMENTS = ("--yolo", "--skip-trust", "--output-format", "stream-json")
DENIED = ("google_web_search", "web_fetch", "ask_user", "save_memory")
"""Tools that need a network, a person or a later session."""
SKILL_TOOL = "activate_skill"
BUILT_IN_SKILLS = ("antigravity-support", "skill-creator")
ASSUMED_CONTEXT = 1_048_576
"""The context that it assumes for every model."""
COMPACTION_SHARE = 0.85
"""The share of the context after which it compacts the conversation."""
MAX_OUTPUT_CHARACTERS = 40_000
"""Characters of a tool's output, less if they would take more than about a quarter of the context."""
MAIN = "You are Gemini CLI"
SUMMARY = "<state_snapshot>"


class GeminiCli(Agent):
    name: ClassVar[str] = "gemini-cli"
    dialect: ClassVar[str] = "google"
    answer_timeout: ClassVar[float] = 60.0
    version: ClassVar[str] = "0.61.0"
    size_mb: ClassVar[int] = 75
    prompt_tokens: ClassVar[int] = 10500
    live_events: ClassVar[bool] = True
    clean_abort: ClassVar[bool] = True
    mcp_transports: ClassVar[tuple[McpTransport, ...]] = ("stdio", "sse", "streamable-http")
    supports_skills: ClassVar[bool] = True
    tools: ClassVar[AgentTools] = AgentTools(
        run=lambda command: ("run_shell_command", {"command": command, "description": "Runs it"}),
        write=lambda path, text: ("write_file", {"file_path": path, "content": text}),
        call_mcp=lambda server, tool: (f"mcp_{server}_{tool}", {}),
    )

    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        return await fetch_npm_bundle(PACKAGE, self.version, FOLDER, BUNDLED_FILES, log, timeout=timeout)

    async def start(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        home = sandbox.home / ".paddock" / "gemini"
        await sandbox.write(home / ".gemini" / "settings.json", orjson.dumps(settings(assignment)))
        if assignment.skills_dir:
            await copy_skills(sandbox, assignment.skills_dir, home / ".gemini" / "skills")
        env = {
            "HOME": str(sandbox.home),
            "GEMINI_CLI_HOME": str(home),
            "GEMINI_CLI_NO_RELAUNCH": "true",
            "GOOGLE_GEMINI_BASE_URL": assignment.root_url,
            "GEMINI_API_KEY": assignment.api_key,
        }
        arguments = with_bash(*NODE_COMMAND, PROGRAM, "--model", assignment.model, *ARGUMENTS)
        stdin = escape_slash_command(assignment.instruction)
        job = await sandbox.start(Command(arguments, cwd=sandbox.workdir, env=env, stdin=stdin))
        return GeminiCliRun(job, assignment.instruction, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """Its sub-agents have tools and another system prompt; a call without tools is a side call."""
        system = system_prompt(body)
        if body.get("tools"):
            return Role.AGENT if system.startswith(MAIN) else Role.SUBAGENT
        return Role.COMPACTION if SUMMARY in system else Role.TITLE


class GeminiCliRun(HeadlessRun):
    """Texts are printed in pieces, which are joined until another event comes."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, job: Job, instruction: str, report: Report) -> None:
        super().__init__(job, instruction, report)
        self._pieces: list[str] = []
        self._number = 0

    def handle_event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        self.session = event.get("session_id") or self.session
        if kind == "message" and event.get("role") == "assistant":
            if not self.is_transcript_full:
                self._pieces.append(str(event.get("content") or ""))
            return
        self._finish_text()
        if kind == "tool_use":
            self.start_tool(self._name, str(event.get("tool_id")), event.get("tool_name"), event.get("parameters"))
        elif kind == "tool_result":
            self._number += 1
            failed = event.get("status") == "error"
            output = error_text(event.get("error")) if failed else event.get("output")
            self.end_tool(str(event.get("tool_id")), output, failed=failed)
        elif kind == "error" or (kind == "result" and event.get("status") == "error"):
            self.fail(error_text(event.get("error") or event.get("message")))

    async def messages(self) -> list[dict[str, Any]]:
        self._finish_text()
        return await super().messages()

    @property
    def _name(self) -> str:
        """Its messages have no ids: one lasts until its tools have answered."""
        return f"message-{self._number}"

    def _finish_text(self) -> None:
        text, self._pieces = "".join(self._pieces), []
        self.add_text(self._name, text)


def error_text(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    return f"{error.get('type', 'error')}: {error.get('message')}"


def system_prompt(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    return block_text(first.get("content")) if isinstance(first, dict) and first.get("role") == "system" else ""


def settings(assignment: Assignment) -> dict[str, Any]:
    """No trusted folder, no other traffic, no side calls, and compaction in time for the real context."""
    return {
        "security": {
            # With auth of its own it would read a `.env` file again, after it trusts the folder.
            "auth": {"selectedType": "gemini-api-key", "useExternal": True},
            "folderTrust": {"enabled": True},
        },
        "advanced": {"ignoreLocalEnv": True, "autoConfigureMemory": False},
        "general": {
            "enableAutoUpdate": False,
            "enableAutoUpdateNotification": False,
            "topicUpdateNarration": False,
            "maxAttempts": 2,
            "plan": {"enabled": False},
            "sessionRetention": {"enabled": False},
        },
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "ide": {"enabled": False},
        "model": {
            "disableLoopDetection": True,
            "skipNextSpeakerCheck": True,
            "compressionThreshold": assignment.context_tokens * COMPACTION_SHARE / ASSUMED_CONTEXT,
        },
        "tools": {
            "exclude": list(DENIED) if assignment.skills_dir else [*DENIED, SKILL_TOOL],
            "shell": {"enableInteractiveShell": False, "showColor": False},
            "useRipgrep": False,
            "truncateToolOutputThreshold": min(MAX_OUTPUT_CHARACTERS, assignment.context_tokens),
        },
        "skills": {"enabled": bool(assignment.skills_dir), "disabled": list(BUILT_IN_SKILLS)},
        "mcpServers": {name: {**entry, "trust": True} for name, entry in mcp_entries(assignment.mcp_servers).items()},
        "hooksConfig": {"enabled": False},
    }
