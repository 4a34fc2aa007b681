"""Two rollouts compared: how many tokens they share, and where they first differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.store import partial_read
from paddock.store.packing import ID_BYTES, pack_ids, unpack_ids
from paddock.store.sequences import common_prefix
from paddock.web import tokens
from paddock.web.read_store import summarize_head

if TYPE_CHECKING:
    import sqlite3

    from paddock.store.partial_read import CallHead
    from paddock.web.loaded_rollout import LoadedRollout

CONTEXT_TOKENS = 24
"""Tokens before the first that differs."""
FOLLOWING_ITEMS = 30
"""Items of each transcript from the first that differs."""
OTHER_ROLES = ("title", "retried", "compaction", "subagent")


def compare(connection: sqlite3.Connection, first: LoadedRollout, second: LoadedRollout) -> dict[str, Any]:
    calls_a, calls_b = _main_calls(first), _main_calls(second)
    return {
        "a": summarize_head(first.head),
        "b": summarize_head(second.head),
        "calls": {"a": len(calls_a), "b": len(calls_b)},
        "same_prompt_tokens": _same_prompt(connection, first, second, calls_a, calls_b),
        "first": _first_difference(connection, first, second, calls_a, calls_b),
        "messages": _messages(first, second),
    }


def _main_calls(rollout: LoadedRollout) -> list[CallHead]:
    return [head for head in rollout.ordered() if head.values["role"] not in OTHER_ROLES]


def _same_prompt(
    connection: sqlite3.Connection,
    first: LoadedRollout,
    second: LoadedRollout,
    calls_a: list[CallHead],
    calls_b: list[CallHead],
) -> int:
    if not calls_a or not calls_b:
        return 0
    prompts = (
        first.prompts.get(connection, calls_a[0].prompt),
        second.prompts.get(connection, calls_b[0].prompt),
    )
    return common_prefix(*prompts) // ID_BYTES


def _first_difference(
    connection: sqlite3.Connection,
    first: LoadedRollout,
    second: LoadedRollout,
    calls_a: list[CallHead],
    calls_b: list[CallHead],
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
                "shared_tokens": offset + (0 if where == "prompt" else a.prompt_tokens),
                "a": _token_context(connection, first, ids_a, offset),
                "b": _token_context(connection, second, ids_b, offset),
            }
    if len(calls_a) == len(calls_b):
        return None
    index = min(len(calls_a), len(calls_b))
    longer, head = (first, calls_a[index]) if len(calls_a) > index else (second, calls_b[index])
    ends: dict[str, Any] = {"before": [], "piece": None}
    ids = _ids(connection, longer, head, "completion")
    continuation = _token_context(connection, longer, ids, 0)
    return {
        "call_a": calls_a[index].id if longer is first else None,
        "call_b": calls_b[index].id if longer is second else None,
        "index": index,
        "where": "completion",
        "offset": 0,
        "shared_tokens": head.prompt_tokens,
        "a": continuation if longer is first else ends,
        "b": continuation if longer is second else ends,
    }


def _ids(connection: sqlite3.Connection, rollout: LoadedRollout, head: CallHead, where: str) -> bytes:
    if where == "prompt":
        return rollout.prompts.get(connection, head.prompt)
    return pack_ids(partial_read.completion(connection, rollout.key, head.id, texts=False).ids) or b""


def _token_context(
    connection: sqlite3.Connection, rollout: LoadedRollout, packed: bytes, offset: int
) -> dict[str, Any]:
    ids = unpack_ids(packed[max(0, offset - CONTEXT_TOKENS) * ID_BYTES : (offset + 1) * ID_BYTES])
    texts = tokens.texts(connection, rollout, ids)
    pieces = [{"id": number, "text": text} for number, text in zip(ids, texts, strict=True)]
    here = len(packed) // ID_BYTES > offset
    return {"before": pieces[:-1] if here else pieces, "piece": pieces[-1] if here else None}


def _messages(first: LoadedRollout, second: LoadedRollout) -> dict[str, Any] | None:
    """The first items of the transcripts that differ, and what follows in both; notes are skipped."""
    a, b = _comparable_items(first), _comparable_items(second)
    at = next(
        (at for at, (one, other) in enumerate(zip(a, b, strict=False)) if _content(one) != _content(other)), None
    )
    if at is None:
        if len(a) == len(b):
            return None
        at = min(len(a), len(b))
    return {
        "a": a[at] if at < len(a) else None,
        "b": b[at] if at < len(b) else None,
        "same": at,
        "after": {"a": a[at : at + FOLLOWING_ITEMS], "b": b[at : at + FOLLOWING_ITEMS]},
        "left": {"a": max(len(a) - at - FOLLOWING_ITEMS, 0), "b": max(len(b) - at - FOLLOWING_ITEMS, 0)},
    }


def _comparable_items(rollout: LoadedRollout) -> list[dict[str, Any]]:
    return [item for item in rollout.items if item["kind"] != "note" and item["label"] not in OTHER_ROLES]


def _content(item: dict[str, Any]) -> tuple[Any, ...]:
    """What is compared of an item: not the id of a tool call, which is random."""
    return tuple(item.get(name) for name in ("kind", "role", "text", "name", "arguments", "data"))
