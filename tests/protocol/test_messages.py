import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, Json, field_validator

from environments import Add, Kit, Total
from paddock import Action, State
from paddock.errors import (
    EnvironmentFailure,
    InvalidJSON,
    InvalidMessage,
    RequestError,
    SessionBusy,
    UnknownType,
)
from paddock.protocol import messages
from paddock.protocol.messages import Wire
from paddock.sessions.spec import EnvironmentSpec
from paddock.types import CallToolAction, ListToolsAction

WIRE = Wire(Add)


def refusal(raw: bytes | str, wire: Wire = WIRE) -> RequestError:
    with pytest.raises(RequestError) as failure:
        wire.parse(raw)
    assert isinstance(json.loads(messages.write_error(failure.value)), dict)
    return failure.value


def locations(error: RequestError) -> list[list[Any]]:
    return [problem["loc"] for problem in error.data["errors"]]


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ('{"type":"reset"}', messages.ResetMessage),
        ('{"type":"reset","data":{"seed":3}}', messages.ResetMessage),
        ('{"type":"step","data":{"amount":3}}', messages.StepMessage),
        ('{"type":"state"}', messages.StateMessage),
        ('{"type":"mcp","data":{"method":"ping"}}', messages.McpMessage),
        ('{"type":"close"}', messages.CloseMessage),
        ('{"type":"cancel","data":3}', messages.CancelMessage),
    ],
)
def test_every_kind_of_frame_is_read(raw: str, kind: type) -> None:
    assert isinstance(WIRE.parse(raw), kind)
    assert isinstance(WIRE.parse(raw.encode()), kind)


def test_an_action_arrives_typed() -> None:
    message: Any = WIRE.parse('{"type":"step","data":{"amount":"3"},"id":7,"timeout_s":1.5}')
    assert message.data == Add(amount=3)
    assert (message.id, message.timeout_s) == (7, 1.5)


def test_a_reset_passes_on_only_what_was_given() -> None:
    message: Any = WIRE.parse('{"type":"reset","data":{"seed":null,"level":2,"self":1,"session_id":"x"}}')
    assert message.data.sent_arguments() == {"seed": None, "level": 2, "self": 1, "session_id": "x"}
    empty: Any = WIRE.parse('{"type":"reset"}')
    assert empty.data.sent_arguments() == {}


@pytest.mark.parametrize(
    "name", ["sent_arguments", "own_fields_set", "model_fields", "model_extra", "__dict__", "model_config"]
)
def test_a_reset_argument_may_have_any_name(name: str) -> None:
    message: Any = WIRE.parse(json.dumps({"type": "reset", "data": {name: 1}}))
    assert messages.ResetArguments.sent_arguments(message.data) == {name: 1}
    assert message.data.sent_arguments() == {name: 1}


@pytest.mark.parametrize(
    "raw", ["", " ", "{", "nope", '{"type":', "\x00", "'a'", '{"type":"step","data":{"amount":1}']
)
def test_what_is_not_json_is_invalid_json(raw: str) -> None:
    assert isinstance(refusal(raw), InvalidJSON)


@pytest.mark.parametrize(
    "raw", ["{}", '{"type":null}', '{"type":"dance"}', '{"type":5}', '{"type":["step"]}', '{"type":{}}']
)
def test_a_frame_without_a_known_type_is_unknown(raw: str) -> None:
    error = refusal(raw)
    assert isinstance(error, UnknownType)
    assert "step" in (error.hint or "")


@pytest.mark.parametrize("raw", ["[]", "[1]", "5", "null", "true", '"step"', '[{"type":"state"}]', "1e400", "NaN"])
def test_json_that_is_no_object_is_an_invalid_message(raw: str) -> None:
    assert isinstance(refusal(raw), InvalidMessage)


