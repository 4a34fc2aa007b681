"""The calls of a rollout: a row for each, and one of them with its request and its answer."""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Any, cast

from paddock.capture.trace import Call, Caller, Level, LogprobsKind, Role
from paddock.rollouts.graph import Graph
from paddock.store import blobs, calls, partial_read, sequences
from paddock.web import transcript_items
from paddock.web.responses import PageNotFound

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from paddock.rollouts.graph import CallNode
    from paddock.store.partial_read import CallHead
    from paddock.web.loaded_rollout import LoadedRollout

MAX_GRAPH_TOKENS = 16_000_000
"""Of all prompts together. Longer rollouts show the parents that the proxy recorded instead of a computed graph."""
SUMMARY_CHARACTERS = 120
MARKS = re.compile(r"^#+ |[*]{2}|`+", re.MULTILINE)
"""Marks of Markdown that a summary leaves out."""


def list_calls(
    connection: sqlite3.Connection, rollout: LoadedRollout, names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """All calls, or those named, in the order in which they began."""
    nodes = graph(connection, rollout)
    selected = None if names is None else set(names)
    return [_row(head, nodes.get(head.id)) for head in rollout.ordered() if selected is None or head.id in selected]


def find_call(rollout: LoadedRollout, call_id: str) -> CallHead:
    head = rollout.calls.get(call_id)
    if head is None:
        raise PageNotFound(f"rollout {rollout.id} has no call {call_id[:80]!r}", hint="its calls are c0, c1, …")
    return head


def describe_call(connection: sqlite3.Connection, rollout: LoadedRollout, call_id: str) -> dict[str, Any]:
    """One call: the request in chat form and as it was sent, and the answer."""
    head = find_call(rollout, call_id)
    raw = _body(connection, rollout, head.request)
    dialect = str(head.values.get("dialect") or "chat")
    field = "messages" if head.conversation is None else head.conversation[0]
    messages = transcript_items.chat_messages(dialect, field, raw)
    return {
        **_row(head, graph(connection, rollout).get(head.id)),
        "dialect": dialect,
        "session": head.values.get("session"),
        "request": {"messages": messages, "tools": raw.get("tools") or []},
        "raw_request": raw,
        "message": head.values.get("message") or {},
        "forwarded": _body(connection, rollout, head.forwarded),
        "attempt_list": head.values.get("attempts") or [],
        "usage": head.values.get("usage") or {},
        "status": head.values.get("status"),
    }


def _body(connection: sqlite3.Connection, rollout: LoadedRollout, parts: list[list[Any]]) -> dict[str, Any]:
    conversations = sequences.ConversationReader()
    messages = {key: conversations.get(connection, key)[0] for _, kind, key in parts if kind == "sequence"}
    return calls.join_body(parts, messages, blobs.Reader(connection))


def graph(connection: sqlite3.Connection, rollout: LoadedRollout) -> dict[str, CallNode]:
    """The graph node of each call; empty if the prompts together are too long to compare."""
    if "graph" not in rollout.cache:
        heads = rollout.ordered()
        if sum(head.prompt_tokens for head in heads) > MAX_GRAPH_TOKENS:
            rollout.cache["graph"] = {}
        else:
            rollout.cache["graph"] = Graph.of(_call_with_ids(connection, rollout, head) for head in heads).nodes
    nodes: dict[str, CallNode] = rollout.cache["graph"]
    return nodes


def _call_with_ids(connection: sqlite3.Connection, rollout: LoadedRollout, head: CallHead) -> Call:
    """A call with packed ids, and without everything else that is large."""
    prompt, completion = array("I"), array("I")
    prompt.frombytes(rollout.prompts.get(connection, head.prompt))
    completion.extend(partial_read.completion(connection, rollout.key, head.id, texts=False).ids)
    return Call(
        head.id,
        int(head.values["index"]),
        role=Role(head.values["role"]),
        prompt_token_ids=cast("Any", prompt),
        completion_token_ids=cast("Any", completion),
    )


def _row(head: CallHead, node: CallNode | None) -> dict[str, Any]:
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
        "token_mode": values.get("token_mode"),
        "replayed_from": values.get("replayed_from"),
        "trainable": reason is None,
        "untrainable_because": reason,
        "mean_logprob": None
        if head.logprob_sum is None or not head.completion_tokens
        else head.logprob_sum / head.completion_tokens,
        "gist": summarize_message(values.get("message") or {}),
    }


def untrainable_because(head: CallHead) -> str | None:
    """`Call.untrainable_because`, computed from the numbers of tokens instead of the tokens."""
    call = Call(
        head.id,
        0,
        role=Role(head.values["role"]),
        error=head.values["error"],
        aborted=head.values["aborted"],
        level=Level(head.values["level"]),
        caller=Caller(head.values.get("caller", Caller.UNKNOWN)),
        caller_reason=head.values.get("caller_reason"),
        token_problem=head.values.get("token_problem"),
        replayed_from=head.values.get("replayed_from"),
        is_copy=head.values.get("is_copy", False),
        prompt_token_ids=[0] if head.prompt_tokens else [],
        completion_token_ids=[0] if head.completion_tokens else [],
        logprobs=[0.0] if head.completion_tokens and head.logprob_sum is not None else [],
    )
    return call.untrainable_because


def _label(role: str) -> str:
    return "main" if role == "agent" else role


def summarize_message(message: dict[str, Any]) -> str:
    """The beginning of what was sampled: the text without marks of Markdown, and the tools it called."""
    tools = [str((tool.get("function") or {}).get("name")) for tool in message.get("tool_calls") or ()]
    content = MARKS.sub("", str(message.get("content") or "")[: 4 * SUMMARY_CHARACTERS])
    text = " ".join(content.split())[:SUMMARY_CHARACTERS]
    return " ".join(part for part in (text, *(f"[{name}]" for name in tools)) if part)
