"""Codex (`codex exec --json`): OpenAI's agent, which uses the Responses API.

It does not trust the work folder, so it reads no settings, hooks, rules or MCP servers there. `AGENTS.md` is copied
into its own folder. Its request headers name the role of a call.
"""

from __future__ import annotations

import platform
import signal
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.agents.base import Agent, AgentRun, AgentTools, Assignment, Report, copy_notes, shell_write
from paddock.agents.equipment import copy_skills
from paddock.agents.headless import HeadlessRun, read_object
from paddock.agents.install import fetch_npm_binary, fetch_ripgrep, npm_platform, with_ripgrep
from paddock.capture.trace import Role
from paddock.limits import ANSWER_MS
from paddock.sandbox.base import Command, Mount

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.sandbox.base import Sandbox
    from paddock.tasks.settings import McpServer, McpTransport

PACKAGE = "@openai/codex"
FOLDER = PurePosixPath("/opt/codex")
PROGRAM = str(FOLDER / "codex")
KEY = "PADDOCK_MODEL_KEY"
PROVIDER = "paddock"
ARGUMENTS = (
    *("exec", "--json", "--color", "never", "--ephemeral", "--ignore-rules", "--skip-git-repo-check"),
    *("--dangerously-bypass-approvals-and-sandbox", "-"),
)
NOTES = ("AGENTS.override.md", "AGENTS.md")
OFF = (
    *("apps", "plugins", "remote_plugin", "plugin_sharing", "plugin_discovery_prefetch", "tool_suggest"),
    *("browser_use", "browser_use_external", "computer_use", "image_generation", "in_app_browser"),
    *("goals", "memories", "hooks", "skill_search", "skill_mcp_dependency_install", "workspace_dependencies"),
    *("api_key_model_discovery", "enable_request_compression", "code_mode_host", "daemon_auto_start"),
    *("shell_snapshot", "fast_mode"),
)
"""Features that need a network, an account or a person, or start something in the background."""
MCP_START_SECONDS = 60
MCP_CALL_SECONDS = 600
UNKNOWN_MODEL = "Model metadata for"
COMPACTION_SHARE = 0.85
"""The share of the context after which it compacts the conversation."""
TOOL_NAMES = {
    "command_execution": "exec_command",
    "file_change": "apply_patch",
    "todo_list": "update_plan",
    "web_search": "web_search",
}
"""The tool that the model called, by the type of the item."""


