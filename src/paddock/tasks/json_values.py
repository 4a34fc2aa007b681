"""Frozen dataclasses from plain data (JSON or TOML) and back, checked against the types of their fields.

A wrong type raises TaskError that names the place. A key without a field is passed to `on_unknown`, which raises
or takes note. Knows nothing about tasks except how file contents are written.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from paddock.errors import ConfigError, TaskError

ValueT = TypeVar("ValueT")
OnUnknown = Callable[[str, str, list[str]], None]
"""Called with the place of an object, a key of it that means nothing, and the keys that it can have."""
SCALARS = {
    str: ("text", '"…"'),
    bool: ("true or false", "true or false"),
    int: ("a whole number", "a whole number above 0"),
    float: ("a number", "a number above 0"),
}
"""How messages call a kind of value, and an example of it."""


def read_value(kind: type[ValueT], plain: object, where: str, on_unknown: OnUnknown | None = None) -> ValueT:
    """A `kind` made from plain data. `where` names the data in messages. Raises TaskError."""
    value: ValueT = _read(kind, plain, where, on_unknown or refuse_unknown)
    return value


def refuse_unknown(where: str, key: str, keys: list[str]) -> None:
    raise unknown_key(key, keys, where)


def ignore_unknown(where: str, key: str, keys: list[str]) -> None:
    """For data of others, which may have more keys than are read."""


def unknown_key(key: str, keys: Iterable[str], where: str) -> TaskError:
    """The error for a key that means nothing here, with the one that was probably meant."""
    close = difflib.get_close_matches(key, list(keys), 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(keys)}"
    return TaskError(f"{where}: unknown key {key!r}", hint=hint)


def write_value(value: object) -> Any:
    """Plain data from which `read_value` makes an equal value. Fields that have their default are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        written = {field.name: getattr(value, field.name) for field in fields(value) if _differs(value, field)}
        return {name: write_value(item) for name, item in written.items()}
    if isinstance(value, Mapping):
        return {key: write_value(item) for key, item in sorted(value.items())}
    if isinstance(value, tuple):
        return [write_value(item) for item in value]
    return write_content(value) if isinstance(value, bytes) else value


