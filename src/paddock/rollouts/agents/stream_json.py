"""Events as `--output-format stream-json` tells them: whole messages of Anthropic's form, and a result at the end."""

from __future__ import annotations

from typing import Any

from paddock.rollouts.agents.headless import HeadlessRun


class StreamJsonRun(HeadlessRun):
    def take(self, event: dict[str, Any]) -> None:
        kind, message = event.get("type"), event.get("message")
        self.session = event.get("session_id") or self.session
        if kind == "result" and event.get("is_error"):
            self.fail(result_error(event))
        elif kind in ("assistant", "user") and isinstance(message, dict):
            blocks = message.get("content")
            for block in blocks if isinstance(blocks, list) else ():
                # What the user says is the instruction, or one for a sub-agent: only tools answer in its name.
                if isinstance(block, dict) and (kind == "assistant" or block.get("type") == "tool_result"):
                    self._block(str(message.get("id") or ""), block)

    def _block(self, message: str, block: dict[str, Any]) -> None:
        match block.get("type"):
            case "text":
                self.add_text(message, block.get("text"))
            case "thinking":
                self.add_text(message, block.get("thinking"), kind="reasoning")
            case "tool_use":
                self.start_tool(message, str(block.get("id")), block.get("name"), block.get("input"))
            case "tool_result":
                call, failed = str(block.get("tool_use_id")), block.get("is_error") is True
                self.end_tool(call, block_text(block.get("content")), failed=failed)


def block_text(content: Any) -> str:
    """A content that is a text, or a list of blocks of which some are."""
    if isinstance(content, list):
        return "\n".join(str(block.get("text", "")) for block in content if isinstance(block, dict))
    return "" if content is None else str(content)


def result_error(event: dict[str, Any]) -> str:
    """What the last event says went wrong."""
    error = event.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or event.get("result") or event.get("subtype"))
