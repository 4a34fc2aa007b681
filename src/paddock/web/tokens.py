"""Pages of the tokens of one call: ids, texts, whose they are, and how sure the model was."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from paddock.rollouts.store import light
from paddock.rollouts.store.packing import ID_BYTES, unpack_ids
from paddock.web import calls

if TYPE_CHECKING:
    import sqlite3

    from paddock.rollouts.store.light import Head, Sampled
    from paddock.web.trail import Trail

Part = Literal["prompt", "completion"]
PARTS: tuple[Part, ...] = ("prompt", "completion")
POINTS = 2000
SURE = 1e-9


def page(
    connection: sqlite3.Connection, trail: Trail, call_id: str, part: Part, offset: int, limit: int
) -> dict[str, Any]:
    """Some tokens of a call, as columns."""
    head = calls.find(trail, call_id)
    read = _prompt if part == "prompt" else _completion
    return read(connection, trail, head, offset, limit)


def _prompt(connection: sqlite3.Connection, trail: Trail, head: Head, offset: int, limit: int) -> dict[str, Any]:
    packed = trail.prompts.get(connection, head.prompt)
    ids = unpack_ids(packed[offset * ID_BYTES : (offset + limit) * ID_BYTES])
    node = calls.graph(connection, trail).get(head.id)
    return {
        "total": len(packed) // ID_BYTES,
        "offset": offset,
        "ids": ids,
        "texts": texts(connection, trail, ids),
        "mask": _sampled_before(connection, trail, head, offset, len(ids)),
        "logprobs": None,
        "entropy": None,
        "top": None,
        "shared": node.shared_tokens if node is not None else head.values["shared_tokens"],
    }


def _completion(connection: sqlite3.Connection, trail: Trail, head: Head, offset: int, limit: int) -> dict[str, Any]:
    found = sampled(connection, trail, head)
    until = offset + limit
    ids = found.ids[offset:until]
    words = found.texts[offset:until] if len(found.texts) == len(found.ids) else [None] * len(ids)
    tops = found.tops[offset:until] if len(found.tops) == len(found.ids) else None
    logprobs = found.logprobs[offset:until] if len(found.logprobs) == len(found.ids) else None
    trainable = int(calls.untrainable_because(head) is None)
    return {
        "total": len(found.ids),
        "offset": offset,
        "ids": ids,
        "texts": words,
        "mask": [trainable] * len(ids),
        "logprobs": logprobs,
        "entropy": None if tops is None or all(len(top) < 2 for top in tops) else [entropy(top) for top in tops],
        "top": None if tops is None else [_ranked(top) for top in tops],
        "shared": 0,
    }


def _sampled_before(connection: sqlite3.Connection, trail: Trail, head: Head, offset: int, count: int) -> list[int]:
    """1 where a token of the prompt was sampled by a call that this one goes on from."""
    mask = [0] * count
    nodes = calls.graph(connection, trail)
    current, most = head, head.prompt_tokens
    for _ in range(len(trail.calls)):
        node = nodes.get(current.id)
        parent = trail.calls.get((node.parent if node is not None else current.values["parent"]) or "")
        if parent is None or parent.id == current.id:
            break
        most = min(most, node.shared_tokens if node is not None else int(current.values["shared_tokens"]))
        start, end = parent.prompt_tokens, min(most, parent.prompt_tokens + parent.completion_tokens)
        for at in range(max(start, offset), min(end, offset + count)):
            mask[at - offset] = 1
        if most <= offset:
            break
        current = parent
    return mask


def curve(connection: sqlite3.Connection, trail: Trail, call_id: str) -> dict[str, Any]:
    """How unsure the model was along a completion: entropy where it is known, in at most so many points."""
    head = calls.find(trail, call_id)
    found = sampled(connection, trail, head)
    series: list[float | None] = [entropy(top) for top in found.tops] if len(found.tops) == len(found.ids) else []
    what = "entropy"
    if not any(value is not None for value in series):
        series, what = [-value for value in found.logprobs], "surprise"
    step = max(1, math.ceil(len(series) / POINTS))
    points = []
    for start in range(0, len(series), step):
        known = [value for value in series[start : start + step] if value is not None]
        if known:
            points.append({"at": start, "min": min(known), "mean": sum(known) / len(known), "max": max(known)})
    return {"call": head.id, "what": what, "total": len(series), "step": step, "points": points}


def sampled(connection: sqlite3.Connection, trail: Trail, head: Head) -> Sampled:
    """The completion of a call; the last one that was asked for is kept."""
    known = trail.cache.get("sampled")
    if known is None or known[0] != head.id:
        known = trail.cache["sampled"] = (head.id, light.sampled(connection, trail.key, head.id))
    found: Sampled = known[1]
    return found


def texts(connection: sqlite3.Connection, trail: Trail, ids: list[int]) -> list[str | None]:
    """The text of each id, as far as it was sampled somewhere in the rollout."""
    known: dict[int, str | None] = trail.cache.setdefault("texts", {})
    missing = set(ids) - known.keys()
    if missing:
        known.update(dict.fromkeys(missing))
        known.update(light.texts_of(connection, trail.key, missing))
    return [known[number] for number in ids]


def entropy(top: dict[str, float]) -> float | None:
    """In nats, from the alternatives that are known; all that is left counts as one more."""
    if len(top) < 2:
        return None
    shares = [math.exp(min(0.0, value)) for value in top.values() if isinstance(value, float | int)]
    rest = 1.0 - sum(shares)
    every = [share for share in (*shares, rest) if share > SURE]
    return -sum(share * math.log(share) for share in every)


def _ranked(top: dict[str, float]) -> list[list[Any]]:
    return [[text, value] for text, value in sorted(top.items(), key=lambda each: -each[1])]
