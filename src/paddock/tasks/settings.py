"""What a task says beside its files and its limits, as values: image, network, users, verifier, steps.

The names follow Harbor's task.toml (schema 1.4) where it has one. Nothing here reads files or runs anything: see
`task_toml` for the file, and `requirements` for what cannot be run here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping  # noqa: TC003, as `json_values` resolves the types of fields at run time
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, get_args

from paddock.errors import TaskError
from paddock.limits import BUILD_SECONDS, SandboxLimits
from paddock.sandbox.images.image import HealthCheck  # noqa: TC001
from paddock.sandbox.network.policy import NO_NETWORK, REGISTRIES, NetworkPolicy

Phase = Literal["build", "setup", "agent", "verifier"]
"""The parts of a rollout that can have different networks."""
VerifierMode = Literal["sealed", "live", "separate"]
"""`sealed`: the agent is dead, its files are data in a new sandbox. `live`: the tests run beside the processes that
the agent left. `separate`: the tests run on an image of their own and see only the artifacts."""
VERIFIER_MODES: tuple[VerifierMode, ...] = get_args(VerifierMode)
RewardStrategy = Literal["mean", "final"]
McpTransport = Literal["stdio", "sse", "streamable-http"]
MAIN_SERVICE = "main"
"""The service of a compose file in which the agent works. It is the only one here."""
COLLECT_SECONDS = 60.0
PUBLIC = NetworkPolicy("public")
REGISTRIES_ONLY = NetworkPolicy("allowlist", (REGISTRIES,))


@dataclass(frozen=True, slots=True)
class TaskImage:
    """The root filesystem of a task: an image that exists, or a Dockerfile whose context are the task's files."""

    name: str = ""
    """Of an image in a registry or in the local store. If it is given, the Dockerfile is not built."""
    dockerfile: str = ""
    """The text of the Dockerfile."""

    def __post_init__(self) -> None:
        if not self.name and not self.dockerfile.strip():
            raise TaskError("the image has neither a name nor a Dockerfile", hint="give one of them")


