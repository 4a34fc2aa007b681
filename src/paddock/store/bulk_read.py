"""Bulk reads for exports: many rollouts with their tokens in few queries.

Ids and logprobs come as arrays, and what no trainer reads is left out: messages, requests, texts of tokens,
alternatives. `calls.load` reads whole calls.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from paddock.capture.trace import Call, Caller, Level, LogprobsKind, Role
from paddock.store import calls, replayed
from paddock.store.calls import PACKED, SUMMARY_FIELDS, summary
from paddock.store.packing import ID_BYTES, UNCOMPRESSED, PrefixedIds, decode, decompress, floats_array, ids_array
from paddock.store.rows import to_record
from paddock.store.sequences import MAX_KEYS, TOKENS, SharedEnds, decompress_middle, join, with_bases

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from paddock.store.record import RolloutRecord

_PLAIN = UNCOMPRESSED + PACKED
"""How most arrays of numbers begin: neither compressed nor JSON. They are unpacked without a function call."""
_ROLES = {role.value: role for role in Role}
_LEVELS = {level.value: level for level in Level}
_CALLERS = {caller.value: caller for caller in Caller}
_KINDS = {kind.value: kind for kind in LogprobsKind}
_ADDED = SUMMARY_FIELDS[SUMMARY_FIELDS.index("caller") :]
_SINCE_3 = SUMMARY_FIELDS.index("caller") - len(("id", "index", "role", "level"))
"""Where the fields begin that summaries have since version 3 of the store, after the first four."""
_BEFORE_3 = (Caller.UNKNOWN, None, LogprobsKind.UNKNOWN, None)
_BEFORE_5 = (None, False)
_EMPTY: dict[str, Any] = {}
_order = attrgetter("index")


@dataclass(slots=True)
class SampledCall:
    """The part of a `Call` that graphs, policies and training samples read."""

    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    logprobs: Sequence[float]
    forwarded: dict[str, Any]
    request: dict[str, Any]
    id: str
    index: int
    role: Role
    level: Level
    session: str | None
    finish_reason: str | None
    error: str | None
    aborted: bool
    started: float
    ended: float | None
    model: str
    weight_version: str | None
    admitted_version: str | None
    caller: Caller
    caller_reason: str | None
    logprobs_kind: LogprobsKind
    token_problem: str | None
    replayed_from: str | None
    is_copy: bool
    temperature: float | None

    untrainable_because = Call.untrainable_because
    trainable = Call.trainable


def read(connection: sqlite3.Connection, keys: Sequence[int]) -> list[tuple[RolloutRecord, list[Call]]]:
    """Records without their long texts, each with its calls as `SampledCall`, in the order of `keys`."""
    assert len(keys) <= MAX_KEYS
    marks = ", ".join("?" * len(keys))
    heads = connection.execute(f"SELECT id, head FROM rollouts WHERE id IN ({marks})", keys).fetchall()
    records = {key: to_record(decode(decompress(head))) for key, head in heads}
    rows = connection.execute(
        "SELECT rollout, brief, completion, logprobs, CASE WHEN brief IS NULL THEN head END"
        f" FROM calls WHERE rollout IN ({marks})",
        keys,
    )
    summaries = [
        (rollout, decode(brief) if head is None else _summary_of_head(decode(decompress(head))), completion, logprobs)
        for rollout, brief, completion, logprobs, head in rows
    ]
    summaries += _read_repeated(connection, keys)
    prompts = _prompts(connection, marks, keys, {values[0] for _, values, *_ in summaries if type(values[0]) is int})
    sampled: dict[int, list[Call]] = defaultdict(list)
    for rollout, values, completion, logprobs in summaries:
        sampled[rollout].append(_call(values, completion, logprobs, prompts))
    for ordered in sampled.values():
        ordered.sort(key=_order)
    return [(records[key], sampled[key]) for key in keys if key in records]


def _read_repeated(connection: sqlite3.Connection, keys: Sequence[int]) -> list[tuple[int, list[Any], bytes, bytes]]:
    """Of each replayed call of those rollouts that are forks: its rollout, summary, completion and logprobs."""
    repeated = []
    for rollout, references in replayed.load_many(connection, keys).items():
        for reference in references.values():
            head, completion, logprobs, *_ = calls.read_reference(connection, reference)
            repeated.append((rollout, _summary_of_head(head), completion, logprobs))
    return repeated


def _prompts(
    connection: sqlite3.Connection, marks: str, keys: Sequence[int], named: set[int]
) -> dict[int, PrefixedIds]:
    """The ids of every prompt, as the difference to the one that it builds on. `named` are those of calls, which in
    forks may be prompts of other rollouts."""
    prompts: dict[int, PrefixedIds] = {}
    rows = connection.execute(
        "SELECT id, kind, base, head, tail, middle FROM sequences"
        f" WHERE rollout IN ({marks}) AND kind = ? ORDER BY id",
        (*keys, TOKENS),
    ).fetchall()
    for key, _, base, head, tail, middle in with_bases(connection, rows, named):
        added = decompress_middle(middle, lambda key: prompts[key].tobytes())
        if tail:
            ends = SharedEnds(head * ID_BYTES, tail * ID_BYTES)
            prompts[key] = PrefixedIds(join(prompts[base].tobytes(), ends, added))
        else:
            prompts[key] = PrefixedIds(added, prompts.get(base), head)
    return prompts


def _call(values: list[Any], completion: bytes, logprobs: bytes, prompts: dict[int, PrefixedIds]) -> Call:
    prompt, temperature, call_id, index, role, level, *rest = values
    since_3 = rest[_SINCE_3:] or _BEFORE_3
    caller, caller_reason, kind, problem, replayed_from, is_copy = (*since_3, *_BEFORE_5)[: len(_ADDED)]
    rest[_SINCE_3:] = [
        _CALLERS[caller], caller_reason, _KINDS[kind], problem, replayed_from, is_copy, temperature,
    ]  # fmt: skip
    call = SampledCall(
        prompt if isinstance(prompt, list) else () if prompt is None else prompts[prompt],
        ids_array(completion[2:]) if completion.startswith(_PLAIN) else _numbers(completion, ids_array),
        floats_array(logprobs[2:]) if logprobs.startswith(_PLAIN) else _numbers(logprobs, floats_array),
        _EMPTY if temperature is None else _temperature(temperature),
        _EMPTY,
        call_id,
        index,
        _ROLES[role],
        _LEVELS[level],
        *rest,
    )
    return cast("Call", call)


@cache
def _temperature(value: float) -> dict[str, Any]:
    """One shared object per value: calls are many, and they are never changed."""
    return {"temperature": value}


def _summary_of_head(head: dict[str, Any]) -> list[Any]:
    """The summary of a call that was written before there were summaries, or whose ids cannot be packed."""
    forwarded, request = (
        {name: value for name, kind, value in head[body] if kind == "value"} for body in ("forwarded", "request")
    )
    values = {name: head[name] for name in SUMMARY_FIELDS if name in head}
    prompt = head.get("prompt", head.get("prompt_token_ids"))
    return summary(Call(**values, forwarded=forwarded, request=request), prompt)


def _numbers(compressed: bytes, unpack: Callable[[bytes], Any]) -> Any:
    data = decompress(compressed)
    return unpack(data[1:]) if data[:1] == PACKED else decode(data[1:])
