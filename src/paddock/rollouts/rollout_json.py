"""Rollouts and calls as JSON: the one shape that the command line, the environment and the page print."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.capture.trace import Call, Event
    from paddock.store.record import RolloutRecord

SUMMARY = (
    "rollout_id",
    "task_id",
    "outcome",
    "reward",
    "reward_reason",
    "reward_parts",
    "trainable_calls",
    "trainable",
    "level",
    "prompt_tokens",
    "completion_tokens",
    "wall_s",
    "stage",
    "stages",
    "agent",
    "driver",
    "model",
    "mode",
    "sandbox",
    "sandbox_id",
    "image",
    "verifier",
    "batch_id",
    "member",
    "weight_version",
    "attempt",
    "exit_code",
    "test_exit_code",
    "error",
    "started_at",
    "finished_at",
)


def summarize(record: RolloutRecord) -> dict[str, Any]:
    """What fits on a line: how it went, without its logs. `calls` is the number of calls here."""
    return {**{name: getattr(record, name) for name in SUMMARY}, "calls": record.call_count}


def rollout_to_json(
    record: RolloutRecord,
    calls: Iterable[Call],
    events: Iterable[tuple[int, Event]] = (),
    scores: Iterable[dict[str, Any]] = (),
) -> dict[str, Any]:
    """All that is known of a rollout. `calls` is the list of its calls here, `call_count` their number."""
    whole = {**asdict(record), **summarize(record)}
    del whole["store_folder"]
    return {
        **whole,
        "call_count": record.call_count,
        "calls": [call_to_json(call) for call in calls],
        "events": [{"seq": number, **asdict(event)} for number, event in events],
        "scores": list(scores),
    }


def call_to_json(call: Call) -> dict[str, Any]:
    ended = None if call.ended is None else call.ended - call.started
    first = None if call.first_token is None else call.first_token - call.started
    return {
        **asdict(call),
        **chat_view(call),
        "ok": call.ok,
        "trainable": call.trainable,
        "untrainable_because": call.untrainable_because,
        "timing": {
            "started": call.started,
            "first_token": call.first_token,
            "ended": call.ended,
            "seconds": ended,
            "seconds_to_first_token": first,
        },
    }


def chat_view(call: Call) -> dict[str, Any]:
    """`chat`: messages and tools as chat completions have them, where `request` has another dialect."""
    if call.dialect == "chat":
        return {}
    # The capture brings an HTTP server along, which a command that prints calls has no use for.
    from paddock.capture.dialects import chat_request
    from paddock.capture.errors import BadRequest

    try:
        chat = chat_request(call)
    except BadRequest:
        return {}
    return {"chat": {name: chat[name] for name in ("messages", "tools") if name in chat}}
