"""The role of a call, from its body and headers. No IO.

A call has the role `agent` unless its content shows another one. A title is recognized by its system prompt; a
summary by the text that requests it, once the rollout had a call with tools; a sub-agent by its session. Drivers that
know their program better implement `Agent.classify`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from paddock.capture.trace import Role
from paddock.models.message_text import content_text

if TYPE_CHECKING:
    from collections.abc import Mapping

SYSTEM_ROLES = ("system", "developer")
SESSION_HEADERS = ("x-session-id", "x-session-affinity", "thread-id", "session-id", "x-claude-code-session-id")
"""The first of these that a program sends is the id of its conversation."""
TITLE_PROMPT = re.compile(
    r"\s*(you are (a|an|the) [\w -]{0,30}title|(generate|create|write) (a|an)\b[^.\n]{0,60}\btitle)", re.IGNORECASE
)
SUMMARY = re.compile(r"\bsummar(y|i[sz]e)|\bcompact", re.IGNORECASE)


def session_of(headers: Mapping[str, str]) -> str | None:
    return next((headers[name] for name in SESSION_HEADERS if headers.get(name)), None)


class Roles:
    """Assigns a role to each call of one rollout, in the order they begin."""

    def __init__(self) -> None:
        self._had_tools = False
        self._session: str | None = None
        """The conversation of the first call with tools: calls with tools in other conversations are a subagent's."""

    def classify(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Role:
        session = session_of(headers)
        if body.get("tools"):
            if not self._had_tools:
                self._had_tools = True
                self._session = session
            return Role.AGENT if session == self._session else Role.SUBAGENT
        if TITLE_PROMPT.match(system_prompt(body)):
            return Role.TITLE
        return Role.COMPACTION if self._had_tools and requests_summary(body) else Role.AGENT


def requests_summary(body: Mapping[str, Any]) -> bool:
    last = (body.get("messages") or [{}])[-1]
    return bool(SUMMARY.search(system_prompt(body)) or SUMMARY.search(content_text(last.get("content"))))


def system_prompt(body: Mapping[str, Any]) -> str:
    for message in body.get("messages") or ():
        if isinstance(message, dict) and message.get("role") in SYSTEM_ROLES:
            return content_text(message.get("content"))
    return ""
