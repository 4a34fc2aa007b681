"""The shapes of the Model Context Protocol, written so that MCP clients and OpenEnv clients both read them.

Results carry the spec's keys (`structuredContent`, `isError`) and OpenEnv's (`structured_content`,
`is_error`, `data`) side by side. Knows no transport and no session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import from_json

from paddock.protocol import jsonrpc
from paddock.protocol.codec import encode, model_fields

if TYPE_CHECKING:
    from paddock.tools import ToolSpec

STATELESS_VERSION = "2026-07-28"
"""The revision without `initialize`: every request stands alone and says who sends it."""
SESSION_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Revisions that begin with `initialize`; the first is offered to a client that asks for an unknown one."""

COMPLETE = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
"""What every result says in the stateless revision; older clients pass it by."""
UNSUPPORTED_VERSION = -32022
FASTMCP_RESULT = ("content", "structured_content", "meta", "data", "is_error")


def choose_version(asked: Any) -> str:
    """The revision to speak with a client that asks for `asked`."""
    return asked if asked in SESSION_VERSIONS else SESSION_VERSIONS[0]


def tool_info(spec: ToolSpec) -> dict[str, Any]:
    """A tool as the `list_tools` action describes it."""
    return {"name": spec.name, "description": spec.description, "input_schema": spec.input_schema}


def tool_listing(spec: ToolSpec) -> dict[str, Any]:
    """A tool as `tools/list` describes it."""
    options = spec.options
    annotations: dict[str, Any] = {"readOnlyHint": options.read_only, "idempotentHint": options.idempotent}
    if options.destructive is not None or options.read_only:
        annotations["destructiveHint"] = bool(options.destructive) and not options.read_only
    return {
        "name": spec.name,
        "title": options.title,
        "description": spec.description,
        "inputSchema": spec.input_schema,
        "outputSchema": spec.output_schema,
        "icons": None,
        "annotations": annotations,
        "meta": None,
        "execution": None,
    }


def tool_result(value: Any) -> dict[str, Any]:
    """A tool's return value as a `tools/call` result."""
    structured = value
    if isinstance(value, BaseModel):
        structured = value = model_fields(value)
    elif not isinstance(value, dict):
        structured = None if value is None else {"result": value}
    return {
        "content": _content(value),
        "structured_content": structured,
        "structuredContent": structured,
        "meta": None,
        "data": value,
        "is_error": False,
        "isError": False,
        "resultType": "complete",
    }


def plain_result(result: Any) -> dict[str, Any]:
    """A `tools/call` result from whatever stands in a tool observation: ours, FastMCP's, or a bare value."""
    if isinstance(result, dict) and "content" in result:
        return result
    if not hasattr(result, "structured_content"):
        return tool_result(result)
    fields = from_json(encode({key: getattr(result, key, None) for key in FASTMCP_RESULT}))
    spec = {"structuredContent": fields["structured_content"], "isError": bool(fields["is_error"])}
    return {**fields, **spec, "resultType": "complete"}


def tool_failure(message: str) -> dict[str, Any]:
    """A tool that ran and failed, as a `tools/call` result: the model is meant to read it."""
    return {
        "content": [_text(message)],
        "structured_content": None,
        "meta": None,
        "data": None,
        "is_error": True,
        "isError": True,
        "resultType": "complete",
    }


def with_score(result: dict[str, Any], reward: Any, done: bool) -> dict[str, Any]:
    """Tell what the call earned, where MCP leaves room for it."""
    if reward is None and not done:
        return result
    score = {"paddock/reward": reward, "paddock/done": done}
    return {**result, "_meta": score, "meta": score}


def _content(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if isinstance(value, list) and value and all(_is_block(member) for member in value):
        return value
    if _is_block(value):
        return [value]
    return [_text(value if isinstance(value, str) else encode(value).decode())]


BLOCKS = {
    "text": {"text"},
    "image": {"data", "mimeType"},
    "audio": {"data", "mimeType"},
    "resource": {"resource"},
    "resource_link": {"uri"},
}


def _is_block(value: Any) -> bool:
    """Whether a tool returned MCP content itself, such as an image."""
    needed = BLOCKS.get(str(value.get("type"))) if isinstance(value, dict) else None
    return needed is not None and needed <= value.keys()


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "annotations": None, "meta": None}


def client_answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a client without anything to offer says when the server asks it: it may wait for that."""
    if request["method"] == "ping":
        return jsonrpc.result({}, request["id"])
    refused = {"code": jsonrpc.METHOD_NOT_FOUND, "message": "not offered by this client"}
    return {"jsonrpc": "2.0", "id": request["id"], "error": refused}


def is_stateless(params: dict[str, Any]) -> bool:
    """Whether a request follows the revision without sessions: it then says so in its `_meta`."""
    return stateless_version(params) is not None


def stateless_version(params: dict[str, Any]) -> Any:
    meta = params.get("_meta")
    return meta.get("io.modelcontextprotocol/protocolVersion") if isinstance(meta, dict) else None


def discovery(server: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The answer to `server/discover`.

    A client that negotiates is offered the revisions with sessions only: an environment is state, and
    a client that hears of the stateless revision gives up its session for it. Anybody else is told
    all that is served.
    """
    versions = SESSION_VERSIONS if is_stateless(params) else (STATELESS_VERSION, *SESSION_VERSIONS)
    return {
        **COMPLETE,
        "supportedVersions": list(versions),
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": server,
        "_meta": {
            "io.modelcontextprotocol/serverInfo": server,
            "paddock/statelessVersion": STATELESS_VERSION,
        },
    }
