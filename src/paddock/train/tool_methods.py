"""Tools as Python methods: signature, types and docstring made from their JSON Schemas. No IO.

For trainers that offer the methods of an object to a model and read the schema off them again.
"""

from __future__ import annotations

import inspect
import keyword
import re
from typing import TYPE_CHECKING, Any, Literal, Union

from paddock.tools import parse_docstring

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from paddock.types import ToolInfo

    Call = Callable[[Any, str, dict[str, Any]], Any]
    """What carries a call out: the object, the name of the tool, its arguments."""

PLAIN: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "null": None,
    "object": dict[str, Any],
}


def make_methods(tools: Collection[ToolInfo], call: Call, taken: Collection[str] = ()) -> dict[str, Any]:
    """A method for each tool, by the attribute to put it under. It is called as the tool is (`__name__`), even
    where that is no name for an attribute or is `taken`."""
    methods: dict[str, Any] = {}
    for tool in tools:
        attribute = identifier(tool.name)
        while attribute in methods or attribute in taken:
            attribute += "_"
        methods[attribute] = make_method(tool, call)
    return methods


def make_method(tool: ToolInfo, call: Call) -> Any:
    """A method that passes on the arguments it is given, and no others."""
    schema = tool.input_schema
    named = {identifier(name): name for name in schema.get("properties") or {}}
    signature = make_signature(schema, named)

    def method(self: Any, *args: Any, **arguments: Any) -> Any:
        bound = signature.bind(self, *args, **arguments).arguments
        return call(self, tool.name, {named[name]: value for name, value in bound.items() if name != "self"})

    method.__name__ = method.__qualname__ = tool.name
    method.__doc__ = make_docstring(tool, named)
    method.__signature__ = signature  # type: ignore[attr-defined]
    method.__annotations__ = {
        parameter.name: parameter.annotation
        for parameter in signature.parameters.values()
        if parameter.annotation is not parameter.empty
    } | {"return": str}
    return method


def make_signature(schema: Mapping[str, Any], named: Mapping[str, str]) -> inspect.Signature:
    """The arguments that must be given first; the others have their default, or None."""
    required = set(schema.get("required") or ())
    definitions = schema.get("$defs") or {}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, own in sorted(named.items(), key=lambda pair: pair[1] not in required):
        described = schema["properties"][own]
        kind = annotation(described, definitions)
        default: Any = inspect.Parameter.empty
        if own not in required:
            default = described.get("default") if isinstance(described, dict) else None
            kind = kind if default is not None else Union[kind, None]  # noqa: UP007 (kinds are values here)
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        )
    return inspect.Signature(parameters, return_annotation=str)


def annotation(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The Python type that a schema describes, as closely as a type can; Any if it says nothing."""
    if not isinstance(schema, dict):
        return Any
    if (reference := schema.get("$ref")) is not None:
        name = str(reference).rpartition("/")[2]
        # A definition that names itself ends here.
        rest = {other: definition for other, definition in definitions.items() if other != name}
        return annotation(definitions.get(name), rest)
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices and all(choice is None or isinstance(choice, str | int | bool) for choice in choices):
        return Literal[tuple(choices)]
    for several in ("anyOf", "oneOf"):
        if schema.get(several):
            return Union[tuple(annotation(part, definitions) for part in schema[several])]  # noqa: UP007
    kind = schema.get("type")
    if isinstance(kind, list):
        return Union[tuple(annotation({**schema, "type": each}, definitions) for each in kind)]  # noqa: UP007
    if kind == "array":
        return list[annotation(schema.get("items"), definitions)]  # type: ignore[misc]
    return PLAIN.get(str(kind), Any)


def make_docstring(tool: ToolInfo, named: Mapping[str, str]) -> str:
    """What the tool does and what each argument is, in the form that schemas are read from."""
    summary, argument_docs = parse_docstring(tool.description)
    lines = [summary or tool.name]
    if named:
        lines += ["", "Args:"]
    for name, own in named.items():
        schema = tool.input_schema["properties"][own]
        text = (schema.get("description") if isinstance(schema, dict) else None) or argument_docs.get(own) or own
        lines.append(f"    {name}: {' '.join(str(text).split())}")
    return "\n".join(lines)


def identifier(name: str) -> str:
    """A public name that Python takes."""
    attribute = re.sub(r"\W", "_", name).lstrip("_")
    if not attribute or attribute[0].isdigit():
        attribute = f"tool_{attribute}"
    return f"{attribute}_" if keyword.iskeyword(attribute) else attribute
