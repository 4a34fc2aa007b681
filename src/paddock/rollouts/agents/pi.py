"""Pi (`pi --mode json`): a small agent with four tools, and a prompt short enough for small models.

The package bundles all it needs. Its configuration lies in a folder of its own, written anew for each rollout;
nothing that the work folder holds is read as configuration, extensions or skills. It reads `AGENTS.md` there itself.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.rollouts.agents.base import Agent, AgentRun, Assignment, Installed, Report
from paddock.rollouts.agents.headless import HeadlessRun
from paddock.rollouts.agents.install import NODE_COMMAND, install_npm_bundle
from paddock.rollouts.agents.stream_json import block_text
from paddock.rollouts.sandbox.base import Command
from paddock.rollouts.trace import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.rollouts.sandbox.base import Sandbox

PACKAGE = "@earendil-works/pi-coding-agent"
INSIDE = PurePosixPath("/opt/pi")
PROGRAM = str(INSIDE / "node_modules" / PACKAGE / "dist" / "bundle" / "cli.js")
PROVIDER = "paddock"
MINUTES_15 = 900_000
KEPT = ("dist/bundle", "docs", "README.md", "package.json")
"""What runs, and what its prompt refers to; the rest of the package is examples and a copy that is not bundled."""
IGNORED = ("--no-approve", "--no-extensions", "--no-mcp", "--no-skills", "--no-prompt-templates", "--no-themes")
ARGUMENTS = ("--mode", "json", "--print", "--no-session", "--offline", *IGNORED)


class Pi(Agent):
    name: ClassVar[str] = "pi"
    version: ClassVar[str] = "1.5.0"
    size_mb: ClassVar[int] = 13
    live_events: ClassVar[bool] = True

    async def install(self, log: Callable[[str], None], *, timeout: float) -> Installed:
        return await install_npm_bundle(PACKAGE, self.version, INSIDE, KEPT, log, timeout=timeout)

    async def begin(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
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
        words = [*NODE_COMMAND, PROGRAM, *ARGUMENTS, "--provider", PROVIDER, "--model", assignment.model]
        stdin = assignment.instruction.encode()
        job = await sandbox.start(Command(words, cwd=sandbox.workdir, env=env, stdin=stdin))
        return PiRun(job, assignment.instruction, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """Without tools, it sums up a conversation that became too long."""
        return None if body.get("tools") else Role.COMPACTION


def settings(assignment: Assignment) -> dict[str, Any]:
    """What fails is tried again behind the model's address: another try from here would be another sample."""
    room = assignment.context_tokens - assignment.max_tokens
    return {
        "retry": {"enabled": False, "provider": {"maxRetries": 0, "timeoutMs": MINUTES_15}},
        "httpIdleTimeoutMs": MINUTES_15,
        "compaction": {"reserveTokens": assignment.max_tokens, "keepRecentTokens": max(room, 2) // 2},
        "cacheWarming": "off",
        "enableInstallTelemetry": False,
        "defaultProjectTrust": "never",
    }


def models(assignment: Assignment) -> dict[str, Any]:
    """One provider with one model, spoken to as to any server of this dialect."""
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

    def take(self, event: dict[str, Any]) -> None:
        kind, call = event.get("type"), str(event.get("toolCallId"))
        if kind == "session":
            self.session = event.get("id")
        elif kind == "message_end":
            self._message(event.get("message") or {})
        elif kind == "tool_execution_start":
            self.start_tool(f"turn-{self._turn}", call, event.get("toolName"), event.get("args"))
        elif kind == "tool_execution_end":
            self.end_tool(
                call, block_text((event.get("result") or {}).get("content")), failed=event.get("isError") is True
            )

    def _message(self, message: dict[str, Any]) -> None:
        if message.get("role") != "assistant":
            return
        self._turn += 1
        for block in message.get("content") or ():
            self.add_text(f"turn-{self._turn}", block.get("thinking"), kind="reasoning")
            self.add_text(f"turn-{self._turn}", block.get("text"))
        if message.get("errorMessage"):
            self.fail(str(message["errorMessage"]))
