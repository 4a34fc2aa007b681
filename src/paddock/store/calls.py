"""Model calls as rows: prompts and conversations as sequences, large repeated parts as blobs, the rest packed.

`save` and `load` handle whole calls. `partial_read` and `bulk_read` read less of them.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from paddock.capture.trace import Call, Caller, Level, LogprobsKind, Role, sent_temperature
from paddock.store import blobs, replayed, sequences
from paddock.store.packing import (
    compress,
    compress_head,
    decode,
    decode_list,
    decompress,
    encode,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Mapping, Sequence

    from paddock.store.sequences import WriteCache

Number = TypeVar("Number", int, float)

CONVERSATION_FIELDS = frozenset(("messages", "input", "contents"))
"""Where the dialects have the conversation, which grows from call to call."""
BLOB_BYTES = 512
_STORED_ELSEWHERE = frozenset(
    ("request", "forwarded", "prompt_token_ids", "completion_token_ids", "logprobs", "tokens", "top_logprobs")
)
_HEAD_FIELDS = tuple(field.name for field in fields(Call) if field.name not in _STORED_ELSEWHERE)
_COLUMNS = (
    "rollout", "call_id", "position", "head", "completion", "logprobs", "texts", "tops",
    "prompt_tokens", "completion_tokens", "logprob_sum", "brief",
)  # fmt: skip
_SAVE = (
    f"INSERT INTO calls ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
    " ON CONFLICT (rollout, call_id) DO UPDATE SET " + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS[2:])
)
SUMMARY_FIELDS = (
    "id", "index", "role", "level", "session", "finish_reason", "error", "aborted", "started", "ended", "model",
    "weight_version", "admitted_version", "caller", "caller_reason", "logprobs_kind", "token_problem",
    "replayed_from", "is_copy",
)  # fmt: skip
_WHOLE = "head, completion, logprobs, texts, tops"
PACKED = b"p"
_JSON = b"j"


def save(connection: sqlite3.Connection, cache: WriteCache, call: Call) -> None:
    """Insert or replace a call."""
    source = replayed.find_source_row(connection, cache, call)
    head: dict[str, Any] = {name: getattr(call, name) for name in _HEAD_FIELDS}
    head["request"] = _split_body(connection, cache, call.request)
    head["forwarded"] = _split_body(connection, cache, call.forwarded)
    prompt = pack_ids(call.prompt_token_ids)
    if prompt is None:
        head["prompt_token_ids"] = call.prompt_token_ids
    elif prompt:
        head["prompt"] = sequences.save_tokens(connection, cache, prompt)
    columns = (
        _pack(call.completion_token_ids, pack_ids(call.completion_token_ids)),
        _pack(call.logprobs, pack_floats(call.logprobs)),
        compress(encode(call.tokens)),
        compress(encode(call.top_logprobs)),
    )
    if source is not None and source[1][1:] == columns and is_base(source[1][0], head):
        replayed.save(connection, cache, call.id, source[0], source[1][0], head)
        return
    replayed.forget(connection, cache, call.id)
    connection.execute(
        _SAVE,
        (
            cache.key,
            call.id,
            call.index,
            compress_head(encode(head)),
            *columns,
            len(call.prompt_token_ids),
            len(call.completion_token_ids),
            logprob_sum(call.logprobs),
            None if prompt is None else encode(summary(call, head.get("prompt"))),
        ),
    )


def is_base(source: Mapping[str, Any], head: Mapping[str, Any]) -> bool:
    """Whether a head has all fields of a source's, so that the two differ by values only."""
    return source.keys() <= head.keys()


def load(connection: sqlite3.Connection, rollout: int) -> list[Call]:
    """All calls of a rollout, in their order."""
    read_blob = blobs.Reader(connection)
    heads = connection.execute(
        f"SELECT {_WHOLE} FROM calls WHERE rollout = ? ORDER BY position, rowid", (rollout,)
    ).fetchall()
    stored = [(decode(decompress(head)), *columns) for head, *columns in heads]
    references = replayed.load(connection, rollout)
    if references:
        stored += [read_reference(connection, reference) for reference in references.values()]
        stored.sort(key=lambda values: int(values[0]["index"]))
    named = {key for values, *_ in stored for key in sequence_keys(values)}
    tokens, messages = sequences.load(connection, rollout, read_blob, named)
    return [_make_call(*values, tokens=tokens, messages=messages, read_blob=read_blob) for values in stored]


