"""When each tool of a rollout ran.

The proxy sees model calls only. A tool begins when the answer that asked for it has ended. It has ended when the
agent reported it, or at the latest when the next request contains its result. Of tools that one answer asked for
together, only the reports tell which was slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

EndedBy = Literal["agent", "request"]


@dataclass(slots=True)
class ToolSpan:
    id: str
    name: str
    call: str
    """The model call that asked for it."""
    arguments: Any
    started: float | None
    ended: float | None = None
    ended_by: EndedBy | None = None
    """Who told the end: the agent, or the request with the result."""
    error: bool = False
    result_in: str | None = None
    """The model call whose request has the result."""

    @property
    def seconds(self) -> float | None:
        return None if self.started is None or self.ended is None else max(0.0, self.ended - self.started)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "call": self.call,
            "gist": _gist(self.arguments),
            "started": self.started,
            "ended": self.ended,
            "ended_by": self.ended_by,
            "error": self.error,
            "result_in": self.result_in,
        }


class ToolSpans:
    """Collects spans while a transcript grows, in the order of writing."""

    def __init__(self) -> None:
        self.spans: list[ToolSpan] = []
        self._waiting: dict[str, ToolSpan] = {}

    def begin(self, item: dict[str, Any], call: str | None, at: float | None) -> None:
        """A model asked for a tool. One that an agent sends back changed has its span already."""
        call_id = str(item["id"])
        if call is None or call_id in self._waiting:
            return
        span = self._waiting[call_id] = ToolSpan(call_id, str(item["name"]), call, item["arguments"], at)
        self.spans.append(span)

    def report(self, data: dict[str, Any], at: float) -> None:
        """The agent said that a tool is done. Agents name no ids: the same name counts, and the same input first."""
        open_spans = [span for span in self._waiting.values() if span.ended is None and span.name == data.get("tool")]
        same_input = [span for span in open_spans if span.arguments == data.get("input")]
        for span in (same_input or open_spans)[:1]:
            span.ended, span.ended_by = at, "agent"
            span.error = data.get("status") == "error"

    def end(self, item: dict[str, Any], call: str | None, at: float | None) -> ToolSpan | None:
        """A request has the result of a tool. Returns its span."""
        span = self._waiting.pop(str(item["id"]), None)
        if span is None:
            return None
        # A report that was read late is corrected: the result was sent before.
        if at is not None and (span.ended is None or span.ended > at):
            span.ended, span.ended_by = at, "request"
        span.result_in = call
        span.error = span.error or bool(item.get("error"))
        return span


def _gist(arguments: Any) -> str:
    """The first text among the arguments, in a line."""
    texts = [arguments] if isinstance(arguments, str) else list(arguments.values())
    first = next((text for text in texts if isinstance(text, str)), "")
    return " ".join(first[:400].split())[:120]
