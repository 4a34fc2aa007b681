"""Qwen Code (`qwen --output-format stream-json`): Qwen's agent, spoken to over an OpenAI-compatible address.

Its settings are given as those of the system, which no settings of a user or of the work folder override, and it
is started in safe mode in a folder that it does not trust, so that it reads no settings, extensions, hooks, skills or
MCP servers there. Words that a task has for its agent in a file are added to its prompt.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.rollouts.agents.base import Agent, AgentRun, Assignment, Installed, Report
from paddock.rollouts.agents.install import NODE_COMMAND, install_npm_bundle
from paddock.rollouts.agents.notes import read_notes
from paddock.rollouts.agents.stream_json import StreamJsonRun
from paddock.rollouts.capture.roles import system_prompt
from paddock.rollouts.sandbox.base import Command
from paddock.rollouts.trace import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.rollouts.sandbox.base import Sandbox

PACKAGE = "@qwen-code/qwen-code"
INSIDE = PurePosixPath("/opt/qwen-code")
PROGRAM = str(INSIDE / "node_modules" / PACKAGE / "cli.js")
MAIN = "You are Qwen Code, "
"""How the system prompt of its own conversation begins."""
MINUTES_15 = 900_000
KEPT = ("*.js", "chunks", "locales", "package.json", "vendor/tree-sitter", "vendor/ripgrep/*-linux")
"""What runs here; the rest is a web page, skills that need a network, and programs of other systems."""
NOTES = ("QWEN.md", "AGENTS.md")
ALLOWED = ("run_shell_command", "write_file", "edit", "read_file", "glob", "grep_search", "notebook_edit", "agent")
"""Tools that need nobody's consent. In a folder that it does not trust there is no such mode for all of them."""
DENIED = ("skill", "cron_create", "cron_list", "cron_delete", "loop_wakeup", "send_message")
"""Tools that need a person or another day, which a sandbox has not."""
ARGUMENTS = (
    *("--safe-mode", "--no-chat-recording", "--output-format", "stream-json", "--auth-type", "openai"),
    *(word for name in ALLOWED for word in ("--allowed-tools", name)),
    *(word for name in DENIED for word in ("--exclude-tools", name)),
)


class QwenCode(Agent):
    name: ClassVar[str] = "qwen-code"
    version: ClassVar[str] = "0.24.4"
    size_mb: ClassVar[int] = 70
    live_events: ClassVar[bool] = True

    async def install(self, log: Callable[[str], None], *, timeout: float) -> Installed:
        return await install_npm_bundle(PACKAGE, self.version, INSIDE, KEPT, log, timeout=timeout)

    async def begin(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        folder = sandbox.home / ".paddock" / "qwen"
        await sandbox.write(folder / "system.json", orjson.dumps(settings(assignment)))
        await sandbox.write(folder / "trusted.json", orjson.dumps({str(sandbox.workdir): "DO_NOT_TRUST"}))
        env = {
            "HOME": str(sandbox.home),
            "QWEN_HOME": str(folder),
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(folder / "system.json"),
            "QWEN_CODE_TRUSTED_FOLDERS_PATH": str(folder / "trusted.json"),
            "QWEN_CODE_NO_RELAUNCH": "true",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(assignment.max_tokens),
            "QWEN_DISABLE_AUTO_TITLE": "1",
            "OPENAI_BASE_URL": assignment.base_url,
            "OPENAI_API_KEY": assignment.api_key,
            "OPENAI_MODEL": assignment.model,
        }
        notes = (await read_notes(sandbox, NOTES)).decode("utf-8", "replace").replace("\0", "")
        words = [*NODE_COMMAND, PROGRAM, *ARGUMENTS, *([f"--append-system-prompt={notes}"] if notes.strip() else [])]
        job = await sandbox.start(Command(words, cwd=sandbox.workdir, env=env, stdin=spoken(assignment.instruction)))
        return StreamJsonRun(job, assignment.instruction, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """Its sub-agents have tools and another system prompt. Without tools, it sums up a conversation."""
        if not body.get("tools"):
            return Role.COMPACTION
        return Role.AGENT if system_prompt(body).startswith(MAIN) else Role.SUBAGENT


def spoken(instruction: str) -> bytes:
    """The instruction on standard input. No `/` begins it: that would make it a command to the program, which then
    asks no model."""
    return (f"\n{instruction}" if instruction.startswith("/") else instruction).encode()


def settings(assignment: Assignment) -> dict[str, Any]:
    """One model; nothing that reaches out; no second try of what is tried again behind the model's address."""
    generation = {"timeout": MINUTES_15, "maxRetries": 0, "contextWindowSize": assignment.context_tokens}
    model = {
        "id": assignment.model,
        "name": "Policy",
        "baseUrl": assignment.base_url,
        "envKey": "OPENAI_API_KEY",
        "generationConfig": generation,
    }
    return {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {
            "folderTrust": {"enabled": True},
            "auth": {"selectedType": "openai", "baseUrl": assignment.base_url, "apiKey": assignment.api_key},
        },
        "modelProviders": {"openai": [model]},
        "model": {"name": assignment.model, "generationConfig": generation},
    }
