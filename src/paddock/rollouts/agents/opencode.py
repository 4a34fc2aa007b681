"""OpenCode: the program, its configuration, and the two ways to drive it.

`run` starts `opencode run`, which works through one instruction and ends. `serve` starts
`opencode serve` and talks to it, which costs the same and adds live messages and a clean abort.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.errors import AgentError
from paddock.rollouts.agents.base import Agent, AgentRun, Assignment, Installed, Report
from paddock.rollouts.agents.install import Said, fetch_npm_binary, has_avx2, npm_platform
from paddock.rollouts.sandbox.base import Mount
from paddock.rollouts.trace import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.rollouts.sandbox.base import Sandbox

RIPGREP = "1.18.0"
"""What its tools `grep` and `glob` call; without one on the PATH it would try to download it."""
INSIDE = PurePosixPath("/opt/opencode")
SEARCH = PurePosixPath("/opt/ripgrep")
PROGRAM = str(INSIDE / "opencode")
PROVIDER = "paddock"
MINUTES_15 = 900_000
DENIED = ("webfetch", "websearch", "skill", "question")
"""Tools that need a network or a person, which a sandbox has not."""


class OpenCode(Agent):
    name: ClassVar[str] = "opencode"
    drivers: ClassVar[tuple[str, ...]] = ("run", "serve")
    version: ClassVar[str] = "1.18.33"
    size_mb: ClassVar[int] = 183
    live_events: ClassVar[bool] = True
    clean_abort: ClassVar[bool] = True

    async def install(self, log: Callable[[str], None], *, timeout: float) -> Installed:
        own = own_program()
        if own is not None:
            return Installed(version="own", mounts=(Mount(own.parent, INSIDE),))
        said = Said(log)
        machine = npm_platform()
        baseline = "-baseline" if machine.endswith("x64") and not has_avx2() else ""
        package = f"opencode-{machine}{baseline}"
        folder = await fetch_npm_binary(package, self.version, "bin/opencode", said, timeout=timeout)
        search = await fetch_npm_binary(f"@vscode/ripgrep-{machine}", RIPGREP, "bin/rg", said, timeout=timeout)
        return Installed(self.version, (Mount(folder, INSIDE), Mount(search, SEARCH)), str(said))

    async def begin(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        from paddock.rollouts.agents.opencode_run import start_run
        from paddock.rollouts.agents.opencode_serve import start_serve

        await write_stubs(sandbox)
        env = environment(assignment, sandbox)
        if self.driver == "serve":
            return await start_serve(sandbox, assignment, env, report)
        return await start_run(sandbox, assignment, env, report)

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """OpenCode's side calls carry no tools: one names the session, the other sums it up."""
        if body.get("tools"):
            return None
        messages = body.get("messages") or [{}]
        text = messages[0].get("content") if isinstance(messages[0], dict) else None
        titles = isinstance(text, str) and text.startswith("You are a title generator")
        return Role.TITLE if titles else Role.COMPACTION


def own_program() -> Path | None:
    """The program that `PADDOCK_OPENCODE` names, for machines that fetch nothing."""
    own = os.environ.get("PADDOCK_OPENCODE")
    if not own:
        return None
    path = Path(own).resolve()
    if path.name != "opencode" or not os.access(path, os.X_OK):
        raise AgentError(f"PADDOCK_OPENCODE is {own!r}", hint="name the program file opencode itself")
    return path


def configuration(assignment: Assignment) -> dict[str, Any]:
    """One provider, one model, nothing that reaches out, no question that nobody answers."""
    model = f"{PROVIDER}/{assignment.model}"
    return {
        "model": model,
        "small_model": model,
        "enabled_providers": [PROVIDER],
        "share": "disabled",
        "autoupdate": False,
        "snapshot": False,
        "permission": {"*": "allow", "external_directory": "allow", **dict.fromkeys(DENIED, "deny")},
        "agent": {"title": {"disable": True}},
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Paddock",
                "options": {
                    "baseURL": assignment.base_url,
                    "apiKey": assignment.api_key,
                    "headerTimeout": MINUTES_15,
                    "chunkTimeout": MINUTES_15,
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


def environment(assignment: Assignment, sandbox: Sandbox) -> dict[str, str]:
    """Given this way, the configuration wins over any file that lies in the work folder."""
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


def command_line(*arguments: str) -> list[str]:
    """OpenCode with its search program on the path, whatever else is there."""
    return ["/bin/sh", "-c", f'PATH="{SEARCH}:$PATH" exec "$0" "$@"', PROGRAM, *arguments]


def models_file(sandbox: Sandbox) -> PurePosixPath:
    return sandbox.home / ".config" / "opencode" / "models.json"


async def write_stubs(sandbox: Sandbox) -> None:
    """An empty list of models, and signs of a finished plugin install: otherwise it reaches for the network."""
    folder = sandbox.home / ".config" / "opencode"
    lock = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
    await sandbox.write(models_file(sandbox), b"{}")
    await sandbox.write(folder / "package-lock.json", orjson.dumps(lock))
    await sandbox.write(folder / "node_modules" / ".keep", b"")
