"""The data of an environment: actions, observations, state, and the actions and observations of tools.

Field names and defaults are those of the OpenEnv wire, so either side's models describe the same JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

ObservationT = TypeVar("ObservationT")


class Action(BaseModel):
    """What an agent does. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, arbitrary_types_allowed=True)

    metadata: dict[str, Any] = Field(default_factory=dict)
    """Anything else; the server does not read it."""


class Observation(BaseModel):
    """What an agent sees next."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, arbitrary_types_allowed=True)

    done: bool = False
    """Whether the episode has ended."""
    # The most frequent type comes first: pydantic stops at the first exact match.
    reward: float | int | bool | None = None
    """None means "not scored", which is not the same as zero."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Further values for the client, such as how the reward came about."""


class State(BaseModel):
    """The state of an episode. Subclasses add fields; unknown ones are kept."""

    model_config = ConfigDict(extra="allow", validate_assignment=True, arbitrary_types_allowed=True)

    episode_id: str | None = None
    """The name of the episode, if it has one."""
    step_count: int = Field(default=0, ge=0)
    """How many steps the episode has had."""


class ListToolsAction(Action):
    """List the tools of a tool environment."""

    type: Literal["list_tools"] = "list_tools"


class CallToolAction(Action):
    """Call one tool of a tool environment."""

    type: Literal["call_tool"] = "call_tool"
    tool_name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ListToolsObservation(Observation):
    tools: list[dict[str, Any]]


class ToolErrorInfo(BaseModel):
    """Why a tool call failed: `tool_not_found`, `invalid_args`, `execution_error` or `timeout`."""

    error_type: str
    message: str


class CallToolObservation(Observation):
    tool_name: str
    result: Any = None
    error: ToolErrorInfo | None = None


class EnvironmentMetadata(BaseModel):
    """What `/metadata` says about an environment."""

    name: str
    description: str
    readme_content: str | None = None
    version: str | None = "1.0.0"
    author: str | None = None
    documentation_url: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult(Generic[ObservationT]):
    """What a client gets back from `reset` and `step`."""

    observation: ObservationT
    """What the environment returned: an instance of the client's observation type, or a dictionary."""
    reward: float | int | bool | None = None
    """The reward of the step. None means "not scored"."""
    done: bool = False
    """Whether the step ended the episode."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The metadata of the observation."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a client gets back from a tool that ran. One that failed raises ToolFailure."""

    value: Any
    """What the tool returned; the text of its content if the server sends nothing else."""
    reward: float | int | bool | None = None
    """The reward of the call. None means "not scored", or that the server does not send it."""
    done: bool = False
    """Whether the call ended the episode. Servers other than Paddock do not send it; then it is False."""
    content: list[dict[str, Any]] = field(default_factory=list)
    """The blocks of MCP, such as text and images, as the server sent them."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Further fields that the server sent."""


@dataclass(frozen=True, slots=True)
class ToolInfo:
    """A tool as a client sees it."""

    name: str
    description: str
    input_schema: dict[str, Any]
