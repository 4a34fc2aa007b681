"""Pi (`pi --mode json`): a small agent with four tools, and a prompt short enough for small models.

The package bundles its dependencies. Its configuration is in a folder of its own, written for each rollout. It reads
no configuration, extensions or skills from the work folder, but `AGENTS.md`.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.agents.base import Agent, AgentRun, AgentTools, Assignment, Report
from paddock.agents.equipment import copy_skills, mcp_entries
from paddock.agents.headless import HeadlessRun, block_text
from paddock.agents.install import NODE_COMMAND, fetch_npm_bundle, with_bash
from paddock.capture.trace import Role
from paddock.limits import ANSWER_MS
from paddock.sandbox.base import Command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.sandbox.base import Mount, Sandbox
    from paddock.tasks.settings import McpTransport

PACKAGE = "@earendil-works/pi-coding-agent"
FOLDER = PurePosixPath("/opt/pi")
PROGRAM = str(FOLDER / "node_modules" / PACKAGE / "dist" / "bundle" / "cli.js")
PROVIDER = "paddock"
MCP_CALL_SECONDS = 600
BUNDLED_FILES = ("dist/bundle", "docs", "README.md", "package.json")
"""What runs, and what its prompt refers to; the rest is examples and an unbundled copy."""
IGNORED = ("--no-approve", "--no-extensions", "--no-skills", "--no-prompt-templates", "--no-themes")
ARGUMENTS = ("--mode", "json", "--print", "--no-session", "--offline", *IGNORED)


class Pi(Agent):
    name: ClassVar[str] = "pi"
    version: ClassVar[str] = "1.5.0"
    size_mb: ClassVar[int] = 13
    prompt_tokens: ClassVar[int] = 1300
    live_events: ClassVar[bool] = True
    mcp_transports: ClassVar[tuple[McpTransport, ...]] = ("stdio", "streamable-http")
    supports_skills: ClassVar[bool] = True
    tools: ClassVar[AgentTools] = AgentTools(
        run=lambda command: ("bash", {"command": command}),
        write=lambda path, text: ("write", {"path": path, "content": text}),
        call_mcp=lambda server, tool: (f"mcp__{server}__{tool}", {}),
    )

    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        return await fetch_npm_bundle(PACKAGE, self.version, FOLDER, BUNDLED_FILES, log, timeout=timeout)

    async def start(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        folder = sandbox.home / ".paddock" / "pi"
        await sandbox.write(folder / "models.json", orjson.dumps(models(assignment)))
        await sandbox.write(folder / "settings.json", orjson.dumps(settings(assignment)))
        env = {
            "HOME": str(sandbox.home),
            "PI_CODING_AGENT_DIR": str(folder),
            "PI_OFFLINE": "1",
            "PI_SKIP_VERSION_CHECK": "1",
            "PI_TELEMETRY": "0",
        }
        arguments = with_bash(*NODE_COMMAND, PROGRAM, *ARGUMENTS, "--provider", PROVIDER, "--model", assignment.model)
        if assignment.mcp_servers:
            await sandbox.write(folder / "mcp.json", orjson.dumps({"mcpServers": servers(assignment)}))
            arguments += ["--extension", "builtin:mcp"]
        else:
            arguments.append("--no-mcp")
        if assignment.skills_dir:
            await copy_skills(sandbox, assignment.skills_dir, folder / "skills")
            arguments += ["--skill", str(folder / "skills")]
        stdin = assignment.instruction.encode()
        job = await sandbox.start(Command(arguments, cwd=sandbox.workdir, env=env, stdin=stdin))
        return PiRun(job, assignment.instruction, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """A call without tools is a summary of a conversation that became too long."""
        return None if body.get("tools") else Role.COMPACTION


def settings(assignment: Assignment) -> dict[str, Any]:
    """No retries: the proxy retries, and a retry from here would be another sample."""
    room = assignment.context_tokens - assignment.max_tokens
    return {
        "retry": {"enabled": False, "provider": {"maxRetries": 0, "timeoutMs": ANSWER_MS}},
        "httpIdleTimeoutMs": ANSWER_MS,
        "compaction": {"reserveTokens": assignment.max_tokens, "keepRecentTokens": max(room, 2) // 2},
        "cacheWarming": "off",
        "enableInstallTelemetry": False,
        "defaultProjectTrust": "never",
    }


def servers(assignment: Assignment) -> dict[str, Any]:
    """Their tools are declared to the model, as other programs do it, instead of being found by scripts."""
    entries = mcp_entries(assignment.mcp_servers)
    return {name: {**entry, "exposure": "direct", "timeout": MCP_CALL_SECONDS} for name, entry in entries.items()}


def models(assignment: Assignment) -> dict[str, Any]:
    """One provider with one model, without extensions of OpenAI's own API."""
    model = {
        "id": assignment.model,
        "name": "Policy",
        "reasoning": False,
        "input": ["text"],
        "contextWindow": assignment.context_tokens,
        "maxTokens": assignment.max_tokens,
    }
    compat = {"supportsStore": False, "supportsDeveloperRole": False, "supportsReasoningEffort": False}
    provider = {
        "baseUrl": assignment.base_url,
        "apiKey": assignment.api_key,
        "api": "openai-completions",
        "compat": compat | {"maxTokensField": "max_tokens"},
        "models": [model],
    }
    return {"providers": {PROVIDER: provider}}


class PiRun(HeadlessRun):
    _turn = 0

    def handle_event(self, event: dict[str, Any]) -> None:
        kind, call = event.get("type"), str(event.get("toolCallId"))
        if kind == "session":
            self.session = event.get("id")
        elif kind == "message_end":
            self._handle_message(event.get("message") or {})
        elif kind == "tool_execution_start":
            self.start_tool(f"turn-{self._turn}", call, event.get("toolName"), event.get("args"))
        elif kind == "tool_execution_end":
            self.end_tool(
                call, block_text((event.get("result") or {}).get("content")), failed=event.get("isError") is True
            )

    def _handle_message(self, message: dict[str, Any]) -> None:
        if message.get("role") != "assistant":
            return
        self._turn += 1
        for block in message.get("content") or ():
            self.add_text(f"turn-{self._turn}", block.get("thinking"), kind="reasoning")
            self.add_text(f"turn-{self._turn}", block.get("text"))
        if message.get("errorMessage"):
            self.fail(str(message["errorMessage"]))
