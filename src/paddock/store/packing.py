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
WITH_DICTIONARY = b"\1"
"""In front of a zstd frame that needs the dictionary it was written with."""
ID_BYTES = 4
CALL_HEAD = b"\2"
"""In front of a zstd frame with `_TYPICAL_CALL_HEAD` as its dictionary."""
_TYPICAL_CALL_HEAD = (
    b'{"id":"c0","index":0,"dialect":"anthropic","dialect":"responses","dialect":"chat","role":"subagent"'
    b',"role":"agent","session":"ses_","session":null,"message":{"role":"assistant","content":null,"reasoning_content":"'
    b'","content":"","tool_calls":[{"id":"call_","type":"function","function":{"name":"bash","arguments":"{\\"command\\":'
    b'\\"\\"}"}}]},"finish_reason":"stop","finish_reason":"tool_calls","usage":{"prompt_tokens":1000,"completion_tokens":'
    b'100,"total_tokens":1100},"status":200,"error":null,"aborted":false,"attempts":[],"started":1700000000.1,'
    b'"first_token":1700000000.2,"ended":1700000000.3,"engine":"vllm","model":"","weight_version":null,'
    b'"admitted_version":null,"level":"tokens","parent":"c1","shared_tokens":1000,"caller":"unknown","caller":"agent",'
    b'"caller_reason":null,"temperature":1.0,"logprobs_kind":"processed","logprobs_kind":"raw","token_problem":null,'
    b'"step":"","replayed_from":null,"is_copy":false,"request":[["model","value","'
    b'"],["messages","sequence",100],["tools","blob",1],["tool_choice","value","auto"],["temperature","value",1.0],'
    b'["max_tokens","value",32000],["stream","value",true],["stream_options","value",{"include_usage":true}]],'
    b'"forwarded":[["model","value",""],["logprobs","value",true],["top_logprobs","value",0],'
    b'["return_token_ids","value",true]],"prompt":100}'
)
"""What most heads of calls have. Never change it: stored heads could not be read any more."""
_MIN_BYTES = 96
"""Shorter data gains nothing from compression."""
_MAX_RATIO = 0.75
"""How small it has to become. Opening a zstd frame costs as much as reading kilobytes, and ids hardly shrink."""
_MAX_RATIO_WITH_DICTIONARY = 0.5
"""How small a difference has to be compared with a frame that can be read alone."""


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
        heads = zstandard.ZstdCompressionDict(_TYPICAL_CALL_HEAD, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        self.head_compressor = zstandard.ZstdCompressor(level=3, dict_data=heads)
        self.head_decompressor = zstandard.ZstdDecompressor(dict_data=heads)


_compression = _Compression()


def compress(data: bytes) -> bytes:
    """`data` as a zstd frame if that makes it clearly smaller, else with a mark in front."""
    if len(data) >= _MIN_BYTES:
        smaller = _compression.compressor.compress(data)
        if len(smaller) <= len(data) * _MAX_RATIO:
            return smaller
    return UNCOMPRESSED + data


def compress_head(data: bytes) -> bytes:
    """The head of a call; it has about half of the size that `compress` gives it."""
    return CALL_HEAD + _compression.head_compressor.compress(data)


def compress_against(dictionary: bytes, data: bytes) -> bytes | None:
    """`data` as its difference to `dictionary`, which `decompress` needs too; None if they are not alike."""
    if len(data) < _MIN_BYTES or not dictionary:
        return None
    raw = zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    difference = zstandard.ZstdCompressor(level=3, dict_data=raw).compress(data)
    is_alike = len(difference) <= len(compress(data)) * _MAX_RATIO_WITH_DICTIONARY
    return WITH_DICTIONARY + difference if is_alike else None


def decompress(data: bytes, dictionary: bytes = b"") -> bytes:
    """Raises StoreError for what `compress` never wrote: a damaged file."""
    if data.startswith(UNCOMPRESSED):
        return data[1:]
    try:
        if data.startswith(CALL_HEAD):
            return _compression.head_decompressor.decompress(data[1:])
        if data.startswith(WITH_DICTIONARY):
            raw = zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            return zstandard.ZstdDecompressor(dict_data=raw).decompress(data[1:])
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
