"""The frames of `/ws`: what a client may send, and how a reply is written.

One pydantic-core pass takes a frame from bytes to a typed message, action included. The keys `id`,
`timeout_s` and `session`, and the messages `cancel`, `open` and `batch`, are Paddock's additions to
the OpenEnv wire; a stock client never sends them and never receives them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, TypeAdapter, ValidationError

from paddock.errors import InvalidJSON, InvalidMessage, PaddockError, UnknownType
from paddock.protocol.codec import encode, model_fields, observation_data

ActionT = TypeVar("ActionT")
LONGEST_INPUT_ECHOED = 500


class ResetArguments(BaseModel):
    """Arguments of a reset. What an environment does not know is passed by, as stock clients expect."""

    model_config = ConfigDict(extra="allow")

    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)

    def given(self) -> dict[str, Any]:
        """Only the arguments that the caller sent."""
        return {**(self.__pydantic_extra__ or {}), **{k: getattr(self, k) for k in self.own_fields_set()}}

    def own_fields_set(self) -> set[str]:
        return self.__pydantic_fields_set__ & type(self).model_fields.keys()


class Envelope(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: int | None = None
    """Number of the request, rising by one. The reply carries it, and a repeated one is not executed again."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Deadline for this request alone."""
    session: str | None = None
    """Which session is meant, on a connection that carries many."""


class ResetMessage(Envelope):
    type: Literal["reset"]
    data: ResetArguments = Field(default_factory=ResetArguments)


class StepMessage(Envelope, Generic[ActionT]):
    type: Literal["step"]
    data: ActionT


class StateMessage(Envelope):
    type: Literal["state"]


class McpMessage(Envelope):
    type: Literal["mcp"]
    data: dict[str, Any]


class CloseMessage(Envelope):
    type: Literal["close"]


class CancelMessage(Envelope):
    """Give up waiting for request `data`: a running async step is cancelled."""

    type: Literal["cancel"]
    data: int


class OpenMessage(Envelope):
    """Open the session named by `session` on a connection that carries many."""

    type: Literal["open"]
    resume: str | None = None
    """Token of a session to return to; without it a new one is opened."""
    queue_timeout: float | None = Field(default=None, ge=0)


Single = ResetMessage | StepMessage[Any] | StateMessage | McpMessage | CloseMessage | CancelMessage
Message = Single | OpenMessage
KINDS = ("reset", "step", "state", "mcp", "close", "cancel")


class Wire:
    """Reads the frames that clients of one environment send."""

    def __init__(self, action_type: Any) -> None:
        step = StepMessage[action_type]  # type: ignore[valid-type]
        tagged = Discriminator("type")
        single = ResetMessage | step | StateMessage | McpMessage | CloseMessage | CancelMessage
        single_adapter: TypeAdapter[Single] = TypeAdapter(Annotated[single, tagged])
        batch_adapter: TypeAdapter[list[Message]] = TypeAdapter(
            list[Annotated[single | OpenMessage, tagged]]  # type: ignore[valid-type]
        )
        self._read_single = single_adapter.validator.validate_json
        self._read_batch = batch_adapter.validator.validate_json

    def parse(self, raw: bytes | str) -> Single:
        """The one message in a frame. Raises RequestError; then nothing may be executed."""
        try:
            message: Single = self._read_single(raw)
        except ValidationError as error:
            raise explain(error) from None
        return message

    def parse_batch(self, raw: bytes | str) -> list[Message]:
        """All messages in a frame of a connection that carries many sessions."""
        try:
            messages: list[Message] = self._read_batch(raw)
        except ValidationError as error:
            raise explain(error) from None
        return messages


def explain(error: ValidationError) -> InvalidJSON | UnknownType | InvalidMessage:
    """Which of the three ways a frame can be wrong this is, and where."""
    problems = error_list(error)
    first = problems[0]
    if first["type"] == "json_invalid":
        return InvalidJSON(f"Invalid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "union_tag_not_found":
        return UnknownType("Unknown message type: ", hint=f"send a type: {', '.join(KINDS)}")
    if first["type"] == "union_tag_invalid":
        tag = first["ctx"]["tag"]
        return UnknownType(f"Unknown message type: {tag}", hint=f"known types: {', '.join(KINDS)}")
    if first["type"] in ("model_attributes_type", "list_type"):
        return InvalidMessage("Invalid message", errors=problems, hint="send one JSON object per frame")
    return InvalidMessage("Invalid message", errors=problems)


def error_list(error: ValidationError) -> list[dict[str, Any]]:
    """pydantic's list of problems as plain JSON, each located relative to the caller's own object."""
    problems: list[dict[str, Any]] = json.loads(error.json())
    for problem in problems:
        problem["loc"] = _own_location(problem["loc"])
        shown = problem.get("input")
        if isinstance(shown, str) and len(shown) > LONGEST_INPUT_ECHOED:
            problem["input"] = shown[:LONGEST_INPUT_ECHOED] + "…"
    return problems


def _own_location(location: list[Any]) -> list[Any]:
    """Drop the union tags that pydantic puts in: `["step", "data", "amount"]` is the action's `amount`."""
    if location and location[0] in (*KINDS, "open"):
        location = location[1:]
        if location[:1] == ["data"] and len(location) > 1:
            location = location[1:]
        if location and location[0] in ("call_tool", "list_tools"):
            location = location[1:]
    return location


def write_observation(observation: Any, number: int | None = None, session: str | None = None) -> bytes:
    return _write("observation", observation_data(observation), number, session)


def write_state(state: Any, number: int | None = None, session: str | None = None) -> bytes:
    return _write("state", model_fields(state), number, session)


def write_mcp(response: Any, number: int | None = None, session: str | None = None) -> bytes:
    return _write("mcp", response, number, session)


def write_opened(data: dict[str, Any], session: str) -> bytes:
    return _write("opened", data, None, session)


def write_queued(place: int) -> bytes:
    """Tells a client that asked to wait which place in the queue it has, 1 being next."""
    return _write("queued", {"place": place}, None, None)


def write_error(error: PaddockError, number: int | None = None, session: str | None = None) -> bytes:
    return _write("error", error.to_wire(), number, session)


def _write(kind: str, data: Any, number: int | None, session: str | None) -> bytes:
    frame: dict[str, Any] = {"type": kind, "data": data}
    if number is not None:
        frame["id"] = number
    if session is not None:
        frame["session"] = session
    return encode(frame)
