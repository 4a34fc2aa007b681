"""Examples made from a JSON Schema: the simplest value that fits, and values that must be refused.

What an author says goes first: `const`, `enum`, `examples` and `default`. Otherwise the smallest value
within the bounds is made. Knows the part of JSON Schema that pydantic and FastMCP write.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Schema = dict[str, Any]

MAX_DEPTH = 16
FORMATS = {
    "date-time": "2030-01-02T03:04:05Z",
    "date": "2030-01-02",
    "time": "03:04:05Z",
    "duration": "PT1M",
    "email": "someone@example.org",
    "uri": "https://example.org/",
    "uuid": "12345678-1234-4234-8234-123456789abc",
    "uuid4": "12345678-1234-4234-8234-123456789abc",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
}
WORD = "text"
UNKNOWN_NAME = "no_such_field"


class NoExample(Exception):
    """The schema asks for something that cannot be made up, such as a match for a pattern."""


def example(schema: Schema | bool) -> Any:
    """A value that fits `schema`. Raises NoExample."""
    document = schema if isinstance(schema, dict) else {}
    return _example(document, document, 0)


def counterexamples(schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects that do not fit the object `schema`, each with what is wrong with it. Raises NoExample."""
    schema = _resolve(schema, schema)
    good = example(schema)
    if schema.get("additionalProperties") is False:
        yield f"an unknown field {UNKNOWN_NAME!r}", {**good, UNKNOWN_NAME: 1}
    for name in schema.get("required", []):
        yield f"no {name!r}", {key: value for key, value in good.items() if key != name}
    for name, described in schema.get("properties", {}).items():
        kinds = _kinds(described, schema, 0)
        if isinstance(described, dict) and "const" in described:
            continue  # It tells apart kinds of actions: a wrong one is another kind, not a wrong value.
        if "array" not in kinds:
            yield f"a list as {name!r}", {**good, name: []}
        elif "object" not in kinds:
            yield f"an object as {name!r}", {**good, name: {}}


def has_type(schema: Schema | bool, root: Schema) -> bool:
    """Whether a schema says anything about the kind of value it wants."""
    if not isinstance(schema, dict):
        return False
    return bool(schema.keys() & {"type", "enum", "const", "anyOf", "oneOf", "allOf"}) or (
        "$ref" in schema and has_type(_resolve(schema, root), root)
    )


ALL_KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


