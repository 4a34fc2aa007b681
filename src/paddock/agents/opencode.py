"""OpenCode: the program, its configuration, and the two ways to drive it.

`run` starts `opencode run`, which works through one instruction and ends. `serve` starts `opencode serve` and uses
its HTTP API (`_opencode_server.py`), which costs the same and adds live messages and a clean abort.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.agents.base import Agent, AgentRun, AgentTools, Assignment, Report
from paddock.agents.equipment import copy_skills
from paddock.agents.headless import HeadlessRun
from paddock.agents.install import fetch_npm_binary, fetch_ripgrep, has_avx2, npm_platform, with_ripgrep
from paddock.capture.trace import Role
from paddock.config import PADDOCK_OPENCODE
from paddock.errors import AgentError
from paddock.limits import ANSWER_MS
from paddock.sandbox.base import Command, Mount

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.sandbox.base import Sandbox
    from paddock.tasks.settings import McpServer, McpTransport

FOLDER = PurePosixPath("/opt/opencode")
PROGRAM = str(FOLDER / "opencode")
PROVIDER = "paddock"
RUN_ARGUMENTS = ("run", "--format", "json", "--title", "rollout")
BUILT_IN_SKILL = "customize-opencode"
DENIED = ("webfetch", "websearch", "question")
"""Tools that need a network or a person."""


class OpenCode(Agent):
    name: ClassVar[str] = "opencode"
    drivers: ClassVar[tuple[str, ...]] = ("run", "serve")
    version: ClassVar[str] = "1.18.33"
    size_mb: ClassVar[int] = 183
    prompt_tokens: ClassVar[int] = 7000
    live_events: ClassVar[bool] = True
    clean_abort: ClassVar[bool] = True
    mcp_transports: ClassVar[tuple[McpTransport, ...]] = ("stdio", "sse", "streamable-http")
    supports_skills: ClassVar[bool] = True
    tools: ClassVar[AgentTools] = AgentTools(
        run=lambda command: ("bash", {"command": command, "description": "Runs it"}),
        write=lambda path, text: ("write", {"filePath": path, "content": text}),
        call_mcp=lambda server, tool: (f"{server}_{tool}", {}),
    )

    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        own = own_program()
        if own is not None:
            return (Mount(own.parent, FOLDER, ("opencode",)),)
        machine = npm_platform()
        baseline = "-baseline" if machine.endswith("x64") and not has_avx2() else ""
        package = f"opencode-{machine}{baseline}"
        folder = await fetch_npm_binary(package, self.version, "bin/opencode", log, timeout=timeout)
        return (Mount(folder, FOLDER, ("opencode",)), await fetch_ripgrep(log, timeout=timeout))

    async def start(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        await write_stubs(sandbox)
        if assignment.skills_dir:
            await copy_skills(sandbox, assignment.skills_dir, config_folder(sandbox) / "skills")
        env = environment(assignment, sandbox)
        if self.driver == "serve":
            from paddock.agents._opencode_server import start_server

            return await start_server(sandbox, assignment, env, report)
        # As an argument the instruction would reach the model in quotes; on standard input it is unchanged.
        stdin = assignment.instruction.encode()
        arguments = with_ripgrep(PROGRAM, *RUN_ARGUMENTS)
        job = await sandbox.start(Command(arguments, cwd=sandbox.workdir, env=env, stdin=stdin))
        return OpenCodeRun(job, assignment.instruction, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """OpenCode's side calls have no tools: one makes a title, the other a summary."""
        if body.get("tools"):
            return None
        messages = body.get("messages") or [{}]
        text = messages[0].get("content") if isinstance(messages[0], dict) else None
        is_title = isinstance(text, str) and text.startswith("You are a title generator")
        return Role.TITLE if is_title else Role.COMPACTION


