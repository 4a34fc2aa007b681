"""Qwen Code (`qwen --output-format stream-json`): Qwen's agent, which uses chat completions.

Its settings are system settings, which no settings of a user or of the work folder override. It starts in safe mode
in a folder that it does not trust, so it reads no settings, extensions, hooks, skills or MCP servers there. The notes
of a task are added to its prompt. It connects to the MCP servers of a task only in a folder that it trusts; safe mode
and the system settings then keep the settings of the folder out. Safe mode offers no skills of a task.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.agents.base import (
    Agent,
    AgentRun,
    AgentTools,
    Assignment,
    Report,
    escape_slash_command,
    read_notes,
)
from paddock.agents.equipment import mcp_entries
from paddock.agents.headless import StreamJsonRun
from paddock.agents.install import NODE_COMMAND, fetch_npm_bundle, with_bash
from paddock.capture.roles import system_prompt
from paddock.capture.trace import Role
from paddock.limits import ANSWER_MS
from paddock.sandbox.base import Command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.sandbox.base import Mount, Sandbox
    from paddock.tasks.settings import McpTransport

PACKAGE = "@qwen-code/qwen-code"
FOLDER = PurePosixPath("/opt/qwen-code")
PROGRAM = str(FOLDER / "node_modules" / PACKAGE / "cli.js")
MAIN = "You are Qwen Code, "
"""How the system prompt of its own conversation begins."""
BUNDLED_FILES = ("*.js", "chunks", "locales", "package.json", "vendor/tree-sitter", "vendor/ripgrep/*-linux")
"""What runs here; the rest is a web page, skills that need a network, and programs of other platforms."""
NOTES = ("QWEN.md", "AGENTS.md")
ALLOWED = ("run_shell_command", "write_file", "edit", "read_file", "glob", "grep_search", "notebook_edit", "agent")
"""Tools that need no confirmation. In an untrusted folder there is no such mode for all tools at once."""
DENIED = ("skill", "cron_create", "cron_list", "cron_delete", "loop_wakeup", "send_message")
"""Tools that need a person or a later session."""
DENIED_BESIDE_MCP = (
    *("web_fetch", "enter_worktree", "exit_worktree", "record_artifact", "report_findings", "zoom_image"),
    *("tool_search", "tool_call"),
)
"""Tools that the model would have to search for. Without the search, which would hide the tools of MCP servers too,
all are declared."""
ARGUMENTS = (
    *("--safe-mode", "--no-chat-recording", "--output-format", "stream-json", "--auth-type", "openai"),
    *(word for name in ALLOWED for word in ("--allowed-tools", name)),
    *(word for name in DENIED for word in ("--exclude-tools", name)),
)


class QwenCode(Agent):
    name: ClassVar[str] = "qwen-code"
    version: ClassVar[str] = "0.24.4"
    size_mb: ClassVar[int] = 70
    prompt_tokens: ClassVar[int] = 15000
    live_events: ClassVar[bool] = True
    mcp_transports: ClassVar[tuple[McpTransport, ...]] = ("stdio", "sse", "streamable-http")
    tools: ClassVar[AgentTools] = AgentTools(
        run=lambda command: ("run_shell_command", {"command": command, "is_background": False}),
        write=lambda path, text: ("write_file", {"file_path": path, "content": text}),
        call_mcp=lambda server, tool: (f"mcp__{server}__{tool}", {}),
    )

    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        return await fetch_npm_bundle(PACKAGE, self.version, FOLDER, BUNDLED_FILES, log, timeout=timeout)

    async def start(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        folder = sandbox.home / ".paddock" / "qwen"
        await sandbox.write(folder / "system.json", orjson.dumps(settings(assignment)))
        trust = "TRUST_FOLDER" if assignment.mcp_servers else "DO_NOT_TRUST"
        await sandbox.write(folder / "trusted.json", orjson.dumps({str(sandbox.workdir): trust}))
        env = {
            "HOME": str(sandbox.home),
            "QWEN_HOME": str(folder),
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(folder / "system.json"),
            "QWEN_CODE_TRUSTED_FOLDERS_PATH": str(folder / "trusted.json"),
            "QWEN_CODE_NO_RELAUNCH": "true",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(assignment.max_tokens),
            "QWEN_DISABLE_AUTO_TITLE": "1",
            "QWEN_STREAM_IDLE_TIMEOUT_MS": str(ANSWER_MS),
            "QWEN_STREAM_MAX_LIFETIME_MS": str(ANSWER_MS),
            "OPENAI_BASE_URL": assignment.base_url,
            "OPENAI_API_KEY": assignment.api_key,
            "OPENAI_MODEL": assignment.model,
        }
        notes = (await read_notes(sandbox, NOTES)).decode("utf-8", "replace").replace("\0", "")
        system_prompt = [f"--append-system-prompt={notes}"] if notes.strip() else []
        arguments = with_bash(*NODE_COMMAND, PROGRAM, *ARGUMENTS, *system_prompt)
        if assignment.mcp_servers:
            await sandbox.write(folder / "mcp.json", orjson.dumps({"mcpServers": servers(assignment)}))
            arguments += ["--mcp-config", str(folder / "mcp.json")]
            arguments += [word for name in DENIED_BESIDE_MCP for word in ("--exclude-tools", name)]
        stdin = escape_slash_command(assignment.instruction, "\n")
        job = await sandbox.start(Command(arguments, cwd=sandbox.workdir, env=env, stdin=stdin))
        return StreamJsonRun(job, assignment.instruction, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """Its sub-agents have tools and another system prompt. A call without tools is a summary."""
        if not body.get("tools"):
            return Role.COMPACTION
        return Role.AGENT if system_prompt(body).startswith(MAIN) else Role.SUBAGENT


def servers(assignment: Assignment) -> dict[str, Any]:
    """Trusted, so that their tools need no confirmation. It knows streamable HTTP by the name of the URL."""
    entries = mcp_entries(assignment.mcp_servers)
    for entry in entries.values():
        if entry["type"] == "http":
            entry["httpUrl"] = entry.pop("url")
        entry["trust"] = True
    return entries


def settings(assignment: Assignment) -> dict[str, Any]:
    """One model, no other traffic, and no retries: the proxy retries."""
    generation = {"timeout": ANSWER_MS, "maxRetries": 0, "contextWindowSize": assignment.context_tokens}
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
