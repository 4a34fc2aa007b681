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
from paddock.protocol.finite import check_finite, place_of_nonfinite
from paddock.protocol.redact import told

ActionT = TypeVar("ActionT")
COMPACT_STEP = b'{"type":"step","data":{'[:-1]
SPACED_STEP = b'{"type": "step", "data": {'[:-1]
LONGEST_INPUT_ECHOED = 500
MOST_PROBLEMS = 50


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
    """A slot that the door of a cluster has taken for this session."""


Single = ResetMessage | StepMessage[Any] | StateMessage | McpMessage | CloseMessage | CancelMessage
Message = Single | OpenMessage
CHECKED = frozenset(("step", "reset"))
"""Messages whose numbers must be finite. JSON-RPC looks after those of `mcp`, and answers in its own form."""
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
        self._read_action_json = TypeAdapter(action_type).validator.validate_json
        self._tags = _tags_of(action_type)

    def parse(self, raw: bytes | str) -> Single:
        """The one message in a frame. Raises RequestError; then nothing may be executed."""
        try:
            message: Single = self._read_single(raw)
        except BaseException as error:
            # A validator may raise SystemExit; it is not ours to obey.
            raise self._explain(error) from None
        if message.type in CHECKED:
            check_finite(message.data)  # type: ignore[union-attr]
        return message

    def quick_step(self, raw: bytes) -> Any:
        """The action of a frame that is a step and nothing else, as JSON writers spell it; else None.

        Most frames are steps: this spares them the envelope. Whatever is odd is left to `parse`.
        """
        if raw[-2:] != b"}}":
            return None
        begins = 22 if raw.startswith(COMPACT_STEP) else 25 if raw.startswith(SPACED_STEP) else 0
        if not begins:
            return None
        try:
            action = self._read_action_json(raw[begins:-1])
        except BaseException:
            return None
        return action if place_of_nonfinite(action) is None else None

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
        """Which of the ways a frame can be wrong this is, and where."""
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
        kind, *rest = location or [None]
        if rest[:1] == ["data"] and len(rest) > 1:
            rest = rest[1:]
            return self._without_tag(rest) if kind == "step" else rest
        return rest

    def _without_tag(self, location: list[Any]) -> list[Any]:
        return location[1:] if location and location[0] in self._tags else location


def _tags_of(action_type: Any) -> frozenset[Any]:
    """The tags that pydantic puts into locations where the action is one of several types."""
    members = get_args(get_args(action_type)[0]) if get_origin(action_type) is Annotated else ()
    tags = (getattr(note, "tag", None) for member in members for note in get_args(member)[1:])
    return frozenset(tag for tag in tags if tag is not None)


def _broken_validator(error: BaseException) -> InvalidMessage:
    problem = {"type": "validator_failed", "loc": [], "msg": told(error)}
    return InvalidMessage("Invalid message", errors=[problem])


def error_list(error: ValidationError) -> list[dict[str, Any]]:
    """pydantic's list of problems as plain JSON, as many of them as anybody reads."""
    problems: list[dict[str, Any]] = [dict(problem) for problem in error.errors()[:MOST_PROBLEMS]]
    for problem in problems:
        problem["loc"] = list(problem["loc"])
        problem["input"] = _shown(problem["input"])
        if problem["type"] == "model_type":
            problem |= {"type": "dict_type", "msg": "Input should be a valid dictionary"}
            problem["url"] = problem["url"].replace("model_type", "dict_type")
            problem.pop("ctx", None)
        if "ctx" in problem:
            problem["ctx"] = {k: str(v) if isinstance(v, Exception) else v for k, v in problem["ctx"].items()}
    return problems


def _shown(value: Any) -> Any:
    """What was sent, unless it is too long to send back."""
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= LONGEST_INPUT_ECHOED else text[:LONGEST_INPUT_ECHOED] + "…"


def write_observation(observation: Any, number: int | None = None, session: str | None = None) -> bytes:
    frame: dict[str, Any] = {"type": "observation", "data": observation_data(observation)}
    if number is not None:
        frame["id"] = number
    if session is not None:
        frame["session"] = session
    return encode(frame)


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
