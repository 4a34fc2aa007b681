"""What a task gives its agent beside the instruction: MCP servers, and a folder with skills.

A driver says in `mcp_transports` and `supports_skills` what its program can use. A rollout whose agent cannot use all
of it is refused before it starts: without its tools a low score would say nothing about the model.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.agents import AGENTS, find_agent
from paddock.errors import SandboxError, TaskError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paddock.agents.base import AgentBase
    from paddock.sandbox.base import Sandbox
    from paddock.tasks.settings import EnvironmentSettings, McpServer
    from paddock.tasks.task import Task

SKILL_FILE = "SKILL.md"
MAX_SKILLS_BYTES = 256 * 1024 * 1024
ENTRY_TYPES = {"stdio": "stdio", "sse": "sse", "streamable-http": "http"}


def check_can_use(agent: AgentBase, task: Task) -> None:
    """Raises TaskError for a task with MCP servers or skills that the agent cannot use."""
    environment = task.settings.environment
    missing = list(missing_equipment(type(agent), environment))
    if not missing:
        return
    others = [name for name in sorted(AGENTS) if not any(missing_equipment(find_agent(name), environment))]
    raise TaskError(
        f"task {task.id} cannot be run with the agent {agent.name}, which cannot use {', '.join(missing)}",
        hint=f"use --agent {' or '.join(others)}" if others else "no agent can: take these parts out of the task",
    )


def missing_equipment(agent: type[AgentBase], environment: EnvironmentSettings) -> Iterator[str]:
    """What agents of this class cannot use, as task.toml names it."""
    if environment.mcp_servers and not agent.mcp_transports:
        yield "environment.mcp_servers"
    elif environment.mcp_servers:
        wanted = dict.fromkeys(server.transport for server in environment.mcp_servers)
        for transport in wanted:
            if transport not in agent.mcp_transports:
                yield f"environment.mcp_servers with transport {transport!r}"
    if environment.skills_dir and not agent.supports_skills:
        yield "environment.skills_dir"


def mcp_entries(servers: Iterable[McpServer]) -> dict[str, dict[str, Any]]:
    """The servers in the form of `mcpServers` that most programs read."""
    return {server.name: _entry(server) for server in servers}


def _entry(server: McpServer) -> dict[str, Any]:
    kind = ENTRY_TYPES[server.transport]
    if server.transport == "stdio":
        return {"type": kind, "command": server.command, "args": list(server.args)}
    return {"type": kind, "url": server.url, "headers": dict(server.headers)}


async def copy_skills(sandbox: Sandbox, source: str, target: PurePosixPath) -> None:
    """Copy the task's folder with skills to where a program looks for them. Raises TaskError if there are none."""
    folder = PurePosixPath(source)
    try:
        entries = await sandbox.list(folder)
        archive = await sandbox.pack(folder, limit=MAX_SKILLS_BYTES)
    except (OSError, SandboxError) as error:
        raise TaskError(
            f"environment.skills_dir {source} cannot be read: {error}",
            hint="name a folder that the image or the set-up of the task puts into the sandbox",
        ) from error
    if not any(PurePosixPath(entry.path).name == SKILL_FILE for entry in entries):
        raise TaskError(
            f"environment.skills_dir {source} has no skill", hint=f"put each skill into it as NAME/{SKILL_FILE}"
        )
    await sandbox.unpack(target, archive)
