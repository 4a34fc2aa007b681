"""Gemini CLI (`gemini --output-format stream-json`): Google's agent, which speaks Google's generateContent.

It reads its settings before its arguments: at that time the work folder is one that it does not trust, so that no
settings, hooks, MCP servers or `.env` files are taken from there. Only then `--skip-trust` lets it work freely.
"""

from __future__ import annotations

import signal
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.rollouts.agents.base import Agent, AgentRun, Assignment, Installed, Report
from paddock.rollouts.agents.headless import LONGEST_TRANSCRIPT, HeadlessRun
from paddock.rollouts.agents.install import NODE_COMMAND, install_npm_bundle
from paddock.rollouts.agents.notes import plain_words
from paddock.rollouts.agents.stream_json import block_text
from paddock.rollouts.sandbox.base import Command
from paddock.rollouts.trace import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.rollouts.sandbox.base import Job, Sandbox

PACKAGE = "@google/gemini-cli"
INSIDE = PurePosixPath("/opt/gemini-cli")
PROGRAM = str(INSIDE / "node_modules" / PACKAGE / "bundle" / "gemini.js")
KEPT = ("package.json", "bundle/*.js", "bundle/*.json", "bundle/builtin", "bundle/policies", "bundle/worker")
"""What runs here; the rest is documentation and a browser's tools."""
ARGUMENTS = ("--yolo", "--skip-trust", "--output-format", "stream-json")
DENIED = ("google_web_search", "web_fetch", "ask_user", "activate_skill", "save_memory")
"""Tools that need a network, a person or another day, which a sandbox has not."""
WINDOW = 1_048_576
"""The context that it takes every model to have."""
ROOM = 0.85
"""The part of the context after which it sums up what was said."""
LONGEST_OUTPUT = 40_000
"""Characters of a tool's output, less if they would take more than about a quarter of the context."""
MAIN = "You are Gemini CLI"
SUMMARY = "<state_snapshot>"


class GeminiCli(Agent):
    name: ClassVar[str] = "gemini-cli"
    dialect: ClassVar[str] = "google"
    version: ClassVar[str] = "0.61.0"
    size_mb: ClassVar[int] = 75
    live_events: ClassVar[bool] = True
    clean_abort: ClassVar[bool] = True

    async def install(self, log: Callable[[str], None], *, timeout: float) -> Installed:
        return await install_npm_bundle(PACKAGE, self.version, INSIDE, KEPT, log, timeout=timeout)

    async def begin(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        home = sandbox.home / ".paddock" / "gemini"
        await sandbox.write(home / ".gemini" / "settings.json", orjson.dumps(settings(assignment)))
        env = {
            "HOME": str(sandbox.home),
            "GEMINI_CLI_HOME": str(home),
            "GEMINI_CLI_NO_RELAUNCH": "true",
            "GOOGLE_GEMINI_BASE_URL": assignment.root_url,
            "GEMINI_API_KEY": assignment.api_key,
        }
        words = [*NODE_COMMAND, PROGRAM, "--model", assignment.model, *ARGUMENTS]
        stdin = plain_words(assignment.instruction)
        job = await sandbox.start(Command(words, cwd=sandbox.workdir, env=env, stdin=stdin))
        return GeminiCliRun(job, assignment.instruction, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """Its sub-agents have tools and another system prompt; what has no tools is a side call."""
        system = system_prompt(body)
        if body.get("tools"):
            return Role.AGENT if system.startswith(MAIN) else Role.SUBAGENT
        return Role.COMPACTION if SUMMARY in system else Role.TITLE


class GeminiCliRun(HeadlessRun):
    """Texts come in pieces, and are put together until something else comes."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, job: Job, instruction: str, report: Report) -> None:
        super().__init__(job, instruction, report)
        self._pieces: list[str] = []
        self._number = 0

    def take(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        self.session = event.get("session_id") or self.session
        if kind == "message" and event.get("role") == "assistant":
            if self._kept <= LONGEST_TRANSCRIPT:
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
        """It does not name its messages: one lasts until its tools have answered."""
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
    """No trust, nothing that reaches out, no side calls, and a summary in time for the real context."""
    return {
        "security": {
            # With auth of its own it would look for a `.env` file again, after it was told to trust.
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
            "compressionThreshold": assignment.context_tokens * ROOM / WINDOW,
        },
        "tools": {
            "exclude": list(DENIED),
            "shell": {"enableInteractiveShell": False, "showColor": False},
            "useRipgrep": False,
            "truncateToolOutputThreshold": min(LONGEST_OUTPUT, assignment.context_tokens),
        },
        "skills": {"enabled": False},
        "hooksConfig": {"enabled": False},
    }
