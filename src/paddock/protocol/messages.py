"""The frames of `/ws`: what a client may send, and how a reply is written.

One pydantic-core pass takes a frame from bytes to a typed message, action included. The keys `id`, `ack`,
`timeout_s` and `session`, and the messages `cancel` and `open`, are Paddock's additions to the OpenEnv
wire; a stock client never sends them and never receives them.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Field, TypeAdapter, ValidationError

from paddock.errors import InvalidJSON, InvalidMessage, PaddockError, RequestError, UnknownType
from paddock.protocol.codec import encode, model_fields, observation_data
from paddock.protocol.finite import check_finite
from paddock.protocol.redact import describe_error

ActionT = TypeVar("ActionT")
MAX_ECHOED_CHARACTERS = 500
MAX_PROBLEMS = 50


class ResetArguments(BaseModel):
    """Arguments of a reset. Those that the environment does not take are ignored, as OpenEnv's clients expect."""

    model_config = ConfigDict(extra="allow")

    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)

    def sent_arguments(self) -> dict[str, Any]:
        """Only the arguments that the caller sent."""
        return {**(self.__pydantic_extra__ or {}), **{k: getattr(self, k) for k in self.own_fields_set()}}

    def own_fields_set(self) -> set[str]:
        """The fields of this class that the client sent."""
        return self.__pydantic_fields_set__ & type(self).model_fields.keys()


class Envelope(BaseModel):
    """What all messages of a client have beside their type."""

    model_config = ConfigDict(extra="forbid")

    id: int | None = Field(default=None, ge=0)
    """Number of the request, rising. The reply carries it, and a repeated one is not executed again."""
    ack: int | None = Field(default=None, ge=0)
    """The client needs no answer up to and including this number: see `protocol/resume.py`."""
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
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
    token: str | None = Field(default=None, pattern=r"^[0-9A-Za-z-]{32,200}$")
    """What the client wants as the token of the new session, as hard to guess as ours. If the answer is lost, the
    same `open` again returns to the session that the first one made."""
    queue_timeout: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    lease: str | None = None
    """A slot that the gateway of a cluster has reserved for this session."""


Single = ResetMessage | StepMessage[Any] | StateMessage | McpMessage | CloseMessage | CancelMessage
Message = Single | OpenMessage
CHECKED = frozenset(("step", "reset"))
"""Messages whose numbers must be finite. `protocol/jsonrpc.py` checks those of `mcp`."""
KINDS = ("reset", "step", "state", "mcp", "close", "cancel")


class Wire:
    """Reads the frames that clients of one environment send."""

    def __init__(self, action_type: Any) -> None:
        step = StepMessage[action_type]
        tagged = Discriminator("type")
        single = ResetMessage | step | StateMessage | McpMessage | CloseMessage | CancelMessage
        single_adapter: TypeAdapter[Single] = TypeAdapter(Annotated[single, tagged])
        batch_adapter: TypeAdapter[list[Message]] = TypeAdapter(list[Annotated[single | OpenMessage, tagged]])
        self._read_single = single_adapter.validator.validate_json
        self._read_batch = batch_adapter.validator.validate_json
        self._read_action = TypeAdapter(action_type).validator.validate_python
        self._tags = _tags_of(action_type)

    def parse(self, raw: bytes | str) -> Single:
        """The one message in a frame. Raises RequestError; then nothing may be executed."""
        try:
            message: Single = self._read_single(raw)
        except BaseException as error:
            # A validator may raise even SystemExit. It must not end the server.
            raise self._explain(error) from None
        if message.type in CHECKED:
            check_finite(message.data)  # type: ignore[union-attr]
        return message

    def parse_batch(self, raw: bytes | str) -> list[Message]:
        """All messages in a frame of a connection that carries many sessions."""
        try:
            messages: list[Message] = self._read_batch(raw)
        except BaseException as error:
            raise self._explain(error, inside_list=True) from None
        for message in messages:
            if message.type in CHECKED:
                check_finite(message.data)  # type: ignore[union-attr]
        return messages

    def parse_action(self, document: Any) -> Any:
        """An action that comes without a frame around it. Locations in the error are the action's own."""
        try:
            action = self._read_action(document)
        except ValidationError as error:
            problems = error_list(error)
            for problem in problems:
                problem["loc"] = self._without_tag(problem["loc"])
            raise InvalidMessage("Invalid message", errors=problems) from None
        except BaseException as error:
            raise _broken_validator(error) from error
        check_finite(action)
        return action

    def _explain(self, error: BaseException, *, inside_list: bool = False) -> RequestError:
        """The Paddock error for a frame that pydantic refuses, with the location of the problem."""
        if not isinstance(error, ValidationError):
            return _broken_validator(error)
        depth = 1 if inside_list else 0
        first = error.errors(include_url=False, include_input=False)[0]
        kind = first["type"] if len(first["loc"]) <= depth else "field"
        if kind == "json_invalid":
            return InvalidJSON(f"Invalid JSON: {first['ctx']['error']}")
        if kind in ("union_tag_not_found", "union_tag_invalid"):
            tag = first.get("ctx", {}).get("tag", "")
            return UnknownType(f"Unknown message type: {tag}", hint=f"known types: {', '.join(KINDS)}")
        hint = "send one JSON object per frame" if kind in ("model_attributes_type", "list_type") else None
        problems = error_list(error)
        for problem in problems:
            problem["loc"] = self._inside_frame(problem["loc"][depth:])
        return InvalidMessage("Invalid message", errors=problems, hint=hint)

    def _inside_frame(self, location: list[Any]) -> list[Any]:
        """Relative to the caller's own object: `["step", "data", "amount"]` is the action's `amount`."""
        kind, *inner = location or [None]
        if inner[:1] == ["data"] and len(inner) > 1:
            inner = inner[1:]
            return self._without_tag(inner) if kind == "step" else inner
        return inner

    def _without_tag(self, location: list[Any]) -> list[Any]:
        return location[1:] if location and location[0] in self._tags else location


