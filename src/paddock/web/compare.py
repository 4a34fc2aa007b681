"""Two rollouts compared: the tokens they share, their transcripts next to each other, and the files they left."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from paddock.store import partial_read
from paddock.store.packing import ID_BYTES, encode, pack_ids, unpack_ids
from paddock.store.sequences import common_prefix
from paddock.web import detail, tokens
from paddock.web.read_store import summarize_head

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

    from paddock.store.partial_read import CallHead
    from paddock.web.loaded_rollout import LoadedRollout

CONTEXT_TOKENS = 24
"""Tokens before the first that differs."""
MAX_ROWS = 400
MAX_ALIGNED_ITEMS = 1000
MAX_DISTANCE = 8
"""How far an item may be from the one of its kind that stands next to it."""
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
            # Sampled tokens follow the prompt, which is the same here.
            prompt_ids = b"" if where == "prompt" else _ids(connection, first, a, "prompt")
            from_start = offset + len(prompt_ids) // ID_BYTES
            return {
                "call_a": a.id,
                "call_b": b.id,
                "index": index,
                "where": where,
                "offset": offset,
                "shared_tokens": from_start,
                "a": _token_context(connection, first, prompt_ids + ids_a, from_start),
                "b": _token_context(connection, second, prompt_ids + ids_b, from_start),
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
    """Both transcripts in rows: what is the same, and next to each other what differs. None if nothing differs."""
    a, b = _comparable_items(first), _comparable_items(second)
    keys_a, keys_b = [_content(item) for item in a], [_content(item) for item in b]
    if keys_a == keys_b:
        return None
    rows: list[dict[str, Any]] = []
    for is_same, (from_a, to_a), (from_b, to_b) in align_items(keys_a, keys_b):
        if is_same:
            rows += _same_rows(a[from_a:to_a], b[from_b:to_b])
        else:
            rows += _differing_rows(a[from_a:to_a], b[from_b:to_b])
    return {"rows": rows[:MAX_ROWS], "left": max(0, len(rows) - MAX_ROWS)}


def align_items(a: list[bytes], b: list[bytes]) -> Iterator[tuple[bool, tuple[int, int], tuple[int, int]]]:
    """What is the same and what is not, in order. Between the first and the last difference, long lists are not
    searched for equal items: that takes the product of both lengths."""
    start = next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    until_a, until_b = len(a) - end, len(b) - end
    yield True, (0, start), (0, start)
    if max(until_a - start, until_b - start) > MAX_ALIGNED_ITEMS:
        yield False, (start, until_a), (start, until_b)
    else:
        matcher = SequenceMatcher(None, a[start:until_a], b[start:until_b], autojunk=False)
        for tag, a1, a2, b1, b2 in matcher.get_opcodes():
            yield tag == "equal", (start + a1, start + a2), (start + b1, start + b2)
    yield True, (until_a, len(a)), (until_b, len(b))


def _same_rows(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last item stands for the others: it is what the difference follows."""
    if not a:
        return []
    skipped = {"kind": "same", "from": a[0]["seq"], "to": a[-2]["seq"], "count": len(a) - 1} if len(a) > 1 else None
    return [*([skipped] if skipped else []), {"kind": "shared", "a": a[-1], "b": b[-1]}]


def _differing_rows(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of the same kind stand next to each other, in their order."""
    rows: list[dict[str, Any]] = []
    rest = list(b)
    for item in a:
        at = next((at for at, other in enumerate(rest[:MAX_DISTANCE]) if _kind(other) == _kind(item)), None)
        if at is None:
            rows.append({"kind": "differs", "a": item, "b": None})
            continue
        rows += [{"kind": "differs", "a": None, "b": each} for each in rest[:at]]
        rows.append({"kind": "differs", "a": item, "b": rest[at]})
        rest = rest[at + 1 :]
    return rows + [{"kind": "differs", "a": None, "b": each} for each in rest]


def compare_files(connection: sqlite3.Connection, first: LoadedRollout, second: LoadedRollout) -> dict[str, Any]:
    """The work folders that both left; `changes` is None if one of them was not stored."""
    a, b = (detail.read_folder(connection, rollout) for rollout in (first, second))
    if a is None or b is None:
        return {
            "changes": None,
            "same": 0,
            "missing": [each.id for each, folder in ((first, a), (second, b)) if folder is None],
        }
    changes = detail.compare_folders(a, b)
    return {
        "changes": changes,
        "same": sum(path in b and b[path] == content for path, content in a.items()),
        "missing": [],
    }


def _comparable_items(rollout: LoadedRollout) -> list[dict[str, Any]]:
    return [item for item in rollout.items if item["kind"] != "note" and item["label"] not in OTHER_ROLES]


def _content(item: dict[str, Any]) -> bytes:
    """What is compared of an item: not the id of a tool call, which is random."""
    return encode([item.get(name) for name in ("kind", "role", "text", "name", "arguments", "data")])


def _kind(item: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(item.get(name) for name in ("kind", "role", "name"))