class OpenCodeRun(HeadlessRun):
    """`opencode run`: it prints whole parts, which have the form of the transcript already."""

    def handle_event(self, event: dict[str, Any]) -> None:
        self.session = event.get("sessionID") or self.session
        if event.get("type") == "error":
            self.fail(error_text(event.get("error")))
        elif isinstance(part := event.get("part"), dict):
            self.add_part(str(part.get("messageID") or ""), part)


def error_text(error: Any) -> str:
    """OpenCode's error object in one line."""
    if not isinstance(error, dict):
        return str(error)
    data = error.get("data")
    message = data.get("message") if isinstance(data, dict) else None
    return f"{error.get('name', 'error')}: {message}" if message else str(error.get("name", error))


def own_program() -> Path | None:
    """The program that `PADDOCK_OPENCODE` names, for machines that fetch nothing."""
    own = PADDOCK_OPENCODE.read()
    if not own:
        return None
    path = Path(own).resolve()
    if path.name != "opencode" or not os.access(path, os.X_OK):
        raise AgentError(f"PADDOCK_OPENCODE is {own!r}", hint="name the program file opencode itself")
    return path


def configuration(assignment: Assignment) -> dict[str, Any]:
    """One provider, one model, no other traffic, no questions to a person."""
    model = f"{PROVIDER}/{assignment.model}"
    return {
        "model": model,
        "small_model": model,
        "enabled_providers": [PROVIDER],
        "share": "disabled",
        "autoupdate": False,
        "snapshot": False,
        "permission": {
            "*": "allow",
            "external_directory": "allow",
            **dict.fromkeys(DENIED, "deny"),
            "skill": {"*": "allow", BUILT_IN_SKILL: "deny"} if assignment.skills_dir else "deny",
        },
        "mcp": {server.name: mcp_entry(server) for server in assignment.mcp_servers},
        "agent": {"title": {"disable": True}},
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Paddock",
                "options": {
                    "baseURL": assignment.base_url,
                    "apiKey": assignment.api_key,
                    "headerTimeout": ANSWER_MS,
                    "chunkTimeout": ANSWER_MS,
                },
                "models": {
                    assignment.model: {
                        "name": "Policy",
                        "tool_call": True,
                        "temperature": True,
                        "limit": {"context": assignment.context_tokens, "output": assignment.max_tokens},
                    }
                },
            }
        },
    }


def mcp_entry(server: McpServer) -> dict[str, Any]:
    """It tries streamable HTTP at a `remote` server, then SSE."""
    if server.transport == "stdio":
        return {"type": "local", "command": [server.command, *server.args], "enabled": True}
    return {
        "type": "remote",
        "url": server.url,
        "headers": dict(server.headers),
        "oauth": False,
        "enabled": True,
    }


def environment(assignment: Assignment, sandbox: Sandbox) -> dict[str, str]:
    """A configuration in a variable overrides every file in the work folder."""
    return {
        "HOME": str(sandbox.home),
        "OPENCODE_CONFIG_CONTENT": orjson.dumps(configuration(assignment)).decode(),
        "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
        "OPENCODE_MODELS_PATH": str(models_file(sandbox)),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_EXTERNAL_SKILLS": "1",
        "OPENCODE_DISABLE_CLAUDE_CODE": "1",
        "OPENCODE_DISABLE_SHARE": "1",
    }


def config_folder(sandbox: Sandbox) -> PurePosixPath:
    return sandbox.home / ".config" / "opencode"


def models_file(sandbox: Sandbox) -> PurePosixPath:
    return config_folder(sandbox) / "models.json"


async def write_stubs(sandbox: Sandbox) -> None:
    """An empty list of models, and the marks of a finished plugin install: without them it needs the network."""
    folder = config_folder(sandbox)
    lock = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
    await sandbox.write(models_file(sandbox), b"{}")
    await sandbox.write(folder / "package-lock.json", orjson.dumps(lock))
    await sandbox.write(folder / "node_modules" / ".keep", b"")
