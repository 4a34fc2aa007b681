"""Everything a fleet client announces, as values. Who listens is decided elsewhere (`paddock.telemetry`).

Every event carries the base attributes of the rollout it belongs to. They are bound to the rollout, so two
environments in one task never mix them up.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from paddock.errors import ConfigError
from paddock.telemetry.bus import Level, bus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Which task an event belongs to."""

    env_key: str | None = None
    env_version: str | None = None
    task_key: str | None = None
    modality: str | None = None

    @property
    def label(self) -> str:
        """How log lines name the environment."""
        return f"env={self.env_key}:{self.env_version}" if self.env_version else f"env={self.env_key}"


_ambient: ContextVar[TaskContext | None] = ContextVar("paddock_fleet_task", default=None)


def set_task_context(
    env_key: str | None = None,
    env_version: str | None = None,
    task_key: str | None = None,
    modality: str | None = None,
) -> None:
    """The base attributes of events that belong to no rollout, from here on in this context."""
    _ambient.set(TaskContext(env_key, env_version, task_key, modality))


def clear_task_context() -> None:
    _ambient.set(None)


def ambient_context() -> TaskContext:
    return _ambient.get() or TaskContext()


def configure_fleet_telemetry(
    token: str | None = None, environment: str = "training_rollouts", service_name: str = "openenv-fleet"
) -> None:
    """Send all events to Logfire, with this token or the one that Logfire finds itself (`LOGFIRE_TOKEN`).

    Telemetry never stops a run: without the `logfire` package a warning is logged, and without any token nothing is
    sent. Called again, it replaces what the earlier call set up.
    """
    global _unsubscribe
    from paddock.telemetry.sinks.logfire import LogfireSink

    try:
        sink = LogfireSink(token or None, environment=environment, service_name=service_name)
    except ConfigError as error:
        logger.warning("events are not sent to Logfire: %s (%s)", error, error.hint)
        return
    if _unsubscribe is not None:
        _unsubscribe()
    _unsubscribe = bus.subscribe(sink)


_unsubscribe: Any = None


@dataclass(frozen=True, kw_only=True)
class FleetEvent:
    name: ClassVar[str]
    level: ClassVar[Level] = "info"

    context: TaskContext

    def attributes(self) -> dict[str, Any]:
        """The base attributes and the event's own, flat."""
        base = {field.name: getattr(self.context, field.name) for field in fields(self.context)}
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "context"}
        return base | own


@dataclass(frozen=True, kw_only=True)
class RolloutStarted(FleetEvent):
    name: ClassVar[str] = "fleet_rollout_started"


@dataclass(frozen=True, kw_only=True)
class RolloutCompleted(FleetEvent):
    """The one end of a rollout. `reason` is always there; `failure_reason` only when the grade is not to be trusted
    or the episode did not end as episodes should."""

    name: ClassVar[str] = "fleet_rollout_completed"
    reason: str
    failure_reason: str | None
    step_count: int
    max_steps: int
    reward: float | None
    verifier_success: bool
    error_message: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProvisioningCompleted(FleetEvent):
    name: ClassVar[str] = "fleet_provisioning_completed"
    provisioning_time_s: float
    queue_time_s: float
    instance_id: str


@dataclass(frozen=True, kw_only=True)
class Failed(FleetEvent):
    """A failure, by its type; the message never holds a key."""

    level: ClassVar[Level] = "error"
    error_type: str
    error_message: str


@dataclass(frozen=True, kw_only=True)
class Retry(Failed):
    level: ClassVar[Level] = "warning"
    attempt: int
    retry_delay_s: float


@dataclass(frozen=True, kw_only=True)
class MakeRetry(Retry):
    name: ClassVar[str] = "fleet_make_retry"


@dataclass(frozen=True, kw_only=True)
class MakeWaiting(FleetEvent):
    """The plane runs as many instances as it may; `ahead` creates of this process come first."""

    name: ClassVar[str] = "fleet_make_waiting"
    ahead: int
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class MakeFailed(Failed):
    name: ClassVar[str] = "fleet_make_failed"
    attempt: int


@dataclass(frozen=True, kw_only=True)
class EnvResetFailed(Failed):
    name: ClassVar[str] = "fleet_env_reset_failed"
    level: ClassVar[Level] = "warning"


@dataclass(frozen=True, kw_only=True)
class ScreenshotFailed(Failed):
    name: ClassVar[str] = "fleet_screenshot_failed"
    level: ClassVar[Level] = "warning"
    step_count: int


@dataclass(frozen=True, kw_only=True)
class ToolCallFailedEvent(Failed):
    """The call itself failed: no result came back."""

    name: ClassVar[str] = "fleet_tool_call_failed"
    step_count: int
    max_steps: int
    tool_name: str


@dataclass(frozen=True, kw_only=True)
class McpToolError(FleetEvent):
    """The tool ran and said that it failed."""

    name: ClassVar[str] = "fleet_mcp_tool_error"
    level: ClassVar[Level] = "warning"
    step_count: int
    max_steps: int
    tool_name: str
    error_message: str | None


@dataclass(frozen=True, kw_only=True)
class VerifierFailed(Failed):
    name: ClassVar[str] = "fleet_verifier_failed"
    step_count: int
    failure_reason: str


@dataclass(frozen=True, kw_only=True)
class ListToolsRetry(Retry):
    name: ClassVar[str] = "fleet_list_tools_retry"
    endpoint: str


@dataclass(frozen=True, kw_only=True)
class ListToolsExhausted(Failed):
    name: ClassVar[str] = "fleet_list_tools_exhausted"


@dataclass(frozen=True, kw_only=True)
class ListToolsPartial(FleetEvent):
    name: ClassVar[str] = "fleet_list_tools_partial"
    level: ClassVar[Level] = "warning"
    failed_endpoints: tuple[str, ...]
    tool_count: int
    error_message: str


@dataclass(frozen=True, kw_only=True)
class ToolCollision(FleetEvent):
    name: ClassVar[str] = "fleet_tool_collision"
    level: ClassVar[Level] = "warning"
    tool_names: tuple[str, ...]
    policy: str


@dataclass(frozen=True, kw_only=True)
class CallToolRetry(Retry):
    name: ClassVar[str] = "fleet_call_tool_retry"
    tool_name: str


@dataclass(frozen=True, kw_only=True)
class CallToolExhausted(Failed):
    name: ClassVar[str] = "fleet_call_tool_exhausted"
    tool_name: str


@dataclass(frozen=True, kw_only=True)
class CloseFailed(Failed):
    """An instance could not be ended; it lives until its time to live is over, or until a sweep."""

    name: ClassVar[str] = "fleet_close_failed"
    instance_id: str


@dataclass(frozen=True, kw_only=True)
class HeartbeatFailed(Failed):
    name: ClassVar[str] = "fleet_heartbeat_failed"
    level: ClassVar[Level] = "warning"
    instance_id: str


@dataclass(frozen=True, kw_only=True)
class TraceFailed(Failed):
    name: ClassVar[str] = "fleet_trace_failed"
    level: ClassVar[Level] = "warning"
