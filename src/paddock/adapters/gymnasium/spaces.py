"""Gymnasium's spaces as JSON: the schema of each, how its values are encoded and decoded, and how it is rebuilt.

A description (`describe`) is a small JSON object from which `rebuild` makes an equal space on the other side.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import numpy
from gymnasium import spaces
from gymnasium.spaces import Space

from paddock.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable

AnySpace = Space[Any]
MAX_PATTERN_CHARACTERS = 256


class NotInSpace(ValueError):
    """A value is not in its space; the message says where and why."""


def describe(space: AnySpace) -> dict[str, Any]:
    """The space as JSON. Raises TargetError for a kind that has no fixed form."""
    if isinstance(space, spaces.Discrete):
        return {"kind": "discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.Box):
        low, high = _bounds(space.low), _bounds(space.high)
        return {"kind": "box", "shape": list(space.shape), "dtype": str(space.dtype), "low": low, "high": high}
    if isinstance(space, spaces.MultiDiscrete):
        start = space.start.tolist()
        return {"kind": "multi_discrete", "nvec": space.nvec.tolist(), "start": start, "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "multi_binary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, spaces.Text):
        low, high = int(space.min_length), int(space.max_length)
        return {"kind": "text", "min": low, "max": high, "charset": "".join(sorted(space.character_set))}
    if isinstance(space, spaces.Dict):
        return {"kind": "dict", "spaces": {str(name): describe(inner) for name, inner in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"kind": "tuple", "spaces": [describe(inner) for inner in space.spaces]}
    raise TargetError(
        f"{type(space).__name__} spaces cannot be served",
        hint="Discrete, Box, MultiDiscrete, MultiBinary, Text, Dict and Tuple can; wrap the environment",
    )


def rebuild(described: dict[str, Any]) -> AnySpace:
    """The space that was described."""
    kind = described["kind"]
    if kind == "discrete":
        return spaces.Discrete(described["n"], start=described["start"], dtype=cast("Any", described["dtype"]))
    if kind == "box":
        shape, dtype = tuple(described["shape"]), numpy.dtype(described["dtype"])
        low, high = (_from_bounds(described[name], shape, dtype) for name in ("low", "high"))
        return spaces.Box(low, high, shape, cast("Any", dtype.type))
    if kind == "multi_discrete":
        nvec, start = numpy.array(described["nvec"]), numpy.array(described["start"])
        return spaces.MultiDiscrete(nvec, dtype=cast("Any", described["dtype"]), start=start)
    if kind == "multi_binary":
        return spaces.MultiBinary(described["n"])
    if kind == "text":
        return spaces.Text(described["max"], min_length=described["min"], charset=described["charset"])
    if kind == "dict":
        return spaces.Dict({name: rebuild(inner) for name, inner in described["spaces"].items()})
    return spaces.Tuple([rebuild(inner) for inner in described["spaces"]])


def schema(space: AnySpace) -> dict[str, Any]:
    """The JSON Schema of a value of the space."""
    if isinstance(space, spaces.Discrete):
        return {"type": "integer", "minimum": int(space.start), "maximum": int(space.start + space.n - 1)}
    if isinstance(space, spaces.Box):
        return _nested(space.shape, _box_item(space))
    if isinstance(space, spaces.MultiDiscrete):
        last = space.start + space.nvec - 1
        item = {"type": "integer", "minimum": int(space.start.min()), "maximum": int(last.max())}
        return _nested(space.shape, item)
    if isinstance(space, spaces.MultiBinary):
        return _nested(space.shape, {"type": "integer", "minimum": 0, "maximum": 1})
    if isinstance(space, spaces.Text):
        limits = {"type": "string", "minLength": int(space.min_length), "maxLength": int(space.max_length)}
        return (
            {**limits, "pattern": _pattern(space)} if len(space.character_set) <= MAX_PATTERN_CHARACTERS else limits
        )
    if isinstance(space, spaces.Dict):
        inner = {str(name): schema(member) for name, member in space.spaces.items()}
        return {"type": "object", "properties": inner, "required": list(inner), "additionalProperties": False}
    assert isinstance(space, spaces.Tuple)
    members = [schema(member) for member in space.spaces]
    return {"type": "array", "prefixItems": members, "minItems": len(members), "maxItems": len(members)}


def decode(space: AnySpace, value: Any, place: str = "") -> Any:
    """The value of the space that JSON `value` stands for. Raises NotInSpace, with the place."""
    return _DECODERS[_kind(space)](space, value, place)


def decode_unchecked(space: AnySpace, value: Any) -> Any:
    """The inverse of `encode`. Not validated: environments leave their own bounds."""
    if isinstance(space, spaces.Dict):
        return {name: decode_unchecked(inner, value[str(name)]) for name, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(decode_unchecked(inner, member) for inner, member in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Text):
        return value
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(value)
    # JSON has no NaN: null stands for it, and becomes one on the way through floats.
    array = numpy.asarray(value)
    return (array.astype(numpy.float64) if array.dtype == object else array).astype(space.dtype).reshape(space.shape)


def encode(space: AnySpace, value: Any) -> Any:
    """A value of the space as it is sent. Arrays stay arrays, which the codec can write."""
    if isinstance(space, spaces.Dict):
        return {str(name): encode(inner, value[name]) for name, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [encode(inner, member) for inner, member in zip(space.spaces, value, strict=True)]
    if isinstance(space, spaces.Discrete):
        if int(value) != value:
            raise ValueError(f"{value!r} is no whole number")
        return int(value)
    if isinstance(space, spaces.Text):
        return str(value)
    return numpy.ascontiguousarray(value) if numpy.ndim(value) else numpy.asarray(value).item()


def encode_action(space: AnySpace, action: Any) -> Any:
    """An action as it is sent. One that does not fit is sent as it is: the server says what is wrong."""
    try:
        return encode(space, action)
    except (KeyError, OverflowError, TypeError, ValueError):
        return action


def _kind(space: AnySpace) -> type:
    return next(kind for kind in _DECODERS if isinstance(space, kind))


def _decode_discrete(space: Any, value: Any, place: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        raise NotInSpace(f"{_at(place)}a whole number is needed, not {_short(value)}")
    if not space.start <= value < space.start + space.n:
        raise NotInSpace(f"{_at(place)}{value} is not between {space.start} and {space.start + space.n - 1}")
    return space.dtype.type(value)


def _decode_box(space: Any, value: Any, place: str) -> Any:
    array = _array(space, value, place)
    if len(invalid := numpy.argwhere(~numpy.isfinite(array))):
        raise NotInSpace(f"{_at(place, tuple(invalid[0].tolist()))}a finite number is needed")
    wrong = numpy.argwhere((array < space.low) | (array > space.high))
    if len(wrong):
        index = tuple(wrong[0].tolist())
        low, high = space.low[index], space.high[index]
        raise NotInSpace(f"{_at(place, index)}{array[index]} is not between {low} and {high}")
    return array


def _decode_integers(space: Any, value: Any, place: str) -> Any:
    array = _array(space, value, place, whole=True)
    low = getattr(space, "start", 0) + numpy.zeros(space.shape, dtype=numpy.int64)
    high = low + (space.nvec - 1 if isinstance(space, spaces.MultiDiscrete) else 1)
    wrong = numpy.argwhere((array < low) | (array > high))
    if len(wrong):
        index = tuple(wrong[0].tolist())
        raise NotInSpace(f"{_at(place, index)}{array[index]} is not between {low[index]} and {high[index]}")
    return array


def _decode_text(space: Any, value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise NotInSpace(f"{_at(place)}text is needed, not {_short(value)}")
    if not space.min_length <= len(value) <= space.max_length:
        raise NotInSpace(f"{_at(place)}{len(value)} characters, not {space.min_length} to {space.max_length}")
    if invalid := next((character for character in value if character not in space.character_set), None):
        raise NotInSpace(f"{_at(place)}the character {invalid!r} is not allowed")
    return value


def _decode_dict(space: Any, value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NotInSpace(f"{_at(place)}an object is needed, not {_short(value)}")
    if unknown := value.keys() - {str(name) for name in space.spaces}:
        raise NotInSpace(f"{_at(place)}unknown field {min(unknown)!r}")
    if absent := [str(name) for name in space.spaces if str(name) not in value]:
        raise NotInSpace(f"{_at(place)}field {absent[0]!r} is missing")
    return {name: decode(inner, value[str(name)], f"{place}.{name}") for name, inner in space.spaces.items()}


def _decode_tuple(space: Any, value: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) != len(space.spaces):
        raise NotInSpace(f"{_at(place)}an array of {len(space.spaces)} is needed, not {_short(value)}")
    pairs = enumerate(zip(space.spaces, value, strict=True))
    return tuple(decode(inner, member, f"{place}[{number}]") for number, (inner, member) in pairs)


_DECODERS: dict[type, Callable[[Any, Any, str], Any]] = {
    spaces.Discrete: _decode_discrete,
    spaces.Box: _decode_box,
    spaces.MultiDiscrete: _decode_integers,
    spaces.MultiBinary: _decode_integers,
    spaces.Text: _decode_text,
    spaces.Dict: _decode_dict,
    spaces.Tuple: _decode_tuple,
}


def _array(space: Any, value: Any, place: str, *, whole: bool = False) -> Any:
    """Numbers of the space's shape and type. A null among floats becomes NaN, which the caller refuses."""
    kind = space.dtype
    try:
        array = numpy.asarray(value)
        if array.dtype == object:
            array = numpy.asarray(value, dtype=numpy.float64)
    except (ValueError, TypeError, OverflowError):
        raise NotInSpace(f"{_at(place)}numbers of shape {space.shape} are needed, not {_short(value)}") from None
    if array.shape != space.shape:
        raise NotInSpace(f"{_at(place)}the shape is {array.shape}, not {space.shape}")
    if array.size and (array.dtype.kind not in "iuf" or (whole and array.dtype.kind == "f")):
        raise NotInSpace(f"{_at(place)}{'whole numbers' if whole else 'numbers'} are needed, not {_short(value)}")
    if kind.kind in "iu" and array.dtype.kind == "f" and not numpy.array_equal(array, numpy.trunc(array)):
        raise NotInSpace(f"{_at(place)}whole numbers are needed, not {_short(value)}")
    if (
        kind.kind in "iu"
        and array.size
        and (array.min() < numpy.iinfo(kind).min or array.max() > numpy.iinfo(kind).max)
    ):
        raise NotInSpace(f"{_at(place)}{_short(value)} does not fit {kind}")
    return array.astype(kind)


