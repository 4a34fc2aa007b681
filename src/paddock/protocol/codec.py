"""Values to JSON bytes, once per message.

Plain models go to orjson as their own `__dict__`; models with their own serialisers go through pydantic.
Values that JSON cannot express become what OpenEnv sends for them: NaN is null (not as a reward: see `finite.py`),
sets and numpy arrays are arrays, datetimes are ISO strings.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel, RootModel
from pydantic_core import from_json, to_jsonable_python

from paddock.errors import EnvironmentFailure
from paddock.protocol.finite import check_reward
from paddock.protocol.redact import describe_error

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS


def encode(value: Any) -> bytes:
    """JSON bytes of `value`. Raises EnvironmentFailure for what JSON cannot express."""
    try:
        return orjson.dumps(value, _jsonable, OPTIONS)
    except TypeError:
        return _encode_slowly(value)


def observation_data(observation: Any) -> dict[str, Any]:
    """The `data` of an observation frame: `metadata` stands at the top only when there is any."""
    # The first case of `model_fields` without its call: every step passes here.
    fields = observation.__dict__.copy() if type(observation) in _PLAIN_TYPES else model_fields(observation)
    reward = check_reward(fields.pop("reward", None))
    data = {"observation": fields, "reward": reward, "done": fields.pop("done", False)}
    metadata = fields.get("metadata")
    if metadata:
        data["metadata"] = metadata
    return data


def observation_body(observation: Any) -> dict[str, Any]:
    """The body of an HTTP answer: `metadata` is always there, and the reward is a float."""
    data = observation_data(observation)
    reward = data["reward"]
    return {**data, "reward": None if reward is None else float(reward), "metadata": data.get("metadata")}


def model_fields(model: Any) -> dict[str, Any]:
    """A fresh dict of a model's fields, ready for `encode`."""
    if isinstance(model, dict):
        return dict(model)
    if not isinstance(model, BaseModel):
        raise EnvironmentFailure(
            f"the environment returned {type(model).__name__}",
            hint="return an Observation (or State), or a dict of its fields",
        )
    if _is_plain(type(model)):
        return dict(model.__dict__)
    try:
        dumped: dict[str, Any] = model.model_dump(mode="json", fallback=_jsonable)
    except Exception as error:
        # Computed fields and serialisers are the author's own code.
        raise not_json(error) from error
    return dumped


_PLAIN_TYPES: set[type] = set()
_OTHER_TYPES: set[type] = set()


def _is_plain(kind: type[BaseModel]) -> bool:
    """Whether `__dict__` is the whole model: it has no serialisers, computed fields, aliases or extra fields."""
    if kind not in _PLAIN_TYPES and kind not in _OTHER_TYPES:
        special = kind.model_config.get("extra") == "allow" or issubclass(kind, RootModel)
        plain = not special and not any(
            _has_own_serialization(node) for node in _nodes(kind.__pydantic_core_schema__)
        )
        (_PLAIN_TYPES if plain else _OTHER_TYPES).add(kind)
    return kind in _PLAIN_TYPES


def _has_own_serialization(node: dict[str, Any]) -> bool:
    return bool(
        node.get("serialization")
        or node.get("computed_fields")
        or node.get("serialization_alias")
        or node.get("serialization_exclude")
        or any(key.startswith("ser_json") for key in node.get("config") or ())
    )


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key != "metadata":
                yield from _nodes(value)
    elif isinstance(schema, (list, tuple)):
        for value in schema:
            yield from _nodes(value)


def _jsonable(value: Any) -> Any:
    """orjson calls this for every type that it does not support."""
    if isinstance(value, BaseModel):
        return dict(value.__dict__) if _is_plain(type(value)) else value.model_dump(mode="json", fallback=_jsonable)
    if hasattr(value, "tolist"):
        return value.tolist()
    return to_jsonable_python(value, by_alias=False)


def _encode_slowly(value: Any) -> bytes:
    """Keys that are not strings and integers of any size; slower, so only when `encode` needs it."""
    try:
        try:
            return orjson.dumps(value, _jsonable, OPTIONS | orjson.OPT_NON_STR_KEYS)
        except TypeError:
            plain = to_jsonable_python(value, by_alias=False, fallback=_jsonable, inf_nan_mode="null")
            return json.dumps(plain, allow_nan=False, ensure_ascii=False).encode()
    except Exception as error:
        raise not_json(error) from error


def not_json(error: Exception) -> EnvironmentFailure:
    """The error for a value that cannot be written as JSON."""
    return EnvironmentFailure(
        f"this cannot be written as JSON: {describe_error(error)}",
        hint="return strings, numbers, lists, dicts, or models of them",
    )


def encode_any(document: Any) -> bytes:
    """JSON as models write it: integers of any length, and strings with lone surrogates, which orjson refuses.

    Raises ValueError for what JSON cannot express."""
    try:
        return orjson.dumps(document)
    except TypeError:
        try:
            return json.dumps(document, allow_nan=False).encode()
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error


def decode_any(text: bytes | str) -> Any:
    """The reverse of `encode_any`. Raises ValueError for what is not JSON."""
    try:
        return from_json(text)
    except ValueError:
        try:
            return json.loads(text)
        except RecursionError as error:
            raise ValueError(str(error)) from error