class Codex(Agent):
    name: ClassVar[str] = "codex"
    dialect: ClassVar[str] = "responses"
    version: ClassVar[str] = "0.166.0"
    size_mb: ClassVar[int] = 325
    prompt_tokens: ClassVar[int] = 8400
    live_events: ClassVar[bool] = True
    clean_abort: ClassVar[bool] = True
    mcp_transports: ClassVar[tuple[McpTransport, ...]] = ("stdio", "streamable-http")
    supports_skills: ClassVar[bool] = True
    tools: ClassVar[AgentTools] = AgentTools(
        run=lambda command: ("exec_command", {"cmd": command}),
        write=lambda path, text: ("exec_command", {"cmd": shell_write(path, text)}),
        call_mcp=lambda server, tool: (f"mcp__{server}__{tool}", {}),
    )

    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        cpu = "aarch64" if platform.machine().lower() in ("aarch64", "arm64") else "x86_64"
        member = f"vendor/{cpu}-unknown-linux-musl/bin/codex"
        folder = await fetch_npm_binary(PACKAGE, f"{self.version}-{npm_platform()}", member, log, timeout=timeout)
        return (Mount(folder, FOLDER, ("codex",)), await fetch_ripgrep(log, timeout=timeout))

    async def start(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        folder = sandbox.home / ".paddock" / "codex"
        await sandbox.write(folder / "config.toml", toml(configuration(assignment, sandbox.workdir)).encode())
        await copy_notes(sandbox, NOTES, folder / "AGENTS.md")
        if assignment.skills_dir:
            await copy_skills(sandbox, assignment.skills_dir, folder / "skills")
        arguments = with_ripgrep(PROGRAM, *ARGUMENTS)
        env = {"HOME": str(sandbox.home), "CODEX_HOME": str(folder), KEY: assignment.api_key}
        stdin = assignment.instruction.encode()
        job = await sandbox.start(Command(arguments, cwd=sandbox.workdir, env=env, stdin=stdin))
        return CodexRun(job, assignment.instruction, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        metadata = read_object(headers.get("x-codex-turn-metadata", "").encode()) or {}
        if metadata.get("request_kind") == "compaction":
            return Role.COMPACTION
        if metadata.get("thread_source") == "subagent" or "x-openai-subagent" in headers:
            return Role.SUBAGENT
        return Role.AGENT if metadata.get("request_kind") == "turn" else None


class CodexRun(HeadlessRun):
    """An item is printed when it has ended, and also when it begins if it takes a while."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGINT

    def handle_event(self, event: dict[str, Any]) -> None:
        kind, item = event.get("type"), event.get("item")
        self.session = event.get("thread_id") or self.session
        if kind == "turn.failed":
            self.fail(str((event.get("error") or {}).get("message")))
        elif kind == "error":
            self.fail(str(event.get("message")))
        elif kind in ("item.started", "item.completed") and isinstance(item, dict):
            self._handle_item(str(item.get("id")), item, ended=kind == "item.completed")

    def _handle_item(self, name: str, item: dict[str, Any], *, ended: bool) -> None:
        match item.get("type"):
            case "agent_message":
                self.add_text(name, item.get("text"))
            case "reasoning":
                self.add_text(name, item.get("text"), kind="reasoning")
            case "error":
                # It continues after these. That it does not know the model is expected.
                if UNKNOWN_MODEL not in str(item.get("message")):
                    self.warn(str(item.get("message")))
            case kind:
                if name not in self.open_tools:
                    tool = item.get("tool") or TOOL_NAMES.get(str(kind), kind)
                    self.start_tool(name, name, tool, arguments_of(item))
                if ended:
                    self.end_tool(name, output_of(item), failed=item.get("status") == "failed")


def arguments_of(item: dict[str, Any]) -> Any:
    names = ("command", "changes", "items", "query", "arguments", "prompt")
    return {name: item[name] for name in names if item.get(name) is not None}


def output_of(item: dict[str, Any]) -> Any:
    if item.get("type") == "command_execution":
        return item.get("aggregated_output")
    error = item.get("error")
    return (error.get("message") if isinstance(error, dict) else error) or item.get("result") or item.get("status")


def configuration(assignment: Assignment, workdir: PurePosixPath) -> dict[str, Any]:
    """One provider, one model, no questions to a person, no other traffic."""
    provider = {
        "name": "Paddock",
        "base_url": assignment.base_url,
        "wire_api": "responses",
        "env_key": KEY,
        "supports_websockets": False,
        "request_max_retries": 1,
        "stream_max_retries": 1,
        "stream_idle_timeout_ms": ANSWER_MS,
    }
    return {
        "model": assignment.model,
        "model_provider": PROVIDER,
        "model_context_window": assignment.context_tokens,
        "model_auto_compact_token_limit": int(assignment.context_tokens * COMPACTION_SHARE),
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        "allow_login_shell": False,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        "include_apps_instructions": False,
        "include_permissions_instructions": False,
        "model_providers": {PROVIDER: provider},
        "projects": {str(workdir): {"trust_level": "untrusted"}},
        "shell_environment_policy": {"inherit": "all", "exclude": [KEY]},
        "skills": {"include_instructions": bool(assignment.skills_dir), "bundled": {"enabled": False}},
        "mcp_servers": {server.name: mcp_entry(server) for server in assignment.mcp_servers},
        "history": {"persistence": "none"},
        "analytics": {"enabled": False},
        "feedback": {"enabled": False},
        "otel": dict.fromkeys(("exporter", "trace_exporter", "metrics_exporter"), "none"),
        "features": dict.fromkeys(OFF, False),
    }


def mcp_entry(server: McpServer) -> dict[str, Any]:
    """A server that cannot be reached ends the program at once, as `required` says."""
    limits = {"required": True, "startup_timeout_sec": MCP_START_SECONDS, "tool_timeout_sec": MCP_CALL_SECONDS}
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args), **limits}
    return {"url": server.url, "http_headers": dict(server.headers), **limits}


def toml(document: dict[str, Any]) -> str:
    """A document of texts, numbers, lists and tables, one line for each key."""
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in document.items())


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(key)} = {toml_value(each)}" for key, each in value.items()) + "}"
    return orjson.dumps(value).decode()
