"""What a call is for, told from its body and headers. No IO.

An agent's calls carry tools, its side calls do not: that holds for every agent program that uses tools.
So a call without tools is a side call once the rollout has seen one with tools, and never before: an agent
that sends no tools at all is the agent. A title is known by its system prompt whenever it comes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from paddock.rollouts.trace import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

SESSION_HEADERS = ("x-session-id", "x-session-affinity", "thread-id", "session-id", "x-claude-code-session-id")
"""The first that a program sends names its conversation."""
TITLE_PROMPT = re.compile(
    r"\s*(you are (a|an|the) [\w -]{0,30}title|(generate|create|write) (a|an)\b[^.\n]{0,60}\btitle)", re.IGNORECASE
)

SUMMARY = re.compile(r"\bsummar(y|i[sz]e)|\bcompact", re.IGNORECASE)


def session_of(headers: Mapping[str, str]) -> str | None:
    return next((headers[name] for name in SESSION_HEADERS if headers.get(name)), None)


class Roles:
    """Tells the role of each call of one rollout, in the order they begin."""

    def __init__(self) -> None:
        self._seen_tools = False
        self._session: str | None = None
        """The conversation of the first call with tools: everything with tools elsewhere is a subagent."""

    def tell(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Role:
        session = session_of(headers)
        if body.get("tools"):
            if not self._seen_tools:
                self._seen_tools = True
                self._session = session
            return Role.AGENT if session == self._session else Role.SUBAGENT
        if TITLE_PROMPT.match(system_prompt(body)):
            return Role.TITLE
        if not self._seen_tools:
            return Role.AGENT
        return Role.COMPACTION if has_answers(body) or asks_for_summary(body) else Role.TITLE


def has_answers(body: Mapping[str, Any]) -> bool:
    """Does the conversation hold something that the model said before?"""
    return any(isinstance(each, dict) and each.get("role") == "assistant" for each in body.get("messages") or ())


def asks_for_summary(body: Mapping[str, Any]) -> bool:
    """A conversation that overflowed at its first call is compacted before the model has said anything."""
    return bool(SUMMARY.search(system_prompt(body)) or SUMMARY.search(text_of((body.get("messages") or [{}])[-1])))


def system_prompt(body: Mapping[str, Any]) -> str:
    for message in body.get("messages") or ():
        if isinstance(message, dict) and message.get("role") in ("system", "developer"):
            return text_of(message)
    return ""


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