def _tags_of(action_type: Any) -> frozenset[Any]:
    """The tags that pydantic puts into locations where the action is one of several types."""
    members = get_args(get_args(action_type)[0]) if get_origin(action_type) is Annotated else ()
    tags = (getattr(note, "tag", None) for member in members for note in get_args(member)[1:])
    return frozenset(tag for tag in tags if tag is not None)


def _broken_validator(error: BaseException) -> InvalidMessage:
    problem = {"type": "validator_failed", "loc": [], "msg": describe_error(error)}
    return InvalidMessage("Invalid message", errors=[problem])


def error_list(error: ValidationError) -> list[dict[str, Any]]:
    """pydantic's list of problems as plain JSON, at most `MAX_PROBLEMS`."""
    problems: list[dict[str, Any]] = [dict(problem) for problem in error.errors()[:MAX_PROBLEMS]]
    for problem in problems:
        problem["loc"] = list(problem["loc"])
        problem["input"] = _shorten(problem["input"])
        if problem["type"] == "model_type":
            problem |= {"type": "dict_type", "msg": "Input should be a valid dictionary"}
            problem["url"] = problem["url"].replace("model_type", "dict_type")
            problem.pop("ctx", None)
        if "ctx" in problem:
            problem["ctx"] = {k: str(v) if isinstance(v, Exception) else v for k, v in problem["ctx"].items()}
    return problems


def _shorten(value: Any) -> Any:
    """The input, cut if it is too long to send back."""
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= MAX_ECHOED_CHARACTERS else text[:MAX_ECHOED_CHARACTERS] + "…"


def write_observation(observation: Any, number: int | None = None, session: str | None = None) -> bytes:
    """An `observation` frame. `number` is that of the request, `session` the sub-session of a vector."""
    frame: dict[str, Any] = {"type": "observation", "data": observation_data(observation)}
    if number is not None:
        frame["id"] = number
    if session is not None:
        frame["session"] = session
    return encode(frame)


def write_state(state: Any, number: int | None = None, session: str | None = None) -> bytes:
    """A `state` frame."""
    return _write("state", model_fields(state), number, session)


def write_mcp(response: Any, number: int | None = None, session: str | None = None) -> bytes:
    """An `mcp` frame with a JSON-RPC response."""
    return _write("mcp", response, number, session)


def write_opened(data: dict[str, Any], session: str) -> bytes:
    """An `opened` frame for a sub-session of a vector."""
    return _write("opened", data, None, session)


def write_queued(place: int) -> bytes:
    """The place of a waiting client in the queue; 1 is next."""
    return _write("queued", {"place": place}, None, None)


def write_error(error: PaddockError, number: int | None = None, session: str | None = None) -> bytes:
    """An `error` frame."""
    return _write("error", error.to_wire(), number, session)


def _write(kind: str, data: Any, number: int | None, session: str | None) -> bytes:
    frame: dict[str, Any] = {"type": kind, "data": data}
    if number is not None:
        frame["id"] = number
    if session is not None:
        frame["session"] = session
    return encode(frame)
