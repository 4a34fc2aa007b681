"""The events of a fleet client, as values. Subscribers are attached elsewhere (`paddock.telemetry`).

Every event carries the base attributes of its rollout. They are bound to the rollout, so two environments in one
asyncio task never mix them up.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from paddock.errors import ConfigError
from paddock.telemetry.bus import Level, bus

if TYPE_CHECKING:
    from paddock.retry import FailedAttempt

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
        """The environment in log lines."""
        return f"env={self.env_key}:{self.env_version}" if self.env_version else f"env={self.env_key}"


_ambient: ContextVar[TaskContext | None] = ContextVar("paddock_fleet_task", default=None)


def set_task_context(
    env_key: str | None = None,
    env_version: str | None = None,
    task_key: str | None = None,
    modality: str | None = None,
) -> None:
    """Set the base attributes of events that belong to no rollout, in this context."""
    _ambient.set(TaskContext(env_key, env_version, task_key, modality))


def clear_task_context() -> None:
    """Forget what `set_task_context` has set."""
    _ambient.set(None)


def ambient_context() -> TaskContext:
    return _ambient.get() or TaskContext()


def configure_fleet_telemetry(
    token: str | None = None, environment: str = "training_rollouts", service_name: str = "openenv-fleet"
) -> None:
    """Send all events to Logfire, with this token or the one in `LOGFIRE_TOKEN`.

    Telemetry never stops a run: without the `logfire` package a warning is logged, and without any token nothing is
    sent. A second call replaces the first.
    """
    global _unsubscribe
    from paddock.telemetry.sinks import LogfireSink

    try:
        sink = LogfireSink(token or None, environment=environment, service_name=service_name)
    except ConfigError as error:
        logger.warning("events are not sent to Logfire: %s (%s)", error, error.hint)
        return
    if _unsubscribe is not None:
        _unsubscribe()
    _unsubscribe = bus.subscribe(sink)


_unsubscribe: Any = None


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class FleetEvent:
    """Subclasses become frozen dataclasses by themselves, and have their name and log level as class arguments."""

    name: ClassVar[str]
    level: ClassVar[Level] = "info"

    context: TaskContext

    def __init_subclass__(cls, *, name: str | None = None, level: Level | None = None) -> None:
        if name is not None:
            cls.name = name
        if level is not None:
            cls.level = level
        dataclass(frozen=True, kw_only=True)(cls)

    def attributes(self) -> dict[str, Any]:
        """The base attributes and the event's own, in one dict."""
        base = {field.name: getattr(self.context, field.name) for field in fields(self.context)}
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "context"}
        return base | own


class RolloutStarted(FleetEvent, name="fleet_rollout_started"):
    pass


class RolloutCompleted(FleetEvent, name="fleet_rollout_completed"):
    """The one end of a rollout. `failure_reason` is set when the grade cannot be trusted or the episode broke."""

    reason: str
    failure_reason: str | None
    step_count: int
    max_steps: int
    reward: float | None
    verifier_success: bool
    error_message: str | None = None


class ProvisioningCompleted(FleetEvent, name="fleet_provisioning_completed"):
    provisioning_time_s: float
    queue_time_s: float
    instance_id: str


class FailureEvent(FleetEvent, level="error"):
    """A failure, with the type of its error. Messages never hold a key."""

    error_type: str
    error_message: str

    @classmethod
    def of(cls, context: TaskContext, error: Exception, *, message: str | None = None, **fields: Any) -> Self:
        """The event for an exception. `fields` are the event's own; `message` replaces the exception's."""
        text = str(error) if message is None else message
        return cls(context=context, error_type=type(error).__name__, error_message=text, **fields)


class RetryEvent(FailureEvent, level="warning"):
    attempt: int
    retry_delay_s: float

    @classmethod
    def of_attempt(cls, context: TaskContext, failed: FailedAttempt[Any], **fields: Any) -> Self:
        return cls.of(context, failed.error, attempt=failed.attempt, retry_delay_s=failed.pause, **fields)


class MakeRetry(RetryEvent, name="fleet_make_retry"):
    pass


class MakeWaiting(FleetEvent, name="fleet_make_waiting"):
    """The plane runs as many instances as it may; `ahead` creates of this process come first."""

    ahead: int
    waited_s: float


class MakeFailed(FailureEvent, name="fleet_make_failed"):
    attempt: int


class EnvResetFailed(FailureEvent, name="fleet_env_reset_failed", level="warning"):
    pass


class ScreenshotFailed(FailureEvent, name="fleet_screenshot_failed", level="warning"):
    step_count: int


class ToolCallFailedEvent(FailureEvent, name="fleet_tool_call_failed"):
    """The call itself failed: no result came back."""

    step_count: int
    max_steps: int
    tool_name: str


class McpToolError(FleetEvent, name="fleet_mcp_tool_error", level="warning"):
    """The tool ran and its result is an error."""

    step_count: int
    max_steps: int
    tool_name: str
    error_message: str | None


class VerifierFailed(FailureEvent, name="fleet_verifier_failed"):
    step_count: int
    failure_reason: str


class ListToolsRetry(RetryEvent, name="fleet_list_tools_retry"):
    endpoint: str


class ListToolsExhausted(FailureEvent, name="fleet_list_tools_exhausted"):
    pass


class ListToolsPartial(FleetEvent, name="fleet_list_tools_partial", level="warning"):
    failed_endpoints: tuple[str, ...]
    tool_count: int
    error_message: str


class ToolCollision(FleetEvent, name="fleet_tool_collision", level="warning"):
    tool_names: tuple[str, ...]
    policy: str


class CallToolRetry(RetryEvent, name="fleet_call_tool_retry"):
    tool_name: str


class CallToolExhausted(FailureEvent, name="fleet_call_tool_exhausted"):
    tool_name: str


class CloseFailed(FailureEvent, name="fleet_close_failed"):
    """An instance could not be ended yet; it lives until a retry succeeds, its time to live is over, or a sweep."""

    instance_id: str


class HeartbeatFailed(FailureEvent, name="fleet_heartbeat_failed", level="warning"):
    instance_id: str


class TraceFailed(FailureEvent, name="fleet_trace_failed", level="warning"):
    pass
