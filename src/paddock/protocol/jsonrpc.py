"""JSON-RPC 2.0: reading requests and writing responses. Knows no method.

A bad request keeps its id in the error wherever an id can be read; a notification gets no answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from paddock.errors import InvalidMessage, PaddockError, ToolFailure
from paddock.protocol.finite import MESSAGE, find_nonfinite, problem_at

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603

RequestId = str | int | None
KEYS = frozenset(("jsonrpc", "method", "params", "id"))


class RpcError(PaddockError):
    """An error with a JSON-RPC code of its own."""

    code = "RPC_ERROR"

    def __init__(self, rpc_code: int, message: str, data: Any = None, *, id: RequestId = None) -> None:
        super().__init__(message)
        self.number = rpc_code
        self.details = data
        self.id = id


@dataclass(slots=True)
class RpcCall:
    """A request (it wants an answer under `id`) or a notification (it wants none)."""

    method: str
    params: dict[str, Any]
    id: RequestId = None
    is_notification: bool = False


def parse(raw: bytes | str) -> list[RpcCall | RpcError] | RpcCall:
    """Calls from JSON text. A batch comes back as a list whose bad members are errors.

    Raises RpcError when there is no request in it at all.
    """
    try:
        document = from_json(raw)
    except ValueError as error:
        raise RpcError(PARSE_ERROR, f"Parse error: {error}") from None
    if not isinstance(document, list):
        return read(document)
    if not document:
        raise RpcError(INVALID_REQUEST, "Invalid request: an empty batch")
    return [_read_or_error(member) for member in document]


def read(document: Any) -> RpcCall:
    """One call from a parsed document."""
    if not isinstance(document, dict):
        raise RpcError(INVALID_REQUEST, "Invalid request: a JSON-RPC request is an object")
    number = document.get("id")
    has_usable_id = isinstance(number, (str, int)) and not isinstance(number, bool)
    request_id: RequestId = number if has_usable_id else None
    problem = _problem(document)
    if problem is not None:
        raise RpcError(INVALID_REQUEST, f"Invalid request: {problem}", id=request_id)
    if number is not None and not has_usable_id:
        raise RpcError(INVALID_REQUEST, "Invalid request: id must be a string or an integer")
    params = document.get("params") or {}
    location = find_nonfinite(params)
    if location is not None:
        field = ".".join(map(str, location))
        data = {"code": InvalidMessage.code, "errors": [problem_at(location)]}
        raise RpcError(INVALID_PARAMS, f"Invalid params: {field}: {MESSAGE}", data, id=request_id)
    return RpcCall(document["method"], params, request_id, "id" not in document)


def _problem(document: dict[str, Any]) -> str | None:
    if document.get("jsonrpc") != "2.0":
        return 'jsonrpc must be "2.0"'
    if not isinstance(document.get("method"), str):
        return "method must be a string"
    if not isinstance(document.get("params", {}), (dict, type(None))):
        return "params must be an object"
    unknown = document.keys() - KEYS
    return f"unknown key {min(unknown)!r}" if unknown else None


def _read_or_error(document: Any) -> RpcCall | RpcError:
    try:
        return read(document)
    except RpcError as error:
        return error


def result(value: Any, id: RequestId) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "result": value}


def failure(error: PaddockError, id: RequestId = None) -> dict[str, Any]:
    """The response for any Paddock error. The three keys of `error` are always there."""
    if isinstance(error, RpcError):
        number, details, id = error.number, error.details, id if id is not None else error.id
    else:
        number, details = error.rpc_code, details_of(error)
    return {"jsonrpc": "2.0", "id": id, "error": {"code": number, "message": error.message, "data": details}}


def details_of(error: PaddockError) -> dict[str, Any]:
    """What an error carries besides its message: its stable `code`, and what tells it from others of that code."""
    details = error.to_wire()
    del details["message"]
    return {**details, "error_type": error.error_type} if isinstance(error, ToolFailure) else details