def _at(place: str, index: tuple[int, ...] = ()) -> str:
    where = place.lstrip(".") + "".join(f"[{number}]" for number in index)
    return f"{where}: " if where else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _box_item(space: spaces.Box) -> dict[str, Any]:
    item: dict[str, Any] = {"type": "integer" if numpy.dtype(space.dtype).kind in "iu" else "number"}
    low, high = (float(space.low.min()), float(space.high.max())) if space.low.size else (math.nan, math.nan)
    number = int if item["type"] == "integer" else float
    return {
        **item,
        **({"minimum": number(low)} if math.isfinite(low) else {}),
        **({"maximum": number(high)} if math.isfinite(high) else {}),
    }


def _nested(shape: tuple[int, ...], item: dict[str, Any]) -> dict[str, Any]:
    for size in reversed(shape):
        item = {"type": "array", "items": item, "minItems": size, "maxItems": size}
    return item


def _pattern(space: spaces.Text) -> str:
    return f"^[{''.join(chr(92) + c if c in '^-]' + chr(92) else c for c in sorted(space.character_set))}]*$"


def _bounds(values: Any) -> Any:
    """One number if all bounds are the same, else all of them. Infinite ones as text, because JSON has none."""
    flat = [_bound(value) for value in values.ravel().tolist()]
    return flat[0] if flat and all(value == flat[0] for value in flat) else flat


def _bound(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _from_bounds(described: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    listed = described if isinstance(described, list) else [described]
    values = numpy.array([float(value) if isinstance(value, str) else value for value in listed], dtype=dtype)
    return values.reshape(shape) if isinstance(described, list) else numpy.full(shape, values[0], dtype=dtype)
