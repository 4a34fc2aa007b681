import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.errors import CapacityReached, InvalidToolArguments, SessionNotFound, ToolFailure, ToolNotFound
from paddock.protocol import jsonrpc
from paddock.protocol.jsonrpc import RpcCall, RpcError


def refusal(raw: bytes | str) -> RpcError:
    with pytest.raises(RpcError) as failure:
        jsonrpc.parse(raw)
    return failure.value


def test_a_request_is_read() -> None:
    call = jsonrpc.parse('{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":1}}')
    assert call == RpcCall("ping", {"a": 1}, 1, False)


@pytest.mark.parametrize("given", [1, 0, -1, "a", "", 10**20])
def test_an_id_may_be_a_number_or_a_string(given: Any) -> None:
    call = jsonrpc.parse(json.dumps({"jsonrpc": "2.0", "id": given, "method": "m"}))
    assert isinstance(call, RpcCall)
    assert call.id == given
    assert not call.is_notification


def test_a_request_without_an_id_is_a_notification() -> None:
    call = jsonrpc.parse('{"jsonrpc":"2.0","method":"notifications/initialized"}')
    assert isinstance(call, RpcCall)
    assert call.is_notification


def test_a_null_id_still_wants_an_answer() -> None:
    call = jsonrpc.parse('{"jsonrpc":"2.0","id":null,"method":"ping"}')
    assert isinstance(call, RpcCall)
    assert not call.is_notification


@pytest.mark.parametrize("params", [None, {}])
def test_params_may_be_missing_null_or_empty(params: Any) -> None:
    call = jsonrpc.parse(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "m", "params": params}))
    assert isinstance(call, RpcCall)
    assert call.params == {}


@pytest.mark.parametrize(
    "document",
    [
        {"id": 7},
        {"id": 7, "jsonrpc": "1.0", "method": "m"},
        {"id": 7, "jsonrpc": "2.0"},
        {"id": 7, "jsonrpc": "2.0", "method": 5},
        {"id": 7, "jsonrpc": "2.0", "method": "m", "params": [1]},
        {"id": 7, "jsonrpc": "2.0", "method": "m", "params": 5},
        {"id": 7, "jsonrpc": "2.0", "method": "m", "extra": 5},
    ],
)
def test_an_invalid_request_keeps_its_id(document: dict[str, Any]) -> None:
    error = refusal(json.dumps(document))
    assert error.number == jsonrpc.INVALID_REQUEST
    assert jsonrpc.failure(error)["id"] == 7


@pytest.mark.parametrize("given", [1.5, True, [1], {"a": 1}])
def test_an_id_of_another_kind_is_refused(given: Any) -> None:
    error = refusal(json.dumps({"jsonrpc": "2.0", "id": given, "method": "m"}))
    assert error.number == jsonrpc.INVALID_REQUEST
    assert jsonrpc.failure(error)["id"] is None


@pytest.mark.parametrize("raw", [b"", b"{", b"nope", b"\xff", b"[" * 100_000, b"9" * 5000 + b"}"])
def test_what_is_not_json_is_a_parse_error(raw: bytes) -> None:
    error = refusal(raw)
    assert error.number == jsonrpc.PARSE_ERROR
    assert jsonrpc.failure(error)["id"] is None


@pytest.mark.parametrize("raw", ["5", "null", '"ping"', "true", "[]"])
def test_json_that_is_no_request_is_an_invalid_request(raw: str) -> None:
    assert refusal(raw).number == jsonrpc.INVALID_REQUEST


def test_a_batch_keeps_its_good_members() -> None:
    batch = jsonrpc.parse('[{"jsonrpc":"2.0","id":1,"method":"ping"},5,{"id":2}]')
    assert isinstance(batch, list)
    good, bad, worse = batch
    assert isinstance(good, RpcCall)
    assert isinstance(bad, RpcError)
    assert isinstance(worse, RpcError)
    assert worse.id == 2


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_an_rpc_error(raw: bytes) -> None:
    try:
        jsonrpc.parse(raw)
    except RpcError as error:
        json.dumps(jsonrpc.failure(error))


@given(
    st.dictionaries(
        st.sampled_from(["jsonrpc", "method", "params", "id", "x"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.sampled_from(["2.0", "m"])
        | st.just([])
        | st.just({}),
    )
)
def test_random_objects_never_raise_anything_but_an_rpc_error(document: Any) -> None:
    try:
        jsonrpc.read(document)
    except RpcError as error:
        json.dumps(jsonrpc.failure(error))


def test_a_result_names_its_request() -> None:
    assert jsonrpc.result({"a": 1}, "x") == {"jsonrpc": "2.0", "id": "x", "result": {"a": 1}}


@pytest.mark.parametrize(
    ("error", "number", "data"),
    [
        (ToolNotFound("t"), -32602, {"code": "TOOL_ERROR", "error_type": "tool_not_found"}),
        (InvalidToolArguments("t"), -32602, {"code": "TOOL_ERROR", "error_type": "invalid_args"}),
        (ToolFailure("t"), -32603, {"code": "TOOL_ERROR", "error_type": "execution_error"}),
        (SessionNotFound("t"), -32602, {"code": "SESSION_ERROR", "kind": "not_found"}),
        (CapacityReached("t"), -32000, {"code": "CAPACITY_REACHED"}),
        (RpcError(-32601, "t"), -32601, None),
    ],
)
def test_an_error_has_its_code_and_always_three_keys(error: Any, number: int, data: Any) -> None:
    response = jsonrpc.failure(error, 3)
    assert response["error"] == {"code": number, "message": "t", "data": data}
    assert response["id"] == 3


def test_an_error_carries_its_values() -> None:
    error = CapacityReached("full", hint="wait", active_sessions=4, max_sessions=4)
    assert jsonrpc.failure(error)["error"]["data"] == {
        "code": "CAPACITY_REACHED",
        "active_sessions": 4,
        "max_sessions": 4,
        "hint": "wait",
    }


def test_an_id_of_zero_is_kept() -> None:
    assert jsonrpc.failure(RpcError(-32600, "no", id=5), 0)["id"] == 0
