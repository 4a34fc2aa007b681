"""Tool schemas from MCP form to the form that chat models are given.

References into `$defs` are written out in place, so that nothing dangles when a schema is cut into properties;
what refers to itself stays a reference, and its definition stays with it.
"""

from __future__ import annotations

from typing import Any

DEFINITIONS = ("$defs", "definitions")
DROPPED = ("title", "default")


def convert_tool_format(tool: dict[str, Any]) -> dict[str, Any]:
    """An MCP tool as `{"type": "function", "function": {name, description, parameters}}`."""
    schema = tool.get("inputSchema") or tool.get("input_schema") or {}
    return {
        "type": "function",
        "function": {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": parameters(schema if isinstance(schema, dict) else {}),
        },
    }


def parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object with `properties` and `required` whatever came in."""
    definitions = {f"#/{key}/{name}": body for key in DEFINITIONS for name, body in (schema.get(key) or {}).items()}
    kept: dict[str, Any] = {}
    inlined = _inlined(schema, definitions, (), kept)
    properties = {name: _normal(body) for name, body in (inlined.get("properties") or {}).items()}
    rest = {
        key: value
        for key, value in inlined.items()
        if key not in ("type", "properties", "required", "title", "$schema", *DEFINITIONS)
    }
    result = {"type": "object", "properties": properties, "required": list(inlined.get("required") or []), **rest}
    if kept:
        result["$defs"] = kept
    return result


def _inlined(node: Any, definitions: dict[str, Any], inside: tuple[str, ...], kept: dict[str, Any]) -> Any:
    """`node` with references replaced by what they refer to. `kept` gathers definitions that contain themselves."""
    if isinstance(node, list):
        return [_inlined(member, definitions, inside, kept) for member in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str) and reference in definitions:
        others = {key: value for key, value in node.items() if key != "$ref"}
        if reference in inside:
            name = reference.rpartition("/")[2]
            if name not in kept:
                kept[name] = True  # Holds the place while the definition itself is written.
                kept[name] = _inlined(definitions[reference], definitions, (reference,), kept)
            return {"$ref": f"#/$defs/{name}", **_inlined(others, definitions, inside, kept)}
        target = _inlined(definitions[reference], definitions, (*inside, reference), kept)
        return target | _inlined(others, definitions, inside, kept) if isinstance(target, dict) else target
    return {
        key: value if key in DEFINITIONS else _inlined(value, definitions, inside, kept)
        for key, value in node.items()
    }


def _normal(node: Any) -> Any:
    """One property as models like it: the first choice that is not null, no titles, no tuples."""
    if isinstance(node, list):
        return [_normal(member) for member in node]
    if not isinstance(node, dict):
        return node
    result = {key: value for key, value in node.items() if key not in DROPPED}
    choices = result.get("anyOf")
    if isinstance(choices, list):
        real = [choice for choice in choices if not (isinstance(choice, dict) and choice.get("type") == "null")]
        if len(real) == 1 and isinstance(real[0], dict):
            del result["anyOf"]
            result = {**real[0], **result}
            result = {key: value for key, value in result.items() if key not in DROPPED}
    prefix = result.pop("prefixItems", None)
    if isinstance(prefix, list) and prefix and "items" not in result:
        result["items"] = prefix[0]
    if isinstance(result.get("properties"), dict):
        result["properties"] = {name: _normal(body) for name, body in result["properties"].items()}
    for key in ("items", "additionalProperties", "anyOf", "oneOf", "allOf"):
        if key in result:
            result[key] = _normal(result[key])
    return result
