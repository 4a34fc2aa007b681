"""Many rollouts with their tokens in few questions, for those who take samples out by the thousand.

Ids and logprobs come as arrays, and what nobody trains on is left out: messages, requests, texts of tokens,
alternatives. For whole calls there is `calls.load`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from paddock.rollouts.outcome import Outcome
from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.store import rows
from paddock.rollouts.store.calls import BRIEF, PACKED, brief
from paddock.rollouts.store.deltas import Shared, join
from paddock.rollouts.store.packing import ID_BYTES, RAW, decode, floats_array, ids_array, unsqueeze
from paddock.rollouts.store.sequences import TOKENS
from paddock.rollouts.tokens import Prompt
from paddock.rollouts.trace import Call, Caller, Level, LogprobsKind, Role

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

MOST_KEYS = 500
"""As many as one question may name."""
PLAIN = RAW + PACKED
"""How most numbers begin: neither compressed nor JSON. They are read on the spot, for they are many."""
_ROLES = {role.value: role for role in Role}
_LEVELS = {level.value: level for level in Level}
_CALLERS = {caller.value: caller for caller in Caller}
_KINDS = {kind.value: kind for kind in LogprobsKind}
_SINCE_3 = BRIEF.index("caller") - len(("id", "index", "role", "level"))
"""Where the values begin that briefs have since version 3 of the store, among those behind the first four."""
_BEFORE_3 = (Caller.UNKNOWN, None, LogprobsKind.UNKNOWN, None)
_NOTHING: dict[str, Any] = {}
_order = attrgetter("index")


@dataclass(slots=True)
class Sampled:
    """A call as far as sampling goes. It has all that graphs, policies and samples ask of a `Call`."""

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
    temperature: float | None

    untrainable_because = Call.untrainable_because
    trainable = Call.trainable


def keys(connection: sqlite3.Connection, filters: rows.Filters) -> list[int]:
    """Of all rollouts that fit, in the order they began."""
    return rows.keys(connection, filters, newest_first=False).tolist()


def read(connection: sqlite3.Connection, wanted: Sequence[int]) -> list[tuple[RolloutRecord, list[Call]]]:
    """Records without their long texts, each with its calls as `Sampled`, in the order of `wanted`."""
    assert len(wanted) <= MOST_KEYS
    places = ", ".join("?" * len(wanted))
    heads = connection.execute(f"SELECT id, head FROM rollouts WHERE id IN ({places})", wanted).fetchall()
    records = {key: _record(head) for key, head in heads}
    prompts = _prompts(connection, places, wanted)
    calls: dict[int, list[Call]] = defaultdict(list)
    for rollout, known, completion, logprobs, head in connection.execute(
        "SELECT rollout, brief, completion, logprobs, CASE WHEN brief IS NULL THEN head END"
        f" FROM calls WHERE rollout IN ({places})",
        wanted,
    ):
        told = decode(known) if head is None else _brief(decode(unsqueeze(head)))
        calls[rollout].append(_call(told, completion, logprobs, prompts))
    for found in calls.values():
        found.sort(key=_order)
    return [(records[key], calls[key]) for key in wanted if key in records]


def _prompts(connection: sqlite3.Connection, places: str, wanted: Sequence[int]) -> dict[int, Prompt]:
    """The ids of every prompt, as what it adds to the one it was stored upon."""
    found: dict[int, Prompt] = {}
    for key, base, head, tail, middle in connection.execute(
        f"SELECT id, base, head, tail, middle FROM sequences WHERE rollout IN ({places}) AND kind = ? ORDER BY id",
        (*wanted, TOKENS),
    ):
        added = unsqueeze(middle)
        if tail:
            kept = Shared(head * ID_BYTES, tail * ID_BYTES)
            found[key] = Prompt(join(found[base].tobytes(), kept, added))
        else:
            found[key] = Prompt(added, found.get(base), head)
    return found


def _record(head: bytes) -> RolloutRecord:
    values = decode(unsqueeze(head))
    if values["outcome"] is not None:
        values["outcome"] = Outcome(values["outcome"])
    return RolloutRecord(**values)


def _call(told: list[Any], completion: bytes, logprobs: bytes, prompts: dict[int, Prompt]) -> Call:
    prompt, temperature, call_id, index, role, level, *rest = told
    caller, caller_reason, kind, problem = rest[_SINCE_3:] or _BEFORE_3
    rest[_SINCE_3:] = [_CALLERS[caller], caller_reason, _KINDS[kind], problem, temperature]
    call = Sampled(
        prompt if isinstance(prompt, list) else () if prompt is None else prompts[prompt],
        ids_array(completion[2:]) if completion.startswith(PLAIN) else _numbers(completion, ids_array),
        floats_array(logprobs[2:]) if logprobs.startswith(PLAIN) else _numbers(logprobs, floats_array),
        _NOTHING if temperature is None else _temperature(temperature),
        _NOTHING,
        call_id,
        index,
        _ROLES[role],
        _LEVELS[level],
        *rest,
    )
    return cast("Call", call)


@cache
def _temperature(value: float) -> dict[str, Any]:
    """The same object for all calls: they are many, and nobody changes what was read."""
    return {"temperature": value}


def _brief(head: dict[str, Any]) -> list[Any]:
    """The same from the head of a call that was written before there were briefs, or whose ids cannot be packed."""
    forwarded, request = (
        {name: value for name, kind, value in head[body] if kind == "value"} for body in ("forwarded", "request")
    )
    values = {name: head[name] for name in BRIEF if name in head}
    prompt = head.get("prompt", head.get("prompt_token_ids"))
    return brief(Call(**values, forwarded=forwarded, request=request), prompt)


def _numbers(squeezed: bytes, packed: Callable[[bytes], Any]) -> Any:
    data = unsqueeze(squeezed)
    return packed(data[1:]) if data[:1] == PACKED else decode(data[1:])
