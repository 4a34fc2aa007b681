"""MCP tools and tool results in the formats of chat models.

Schemas: references into `$defs` are replaced by their definitions, so that none is left dangling; a recursive
definition stays a reference and is recursive. Results: a single text is parsed as JSON if it is JSON; images become
`image_url` parts; several texts stay a list. A result with `isError` becomes `{"error": …}`.
"""

from __future__ import annotations

import json
from typing import Any, Never

import orjson

DEFINITIONS = ("$defs", "definitions")
DROPPED_KEYS = ("title", "default")


def convert_tool_format(tool: dict[str, Any]) -> dict[str, Any]:
    """An MCP tool as `{"type": "function", "function": {name, description, parameters}}`."""
    schema = tool.get("inputSchema") or tool.get("input_schema") or {}
    return {
        "type": "function",
        "function": {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": convert_parameters(schema if isinstance(schema, dict) else {}),
        },
    }


def convert_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: always an object with `properties` and `required`."""
    definitions = {f"#/{key}/{name}": body for key in DEFINITIONS for name, body in (schema.get(key) or {}).items()}
    recursive: dict[str, Any] = {}
    inlined = _inline(schema, definitions, (), recursive)
    properties = {name: _simplify(body) for name, body in (inlined.get("properties") or {}).items()}
    rest = {
        key: value
        for key, value in inlined.items()
        if key not in ("type", "properties", "required", "title", "$schema", *DEFINITIONS)
    }
    result = {"type": "object", "properties": properties, "required": list(inlined.get("required") or []), **rest}
    if recursive:
        result["$defs"] = recursive
    return result


def _inline(node: Any, definitions: dict[str, Any], inside: tuple[str, ...], recursive: dict[str, Any]) -> Any:
    """`node` with references replaced by their definitions. `recursive` collects those that contain themselves."""
    if isinstance(node, list):
        return [_inline(member, definitions, inside, recursive) for member in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str) and reference in definitions:
        others = {key: value for key, value in node.items() if key != "$ref"}
        if reference in inside:
            name = reference.rpartition("/")[2]
            if name not in recursive:
                recursive[name] = True  # Marks it as visited, so that the recursion ends.
                recursive[name] = _inline(definitions[reference], definitions, (reference,), recursive)
            return {"$ref": f"#/$defs/{name}", **_inline(others, definitions, inside, recursive)}
        target = _inline(definitions[reference], definitions, (*inside, reference), recursive)
        return target | _inline(others, definitions, inside, recursive) if isinstance(target, dict) else target
    return {
        key: value if key in DEFINITIONS else _inline(value, definitions, inside, recursive)
        for key, value in node.items()
    }


def _simplify(node: Any) -> Any:
    """One property in simple form: no null alternative, no titles, no tuples."""
    if isinstance(node, list):
        return [_simplify(member) for member in node]
    if not isinstance(node, dict):
        return node
    result = {key: value for key, value in node.items() if key not in DROPPED_KEYS}
    choices = result.get("anyOf")
    if isinstance(choices, list):
        real = [choice for choice in choices if not (isinstance(choice, dict) and choice.get("type") == "null")]
        if len(real) == 1 and isinstance(real[0], dict):
            del result["anyOf"]
            result = {**real[0], **result}
            result = {key: value for key, value in result.items() if key not in DROPPED_KEYS}
    prefix = result.pop("prefixItems", None)
    if isinstance(prefix, list) and prefix and "items" not in result:
        result["items"] = prefix[0]
    if isinstance(result.get("properties"), dict):
        result["properties"] = {name: _simplify(body) for name, body in result["properties"].items()}
    for key in ("items", "additionalProperties", "anyOf", "oneOf", "allOf"):
        if key in result:
            result[key] = _simplify(result[key])
    return result


NO_IMAGE = "Screenshot capture failed (null image)"
DEFAULT_ERROR = "Tool execution failed"


def convert_result(result: dict[str, Any]) -> Any:
    """The value of a `tools/call` result for an agent."""
    blocks = [block for block in result.get("content") or [] if isinstance(block, dict)]
    structured = result.get("structuredContent", result.get("structured_content"))
    if result.get("isError") or result.get("is_error"):
        return {"error": next((text for block in blocks if (text := _text(block))), None) or DEFAULT_ERROR}
    if any(block.get("type") == "image" for block in blocks):
        images = [_image(block) for block in blocks if block.get("type") == "image"]
        return [*({"type": "text", "text": text} for block in blocks if (text := _text(block))), *images]
    texts = [text for block in blocks if (text := _text(block)) is not None]
    if len(texts) == 1:
        return _parse(texts[0])
    if texts:
        return texts
    return structured if structured is not None else {}


def find_error(value: Any) -> str | None:
    """The error in the value of a tool, or None."""
    if not isinstance(value, dict):
        return None
    if value.get("error"):
        return _to_text(value["error"])
    if value.get("status") == "failed" or value.get("isError"):
        return _to_text(value.get("message") or DEFAULT_ERROR)
    return None


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def _text(block: dict[str, Any]) -> str | None:
    """The text of a block; None for an image."""
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "resource" and isinstance(block.get("resource"), dict):
        resource = block["resource"]
        return str(resource["text"]) if "text" in resource else f"[resource {resource.get('uri', 'without address')}]"
    if kind == "resource_link":
        return f"[resource {block.get('uri', 'without address')}]"
    if kind == "audio":
        return f"[audio {block.get('mimeType') or block.get('mime_type') or 'of unknown type'}]"
    return None


def _image(block: dict[str, Any]) -> dict[str, Any]:
    data = block.get("data")
    if not data:
        return {"type": "text", "text": NO_IMAGE}
    kind = block.get("mimeType") or block.get("mime_type") or "image/png"
    # Some servers send the whole data URL where the base64 text belongs.
    url = data if str(data)[:5].lower() == "data:" else f"data:{kind};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _parse(text: str) -> Any:
    try:
        # Not orjson: it rejects integers beyond 64 bits.
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict) and "base64_image" in value:
        image = value["base64_image"]
        return [_image({"data": image})] if image else NO_IMAGE
    return value


def _reject_constant(text: str) -> Never:
    """NaN and infinities are not JSON: a text with one stays a text."""
    raise ValueError(text)
