"""Codex (`codex exec --json`): OpenAI's agent, which speaks the Responses dialect.

The work folder is one that it does not trust, so that it reads no settings, hooks, rules or MCP servers there;
`AGENTS.md` reaches it through its own folder. It says in its headers what a call is for.
"""

from __future__ import annotations

import platform
import signal
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.rollouts.agents.base import Agent, AgentRun, Assignment, Installed, Report
from paddock.rollouts.agents.headless import HeadlessRun, read_object
from paddock.rollouts.agents.install import Said, fetch_npm_binary, npm_platform
from paddock.rollouts.agents.notes import carry_notes
from paddock.rollouts.agents.opencode import RIPGREP, SEARCH
from paddock.rollouts.sandbox.base import Command, Mount
from paddock.rollouts.trace import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.rollouts.sandbox.base import Sandbox

PACKAGE = "@openai/codex"
INSIDE = PurePosixPath("/opt/codex")
PROGRAM = str(INSIDE / "codex")
KEY = "PADDOCK_MODEL_KEY"
PROVIDER = "paddock"
MINUTES_15 = 900_000
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
"""Features that need a network, an account or a person, or start something by themselves."""
UNKNOWN_MODEL = "Model metadata for"
ROOM = 0.85
"""The part of the context after which it sums up what was said."""
TOOLS = {
    "command_execution": "exec_command",
    "file_change": "apply_patch",
    "todo_list": "update_plan",
    "web_search": "web_search",
}
"""What its items are called by the model."""


class Codex(Agent):
    name: ClassVar[str] = "codex"
    dialect: ClassVar[str] = "responses"
    version: ClassVar[str] = "0.166.0"
    size_mb: ClassVar[int] = 325
    live_events: ClassVar[bool] = True
    clean_abort: ClassVar[bool] = True

    async def install(self, log: Callable[[str], None], *, timeout: float) -> Installed:
        said, machine = Said(log), npm_platform()
        cpu = "aarch64" if platform.machine().lower() in ("aarch64", "arm64") else "x86_64"
        member = f"vendor/{cpu}-unknown-linux-musl/bin/codex"
        folder = await fetch_npm_binary(PACKAGE, f"{self.version}-{machine}", member, said, timeout=timeout)
        search = await fetch_npm_binary(f"@vscode/ripgrep-{machine}", RIPGREP, "bin/rg", said, timeout=timeout)
        return Installed(self.version, (Mount(folder, INSIDE), Mount(search, SEARCH)), str(said))

    async def begin(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        folder = sandbox.home / ".paddock" / "codex"
        await sandbox.write(folder / "config.toml", toml(configuration(assignment, sandbox.workdir)).encode())
        await carry_notes(sandbox, NOTES, folder / "AGENTS.md")
        words = ["/bin/sh", "-c", f'PATH="{SEARCH}:$PATH" exec "$0" "$@"', PROGRAM, *ARGUMENTS]
        env = {"HOME": str(sandbox.home), "CODEX_HOME": str(folder), KEY: assignment.api_key}
        stdin = assignment.instruction.encode()
        job = await sandbox.start(Command(words, cwd=sandbox.workdir, env=env, stdin=stdin))
        return CodexRun(job, assignment.instruction, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        told = read_object(headers.get("x-codex-turn-metadata", "").encode()) or {}
        if told.get("request_kind") == "compaction":
            return Role.COMPACTION
        if told.get("thread_source") == "subagent" or "x-openai-subagent" in headers:
            return Role.SUBAGENT
        return Role.AGENT if told.get("request_kind") == "turn" else None


class CodexRun(HeadlessRun):
    """Its items are told when they begin, if they take a while, and when they have ended."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGINT

    def take(self, event: dict[str, Any]) -> None:
        kind, item = event.get("type"), event.get("item")
        self.session = event.get("thread_id") or self.session
        if kind == "turn.failed":
            self.fail(str((event.get("error") or {}).get("message")))
        elif kind == "error":
            self.fail(str(event.get("message")))
        elif kind in ("item.started", "item.completed") and isinstance(item, dict):
            self._item(str(item.get("id")), item, ended=kind == "item.completed")

    def _item(self, name: str, item: dict[str, Any], *, ended: bool) -> None:
        match item.get("type"):
            case "agent_message":
                self.add_text(name, item.get("text"))
            case "reasoning":
                self.add_text(name, item.get("text"), kind="reasoning")
            case "error":
                # It goes on after these. That it does not know the model is so every time, and meant.
                if UNKNOWN_MODEL not in str(item.get("message")):
                    self._report("agent_warning", {"warning": str(item.get("message"))})
            case kind:
                if name not in self._tools:
                    self.start_tool(name, name, item.get("tool") or TOOLS.get(str(kind), kind), given_to(item))
                if ended:
                    self.end_tool(name, output_of(item), failed=item.get("status") == "failed")


def given_to(item: dict[str, Any]) -> Any:
    """What a tool was called with, under the names that the item has for it."""
    known = ("command", "changes", "items", "query", "arguments", "prompt")
    return {key: item[key] for key in known if item.get(key) is not None}


def output_of(item: dict[str, Any]) -> Any:
    if item.get("type") == "command_execution":
        return item.get("aggregated_output")
    error = item.get("error")
    return (error.get("message") if isinstance(error, dict) else error) or item.get("result") or item.get("status")


def configuration(assignment: Assignment, workdir: PurePosixPath) -> dict[str, Any]:
    """One provider, one model, no question that nobody answers, nothing that reaches out."""
    provider = {
        "name": "Paddock",
        "base_url": assignment.base_url,
        "wire_api": "responses",
        "env_key": KEY,
        "supports_websockets": False,
        "request_max_retries": 1,
        "stream_max_retries": 1,
        "stream_idle_timeout_ms": MINUTES_15,
    }
    return {
        "model": assignment.model,
        "model_provider": PROVIDER,
        "model_context_window": assignment.context_tokens,
        "model_auto_compact_token_limit": int(assignment.context_tokens * ROOM),
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
        "skills": {"include_instructions": False, "bundled": {"enabled": False}},
        "history": {"persistence": "none"},
        "analytics": {"enabled": False},
        "feedback": {"enabled": False},
        "otel": dict.fromkeys(("exporter", "trace_exporter", "metrics_exporter"), "none"),
        "features": dict.fromkeys(OFF, False),
    }


def toml(document: dict[str, Any]) -> str:
    """A document of texts, numbers, lists and tables, one line for each key."""
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in document.items())


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(key)} = {toml_value(each)}" for key, each in value.items()) + "}"
    return orjson.dumps(value).decode()
