"""Model calls as rows: the prompt as a sequence, repeated parts of the request as blobs, the rest packed."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

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
from paddock.rollouts.trace import Call, Caller, Level, LogprobsKind, Role, sent_temperature

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from paddock.rollouts.store.live import Live

Number = TypeVar("Number", int, float)

HISTORIES = frozenset(("messages", "input", "contents"))
"""Where the dialects keep the conversation, which grows from call to call."""
BLOB_BYTES = 512
_APART = frozenset(
    ("request", "forwarded", "prompt_token_ids", "completion_token_ids", "logprobs", "tokens", "top_logprobs")
)
_PLAIN = tuple(field.name for field in fields(Call) if field.name not in _APART)
_COLUMNS = (
    "rollout", "call_id", "position", "head", "completion", "logprobs", "texts", "tops",
    "prompt_tokens", "completion_tokens", "logprob_sum", "brief",
)  # fmt: skip
_SAVE = (
    f"INSERT INTO calls ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
    " ON CONFLICT (rollout, call_id) DO UPDATE SET " + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS[2:])
)
BRIEF = (
    "id", "index", "role", "level", "session", "finish_reason", "error", "aborted", "started", "ended", "model",
    "weight_version", "admitted_version", "caller", "caller_reason", "logprobs_kind", "token_problem",
)  # fmt: skip
PACKED = b"p"
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
        _SAVE,
        (
            live.key,
            call.id,
            call.index,
            squeeze(encode(head)),
            _pack(call.completion_token_ids, pack_ids(call.completion_token_ids)),
            _pack(call.logprobs, pack_floats(call.logprobs)),
            squeeze(encode(call.tokens)),
            squeeze(encode(call.top_logprobs)),
            len(call.prompt_token_ids),
            len(call.completion_token_ids),
            logprob_sum(call.logprobs),
            None if prompt is None else encode(brief(call, head.get("prompt"))),
        ),
    )


def load(connection: sqlite3.Connection, rollout: int) -> list[Call]:
    """All calls of a rollout, in their order."""
    read_blob = blobs.Reader(connection)
    tokens, messages = sequences.load(connection, rollout, read_blob)
    found = []
    for head, completion, logprobs, texts, tops in connection.execute(
        "SELECT head, completion, logprobs, texts, tops FROM calls WHERE rollout = ? ORDER BY position, rowid",
        (rollout,),
    ):
        values = decode(unsqueeze(head))
        if texts is not None:
            values["tokens"], values["top_logprobs"] = decode(unsqueeze(texts)), decode(unsqueeze(tops))
        prompt = values.pop("prompt", None)
        values.setdefault("prompt_token_ids", [] if prompt is None else unpack_ids(tokens[prompt]))
        values["request"] = joined(values["request"], messages, read_blob)
        values["forwarded"] = joined(values["forwarded"], messages, read_blob)
        values["role"] = Role(values["role"])
        values["level"] = Level(values["level"])
        values["caller"] = Caller(values.get("caller", Caller.UNKNOWN))
        values["logprobs_kind"] = LogprobsKind(values.get("logprobs_kind", LogprobsKind.UNKNOWN))
        values["completion_token_ids"] = unpack(completion, unpack_ids)
        values["logprobs"] = unpack(logprobs, unpack_floats)
        found.append(Call(**values))
    return found


def brief(call: Call, prompt: int | None) -> list[Any]:
    """What whoever takes samples has to know of a call beside its tokens, in the order of `BRIEF`."""
    return [prompt, sent_temperature(call), *(getattr(call, name) for name in BRIEF)]


def logprob_sum(logprobs: Sequence[float]) -> float | None:
    """None where it is no finite number."""
    try:
        total = math.fsum(logprobs)
    except (TypeError, ValueError, OverflowError):
        return None
    return total if math.isfinite(total) else None


def _pack(values: Sequence[float], packed: bytes | None) -> bytes:
    return squeeze(_JSON + encode(values) if packed is None else PACKED + packed)


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


def unpack(data: bytes, unpacked: Callable[[bytes], list[Number]]) -> list[Number]:
    """Numbers as `_pack` has packed them."""
    packed = unsqueeze(data)
    found: list[Number] = unpacked(packed[1:]) if packed[:1] == PACKED else decode(packed[1:])
    return found


def joined(parts: list[list[Any]], messages: dict[int, list[bytes]], read_blob: blobs.Reader) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for name, kind, value in parts:
        if kind == "sequence":
            body[name] = decode_list(messages[value])
        elif kind == "blob":
            body[name] = decode(read_blob(value))
        else:
            body[name] = value
    return body