def count(connection: sqlite3.Connection, rollout: int) -> int:
    """How many calls a rollout has, with those that it replayed."""
    (own,) = connection.execute("SELECT count(*) FROM calls WHERE rollout = ?", (rollout,)).fetchone()
    return int(own) + len(replayed.load(connection, rollout))


def read_reference(connection: sqlite3.Connection, reference: replayed.CallReference) -> tuple[Any, ...]:
    """The row of a replayed call: head, completion, logprobs, texts, tops."""
    head, *columns = connection.execute(
        f"SELECT {_WHOLE} FROM calls WHERE rollout = ? AND call_id = ?", (reference.rollout, reference.call_id)
    ).fetchone()
    return ({**decode(decompress(head)), **reference.changes}, *columns)


def sequence_keys(head: Mapping[str, Any]) -> list[int]:
    """The sequences that a head names. In a fork they may be those of its source."""
    keys = [value for body in ("request", "forwarded") for _, kind, value in head[body] if kind == "sequence"]
    return keys if head.get("prompt") is None else [*keys, head["prompt"]]


def _make_call(
    values: dict[str, Any],
    completion: bytes,
    logprobs: bytes,
    texts: bytes | None,
    tops: bytes,
    *,
    tokens: dict[int, bytes],
    messages: dict[int, list[bytes]],
    read_blob: blobs.Reader,
) -> Call:
    if texts is not None:
        values["tokens"], values["top_logprobs"] = decode(decompress(texts)), decode(decompress(tops))
    prompt = values.pop("prompt", None)
    values.setdefault("prompt_token_ids", [] if prompt is None else unpack_ids(tokens[prompt]))
    values["request"] = join_body(values["request"], messages, read_blob)
    values["forwarded"] = join_body(values["forwarded"], messages, read_blob)
    values["role"] = Role(values["role"])
    values["level"] = Level(values["level"])
    values["caller"] = Caller(values.get("caller", Caller.UNKNOWN))
    values["logprobs_kind"] = LogprobsKind(values.get("logprobs_kind", LogprobsKind.UNKNOWN))
    values["completion_token_ids"] = unpack(completion, unpack_ids)
    values["logprobs"] = unpack(logprobs, unpack_floats)
    return Call(**values)


def summary(call: Call, prompt: int | None) -> list[Any]:
    """What training samples need of a call beside its tokens: prompt key, temperature, then `SUMMARY_FIELDS`."""
    return [prompt, sent_temperature(call), *(getattr(call, name) for name in SUMMARY_FIELDS)]


def logprob_sum(logprobs: Sequence[float]) -> float | None:
    """None where it is no finite number."""
    try:
        total = math.fsum(logprobs)
    except (TypeError, ValueError, OverflowError):
        return None
    return total if math.isfinite(total) else None


def _pack(values: Sequence[float], packed: bytes | None) -> bytes:
    return compress(_JSON + encode(values) if packed is None else PACKED + packed)


def _split_body(connection: sqlite3.Connection, cache: WriteCache, body: dict[str, Any]) -> list[list[Any]]:
    """The fields of a body in their order: the name, how it is stored, and its key or value."""
    parts: list[list[Any]] = []
    for name, value in body.items():
        if name in CONVERSATION_FIELDS and isinstance(value, list) and value:
            items = [encode(item) for item in value]
            parts.append([name, "sequence", sequences.save_messages(connection, cache, items)])
            continue
        data = encode(value)
        if len(data) >= BLOB_BYTES:
            parts.append([name, "blob", blobs.intern(connection, cache, data)])
        else:
            parts.append([name, "value", value])
    return parts


def unpack(data: bytes, unpack_numbers: Callable[[bytes], list[Number]]) -> list[Number]:
    """Numbers that `_pack` packed."""
    packed = decompress(data)
    numbers: list[Number] = unpack_numbers(packed[1:]) if packed[:1] == PACKED else decode(packed[1:])
    return numbers


def join_body(parts: list[list[Any]], messages: dict[int, list[bytes]], read_blob: blobs.Reader) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for name, kind, value in parts:
        if kind == "sequence":
            body[name] = decode_list(messages[value])
        elif kind == "blob":
            body[name] = decode(read_blob(value))
        else:
            body[name] = value
    return body