@pytest.mark.parametrize(
    ("raw", "location"),
    [
        ('{"type":"step"}', ["data"]),
        ('{"type":"step","data":{}}', ["amount"]),
        ('{"type":"step","data":{"amount":-1}}', ["amount"]),
        ('{"type":"step","data":{"amount":1,"x":2}}', ["x"]),
        ('{"type":"step","data":5}', ["data"]),
        ('{"type":"step","data":null}', ["data"]),
        ('{"type":"step","data":{"amount":1},"extra":2}', ["extra"]),
        ('{"type":"reset","data":{"seed":-5}}', ["seed"]),
        ('{"type":"reset","data":{"seed":"str"}}', ["seed"]),
        ('{"type":"reset","data":{"episode_id":123}}', ["episode_id"]),
        ('{"type":"reset","data":[]}', ["data"]),
        ('{"type":"state","data":{}}', ["data"]),
        ('{"type":"close","data":1}', ["data"]),
        ('{"type":"mcp"}', ["data"]),
        ('{"type":"mcp","data":[]}', ["data"]),
        ('{"type":"state","id":"x"}', ["id"]),
        ('{"type":"state","id":1.5}', ["id"]),
        ('{"type":"state","timeout_s":0}', ["timeout_s"]),
        ('{"type":"state","timeout_s":-1}', ["timeout_s"]),
        ('{"type":"state","timeout_s":NaN}', ["timeout_s"]),
        ('{"type":"cancel"}', ["data"]),
    ],
)
def test_a_wrong_field_is_named(raw: str, location: list[str]) -> None:
    error = refusal(raw)
    assert isinstance(error, InvalidMessage)
    assert error.message == "Invalid message"
    assert locations(error) == [location]
    assert {"type", "loc", "msg", "input"} <= error.data["errors"][0].keys()


def test_deep_json_is_refused() -> None:
    assert isinstance(refusal("[" * 100_000 + "]" * 100_000), RequestError)
    assert isinstance(refusal('{"type":"step","data":' + '{"a":' * 100_000 + "1" + "}" * 100_001), RequestError)


def test_json_of_any_depth_is_answered() -> None:
    for depth in (50, 100, 150, 190, 195, 197, 198, 199, 200, 201, 250, 254, 300):
        refusal('{"type":"step","data":{"amount":' + "[" * depth + "]" * depth + "}}")


def test_an_integer_of_5000_digits_is_refused() -> None:
    refusal('{"type":"step","data":{"amount":-' + "9" * 5000 + "}}")
    refusal('{"type":"state","id":' + "9" * 5000 + "}")
    refusal('{"type":"step","data":{"other":' + "9" * 5000 + "}}")
    refusal("9" * 5000)


def test_an_integer_of_4000_digits_is_answered() -> None:
    refusal('{"type":"step","data":{"amount":-' + "9" * 4000 + "}}")
    refusal('{"type":"step","data":{"amount":1,"other":' + "9" * 4000 + "}}")


def test_invalid_utf8_is_invalid_json() -> None:
    assert isinstance(refusal(b'{"type":"\xff"}'), InvalidJSON)
    assert isinstance(refusal(b"\xff\xfe"), InvalidJSON)


def test_a_lone_surrogate_is_refused() -> None:
    refusal('{"type":"step","data":{"amount":"\\ud800"}}')
    refusal('{"type":"\\ud800"}')


def test_a_long_input_is_not_sent_back_whole() -> None:
    error = refusal(json.dumps({"type": "step", "data": {"amount": "x" * 1_000_000}}))
    assert len(messages.write_error(error)) < 10_000


def test_a_long_list_is_not_sent_back_whole() -> None:
    error = refusal(json.dumps({"type": "step", "data": {"amount": ["x"] * 1_000_000}}))
    assert len(messages.write_error(error)) < 100_000


def test_many_wrong_fields_do_not_make_a_giant_answer() -> None:
    error = refusal(json.dumps({"type": "step", "data": {f"field{n}": n for n in range(100_000)}}))
    assert len(messages.write_error(error)) < 1_000_000


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_a_request_error(raw: bytes) -> None:
    for parse in (WIRE.parse, WIRE.parse_batch):
        try:
            parse(raw)
        except RequestError as error:
            json.loads(messages.write_error(error))


SCRAPS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(messages.KINDS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "data", "id", "seed", "amount", "session"]) | st.text(max_size=3), inner
        )
    ),
    max_leaves=12,
)


@given(SCRAPS)
def test_random_json_never_raises_anything_but_a_request_error(document: Any) -> None:
    raw = json.dumps(document).encode()
    for parse in (WIRE.parse, WIRE.parse_batch):
        try:
            parse(raw)
        except RequestError as error:
            json.loads(messages.write_error(error))


class Left(BaseModel):
    turn: Literal["left"]


class Right(BaseModel):
    turn: Literal["right"]


class Drive(Action):
    turns: list[Annotated[Left | Right, Field(discriminator="turn")]]


