"""Sends the answer of a recorded call to an agent, in place of an exchange with an inference engine."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.capture.call_summary import CallTimes
from paddock.capture.errors import FINAL_MESSAGE, ErrorReply, UpstreamFailure
from paddock.capture.reply import AgentDisconnected, send_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.capture.dialects.base import ReplyWriter
    from paddock.capture.recorded.replay import Replay
    from paddock.capture.reply import Reply
    from paddock.capture.trace import Call

ANSWER_FIELDS = (
    *("prompt_token_ids", "completion_token_ids", "logprobs", "tokens", "top_logprobs", "message", "finish_reason"),
    *("usage", "forwarded", "engine", "model", "weight_version", "admitted_version", "level", "temperature"),
    *("logprobs_kind", "token_problem", "token_mode"),
)
"""What a replayed call has of the recorded one: all that was sampled, and how."""


@dataclass(slots=True)
class RecordedExchange:
    """Fills `call` from `recorded` and answers the agent. Has the methods of `Exchange` that the proxy uses."""

    call: Call
    recorded: Call
    replay: Replay
    writer: ReplyWriter
    reply: Reply
    error_body: Callable[[ErrorReply], bytes]
    """Writes an error in the agent's dialect."""
    is_stream: bool
    on_answer: Callable[[Call], None] | None = None
    """Gets the call when it has its answer, before the agent does."""
    times: CallTimes = field(default_factory=CallTimes)

    async def run(self) -> None:
        call, recorded = self.call, self.recorded
        for name in ANSWER_FIELDS:
            setattr(call, name, deepcopy(getattr(recorded, name)))
        if not self.replay.is_edited(recorded):
            call.replayed_from = recorded.replayed_from or f"{self.replay.source}/{recorded.id}"
            call.is_copy = recorded.is_copy or self.replay.is_copy
        if self.on_answer is not None and recorded.error is None:
            self.on_answer(call)
        call.status, call.first_token = recorded.status or 200, time.time()
        self.times.start_attempt(streamed=self.is_stream)
        self.times.record_byte()
        document = make_document(recorded)
        try:
            if recorded.error is not None:
                await self._send_error(recorded)
            elif self.is_stream:
                await self.reply.send_events(self.writer.write_as_stream(document))
                await self.reply.finish()
            else:
                await self.reply.send_document(200, self.writer.write_document(document))
        except AgentDisconnected:
            call.aborted, call.error = True, "the agent hung up"

    async def _send_error(self, recorded: Call) -> None:
        failure = UpstreamFailure.from_document({"error": {"message": recorded.error}}, recorded.status)
        self.call.error, self.times.fault = recorded.error, failure.fault
        error = ErrorReply(400, FINAL_MESSAGE, "upstream_error")
        if failure.fault != "endpoint" and failure.status is not None:
            error = ErrorReply(failure.status, failure.message, code=failure.code)
        await send_error(self.reply, self.writer, error, self.error_body)


def make_document(call: Call) -> dict[str, Any]:
    """The answer of a call as a whole chat completion."""
    choice = {"index": 0, "message": deepcopy(call.message), "finish_reason": call.finish_reason or "stop"}
    return {
        "id": f"replayed-{call.id}",
        "object": "chat.completion",
        "created": int(call.started),
        "model": call.model,
        "choices": [choice],
        "usage": call.usage or {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