def parse_json(data: bytes, place: str) -> Any:
    """Parse a document. Raises TaskError, with `place` in its message, if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{place} is not valid JSON: {error}", hint="correct the text there") from error


def read_content(content: object, where: str) -> bytes:
    """The bytes of a file: text, `{"text": …}` or `{"base64": …}`."""
    if isinstance(content, str):
        return encoded(content, where)
    if not isinstance(content, dict):
        raise TaskError(f"{where} is {kind_name(content)}", hint='write text, {"text": …} or {"base64": …}')
    for key in content:
        if key not in ("text", "base64", "mode"):
            raise unknown_key(str(key), ("text", "base64", "mode"), where)
    texts = [content[key] for key in ("text", "base64") if key in content]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise TaskError(f"{where} has no content, or two", hint='write one of {"text": "…"} and {"base64": "…"}')
    if "text" in content:
        return encoded(texts[0], where)
    try:
        return base64.b64decode(texts[0], validate=True)
    except (binascii.Error, ValueError):
        raise TaskError(f"{where}: the base64 text is broken", hint="encode the file again") from None


def write_content(data: bytes, mode: int | None = None) -> str | dict[str, str]:
    try:
        written: dict[str, str] = {"text": data.decode()}
    except UnicodeDecodeError:
        written = {"base64": base64.b64encode(data).decode()}
    if mode is not None:
        written["mode"] = f"{mode:o}"
    return written["text"] if list(written) == ["text"] else written


def encoded(data: bytes | str, where: str) -> bytes:
    """Text as UTF-8, bytes as they are."""
    if isinstance(data, str):
        try:
            return data.encode()
        except UnicodeEncodeError:
            raise TaskError(f"{where} cannot be written as UTF-8", hint="remove the lone surrogates") from None
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise TaskError(f"{where} holds {type(data).__name__}", hint="give bytes or text")


def join_place(where: str, key: str) -> str:
    """The place of a key. `where` ends in a colon if it is a whole file."""
    return f"{where} {key}" if where.endswith(":") else f"{where}.{key}"


def kind_name(value: object) -> str:
    names = {
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


# -- reading, by the kind of the field ------------------------------------------------------------------------


def _read(kind: Any, plain: Any, where: str, on_unknown: OnUnknown) -> Any:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _read_union(get_args(kind), plain, where, on_unknown)
    if origin is Literal:
        if plain not in get_args(kind):
            raise TaskError(f"{where} is {plain!r}", hint=f"use {', '.join(map(repr, get_args(kind)))}")
        return plain
    if is_dataclass(kind):
        return _read_object(kind, plain, where, on_unknown)
    if origin is tuple:
        if not isinstance(plain, list | tuple):
            raise TaskError(f"{where} is {plain!r}, not a list", hint="write […]")
        item_kind = get_args(kind)[0]
        return tuple(_read(item_kind, item, f"{where}[{number}]", on_unknown) for number, item in enumerate(plain))
    if origin is Mapping:
        if not isinstance(plain, dict):
            raise TaskError(f"{where} is {kind_name(plain)}, not an object", hint="write names and values")
        item_kind = get_args(kind)[1]
        return {str(key): _read(item_kind, item, f"{where}.{key}", on_unknown) for key, item in plain.items()}
    return _read_scalar(kind, plain, where)


def _read_object(kind: Any, plain: Any, where: str, on_unknown: OnUnknown) -> Any:
    if not isinstance(plain, dict):
        raise TaskError(f"{where} is {plain!r}, not an object", hint="write names and values")
    hints = _hints(kind)
    arguments: dict[str, Any] = {}
    for key, value in plain.items():
        if key not in hints:
            on_unknown(where, str(key), list(hints))
        else:
            arguments[key] = _read(hints[key], value, join_place(where, key), on_unknown)
    for field in fields(kind):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in arguments:
            raise TaskError(f"{where}: {field.name} is missing", hint=f"add {field.name}")
    try:
        return kind(**arguments)
    except (TaskError, ConfigError) as error:
        raise TaskError(f"{where}: {error}", hint=error.hint) from error


def _read_union(kinds: tuple[Any, ...], plain: Any, where: str, on_unknown: OnUnknown) -> Any:
    """The first alternative of the same shape as the data; its error if none fits."""
    if plain is None and NoneType in kinds:
        return None
    present = [kind for kind in kinds if kind is not NoneType]
    for kind in present:
        if _has_shape(kind, plain):
            return _read(kind, plain, where, on_unknown)
    return _read(present[0], plain, where, on_unknown)


def _has_shape(kind: Any, plain: Any) -> bool:
    if is_dataclass(kind) or get_origin(kind) is Mapping:
        return isinstance(plain, dict)
    if isinstance(plain, bool):
        return kind is bool
    scalars: dict[Any, Any] = {str: str, int: int, float: int | float}
    return kind in scalars and isinstance(plain, scalars[kind])


def _read_scalar(kind: Any, plain: Any, where: str) -> Any:
    if kind is bytes:
        return read_content(plain, where)
    if kind is bool and isinstance(plain, bool):
        return plain
    if kind is str and isinstance(plain, str):
        return plain
    is_number = isinstance(plain, int | float) and not isinstance(plain, bool) and math.isfinite(plain)
    if kind is int and is_number and isinstance(plain, int):
        return plain
    if kind is float and is_number:
        return plain
    name, example = SCALARS[kind]
    raise TaskError(f"{where} is {plain!r}, not {name}", hint=f"write {example}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of the fields, in their order."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _differs(value: Any, field: Any) -> bool:
    default = field.default if field.default is not MISSING else MISSING
    if default is MISSING and field.default_factory is not MISSING:
        default = field.default_factory()
    return default is MISSING or getattr(value, field.name) != default
