"""Values as bytes and back, exactly: JSON, token ids, floats, and compression. Knows no database."""

from __future__ import annotations

import json
import sys
import threading
from array import array
from typing import TYPE_CHECKING, Any

import orjson
import zstandard

from paddock.errors import StoreError
from paddock.rollouts.tokens import ID_BYTES as ID_BYTES
from paddock.rollouts.tokens import ids_array as ids_array

if TYPE_CHECKING:
    from collections.abc import Sequence

_OPTIONS = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_SLOW = b" "
"""In front of JSON that only the standard library reads back as it was: NaN, lone surrogates, long integers."""
RAW = b"\0"
_SMALL = 96
"""Shorter data gains nothing from compression."""
_WORTH = 0.75
"""How small it has to become. Opening a frame costs as much as reading kilobytes, and ids hardly shrink."""


def encode(value: Any) -> bytes:
    """JSON that `decode` turns into an equal value. Raises StoreError for what JSON cannot hold."""
    try:
        data = orjson.dumps(value, option=_OPTIONS)
    except TypeError:
        return _encode_slowly(value)
    # NaN and infinities become null without a word, so nulls are looked at again.
    if b"null" in data and orjson.loads(data) != value:
        return _encode_slowly(value)
    return data


def decode(data: bytes) -> Any:
    """Raises StoreError for what `encode` never made: a file that was damaged."""
    try:
        if data.startswith(_SLOW):
            return json.loads(data.decode("utf-8", "surrogatepass"))
        return orjson.loads(data)
    except ValueError as error:
        raise _damaged(error) from error


def decode_list(items: list[bytes]) -> list[Any]:
    """Each item decoded; quicker than one by one."""
    if any(item.startswith(_SLOW) for item in items):
        return [decode(item) for item in items]
    decoded: list[Any] = orjson.loads(b"[" + b",".join(items) + b"]")
    return decoded


def _encode_slowly(value: Any) -> bytes:
    _check_keys(value)
    try:
        # Surrogates stay single: escaped, two neighbours would be read back as one character.
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except TypeError as error:
        raise StoreError(f"this cannot be kept: {error}", hint="give plain JSON values") from error
    return _SLOW + text.encode("utf-8", "surrogatepass")


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise StoreError(f"this cannot be kept: the key {key!r} is no text", hint="give plain JSON values")
            _check_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner)


def pack_ids(ids: Sequence[int]) -> bytes | None:
    """Four bytes each; None if one does not fit."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError):
        return None
    return _little_endian(packed).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return ids_array(data).tolist()


def pack_floats(values: Sequence[float]) -> bytes | None:
    """Eight bytes each, every bit kept; None if one is no float."""
    if not set(map(type, values)) <= {float}:
        return None
    return _little_endian(array("d", values)).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    return floats_array(data).tolist()


def floats_array(data: bytes) -> array[float]:
    """Packed floats without an object for each."""
    return _little_endian(array("d", data))


def _little_endian(packed: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


class _Compression(threading.local):
    """A compressor may serve one thread at a time."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=3)
        self.decompressor = zstandard.ZstdDecompressor()


_compression = _Compression()


def squeeze(data: bytes) -> bytes:
    """`data` compressed, if that makes it clearly smaller."""
    if len(data) >= _SMALL:
        smaller = _compression.compressor.compress(data)
        if len(smaller) <= len(data) * _WORTH:
            return smaller
    return RAW + data


def unsqueeze(data: bytes) -> bytes:
    """Raises StoreError for what `squeeze` never made: a file that was damaged."""
    if data.startswith(RAW):
        return data[1:]
    try:
        return _compression.decompressor.decompress(data)
    except zstandard.ZstdError as error:
        raise _damaged(error) from error


def _damaged(error: Exception) -> StoreError:
    return StoreError(
        f"a row of the store cannot be read: {error}",
        hint="store.db is damaged; copy it away and try `sqlite3 store.db .recover`",
    )
