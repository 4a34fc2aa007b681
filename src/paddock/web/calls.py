"""The calls of a rollout as the page lists them, and one of them with what was asked and answered."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from paddock.rollouts.graph import Graph
from paddock.rollouts.store import blobs, calls, light
from paddock.rollouts.store.packing import unpack_ids
from paddock.rollouts.trace import Call, Caller, Level, LogprobsKind, Role
from paddock.web import speech
from paddock.web.answers import NotFound

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from paddock.rollouts.graph import Node
    from paddock.rollouts.store.light import Head
    from paddock.web.trail import Trail

MOST_TOKENS = 16_000_000
"""Of all prompts together, up to which the graph is worked out from the tokens; beyond, from what was noted."""
GIST = 120


def listed(connection: sqlite3.Connection, trail: Trail, names: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """All calls, or those named, in the order in which they began."""
    nodes = graph(connection, trail)
    wanted = None if names is None else set(names)
    return [_row(head, nodes.get(head.id)) for head in trail.ordered() if wanted is None or head.id in wanted]


def find(trail: Trail, call_id: str) -> Head:
    head = trail.calls.get(call_id)
    if head is None:
        raise NotFound(f"rollout {trail.id} has no call {call_id[:80]!r}", hint="its calls are c0, c1, …")
    return head


def whole(connection: sqlite3.Connection, trail: Trail, call_id: str) -> dict[str, Any]:
    """One call: what was asked, in chat form and as it was sent, and what came."""
    head = find(trail, call_id)
    raw = _body(connection, trail, head.request)
    dialect = str(head.values.get("dialect") or "chat")
    history = head.history
    messages = speech.chat_messages(dialect, "messages" if history is None else history[0], raw)
    return {
        **_row(head, graph(connection, trail).get(head.id)),
        "dialect": dialect,
        "session": head.values.get("session"),
        "request": {"messages": messages, "tools": raw.get("tools") or []},
        "raw_request": raw,
        "message": head.values.get("message") or {},
        "forwarded": _body(connection, trail, head.forwarded),
        "attempt_list": head.values.get("attempts") or [],
        "usage": head.values.get("usage") or {},
        "status": head.values.get("status"),
    }


def _body(connection: sqlite3.Connection, trail: Trail, parts: list[list[Any]]) -> dict[str, Any]:
    histories = light.Histories(trail.key)
    messages = {key: histories.get(connection, key)[0] for _, kind, key in parts if kind == "sequence"}
    return calls.joined(parts, messages, blobs.Reader(connection))


def graph(connection: sqlite3.Connection, trail: Trail) -> dict[str, Node]:
    """The place of each call; empty if the prompts are too long together to be compared."""
    if "graph" not in trail.cache:
        heads = trail.ordered()
        if sum(head.prompt_tokens for head in heads) > MOST_TOKENS:
            trail.cache["graph"] = {}
        else:
            trail.cache["graph"] = Graph.of(light_call(connection, trail, head) for head in heads).nodes
    found: dict[str, Node] = trail.cache["graph"]
    return found


def light_call(connection: sqlite3.Connection, trail: Trail, head: Head) -> Call:
    """A call with its ids packed, and nothing else that weighs."""
    prompt, completion = array("I"), array("I")
    prompt.frombytes(trail.prompts.get(connection, head.prompt))
    completion.extend(light.sampled(connection, trail.key, head.id, texts=False).ids)
    known: Any = (prompt, completion)
    return Call(
        head.id,
        int(head.values["index"]),
        role=Role(head.values["role"]),
        prompt_token_ids=known[0],
        completion_token_ids=known[1],
    )


def _row(head: Head, node: Node | None) -> dict[str, Any]:
    values = head.values
    reason = untrainable_because(head)
    drift = None if node is None or node.drift is None else node.drift
    return {
        "id": head.id,
        "index": values["index"],
        "role": values["role"],
        "label": str(node.label) if node is not None else _label(values["role"]),
        "parent": node.parent if node is not None else values["parent"],
        "shared_tokens": node.shared_tokens if node is not None else values["shared_tokens"],
        "drift": None
        if drift is None
        else {"sampled": drift.sampled, "returned": drift.returned, "first_difference": drift.first_difference},
        "prompt_tokens": head.prompt_tokens,
        "completion_tokens": head.completion_tokens,
        "started": values["started"],
        "first_token": values["first_token"],
        "ended": values["ended"],
        "finish_reason": values["finish_reason"],
        "error": values["error"],
        "aborted": values["aborted"],
        "attempts": len(values.get("attempts") or ()),
        "weight_version": values["weight_version"],
        "engine": values["engine"],
        "model": values["model"],
        "level": values["level"],
        "caller": values.get("caller", Caller.UNKNOWN),
        "temperature": values.get("temperature"),
        "logprobs_kind": values.get("logprobs_kind", LogprobsKind.UNKNOWN),
        "trainable": reason is None,
        "untrainable_because": reason,
        "mean_logprob": None
        if head.logprob_sum is None or not head.completion_tokens
        else head.logprob_sum / head.completion_tokens,
        "gist": gist(values.get("message") or {}),
    }


def untrainable_because(head: Head) -> str | None:
    """What `Call` says, told from the numbers of tokens instead of the tokens."""
    stand_in = Call(
        head.id,
        0,
        role=Role(head.values["role"]),
        error=head.values["error"],
        aborted=head.values["aborted"],
        level=Level(head.values["level"]),
        caller=Caller(head.values.get("caller", Caller.UNKNOWN)),
        caller_reason=head.values.get("caller_reason"),
        token_problem=head.values.get("token_problem"),
        prompt_token_ids=[0] if head.prompt_tokens else [],
        completion_token_ids=[0] if head.completion_tokens else [],
        logprobs=[0.0] if head.completion_tokens and head.logprob_sum is not None else [],
    )
    return stand_in.untrainable_because


def _label(role: str) -> str:
    return "main" if role == "agent" else role


def gist(message: dict[str, Any]) -> str:
    """The beginning of what was sampled: the text, or the tools it called."""
    tools = [str((tool.get("function") or {}).get("name")) for tool in message.get("tool_calls") or ()]
    text = " ".join(str(message.get("content") or "").split())[:GIST]
    return " ".join(part for part in (text, *(f"[{name}]" for name in tools)) if part)


def prompt_ids(connection: sqlite3.Connection, trail: Trail, head: Head) -> list[int]:
    return unpack_ids(trail.prompts.get(connection, head.prompt))
