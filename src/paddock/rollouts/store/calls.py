"""Model calls as rows: the prompt as a sequence, repeated parts of the request as blobs, the rest packed."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from paddock.rollouts.store import blobs, sequences
from paddock.rollouts.store.packing import (
    decode,
    decode_list,
    encode,
    pack_floats,
    pack_ids,
    squeeze,
    unpack_floats,
    unpack_ids,
    unsqueeze,
)
from paddock.rollouts.trace import Call, Level, Role

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from paddock.rollouts.store.live import Live

HISTORIES = frozenset(("messages", "input", "contents"))
"""Where the dialects keep the conversation, which grows from call to call."""
BLOB_BYTES = 512
_APART = frozenset(("request", "forwarded", "prompt_token_ids", "completion_token_ids", "logprobs"))
_PLAIN = tuple(field.name for field in fields(Call) if field.name not in _APART)
_PACKED = b"p"
_JSON = b"j"


def save(connection: sqlite3.Connection, live: Live, call: Call) -> None:
    """Insert or replace a call."""
    head: dict[str, Any] = {name: getattr(call, name) for name in _PLAIN}
    head["request"] = _split(connection, live, call.request)
    head["forwarded"] = _split(connection, live, call.forwarded)
    prompt = pack_ids(call.prompt_token_ids)
    if prompt is None:
        head["prompt_token_ids"] = call.prompt_token_ids
    elif prompt:
        head["prompt"] = sequences.save_tokens(connection, live, prompt)
    connection.execute(
        "INSERT INTO calls (rollout, call_id, position, head, completion, logprobs) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (rollout, call_id) DO UPDATE SET position = excluded.position, head = excluded.head,"
        " completion = excluded.completion, logprobs = excluded.logprobs",
        (
            live.key,
            call.id,
            call.index,
            squeeze(encode(head)),
            _pack(call.completion_token_ids, pack_ids(call.completion_token_ids)),
            _pack(call.logprobs, pack_floats(call.logprobs)),
        ),
    )


def load(connection: sqlite3.Connection, rollout: int) -> list[Call]:
    """All calls of a rollout, in their order."""
    read_blob = blobs.Reader(connection)
    tokens, messages = sequences.load(connection, rollout, read_blob)
    found = []
    for head, completion, logprobs in connection.execute(
        "SELECT head, completion, logprobs FROM calls WHERE rollout = ? ORDER BY position, rowid", (rollout,)
    ):
        values = decode(unsqueeze(head))
        prompt = values.pop("prompt", None)
        values.setdefault("prompt_token_ids", [] if prompt is None else unpack_ids(tokens[prompt]))
        values["request"] = _joined(values["request"], messages, read_blob)
        values["forwarded"] = _joined(values["forwarded"], messages, read_blob)
        values["role"] = Role(values["role"])
        values["level"] = Level(values["level"])
        packed = unsqueeze(completion)
        values["completion_token_ids"] = unpack_ids(packed[1:]) if packed[:1] == _PACKED else decode(packed[1:])
        packed = unsqueeze(logprobs)
        values["logprobs"] = unpack_floats(packed[1:]) if packed[:1] == _PACKED else decode(packed[1:])
        found.append(Call(**values))
    return found


def _pack(values: Sequence[float], packed: bytes | None) -> bytes:
    return squeeze(_JSON + encode(values) if packed is None else _PACKED + packed)


def _split(connection: sqlite3.Connection, live: Live, body: dict[str, Any]) -> list[list[Any]]:
    """The parts of a body in their order: its name, how it is kept, and where or what it is."""
    parts: list[list[Any]] = []
    for name, value in body.items():
        if name in HISTORIES and isinstance(value, list) and value:
            items = [encode(item) for item in value]
            parts.append([name, "sequence", sequences.save_messages(connection, live, items)])
            continue
        data = encode(value)
        if len(data) >= BLOB_BYTES:
            parts.append([name, "blob", blobs.keep(connection, live, data)])
        else:
            parts.append([name, "value", value])
    return parts


def _joined(parts: list[list[Any]], messages: dict[int, list[bytes]], read_blob: blobs.Reader) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for name, kind, value in parts:
        if kind == "sequence":
            body[name] = decode_list(messages[value])
        elif kind == "blob":
            body[name] = decode(read_blob(value))
        else:
            body[name] = value
    return body
