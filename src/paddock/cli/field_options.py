"""Command line options, generated from the fields of a config class (`RunConfig`, `ServerConfig`).

A field becomes an option: its name, type, default and the first paragraph of its docstring are the option's. Metadata
of the field narrows it (see `paddock.config`). A field that is a config class itself gives the options of its own
fields. So a new option is one field.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ConfigT = TypeVar("ConfigT")
TYPES: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "CaptureMode": str,
    "Path": click.Path(path_type=Path),
}
SET_OF_TEXTS = "frozenset[str]"


def field_options(
    kind: type[Any],
    *,
    without: tuple[str, ...] = (),
    defaults: dict[str, Any] | None = None,
    helps: dict[str, str] | None = None,
    flags: dict[str, tuple[str, ...]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds an option for each field of a config class, but those of `without`.

    `defaults`, `helps` and `flags` replace those of a field, by its name. An inner field is `outer_inner`.
    """
    changed = {"default": defaults or {}, "help": helps or {}, "flags": flags or {}}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, each, doc in reversed(list(_option_fields(kind))):
            if name in without:
                continue
            option = _option(each, doc)
            option |= {key: values[name] for key, values in changed.items() if name in values}
            command = click.option(*option.pop("flags"), name, **_with_variable(each, option))(command)
        return command

    return decorate


def read_field_options(kind: type[ConfigT], options: dict[str, Any], **values: Any) -> ConfigT:
    """Takes the options of a config class out of `options` and makes the config; `values` replace its fields.

    Raises ConfigError."""
    return kind(**{**_take_values(kind, options, ""), **values})


def _take_values(kind: Any, options: dict[str, Any], prefix: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for each in fields(kind):
        if (inner := _inner_config(each)) is not None:
            values[each.name] = inner(**_take_values(inner, options, f"{each.name}_"))
        elif prefix + each.name in options:
            values[each.name] = _to_field(each, options.pop(prefix + each.name))
    return values


def _to_field(each: Field[Any], value: Any) -> Any:
    """The value of a field, from that of its option."""
    if each.type == SET_OF_TEXTS:
        return frozenset(value)
    if value == 0 and each.metadata.get("zero_is_none"):
        return None
    return value * each.metadata["unit"] if "unit" in each.metadata else value


def _inner_config(each: Field[Any]) -> Any:
    """The config class of a field whose own fields are options."""
    factory: Any = each.default_factory
    return factory if is_dataclass(factory) and each.metadata.get("option", True) else None


def _option_fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], str]]:
    """The fields that are options: the parameter that each is passed as, the field, and its documentation."""
    docs = field_docs(kind)
    for each in fields(kind):
        if (inner := _inner_config(each)) is not None:
            yield from _option_fields(inner, f"{each.name}_")
        elif each.metadata.get("option", True):
            yield prefix + each.name, each, docs[each.name]


def _option(each: Field[Any], doc: str) -> dict[str, Any]:
    """What `click.option` takes for a field."""
    metadata, default = each.metadata, each.default
    dashed = f"--{each.name.replace('_', '-')}"
    option: dict[str, Any] = {"help": doc, "flags": metadata.get("flags", (dashed,))}
    if "metavar" in metadata:
        option["metavar"] = metadata["metavar"]
    if each.type == SET_OF_TEXTS:
        return {**option, "multiple": True}
    kind = _option_type(each)
    if kind is bool and default is None:
        return {**option, "flags": (f"{dashed}/--no-{dashed[2:]}",), "default": None}
    if kind is bool:
        return {**option, "is_flag": True}
    if default is MISSING:
        return {**option, "type": kind, "required": True}
    if metadata.get("zero_is_none"):
        option["help"] += " 0: no limit."
    return {**option, "type": kind, "default": default // metadata["unit"] if "unit" in metadata else default}


def _option_type(each: Field[Any]) -> Any:
    kind = next((TYPES[name] for name in str(each.type).split(" | ") if name in TYPES), None)
    if "choices" in each.metadata:
        return click.Choice(each.metadata["choices"], case_sensitive=False)
    if "minimum" in each.metadata:
        return (click.FloatRange if kind is float else click.IntRange)(min=each.metadata["minimum"])
    if kind is None:
        raise TypeError(f"{each.name}: {each.type} cannot be an option; add it to TYPES, or use metadata=NO_OPTION")
    return kind


def _with_variable(each: Field[Any], option: dict[str, Any]) -> dict[str, Any]:
    """An option with its default in the help, and with its environment variable as the default if that is set."""
    default, variable = option.get("default"), each.metadata.get("variable")
    if variable is None:
        return {**option, "show_default": default is not None}
    described = "" if default is None else f" Default: {default}."
    return {
        **option,
        "default": lambda: variable.read() or default,
        "help": f"{option['help']}{described} Also: {variable.name}.",
    }


@cache
def field_docs(kind: type) -> dict[str, str]:
    """The first paragraph of the string beneath each field of a class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_doc = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = inspect.cleandoc(str(following.value.value)) if is_doc else ""  # type: ignore[union-attr]
            docs[statement.target.id] = " ".join(text.partition("\n\n")[0].split())
    return docs
