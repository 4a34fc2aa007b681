"""Lossless encoding of values: JSON, packed token ids and floats, zstd. Knows no database."""

from __future__ import annotations

import json
import sys
import threading
from array import array
from collections.abc import Sequence
from typing import Any, overload

import orjson
import zstandard

from paddock.errors import StoreError

_OPTIONS = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_STDLIB_MARK = b" "
"""In front of JSON that only the standard library decodes without loss: NaN, lone surrogates, long integers."""
UNCOMPRESSED = b"\0"
ID_BYTES = 4
_MIN_BYTES = 96
"""Shorter data gains nothing from compression."""
_MAX_RATIO = 0.75
"""How small it has to become. Opening a zstd frame costs as much as reading kilobytes, and ids hardly shrink."""


def encode(value: Any) -> bytes:
    """JSON that `decode` turns into an equal value. Raises StoreError for what JSON cannot hold."""
    try:
        data = orjson.dumps(value, option=_OPTIONS)
    except TypeError:
        return _encode_with_stdlib(value)
    # orjson writes NaN and infinities as null, so a document with a null is compared with its source.
    if b"null" in data and orjson.loads(data) != value:
        return _encode_with_stdlib(value)
    return data


def decode(data: bytes) -> Any:
    """Raises StoreError for what `encode` never wrote: a damaged file."""
    try:
        if data.startswith(_STDLIB_MARK):
            return json.loads(data.decode("utf-8", "surrogatepass"))
        return orjson.loads(data)
    except ValueError as error:
        raise _damaged(error) from error


def decode_list(items: list[bytes]) -> list[Any]:
    """Each item decoded; quicker than one by one."""
    if any(item.startswith(_STDLIB_MARK) for item in items):
        return [decode(item) for item in items]
    decoded: list[Any] = orjson.loads(b"[" + b",".join(items) + b"]")
    return decoded


def _encode_with_stdlib(value: Any) -> bytes:
    _check_keys(value)
    try:
        # Surrogates stay single: escaped, two neighbours would be read back as one character.
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except TypeError as error:
        raise StoreError(f"this cannot be stored: {error}", hint="give plain JSON values") from error
    return _STDLIB_MARK + text.encode("utf-8", "surrogatepass")


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise StoreError(f"this cannot be stored: the key {key!r} is no text", hint="give plain JSON values")
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


def ids_array(data: bytes) -> array[int]:
    """Packed ids without an object for each."""
    return _little_endian(array("I", data))


def floats_array(data: bytes) -> array[float]:
    """Packed floats without an object for each."""
    return _little_endian(array("d", data))


def _little_endian(packed: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


class _Compression(threading.local):
    """One compressor per thread: they are not thread-safe."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=3)
        self.decompressor = zstandard.ZstdDecompressor()


_compression = _Compression()


def compress(data: bytes) -> bytes:
    """`data` as a zstd frame if that makes it clearly smaller, else with a mark in front."""
    if len(data) >= _MIN_BYTES:
        smaller = _compression.compressor.compress(data)
        if len(smaller) <= len(data) * _MAX_RATIO:
            return smaller
    return UNCOMPRESSED + data


def decompress(data: bytes) -> bytes:
    """Raises StoreError for what `compress` never wrote: a damaged file."""
    if data.startswith(UNCOMPRESSED):
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


# -- ids that share a prefix -----------------------------------------------------------------------------


class PrefixedIds(Sequence[int]):
    """Token ids as a difference to an earlier prompt: the first `head` ids of `base`, then the packed ids in `added`.

    Prompts of a conversation grow call by call. Its length, its end, and whether it continues `base` need no copy of
    the whole; everything else builds an array, once.
    """

    __slots__ = ("_base", "_head", "_size", "_whole", "added")

    def __init__(self, added: bytes, base: PrefixedIds | None = None, head: int = 0) -> None:
        self.added = added
        self._base = base
        self._head = head
        self._size = head + len(added) // ID_BYTES
        self._whole: array[int] | None = None

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> array[int]: ...
    def __getitem__(self, key: int | slice) -> int | array[int]:
        if isinstance(key, slice) and key.stop is None and key.step is None and (key.start or 0) >= self._head:
            return ids_array(self.added[(key.start - self._head) * ID_BYTES if key.start else 0 :])
        return self.whole()[key]

    def __eq__(self, other: object) -> bool:
        return self is other or self.whole() == (other.whole() if isinstance(other, PrefixedIds) else other)

    __hash__ = None  # type: ignore[assignment]

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        return self.whole().index(value, start, self._size if stop is None else stop)

    def whole(self) -> array[int]:
        """All ids."""
        if self._whole is None:
            self._whole = ids_array(self.tobytes())
        return self._whole

    def tobytes(self) -> bytes:
        pieces: list[bytes] = []
        current, size = self, self._size
        while True:
            pieces.append(current.added[: max(size - current._head, 0) * ID_BYTES])
            size = min(size, current._head)
            if current._base is None:
                return b"".join(reversed(pieces))
            current = current._base

    def begins_with(self, prompt: Sequence[int], completion: Sequence[int]) -> bool:
        """Whether these ids start with the whole of `prompt` and then the whole of `completion`."""
        size = len(prompt)
        if self._base is prompt and self._head == size and isinstance(completion, array):
            return self.added.startswith(completion.tobytes())
        return begins_with(self.whole(), prompt, completion)


def begins_with(ids: Sequence[int], prompt: Sequence[int], completion: Sequence[int]) -> bool:
    """The same for any sequences of one kind."""
    if isinstance(ids, PrefixedIds):
        return ids.begins_with(prompt, completion)
    size = len(prompt)
    ids_of_prompt: Any = prompt.whole() if isinstance(prompt, PrefixedIds) else prompt
    return ids[:size] == ids_of_prompt and ids[size : size + len(completion)] == completion
