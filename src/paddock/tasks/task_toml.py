"""Harbor's task.toml, schema 1.4: the keys with their types, and the values of a task that they become.

The classes here mirror the file, key by key. `read_task_toml` returns them; the functions below turn them into the
values of `settings`. Keys that are not in the schema are collected by name, with the key that was probably meant.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping  # noqa: TC003, as `json_values` resolves the types of fields at run time
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Any, Literal

from paddock.errors import ConfigError, TaskError
from paddock.limits import BUILD_SECONDS, GIBIBYTE, MEBIBYTE, SandboxLimits
from paddock.sandbox.images.image import HealthCheck
from paddock.sandbox.network.policy import NetworkMode, NetworkPolicy
from paddock.tasks.json_values import join_place, read_value
from paddock.tasks.settings import (
    COLLECT_SECONDS,
    Artifact,
    CollectCommand,
    EnvironmentSettings,
    Machine,
    McpServer,
    RewardStrategy,
    VerifierMode,
)

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
UNITS = {"": 1, "K": 1024, "M": MEBIBYTE, "G": GIBIBYTE, "T": 1024 * GIBIBYTE}
IMAGE_DISK_BYTES = 10 * GIBIBYTE
"""For a task with an image that does not limit its storage: package managers need more than the plain default."""


@dataclass(frozen=True, slots=True)
class TaskTable:
    name: str = ""
    version: str = ""
    description: str = ""
    authors: tuple[Mapping[str, str] | str, ...] = ()
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HealthCheckTable:
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3

    def __post_init__(self) -> None:
        _check_above_zero(self, "interval_sec", "timeout_sec", "start_interval_sec", "retries")


@dataclass(frozen=True, slots=True)
class McpServerTable:
    name: str
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str = ""
    command: str = ""
    args: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TpuTable:
    type: str
    topology: str


@dataclass(frozen=True, slots=True)
class EnvironmentTable:
    build_timeout_sec: float | None = None
    docker_image: str = ""
    os: str = "linux"
    cpus: float | None = None
    memory_mb: float | None = None
    storage_mb: float | None = None
    memory: str = ""
    storage: str = ""
    gpus: int = 0
    gpu_types: tuple[str, ...] = ()
    tpu: TpuTable | None = None
    mcp_servers: tuple[McpServerTable, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    skills_dir: str = ""
    healthcheck: HealthCheckTable | None = None
    workdir: str = ""
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None
    allow_internet: bool | None = None
    setup: str = ""
    """Not of Harbor: the set-up shell of a task without an image."""

    def __post_init__(self) -> None:
        _check_above_zero(self, "build_timeout_sec", "cpus", "memory_mb", "storage_mb")


@dataclass(frozen=True, slots=True)
class AgentTable:
    timeout_sec: float | None = None
    user: str | int = ""
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_above_zero(self, "timeout_sec")


@dataclass(frozen=True, slots=True)
class CollectTable:
    command: str
    service: str = "main"
    timeout_sec: float = COLLECT_SECONDS
    user: str | int = ""


@dataclass(frozen=True, slots=True)
class VerifierTable:
    timeout_sec: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | int = ""
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: tuple[CollectTable, ...] = ()
    mode: VerifierMode | None = None
    """Not of Harbor: chooses between `sealed` and `live`."""

    def __post_init__(self) -> None:
        _check_above_zero(self, "timeout_sec")
        if self.environment_mode == "shared" and self.environment is not None:
            raise TaskError(
                "environment_mode is 'shared', but the verifier has an environment",
                hint='remove [verifier.environment], or write environment_mode = "separate"',
            )

    @property
    def chosen_mode(self) -> VerifierMode | None:
        """None for `shared`, Harbor's default: the mode is then chosen when the agent has ended."""
        if self.mode is not None:
            return self.mode
        is_separate = self.environment_mode == "separate" or self.environment is not None
        return "separate" if is_separate else None


@dataclass(frozen=True, slots=True)
class SolutionTable:
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepTable:
    name: str
    agent: AgentTable = field(default_factory=AgentTable)
    verifier: VerifierTable = field(default_factory=VerifierTable)
    min_reward: float | Mapping[str, float] | None = None
    healthcheck: HealthCheckTable | None = None
    artifacts: tuple[str | Artifact, ...] = ()


@dataclass(frozen=True, slots=True)
class TomlDocument:
    schema_version: str | float = ""
    version: str | float = ""
    source: str = ""
    task: TaskTable = field(default_factory=TaskTable)
    environment: EnvironmentTable = field(default_factory=EnvironmentTable)
    agent: AgentTable = field(default_factory=AgentTable)
    verifier: VerifierTable = field(default_factory=VerifierTable)
    solution: SolutionTable = field(default_factory=SolutionTable)
    artifacts: tuple[str | Artifact, ...] = ()
    steps: tuple[StepTable, ...] = ()
    multi_step_reward_strategy: RewardStrategy | None = None