@dataclass(frozen=True, slots=True)
class TaskNetwork:
    """What each phase may connect to. None: what `policy` chooses."""

    environment: NetworkPolicy | None = None
    """For all phases that have no policy of their own."""
    agent: NetworkPolicy | None = None
    verifier: NetworkPolicy | None = None

    def policy(self, phase: Phase, *, on_image: bool) -> NetworkPolicy:
        """The policy of a phase. By default a task with an image may reach every public address, as in Harbor.

        Without an image there is no network, except for the package registries during set-up."""
        chosen = {"agent": self.agent, "verifier": self.verifier}.get(phase) or self.environment
        if phase == "build" and chosen is not None:
            # Harbor builds images outside the container, so its policy does not restrict the build.
            return PUBLIC
        if chosen is not None:
            return chosen
        if on_image:
            return PUBLIC
        return REGISTRIES_ONLY if phase == "setup" else NO_NETWORK


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and system that a task asks for. Only a plain Linux machine is available here."""

    gpus: int = 0
    gpu_types: tuple[str, ...] = ()
    tpu: str = ""
    os: str = "linux"
    compose: str = ""
    """The name of its compose file, which would start several containers."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server that the agent may use."""

    name: str
    transport: McpTransport = "sse"
    url: str = ""
    command: str = ""
    args: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.transport == "stdio" and not self.command:
            raise TaskError(f"the MCP server {self.name!r} has no command", hint="transport 'stdio' needs command")
        if self.transport != "stdio" and not self.url:
            raise TaskError(
                f"the MCP server {self.name!r} has no url", hint=f"transport {self.transport!r} needs url"
            )


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file or folder that is kept when the agent has ended, and that a separate verifier gets."""

    source: str
    destination: str = ""
    """A relative path to store it under. Empty: the path of `source`."""
    exclude: tuple[str, ...] = ()
    """Shell patterns of paths below a folder that are left out."""
    service: str = MAIN_SERVICE

    def __post_init__(self) -> None:
        for name, path in (("source", self.source), ("destination", self.destination)):
            if ".." in PurePosixPath(path).parts:
                raise TaskError(f"the {name} of an artifact is {path!r}", hint="use a path without '..'")
        if PurePosixPath(self.destination).is_absolute():
            raise TaskError(f"the destination of an artifact is {self.destination!r}", hint="use a relative path")


@dataclass(frozen=True, slots=True)
class CollectCommand:
    """Run after the agent and before artifacts are kept, to write the state of a service into files."""

    command: str
    service: str = MAIN_SERVICE
    timeout: float = COLLECT_SECONDS
    user: str = ""


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """How the sandbox of an agent, or of a separate verifier, is prepared."""

    env: Mapping[str, str] = field(default_factory=dict)
    """`${NAME}` and `${NAME:-default}` stand for variables of this machine."""
    workdir: str = ""
    """Empty: the WORKDIR of the image."""
    build_timeout: float = BUILD_SECONDS
    """Seconds for pulling or building the image."""
    health_check: HealthCheck | None = None
    """The agent starts when it succeeds."""
    mcp_servers: tuple[McpServer, ...] = ()
    skills_dir: str = ""
    """A folder in the sandbox with skills for the agent."""
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    user: str = ""
    """Empty: the user of the image."""
    timeout: float | None = None
    """Of a step. None: that of the task."""


@dataclass(frozen=True, slots=True)
class LogGrader:
    """How what the tests print becomes a reward, outside of the sandbox: with the parsers of `swebench`."""

    repository: str
    """`owner/name`, which chooses the parser if none is named."""
    version: str = ""
    instance: str = ""
    """The id of the row, which some parsers need."""
    parser: str = ""
    fail_to_pass: tuple[str, ...] = ()
    """Names of tests that fail before the work and must pass after it."""
    pass_to_pass: tuple[str, ...] = ()
    """Names of tests that must still pass."""
    evaluation: str = ""
    """`pass_and_fail`, or `fail_only` for test runners that print only failures. Empty: as the repository needs."""
    problem: str = ""
    """Why such a log cannot be parsed. The task is not run then."""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class VerifierSettings:
    mode: VerifierMode | None = None
    """None: `live` if a process is left when the agent ends, else `sealed`."""
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    timeout: float | None = None
    """Of a step. None: that of the task."""
    image: TaskImage | None = None
    """Of a separate verifier. None: that of the task. The context of a Dockerfile are the tests."""
    environment: EnvironmentSettings | None = None
    """Of a separate verifier. None: that of the task."""
    limits: SandboxLimits | None = None
    grader: LogGrader | None = None
    """None: the tests write the reward."""
    collect: tuple[CollectCommand, ...] = ()
    shared: bool = False
    """Of a step: its tests see the agent's files, although those of the task are `separate`."""


@dataclass(frozen=True, slots=True)
class TaskStep:
    """One of several instructions that an agent gets one after the other, each with its own tests."""

    name: str
    instruction: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Put into the work folder before the step. `setup.sh` is run there."""
    tests: Mapping[str, bytes] = field(default_factory=dict)
    """Added to the tests of the task, and replacing those of the same name."""
    solution: Mapping[str, bytes] = field(default_factory=dict)
    agent: AgentSettings = field(default_factory=AgentSettings)
    verifier: VerifierSettings = field(default_factory=VerifierSettings)
    network: TaskNetwork = field(default_factory=TaskNetwork)
    min_reward: Mapping[str, float] = field(default_factory=dict)
    """The last step is this one if a reward of that name is lower. `reward` is the reward itself."""
    health_check: HealthCheck | None = None
    artifacts: tuple[Artifact, ...] = ()
    modes: Mapping[str, int] = field(default_factory=dict)
    """Permission bits of those `files` that are not 0o644."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise TaskError(f"{self.name!r} is not the name of a step", hint="use the name of a folder below steps/")
        if not self.instruction.strip():
            raise TaskError(
                f"step {self.name}: the instruction is missing or empty", hint="say what the agent has to do"
            )
        if not all(map(math.isfinite, self.min_reward.values())):
            raise TaskError(f"step {self.name}: min_reward is not finite", hint="write a number such as 1.0")


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """All settings of a task that have no field of their own in `Task`."""

    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    agent: AgentSettings = field(default_factory=AgentSettings)
    verifier: VerifierSettings = field(default_factory=VerifierSettings)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    reward_strategy: RewardStrategy = "mean"
    """How the rewards of steps become one: their mean, or that of the last step."""
