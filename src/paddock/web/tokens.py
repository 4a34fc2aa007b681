"""Pages of the tokens of one call: ids, texts, mask, logprobs and entropy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from paddock.store import partial_read
from paddock.store.packing import ID_BYTES, unpack_ids
from paddock.web import calls
from paddock.web.token_texts import decode_tokens

if TYPE_CHECKING:
    import sqlite3

    from paddock.store.partial_read import CallHead, StoredCompletion
    from paddock.web.loaded_rollout import LoadedRollout

Part = Literal["prompt", "completion"]
PARTS: tuple[Part, ...] = ("prompt", "completion")
MAX_POINTS = 2000
MIN_PROBABILITY = 1e-9


def token_page(
    connection: sqlite3.Connection, rollout: LoadedRollout, call_id: str, part: Part, offset: int, limit: int
) -> dict[str, Any]:
    """Some tokens of a call, as columns."""
    head = calls.find_call(rollout, call_id)
    read = _prompt if part == "prompt" else _completion
    return read(connection, rollout, head, offset, limit)


def _prompt(
    connection: sqlite3.Connection, rollout: LoadedRollout, head: CallHead, offset: int, limit: int
) -> dict[str, Any]:
    packed = rollout.prompts.get(connection, head.prompt)
    ids = unpack_ids(packed[offset * ID_BYTES : (offset + limit) * ID_BYTES])
    node = calls.graph(connection, rollout).get(head.id)
    return {
        "total": len(packed) // ID_BYTES,
        "offset": offset,
        "ids": ids,
        "texts": texts(connection, rollout, ids),
        "mask": _sampled_before(connection, rollout, head, offset, len(ids)),
        "logprobs": None,
        "entropy": None,
        "top": None,
        "shared": node.shared_tokens if node is not None else head.values["shared_tokens"],
    }


def _completion(
    connection: sqlite3.Connection, rollout: LoadedRollout, head: CallHead, offset: int, limit: int
) -> dict[str, Any]:
    completion = read_completion(connection, rollout, head)
    until = offset + limit
    ids = completion.ids[offset:until]
    token_texts = (
        completion.texts[offset:until] if len(completion.texts) == len(completion.ids) else [None] * len(ids)
    )
    tops = completion.tops[offset:until] if len(completion.tops) == len(completion.ids) else None
    logprobs = completion.logprobs[offset:until] if len(completion.logprobs) == len(completion.ids) else None
    trainable = int(calls.untrainable_because(head) is None)
    return {
        "total": len(completion.ids),
        "offset": offset,
        "ids": ids,
        "texts": token_texts,
        "mask": [trainable] * len(ids),
        "logprobs": logprobs,
        "entropy": None if tops is None or all(len(top) < 2 for top in tops) else [entropy(top) for top in tops],
        "top": None if tops is None else [_ranked(top) for top in tops],
        "shared": 0,
    }


def _sampled_before(
    connection: sqlite3.Connection, rollout: LoadedRollout, head: CallHead, offset: int, count: int
) -> list[int]:
    """1 where a token of the prompt was sampled by a call that this one continues."""
    mask = [0] * count
    nodes = calls.graph(connection, rollout)
    current, shared = head, head.prompt_tokens
    for _ in range(len(rollout.calls)):
        node = nodes.get(current.id)
        parent = rollout.calls.get((node.parent if node is not None else current.values["parent"]) or "")
        if parent is None or parent.id == current.id:
            break
        shared = min(shared, node.shared_tokens if node is not None else int(current.values["shared_tokens"]))
        start, end = parent.prompt_tokens, min(shared, parent.prompt_tokens + parent.completion_tokens)
        for at in range(max(start, offset), min(end, offset + count)):
            mask[at - offset] = 1
        if shared <= offset:
            break
        current = parent
    return mask


def uncertainty_curve(connection: sqlite3.Connection, rollout: LoadedRollout, call_id: str) -> dict[str, Any]:
    """The entropy along a completion (or the surprise, where entropy is unknown) in at most `MAX_POINTS` points."""
    head = calls.find_call(rollout, call_id)
    completion = read_completion(connection, rollout, head)
    series: list[float | None] = (
        [entropy(top) for top in completion.tops] if len(completion.tops) == len(completion.ids) else []
    )
    what = "entropy"
    if not any(value is not None for value in series):
        series, what = [-value for value in completion.logprobs], "surprise"
    step = max(1, math.ceil(len(series) / MAX_POINTS))
    points = []
    for start in range(0, len(series), step):
        values = [value for value in series[start : start + step] if value is not None]
        if values:
            points.append({"at": start, "min": min(values), "mean": sum(values) / len(values), "max": max(values)})
    return {"call": head.id, "what": what, "total": len(series), "step": step, "points": points}


def read_completion(connection: sqlite3.Connection, rollout: LoadedRollout, head: CallHead) -> StoredCompletion:
    """The completion of a call; the last one is cached."""
    cached = rollout.cache.get("completion")
    if cached is None or cached[0] != head.id:
        cached = rollout.cache["completion"] = (head.id, partial_read.completion(connection, rollout.key, head.id))
    completion: StoredCompletion = cached[1]
    return completion


def texts(connection: sqlite3.Connection, rollout: LoadedRollout, ids: list[int]) -> list[str | None]:
    """The text of each id: as it was sampled somewhere in the rollout, or from the tokenizer; None if unknown."""
    cached: dict[int, str | None] = rollout.cache.setdefault("texts", {})
    missing = set(ids) - cached.keys()
    if missing:
        cached.update(dict.fromkeys(missing))
        cached.update(partial_read.find_texts(connection, rollout.key, missing))
        sampled = {token: text for token, text in cached.items() if text is not None}
        cached.update(decode_tokens(str(rollout.head["model"]), missing - sampled.keys(), sampled))
    return [cached[number] for number in ids]


def entropy(top: dict[str, float]) -> float | None:
    """In nats, from the recorded alternatives; the rest of the probability counts as one more."""
    if len(top) < 2:
        return None
    shares = [math.exp(min(0.0, value)) for value in top.values() if isinstance(value, float | int)]
    rest = 1.0 - sum(shares)
    every = [share for share in (*shares, rest) if share > MIN_PROBABILITY]
    return -sum(share * math.log(share) for share in every)


def _ranked(top: dict[str, float]) -> list[list[Any]]:
    return [[text, value] for text, value in sorted(top.items(), key=lambda each: -each[1])]
