"""What a driver says about an agent program: how to get it, start it, follow it and stop it.

A driver knows its program and a sandbox. It knows nothing of models, tokens, verifiers or the
store: the program is given a base URL and a key, and whoever answers there records what it asks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.rollouts.sandbox.base import Mount, Sandbox
    from paddock.rollouts.trace import Role

Report = Callable[[str, dict[str, Any]], None]
"""Called with the kind and the data of each event the program tells about."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A program that is on this machine, ready to be seen inside a sandbox."""

    version: str
    mounts: tuple[Mount, ...] = ()
    log: str = ""
    """What installing it printed; empty when it was there already."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one rollout asks of the agent."""

    instruction: str
    base_url: str
    """Where the model is, seen from inside the sandbox; ends in `/v1`."""
    api_key: str = field(repr=False)
    """Opens the capture of this rollout and nothing else."""
    model: str = "policy"
    max_tokens: int = 4096
    context_tokens: int = 32768

    @property
    def root_url(self) -> str:
        """The base URL without `/v1`, for programs that add a version of their own."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How the program ended. The exit code is told, not trusted: see `rollout.py`."""

    exit_code: int | None
    timed_out: bool = False
    error: str | None = None
    """The program's own last words about what went wrong."""


class AgentRun(ABC):
    """A program at work in a sandbox."""

    session: str | None = None
    """The program's own name for its conversation."""

    @abstractmethod
    async def wait(self, timeout: float) -> AgentExit:
        """Until it ends; at the timeout it is stopped."""

    @abstractmethod
    async def messages(self) -> list[dict[str, Any]]:
        """The program's own transcript so far."""

    @abstractmethod
    async def abort(self) -> None:
        """Ask it to stop at once. `wait` then returns."""

    @abstractmethod
    def log_tail(self, count: int = 4096) -> str: ...


class Agent(ABC):
    """A driver. Instances hold settings only, so one serves any number of rollouts."""

    name: ClassVar[str]
    dialect: ClassVar[str] = "chat"
    """How the program speaks to a model."""
    drivers: ClassVar[tuple[str, ...]] = ("run",)
    """The ways it can be driven, the default first."""
    must_call: ClassVar[bool] = True
    """Whether a run without a single model call means that the program broke."""
    version: ClassVar[str] = ""
    """The release that is installed; empty for a program that is the user's own."""
    size_mb: ClassVar[int] = 0
    """What it takes on the disk."""
    live_events: ClassVar[bool] = False
    """Whether it tells what it does while it does it."""
    clean_abort: ClassVar[bool] = False
    """Whether it can be asked to stop; a program that cannot is killed."""

    def __init__(self, *, driver: str = "run") -> None:
        self.driver = driver

    @abstractmethod
    async def install(self, log: Callable[[str], None], *, timeout: float) -> Installed:
        """Fetch the program once per machine; afterwards this needs no network."""

    @abstractmethod
    async def begin(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        """Write its configuration and start it."""

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        """What a model call is for, where the program gives it away; None leaves it to the capture."""
        return None

    def describe(self) -> dict[str, Any]:
        """Settings worth keeping with a rollout."""
        return {"agent": self.name, "driver": self.driver, "version": self.version}