def _kinds(schema: Any, root: Schema, depth: int) -> frozenset[str]:
    """Which JSON types a schema may allow; all of them if it does not say."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return ALL_KINDS
    schema = _resolve(schema, root)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return frozenset().union(*(_kinds(option, root, depth + 1) for option in schema[key]))
    if "const" in schema or "enum" in schema:
        return frozenset(_kind_of(value) for value in schema.get("enum", [schema.get("const")]))
    named = schema.get("type", ALL_KINDS)
    return frozenset([named]) if isinstance(named, str) else frozenset(named)


def _kind_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _example(schema: Any, root: Schema, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NoExample("the schema refers to itself without end")
    if not isinstance(schema, dict) or not schema:
        return WORD
    schema = _resolve(schema, root)
    if "const" in schema:
        return schema["const"]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    if schema.get("default") is not None:
        return schema["default"]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _first_of(schema[key], root, depth)
    kind = schema.get("type")
    if isinstance(kind, list):
        return _first_of([{**schema, "type": one} for one in kind], root, depth)
    if kind is None:
        kind = "object" if "properties" in schema else "string"
    return _MAKERS[kind](schema, root, depth)


def _resolve(schema: Schema, root: Schema) -> Schema:
    """The schema with references followed and `allOf` merged in."""
    for _ in range(MAX_DEPTH):
        if "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**_look_up(schema["$ref"], root), **rest}
        elif "allOf" in schema:
            merged: Schema = {}
            for part in schema["allOf"]:
                merged |= _resolve(part, root)
            schema = {**merged, **{key: value for key, value in schema.items() if key != "allOf"}}
        else:
            return schema
    raise NoExample("the schema refers to itself without end")


def _look_up(reference: str, root: Schema) -> Schema:
    node: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or name not in node:
            raise NoExample(f"{reference} leads nowhere")
        node = node[name]
    return node if isinstance(node, dict) else {}


def _first_of(options: list[Any], root: Schema, depth: int) -> Any:
    """The first option an example can be made for; null comes last."""
    ordered = sorted(options, key=lambda option: isinstance(option, dict) and option.get("type") == "null")
    for option in ordered:
        try:
            return _example(option, root, depth + 1)
        except NoExample as error:
            reason = error
    raise reason


def _null(_schema: Schema, _root: Schema, _depth: int) -> None:
    return None


def _boolean(_schema: Schema, _root: Schema, _depth: int) -> bool:
    return True


def _string(schema: Schema, _root: Schema, _depth: int) -> str:
    if "pattern" in schema:
        raise NoExample(f"nothing known matches the pattern {schema['pattern']!r}")
    text = FORMATS.get(schema.get("format", ""), WORD)
    longest = schema.get("maxLength", len(text))
    return text.ljust(schema.get("minLength", 0), "x")[: max(longest, schema.get("minLength", 0))]


def _integer(schema: Schema, _root: Schema, _depth: int) -> int:
    lowest, highest = _bounds(schema, math.floor, 1)
    unit = int(schema.get("multipleOf", 1)) or 1
    for start in (max(lowest, min(1, highest)), lowest):
        value = math.ceil(start / unit) * unit if math.isfinite(start) else 0
        if lowest <= value <= highest:
            return value
    raise NoExample("no integer lies within the bounds")


def _number(schema: Schema, _root: Schema, _depth: int) -> float:
    lowest, highest = _bounds(schema, float, 0)
    unit = schema.get("multipleOf")
    value = max(lowest, min(1.0, highest))
    if unit:
        value = math.ceil(value / unit) * unit
    # An exclusive bound is open: step inside, by half of the room there is or by one.
    if value == schema.get("exclusiveMinimum"):
        value = (value + highest) / 2 if math.isfinite(highest) else value + (unit or 1.0)
    if value == schema.get("exclusiveMaximum"):
        value = (value + lowest) / 2 if math.isfinite(lowest) else value - (unit or 1.0)
    return float(value)


def _bounds(schema: Schema, whole: Any, inset: int) -> tuple[float, float]:
    """The lowest and the highest value; `inset` makes an exclusive bound of integers inclusive."""
    lowest = max(
        schema.get("minimum", -math.inf),
        whole(schema["exclusiveMinimum"]) + inset if "exclusiveMinimum" in schema else -math.inf,
    )
    highest = min(
        schema.get("maximum", math.inf),
        -whole(-schema["exclusiveMaximum"]) - inset if "exclusiveMaximum" in schema else math.inf,
    )
    return lowest, highest


def _array(schema: Schema, root: Schema, depth: int) -> list[Any]:
    first = [_example(item, root, depth + 1) for item in schema.get("prefixItems", [])]
    missing = schema.get("minItems", 0) - len(first)
    if missing <= 0:
        return first
    items = schema.get("items", {})
    if not schema.get("uniqueItems"):
        return first + [_example(items, root, depth + 1) for _ in range(missing)]
    return first + _distinct_items(items, missing, root, depth)


def _distinct_items(items: Any, count: int, root: Schema, depth: int) -> list[Any]:
    """Items of which no two are equal."""
    resolved = _resolve(items, root) if isinstance(items, dict) else {}
    if len(resolved.get("enum", [])) >= count:
        return list(resolved["enum"][:count])
    first = _example(items, root, depth + 1)
    if isinstance(first, str):
        return [first, *(f"{first}{number}" for number in range(1, count))]
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return [first + number for number in range(count)]
    if count == 1:
        return [first]
    raise NoExample(f"{count} different items are wanted")


def _object(schema: Schema, root: Schema, depth: int) -> dict[str, Any]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    fields = {name: _example(properties.get(name, {}), root, depth + 1) for name in schema.get("required", [])}
    for number in range(schema.get("minProperties", 0) - len(fields)):
        fields[f"{WORD}{number}"] = _example(others, root, depth + 1)
    return fields


_MAKERS = {
    "null": _null,
    "boolean": _boolean,
    "string": _string,
    "integer": _integer,
    "number": _number,
    "array": _array,
    "object": _object,
}
