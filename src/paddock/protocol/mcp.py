"""The shapes of the Model Context Protocol, written so that MCP clients and OpenEnv clients both read them.

Results carry the spec's keys (`structuredContent`, `isError`) and OpenEnv's (`structured_content`,
`is_error`, `data`) side by side. Where OpenEnv says null, the spec wants silence: `for_mcp` keeps it.
Knows no transport and no session.
"""

from __future__ import annotations

from base64 import b64decode
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import from_json

from paddock.protocol import jsonrpc
from paddock.protocol.codec import encode, model_fields
from paddock.protocol.finite import check_reward

if TYPE_CHECKING:
    from paddock.tools import ToolSpec

SESSION_HEADER = "mcp-session-id"
STATELESS_VERSION = "2026-07-28"
"""The revision without `initialize`: every request stands alone and says who sends it."""
SESSION_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Revisions that begin with `initialize`; the first is offered to a client that asks for an unknown one."""

COMPLETE = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
"""A key of every result in the stateless revision; older clients ignore it."""
VERSIONS = (STATELESS_VERSION, *SESSION_VERSIONS)
UNSUPPORTED_VERSION, HEADER_MISMATCH = -32022, -32020
OPTIONAL = frozenset(("title", "outputSchema", "icons", "annotations", "execution", "structuredContent", "_meta"))
"""Keys that the spec allows to omit, but not to be null: the TypeScript client refuses the whole result."""
REWARD_KEY, DONE_KEY = "paddock/reward", "paddock/done"
"""Keys of `_meta`: the reward of the call, and whether it ended the episode."""
FASTMCP_RESULT = ("content", "structured_content", "meta", "data", "is_error")


def unsupported(version: Any) -> jsonrpc.RpcError:
    """The error for a revision that is not supported."""
    data = {"supported": list(VERSIONS), "requested": version}
    return jsonrpc.RpcError(UNSUPPORTED_VERSION, f"Unsupported protocol version: {version}", data)


def choose_version(requested: Any) -> str:
    """The revision to speak with a client that requests `requested`."""
    return requested if requested in SESSION_VERSIONS else SESSION_VERSIONS[0]


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


def tool_result(value: Any, spec: ToolSpec | None = None) -> dict[str, Any]:
    """A tool's return value as a `tools/call` result, in the form that its listing announced."""
    if isinstance(value, BaseModel):
        value = model_fields(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    wraps = value is not None and not isinstance(value, dict) if spec is None else spec.wraps(value)
    structured = {"result": value} if wraps else value
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


def for_mcp(result: dict[str, Any]) -> dict[str, Any]:
    """A result for a client that keeps to the spec: `tools/call`'s or `tools/list`'s."""
    listed = "tools" if "tools" in result else "content"
    return _without_nulls({**result, listed: [_without_nulls(member) for member in result[listed]]})


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None or name not in OPTIONAL}


def with_score(result: dict[str, Any], reward: Any, done: bool) -> dict[str, Any]:
    """Add reward and `done` to a result, under `_meta`."""
    if reward is None and not done:
        return result
    score = {REWARD_KEY: check_reward(reward), DONE_KEY: done}
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
    "text": ("text",),
    "image": ("data", "mimeType"),
    "audio": ("data", "mimeType"),
    "resource_link": ("uri", "name"),
}
"""The kinds of content, and which strings each cannot do without."""


def _is_block(value: Any) -> bool:
    """Whether a tool returned MCP content itself, such as an image, and not data that looks a little like it."""
    if not isinstance(value, dict):
        return False
    kind = value.get("type")
    if kind == "resource":
        resource = value.get("resource")
        return _has_text(resource, "uri") and (_has_text(resource, "text") or _has_text(resource, "blob"))
    needed = BLOCKS.get(kind) if isinstance(kind, str) else None
    return needed is not None and all(_has_text(value, name) for name in needed)


def _has_text(value: Any, name: str) -> bool:
    return isinstance(value, dict) and isinstance(value.get(name), str)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "annotations": None, "meta": None}


def client_answer(request: dict[str, Any]) -> dict[str, Any]:
    """The response of a client without capabilities to a request of the server, which may wait for one."""
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


def header_value(text: str) -> str:
    """The value of a header of the stateless revision. Values beyond ASCII are sent as base64."""
    if not (text.startswith("=?base64?") and text.endswith("?=")):
        return text
    try:
        return b64decode(text[9:-2], validate=True).decode()
    except ValueError:
        return text


def discovery(server: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The answer to `server/discover`.

    A client that negotiates is offered the revisions with sessions only: an environment is state, and
    a client that is offered the stateless revision gives up its session for it. Other clients get
    all that is served.
    """
    versions = SESSION_VERSIONS if is_stateless(params) else VERSIONS
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
