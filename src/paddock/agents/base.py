"""The base classes of drivers. A driver fetches, starts, follows and stops one agent program.

A driver knows its program and a sandbox. It knows nothing of models, tokens, verifiers or the store: the program
gets a base URL and a key, and the proxy behind that URL records its calls.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from paddock.errors import ConfigError, SandboxError
from paddock.limits import ANSWER_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import PurePosixPath

    from paddock.capture.trace import Role
    from paddock.sandbox.base import Mount, Sandbox
    from paddock.tasks.settings import McpServer, McpTransport

Report = Callable[[str, dict[str, Any]], None]
"""Called with the kind and the data of each event of the program."""
ToolUse = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""
LARGEST_NOTES_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class AgentTools:
    """Tool calls with which a model makes the program act. The conformance suite scripts its model with them."""

    run: Callable[[str], ToolUse]
    """Runs a shell command."""
    write: Callable[[str, str], ToolUse]
    """Writes a file, given its absolute path and its text."""
    finish: ToolUse | None = None
    """Ends the work. None: a message without a tool call does."""
    call_mcp: Callable[[str, str], ToolUse] | None = None
    """Calls a tool without arguments of an MCP server, given the names of both."""


def shell_write(path: str, text: str) -> str:
    """A shell command that writes a file, for programs without a tool for it."""
    return f"printf %s {shlex.quote(text)} > {shlex.quote(path)}"


@dataclass(frozen=True, slots=True)
class Installed:
    """A program that is on this machine, ready to be mounted into a sandbox."""

    mounts: tuple[Mount, ...] = ()
    log: str = ""
    """What fetching it printed; empty if it was in the cache."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one rollout asks of the agent."""

    instruction: str
    base_url: str
    """Where the model is, seen from inside the sandbox; ends in `/v1`."""
    api_key: str = field(repr=False)
    """Accepted by the proxy of this rollout only."""
    model: str = "policy"
    max_tokens: int = 4096
    context_tokens: int = 32768
    mcp_servers: tuple[McpServer, ...] = ()
    """MCP servers of the task, for the program to connect to."""
    skills_dir: str = ""
    """A folder in the sandbox with skills, for the program to offer to the model. Empty: none."""

    @property
    def root_url(self) -> str:
        """The base URL without `/v1`, for programs that add a version of their own."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How the program ended. The exit code alone does not decide the outcome of a rollout."""

    exit_code: int | None
    timed_out: bool = False
    error: str | None = None
    """The program's own last error message."""


class AgentRun(ABC):
    """A program at work in a sandbox."""

    session: str | None = None
    """The program's own id of its conversation."""

    @abstractmethod
    async def wait(self, timeout: float) -> AgentExit:
        """Wait until it ends; at the timeout it is stopped."""

    @abstractmethod
    async def messages(self) -> list[dict[str, Any]]:
        """The program's own transcript so far."""

    @abstractmethod
    async def abort(self) -> None:
        """Ask it to stop at once. `wait` then returns."""

    @abstractmethod
    def log_tail(self, count: int = 4096) -> str:
        """The end of what the program printed, `count` characters at most."""


class AgentBase(ABC):
    """What every agent has: a name, its abilities, and settings to keep with a rollout. Instances hold settings only,
    so one serves any number of rollouts."""

    name: ClassVar[str]
    """As in `--agent`; the module has the same name with underscores."""
    dialect: ClassVar[str] = "chat"
    """The API with which the program calls a model: a name in `paddock.capture.dialects`."""
    drivers: ClassVar[tuple[str, ...]] = ("run",)
    """The ways it can be driven (`--driver`), the default first."""
    requires_model_call: ClassVar[bool] = True
    """Whether a run without a single model call means that the program broke."""
    version: ClassVar[str] = ""
    """The release that is fetched; empty for a program that is the user's own."""
    size_mb: ClassVar[int] = 0
    """Its size on the disk."""
    prompt_tokens: ClassVar[int] = 0
    """About how many tokens its first prompt has, the task left out: measured, at four characters a token. 0: not
    known."""
    live_events: ClassVar[bool] = False
    """Whether it reports what it does while it runs."""
    clean_abort: ClassVar[bool] = False
    """Whether it stops on request; other programs are killed."""
    mcp_transports: ClassVar[tuple[McpTransport, ...]] = ()
    """How it can connect to the MCP servers of a task; empty if it cannot use any."""
    answer_timeout: ClassVar[float] = ANSWER_SECONDS
    """Seconds that the program waits for an answer that is not streamed. Streams get keep-alives. It limits how long
    a batch can be paused."""
    supports_skills: ClassVar[bool] = False
    """Whether it offers the skills of a task to the model."""
    tools: ClassVar[AgentTools | None] = None
    """The tools of the program, for the conformance suite."""

    def __init__(self, *, driver: str = "run") -> None:
        self.driver = driver

    @classmethod
    def from_spec(cls, argument: str, driver: str) -> Self:
        """Make the driver for `--agent NAME` or `--agent NAME:ARGUMENT`. Raises ConfigError."""
        if argument:
            raise ConfigError(f"agent {cls.name!r} takes nothing after the colon", hint=f"write --agent {cls.name}")
        return cls(driver=driver)

    async def install(self, log: Callable[[str], None], *, timeout: float) -> Installed:
        """Fetch the program once per machine; afterwards this needs no network. Raises AgentError."""
        lines: list[str] = []

        def log_and_keep(line: str) -> None:
            lines.append(line)
            log(line)

        mounts = await self.fetch(log_and_keep, timeout=timeout)
        return Installed(mounts, "\n".join(lines))

    @abstractmethod
    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        """Fetch the program unless it is in the cache, and return the folders to mount. Raises AgentError."""

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """The role of a model call (its body in chat form), if the program shows it; None: the proxy decides."""
        return None

    @property
    def spec(self) -> str:
        """What `load_agent` makes an equal driver of, with `driver`."""
        return self.name

    def describe(self) -> dict[str, Any]:
        """Settings worth keeping with a rollout."""
        return {"agent": self.name, "driver": self.driver, "version": self.version}


class Agent(AgentBase):
    """A driver for an agent program, which works in a sandbox."""

    @abstractmethod
    async def start(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        """Write its configuration and start it."""


# -- what a task tells its agent beside the instruction ---------------------------------------------------
#
# Programs read files such as `AGENTS.md` only in a folder that they trust, and then obey the settings there as well
# (other models, programs to start). So drivers let them trust nothing, and pass the notes on in another way.


async def read_notes(sandbox: Sandbox, names: tuple[str, ...]) -> bytes:
    """The first of these files that the work folder has; empty if it has none."""
    for name in names:
        try:
            return await sandbox.read(sandbox.workdir / name, limit=LARGEST_NOTES_BYTES)
        except (FileNotFoundError, SandboxError):
            continue
    return b""


async def copy_notes(sandbox: Sandbox, names: tuple[str, ...], target: PurePosixPath) -> None:
    """Copy the first of these files that the work folder has to `target`."""
    if notes := await read_notes(sandbox, names):
        await sandbox.write(target, notes)


def escape_slash_command(instruction: str, prefix: str = " ") -> bytes:
    """The instruction for programs that take a leading `/word` for a command of their own."""
    return (f"{prefix}{instruction}" if instruction.startswith("/") else instruction).encode()