def test_a_wrong_tag_inside_an_action_is_a_wrong_field() -> None:
    error = refusal('{"type":"step","data":{"turns":[{"turn":"up"}]}}', Wire(Drive))
    assert isinstance(error, InvalidMessage)
    assert locations(error) == [["turns", 0]]


def test_bad_json_inside_an_action_is_a_wrong_field() -> None:
    class Nested(Action):
        code: Json[Any]

    error = refusal('{"type":"step","data":{"code":"{"}}', Wire(Nested))
    assert isinstance(error, InvalidMessage)
    assert locations(error) == [["code"]]


def test_a_list_field_that_is_no_list_gets_no_hint_about_frames() -> None:
    error = refusal('{"type":"step","data":{"turns":5}}', Wire(Drive))
    assert locations(error) == [["turns"]]
    assert error.hint is None


def test_a_validator_that_breaks_is_a_request_error() -> None:
    class Fragile(Action):
        place: str

        @field_validator("place")
        @classmethod
        def known(cls, place: str) -> str:
            return {"here": "there"}[place]

    refusal('{"type":"step","data":{"place":"nowhere"}}', Wire(Fragile))


@pytest.mark.parametrize("name", ["open", "close", "step", "state", "reset", "data", "call_tool", "type", "id"])
def test_a_field_may_be_called_like_a_message(name: str) -> None:
    action = type("Trade", (Action,), {"__annotations__": {name: int}})
    error = refusal(json.dumps({"type": "step", "data": {name: "x"}}), Wire(action))
    assert locations(error) == [[name]]


TOOLS = EnvironmentSpec(Kit).wire


def test_the_type_of_a_tool_action_picks_its_model() -> None:
    listing: Any = TOOLS.parse('{"type":"step","data":{"type":"list_tools"}}')
    call: Any = TOOLS.parse('{"type":"step","data":{"type":"call_tool","tool_name":"t"}}')
    bare: Any = TOOLS.parse('{"type":"step","data":{"tool_name":"t","arguments":{"a":1}}}')
    assert isinstance(listing.data, ListToolsAction)
    assert isinstance(call.data, CallToolAction)
    assert bare.data.arguments == {"a": 1}


@pytest.mark.parametrize(
    ("data", "location"),
    [("{}", ["tool_name"]), ('{"type":"list_tools","x":1}', ["x"]), ('{"tool_name":5}', ["tool_name"])],
)
def test_a_wrong_tool_action_is_located_in_the_action(data: str, location: list[str]) -> None:
    assert locations(refusal(f'{{"type":"step","data":{data}}}', TOOLS)) == [location]


def test_a_batch_is_a_list_of_messages() -> None:
    batch = WIRE.parse_batch(
        '[{"type":"open","session":"a"},{"type":"step","session":"a","data":{"amount":1},"id":1}]'
    )
    assert [message.type for message in batch] == ["open", "step"]


@pytest.mark.parametrize("token", ["", "0" * 31, "0" * 201, "0" * 32 + " ", "ü" * 32])
def test_a_token_that_could_be_guessed_or_not_be_sent_is_refused(token: str) -> None:
    with pytest.raises(InvalidMessage):
        WIRE.parse_batch(json.dumps([{"type": "open", "session": "a", "token": token}]))


def test_open_is_for_batches_only() -> None:
    assert isinstance(refusal('{"type":"open","session":"a"}'), UnknownType)


def test_an_observation_frame_has_the_wires_shape() -> None:
    assert json.loads(messages.write_observation(Total(total=3, reward=1.0))) == {
        "type": "observation",
        "data": {"observation": {"total": 3, "metadata": {}}, "reward": 1.0, "done": False},
    }


def test_a_reply_carries_the_number_and_the_session() -> None:
    frame = json.loads(messages.write_state(State(step_count=2), 7, "a"))
    assert frame == {"type": "state", "data": {"episode_id": None, "step_count": 2}, "id": 7, "session": "a"}


def test_an_error_frame_has_every_field() -> None:
    frame = json.loads(messages.write_error(SessionBusy("wait", hint="a little", waiting=3), 1))
    assert frame == {
        "type": "error",
        "id": 1,
        "data": {
            "message": "wait",
            "code": "SESSION_ERROR",
            "kind": "busy",
            "hint": "a little",
            "waiting": 3,
        },
    }


def test_an_answer_that_json_cannot_say_is_an_error() -> None:
    with pytest.raises(EnvironmentFailure):
        messages.write_observation({"value": object()})
