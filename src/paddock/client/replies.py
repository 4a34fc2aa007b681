"""What a server's replies mean: step results, tool results and errors, from Paddock's and from OpenEnv's servers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from paddock.errors import (
    InvalidMessage,
    PaddockError,
    ServerError,
    SessionError,
    ToolFailure,
    from_wire,
    tool_error_class,
)
from paddock.protocol import jsonrpc, mcp
from paddock.types import CallResult, StepResult

SERVER_ERROR = -32000
"""The first of the numbers that JSON-RPC leaves to servers."""
ERRORS_BY_NUMBER: dict[Any, type[PaddockError]] = {
    jsonrpc.PARSE_ERROR: ServerError,
    jsonrpc.INVALID_REQUEST: SessionError,
    jsonrpc.METHOD_NOT_FOUND: ServerError,
    SERVER_ERROR: ServerError,
}
"""For servers that send only a number. INVALID_REQUEST means the session refused: our requests are well formed."""


def step_result(data: dict[str, Any]) -> StepResult[Any]:
    """The result in the `data` of an observation, with the observation as a dict."""
    fields = data["observation"]
    metadata = data.get("metadata") or fields.get("metadata") or {}
    return StepResult(fields, data.get("reward"), bool(data.get("done")), metadata)


def call_result(result: dict[str, Any]) -> CallResult:
    """The value, reward and end of a `tools/call` result, in Paddock's, OpenEnv's or the specification's form."""
    structured = result.get("structuredContent")
    value = result["data"] if "data" in result else structured if structured is not None else text_of(result)
    meta = result.get("_meta") or result.get("meta")
    metadata = dict(meta) if isinstance(meta, dict) else {}
    reward, done = metadata.pop(mcp.REWARD_KEY, None), bool(metadata.pop(mcp.DONE_KEY, False))
    return CallResult(value, reward, done, result.get("content") or [], metadata)


def text_of(result: dict[str, Any]) -> str:
    """The texts in the content of a tool's result."""
    blocks = result.get("content") or []
    return "\n".join(str(block.get("text", "")) for block in blocks if block.get("type") == "text")


def as_model(kind: type[BaseModel], fields: dict[str, Any], what: str) -> BaseModel:
    """Raises InvalidMessage if the fields do not fit."""
    try:
        return kind.model_validate(fields, by_alias=True, by_name=True)
    except ValidationError as error:
        raise InvalidMessage(
            f"the server's {what} does not fit {kind.__name__}",
            hint="is this the right class?",
            errors=error.errors(include_url=False, include_context=False),
        ) from error


def rpc_error(error: dict[str, Any], tool: str | None) -> PaddockError:
    """The error that the data of a JSON-RPC error names, or else the one of its number."""
    number, data = error.get("code"), error.get("data")
    details = {**data} if isinstance(data, dict) else {}
    kind = type(from_wire(details))
    if kind is ToolFailure:
        kind = tool_error_class(details.get("error_type", ""))
    elif kind is ServerError:
        kind = ERRORS_BY_NUMBER.get(number, ServerError if tool is None else ToolFailure)
    details |= {"rpc_code": number, **({} if tool is None else {"tool_name": tool})}
    data = {name: value for name, value in details.items() if name not in ("code", "kind", "hint")}
    return kind(str(error.get("message")), hint=details.get("hint"), **data)
