"""Two rollouts side by side: how far they are the same, token by token, and where they part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.store import light
from paddock.rollouts.store.deltas import common_prefix
from paddock.rollouts.store.packing import ID_BYTES, pack_ids, unpack_ids
from paddock.web import tokens
from paddock.web.shelf import shown

if TYPE_CHECKING:
    import sqlite3

    from paddock.rollouts.store.light import Head
    from paddock.web.trail import Trail

BEFORE = 24
"""Pieces that are shown before the one that differs."""
ASIDE = ("title", "retried", "compaction", "subagent")


def compare(connection: sqlite3.Connection, first: Trail, second: Trail) -> dict[str, Any]:
    calls_a, calls_b = _main(first), _main(second)
    return {
        "a": shown(first.head),
        "b": shown(second.head),
        "calls": {"a": len(calls_a), "b": len(calls_b)},
        "same_prompt_tokens": _same_prompt(connection, first, second, calls_a, calls_b),
        "first": _part(connection, first, second, calls_a, calls_b),
        "messages": _messages(first, second),
    }


def _main(trail: Trail) -> list[Head]:
    return [head for head in trail.ordered() if head.values["role"] not in ASIDE]


def _same_prompt(
    connection: sqlite3.Connection, first: Trail, second: Trail, calls_a: list[Head], calls_b: list[Head]
) -> int:
    if not calls_a or not calls_b:
        return 0
    prompts = (
        first.prompts.get(connection, calls_a[0].prompt),
        second.prompts.get(connection, calls_b[0].prompt),
    )
    return common_prefix(*prompts) // ID_BYTES


def _part(
    connection: sqlite3.Connection, first: Trail, second: Trail, calls_a: list[Head], calls_b: list[Head]
) -> dict[str, Any] | None:
    """The first call of both whose prompt or completion differs, and where in it."""
    for index, (a, b) in enumerate(zip(calls_a, calls_b, strict=False)):
        for where in ("prompt", "completion"):
            ids_a, ids_b = _ids(connection, first, a, where), _ids(connection, second, b, where)
            if ids_a == ids_b:
                continue
            offset = common_prefix(ids_a, ids_b) // ID_BYTES
            return {
                "call_a": a.id,
                "call_b": b.id,
                "index": index,
                "where": where,
                "offset": offset,
                "a": _pieces(connection, first, ids_a, offset),
                "b": _pieces(connection, second, ids_b, offset),
            }
    if len(calls_a) == len(calls_b):
        return None
    index = min(len(calls_a), len(calls_b))
    longer, head = (first, calls_a[index]) if len(calls_a) > index else (second, calls_b[index])
    ends: dict[str, Any] = {"before": [], "piece": None}
    ids = _ids(connection, longer, head, "completion")
    goes_on = _pieces(connection, longer, ids, 0)
    return {
        "call_a": calls_a[index].id if longer is first else None,
        "call_b": calls_b[index].id if longer is second else None,
        "index": index,
        "where": "completion",
        "offset": 0,
        "a": goes_on if longer is first else ends,
        "b": goes_on if longer is second else ends,
    }


def _ids(connection: sqlite3.Connection, trail: Trail, head: Head, where: str) -> bytes:
    if where == "prompt":
        return trail.prompts.get(connection, head.prompt)
    return pack_ids(light.sampled(connection, trail.key, head.id, texts=False).ids) or b""


def _pieces(connection: sqlite3.Connection, trail: Trail, packed: bytes, offset: int) -> dict[str, Any]:
    ids = unpack_ids(packed[max(0, offset - BEFORE) * ID_BYTES : (offset + 1) * ID_BYTES])
    texts = tokens.texts(connection, trail, ids)
    pieces = [{"id": number, "text": text} for number, text in zip(ids, texts, strict=True)]
    here = len(packed) // ID_BYTES > offset
    return {"before": pieces[:-1] if here else pieces, "piece": pieces[-1] if here else None}


def _messages(first: Trail, second: Trail) -> dict[str, Any] | None:
    """The first items of the transcripts that say something else; notes are passed over."""
    a, b = _said(first), _said(second)
    at = next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if _words(one) != _words(other)), None)
    if at is None:
        if len(a) == len(b):
            return None
        at = min(len(a), len(b))
    return {"a": a[at] if at < len(a) else None, "b": b[at] if at < len(b) else None, "same": at}


def _said(trail: Trail) -> list[dict[str, Any]]:
    return [item for item in trail.items if item["kind"] != "note" and item["label"] not in ASIDE]


def _words(item: dict[str, Any]) -> tuple[Any, ...]:
    """What is compared of an item: not its tool call's id, which is made up anew each time."""
    return tuple(item.get(name) for name in ("kind", "role", "text", "name", "arguments", "data"))