MISSPELLED_RATIO = 0.8
"""How similar the names are, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class TaskToml:
    document: TomlDocument
    metadata: dict[str, Any]
    unknown_keys: tuple[str, ...]
    """Such as `agnt (did you mean agent?)`."""
    misspelled_tables: tuple[str, ...] = ()
    """Those of them that are tables with nearly the name of another one. All that they set is left out."""


def read_task_toml(text: str, file: str) -> TaskToml:
    """Raises TaskError that names the file and the key."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{file} is not valid TOML: {error}", hint="correct the file") from error
    metadata = data.pop("metadata", {})
    if not isinstance(metadata, dict):
        raise TaskError(f"{file}: metadata is {metadata!r}, not an object", hint="write [metadata] on its own line")
    unknown: list[str] = []
    tables: list[str] = []
    top = f"{file}:"

    def collect(where: str, key: str, keys: list[str]) -> None:
        close = difflib.get_close_matches(key, keys, 1)
        # Other programs may have tables of their own here, so that only a very close name is a misspelled one.
        misspelled = difflib.get_close_matches(key, keys, 1, MISSPELLED_RATIO)
        if misspelled and where == top and isinstance(data[key], dict):
            tables.append(f"[{key}] (did you mean [{misspelled[0]}]?)")
        place = join_place(where, key).removeprefix(f"{file}: ")
        unknown.append(f"{place} (did you mean {close[0]}?)" if close else place)

    document = read_value(TomlDocument, data, top, collect)
    task = document.task
    described = {"description": task.description, "authors": list(task.authors), "keywords": list(task.keywords)}
    plain = {key: _plain(value) for key, value in metadata.items()}
    present = {key: value for key, value in described.items() if value}
    return TaskToml(document, {**present, **plain}, tuple(unknown), tuple(tables))


# -- values of a task -----------------------------------------------------------------------------------------


def environment_settings(table: EnvironmentTable, *, compose: str = "") -> EnvironmentSettings:
    tpu = table.tpu
    return EnvironmentSettings(
        env=table.env,
        workdir=table.workdir,
        build_timeout=table.build_timeout_sec or BUILD_SECONDS,
        health_check=health_check(table.healthcheck),
        mcp_servers=tuple(
            McpServer(
                server.name,
                "streamable-http" if server.transport == "http" else server.transport,
                server.url,
                server.command,
                server.args,
                server.headers,
            )
            for server in table.mcp_servers
        ),
        skills_dir=table.skills_dir,
        machine=Machine(
            table.gpus,
            table.gpu_types if table.gpus else (),
            f"{tpu.type} {tpu.topology}" if tpu else "",
            table.os.lower(),
            compose,
        ),
    )


def environment_limits(table: EnvironmentTable, file: str, *, on_image: bool) -> SandboxLimits:
    limits = {
        "cpus": None if table.cpus is None else max(1, round(table.cpus)),
        "memory_bytes": _size(table, "memory", file),
        "disk_bytes": _size(table, "storage", file) or (IMAGE_DISK_BYTES if on_image else None),
    }
    return SandboxLimits(**{key: value for key, value in limits.items() if value is not None})


def health_check(table: HealthCheckTable | None) -> HealthCheck | None:
    if table is None:
        return None
    return HealthCheck(
        ("/bin/sh", "-c", table.command),
        table.interval_sec,
        table.timeout_sec,
        table.start_period_sec,
        table.start_interval_sec,
        table.retries,
    )


def network_policy(table: EnvironmentTable | AgentTable | VerifierTable, where: str) -> NetworkPolicy | None:
    """None if the table has none. Raises TaskError for hosts without mode `allowlist`."""
    mode = table.network_mode
    if mode is None and table.allowed_hosts is None and isinstance(table, EnvironmentTable):
        # Harbor's older key.
        old = table.allow_internet
        return None if old is None else NetworkPolicy("public" if old else "no-network")
    if mode is None and table.allowed_hosts is None:
        return None
    try:
        return NetworkPolicy(mode or "public", table.allowed_hosts or ())
    except ConfigError as error:
        raise TaskError(f"{where}: {error}", hint=error.hint) from error


def collect_commands(table: VerifierTable) -> tuple[CollectCommand, ...]:
    return tuple(CollectCommand(row.command, row.service, row.timeout_sec, str(row.user)) for row in table.collect)


def artifact_values(artifacts: tuple[str | Artifact, ...]) -> tuple[Artifact, ...]:
    return tuple(Artifact(item) if isinstance(item, str) else item for item in artifacts)


def _check_above_zero(table: Any, *names: str) -> None:
    for name in names:
        value = getattr(table, name)
        if value is not None and value <= 0:
            raise TaskError(f"{name} is {value!r}, not a number above 0", hint=f"write {name} = 2")


def _size(table: EnvironmentTable, name: str, file: str) -> int | None:
    """`memory_mb = 2048` or `memory = "2G"`, in bytes."""
    mebibytes: float | None = getattr(table, f"{name}_mb")
    text: str = getattr(table, name)
    if mebibytes is not None and text:
        raise TaskError(f"{file}: both {name} and {name}_mb are given", hint="keep one of them")
    if mebibytes is not None:
        return int(mebibytes * MEBIBYTE)
    if not text:
        return None
    match = SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise TaskError(f"{file}: environment.{name} is {text!r}", hint=f'write {name} = "4G"')
    return size


def _plain(value: Any) -> Any:
    """What TOML knows and JSON does not, as text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime | date | time) else value
