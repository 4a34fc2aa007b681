"""Sampled ids to text while they arrive, without ever showing what turns out to be a part of a tool call.

The ids are parsed again as they grow, each time after a larger step, so that a long reply costs little. Text that
could be the start of a marker is held back, and so is whitespace at the end; tool calls come at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddock.capture.tokens.rendering import ParsedReply, Rendering

STEP_SHARE = 64
"""A reply is parsed again when it has grown by this part of its length."""
MARKERS = (
    *(
        "<tool_call",
        "<|",
        "<｜",
        "<function=",
        "<minimax:tool_call",
        "<invoke",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
    ),
    *("<tool_response", "<arg_key>", "<parameter="),
)
BROKEN_CHARACTER = "\ufffd"
"""What an incomplete UTF-8 character decodes to."""
CHANNEL_NAME = "thought\n"
"""Gemma writes it before its reasoning. It is no part of it, which is known when it is complete."""


class ReplyStream:
    """The reply of one call. `feed` takes ids, `parse` returns what can be shown since the last time."""

    def __init__(
        self, rendering: Rendering, prompt: list[int], tools: list[dict[str, Any]] | None, *, holds_text: bool = False
    ) -> None:
        """`holds_text` keeps all text until the end."""
        self.ids: list[int] = []
        self._rendering = rendering
        self._prompt = prompt
        self._tools = tools
        self._holds_text = holds_text
        self._parsed_at = 0
        self._content = ""
        self._reasoning = ""

    def feed(self, ids: list[int]) -> bool:
        """Add ids. True if it is time for `parse`."""
        self.ids += ids
        step = 1 + self._parsed_at // STEP_SHARE
        return not self._holds_text and len(self.ids) - self._parsed_at >= step

    def parse(self) -> tuple[str, str]:
        """New reasoning and new text that can be shown."""
        self._parsed_at = len(self.ids)
        parsed = self._rendering.parse(self.ids, self._prompt, self._tools)
        # Malformed calls are a part of the text at the end only: an open call may still be completed.
        content = "" if parsed.malformed else parsed.content
        reasoning = parsed.reasoning
        if not (content or parsed.tool_calls):
            reasoning = "" if CHANNEL_NAME.startswith(reasoning) else visible_part(reasoning, has_tools=False)
        return self._show(reasoning, visible_part(content, has_tools=bool(self._tools)))

    def finish(self, parsed: ParsedReply) -> tuple[str, str]:
        """The rest of the reasoning and of the text."""
        return self._show(parsed.reasoning, parsed.content)

    @property
    def visible(self) -> tuple[str, str]:
        """All reasoning and text so far."""
        return self._reasoning, self._content

    def _show(self, reasoning: str, content: str) -> tuple[str, str]:
        new_reasoning, new_content = _growth(self._reasoning, reasoning), _growth(self._content, content)
        self._reasoning += new_reasoning
        self._content += new_content
        return new_reasoning, new_content


def visible_part(text: str, *, has_tools: bool) -> str:
    """The part of an incomplete text that no later token can turn into a tool call or another character."""
    if has_tools and text.lstrip()[:1] in ("{", "["):
        return ""
    end = len(text)
    for marker in MARKERS:
        position = text.find(marker)
        if position != -1:
            end = min(end, position)
        for size in range(min(len(marker) - 1, len(text)), 0, -1):
            if text.endswith(marker[:size]):
                end = min(end, len(text) - size)
                break
    return text[:end].rstrip(BROKEN_CHARACTER).rstrip()


def _growth(before: str, text: str) -> str:
    return text[len(before) :] if text.startswith(before) else ""
