"""Tools: what `@tool` derives from a method, and how the arguments of a call are checked.

The signature becomes the input schema, the docstring the descriptions, the return annotation the
output schema. A tool without a valid schema is refused before anything is served (`build_schemas`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, get_args, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic import create_model as create_pydantic_model

from paddock.errors import ConfigError, InvalidToolArguments, ToolNotFound
from paddock.protocol.finite import MESSAGE, find_nonfinite

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
MARK = "__paddock_tool__"
WRAPS = "x-fastmcp-wrap-result"
RESERVED = frozenset(("reset", "step", "state", "close"))


@dataclass(frozen=True, slots=True)
class ToolOptions:
    name: str | None = None
    title: str | None = None
    read_only: bool = False
    idempotent: bool = False
    destructive: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolReturn:
    """Return this from a tool to score the call or end the episode along with its value."""

    value: Any
    """What the agent gets."""
    reward: float | None = None
    """The reward of the call. None means "not scored"."""
    done: bool = False
    """Whether the call ends the episode."""


@overload
def tool(function: FunctionT) -> FunctionT: ...
@overload
def tool(
    *,
    name: str | None = None,
    title: str | None = None,
    read_only: bool = False,
    idempotent: bool = False,
    destructive: bool | None = None,
) -> Callable[[FunctionT], FunctionT]: ...
def tool(function: Any = None, **options: Any) -> Any:
    """Make a method of a ToolEnvironment callable by agents.

    `read_only` and `idempotent` are hints for MCP clients: a call that changes nothing, a call that
    may be repeated without harm.
    """

    def mark(target: Any) -> Any:
        if isinstance(target, (staticmethod, classmethod)):
            raise _not_a_method(target.__func__.__name__)
        setattr(target, MARK, ToolOptions(**options))
        return target

    return mark if function is None else mark(function)


class ToolSpec:
    """One tool of an environment class."""

    def __init__(self, function: Callable[..., Any], options: ToolOptions) -> None:
        self.name = options.name or function.__name__
        if self.name in RESERVED:
            raise ConfigError(
                f"a tool may not be called {self.name!r}",
                hint="reset, step, state and close belong to the environment; use tool(name=...)",
            )
        self.function = function
        self.options = options
        self._names: dict[str, str] = {}
        self.is_async = inspect.iscoroutinefunction(function)
        self.description, self._arguments_text = parse_docstring(function.__doc__)

    def build_schemas(self) -> None:
        """Derive both schemas. Raises ConfigError if the signature cannot be described."""
        try:
            _ = self.input_schema, self.output_schema
        except PydanticUserError as error:
            reason = error.message.splitlines()[0]
            raise ConfigError(
                f"tool {self.name!r}: an argument cannot be described in JSON Schema: {reason}",
                hint="use plain types, dataclasses or pydantic models",
            ) from error
        except NameError as error:
            raise ConfigError(
                f"tool {self.name!r}: the type of an argument or result cannot be found: {error}",
                hint="import it where it can be found at run time, not only under TYPE_CHECKING",
            ) from error

    @cached_property
    def arguments(self) -> type[BaseModel]:
        """The model that a call's arguments must fit."""
        hints = get_type_hints(self.function, include_extras=True)
        fields: dict[str, Any] = {}
        for number, parameter in enumerate(list(inspect.signature(self.function).parameters.values())[1:]):
            name = parameter.name
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigError(f"tool {self.name!r} takes *{name}", hint="name every argument")
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigError(f"tool {self.name!r} takes {name} by position only", hint="drop the '/'")
            default = ... if parameter.default is parameter.empty else parameter.default
            text = self._arguments_text.get(name)
            described = Field(default, alias=name, description=text) if text else Field(default, alias=name)
            # Fields have names of their own, because a model refuses some (`json`, `model_config`, `_x`).
            fields[f"argument_{number}"] = (hints.get(name, Any), described)
            self._names[f"argument_{number}"] = name
        config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        return create_pydantic_model(self.name, __config__=config, **fields)

    @cached_property
    def input_schema(self) -> dict[str, Any]:
        schema = self.arguments.model_json_schema()
        schema.pop("title", None)
        schema.setdefault("properties", {})
        for described in schema["properties"].values():
            described.pop("title", None)
        return schema

    @cached_property
    def output_schema(self) -> dict[str, Any] | None:
        """An object schema. A result of another type is wrapped as `{"result": …}`, here and on the wire."""
        returned = get_type_hints(self.function).get("return", Any)
        if returned in (Any, None, type(None), ToolReturn) or ToolReturn in get_args(returned):
            return None
        try:
            # Results are written by the names of their fields.
            schema = TypeAdapter(returned).json_schema(mode="serialization", by_alias=False)
        except PydanticUserError:
            return None
        if schema.get("type") == "object":
            schema.pop("title", None)
            return schema
        definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
        # FastMCP's client unwraps a lone result only where it finds its own mark.
        return {
            "type": "object",
            "properties": {"result": schema},
            "required": ["result"],
            **definitions,
            WRAPS: True,
        }

    def wraps(self, value: Any) -> bool:
        """Whether `value` is sent as `{"result": value}`: as the schema says, or else because it is not an object."""
        if self.output_schema is None:
            return value is not None and not isinstance(value, dict)
        return WRAPS in self.output_schema or not isinstance(value, dict)

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the tool. Raises InvalidToolArguments, naming each wrong one."""
        try:
            checked = self.arguments.model_validate(arguments)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, p['loc'])) or 'arguments'}: {p['msg']}" for p in error.errors(include_url=False)
            ]
            raise InvalidToolArguments(f"{self.name}: {'; '.join(problems)}", tool_name=self.name) from None
        values = checked.__dict__
        place = find_nonfinite(values)
        if place is not None:
            name = ".".join(map(str, (self._names[place[0]], *place[1:])))
            raise InvalidToolArguments(f"{self.name}: {name}: {MESSAGE}", tool_name=self.name)
        return {self._names[field]: values[field] for field in checked.__pydantic_fields_set__}


def collect_tools(cls: type) -> dict[str, ToolSpec]:
    """Every `@tool` method of a class, by the name agents use, in the order they were written."""
    specs: dict[str, ToolSpec] = {}
    visited: set[str] = set()
    names = [name for base in reversed(cls.__mro__) for name in vars(base)]
    for attribute in names:
        function = getattr(cls, attribute, None)
        options = getattr(function, MARK, None)
        if options is None or attribute in visited:
            continue
        visited.add(attribute)
        if isinstance(inspect.getattr_static(cls, attribute), (staticmethod, classmethod)):
            raise _not_a_method(attribute)
        spec = ToolSpec(function, options)  # type: ignore[arg-type]
        if spec.name in specs:
            raise ConfigError(f"{cls.__name__} has two tools called {spec.name!r}")
        specs[spec.name] = spec
    return specs


def unknown_tool(name: str, tools: dict[str, ToolSpec]) -> ToolNotFound:
    """The error for a name that is none of `tools`."""
    return ToolNotFound(f"Unknown tool: {name!r}", hint=f"tools here: {', '.join(tools) or 'none'}", tool_name=name)


def _not_a_method(name: str) -> ConfigError:
    return ConfigError(
        f"tool {name!r} is not a plain method", hint="drop @staticmethod or @classmethod, and take self"
    )


_ARGUMENTS = re.compile(r"^\s*(?:args|arguments|parameters)\s*:\s*$", re.IGNORECASE)
_SECTION = re.compile(r"^\s*(?:returns|raises|yields|examples?|notes?)\s*:\s*$", re.IGNORECASE)
_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")


def parse_docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """The description, and what an `Args:` section says about each argument."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, last = "description", None
    for line in inspect.cleandoc(text or "").splitlines():
        if _ARGUMENTS.match(line):
            section = "arguments"
        elif _SECTION.match(line):
            section = "other"
        elif section == "description":
            description.append(line)
        elif section == "arguments" and (match := _ARGUMENT.match(line)):
            last = match.group(1)
            arguments[last] = match.group(2).strip()
        elif section == "arguments" and last and line.strip():
            arguments[last] += " " + line.strip()
    return "\n".join(description).strip(), arguments
