"""How agents speak to the proxy. One file for each dialect; none of them does IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.capture.dialects.anthropic import Anthropic
from paddock.rollouts.capture.dialects.chat import Chat
from paddock.rollouts.capture.dialects.google import Google
from paddock.rollouts.capture.dialects.responses import Responses
from paddock.rollouts.capture.refusals import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.rollouts.capture.dialects.base import Dialect, Place
    from paddock.rollouts.trace import Call

DIALECTS: dict[str, type[Dialect]] = {each.name: each for each in (Chat, Responses, Anthropic, Google)}
"""The first one answers where nobody can tell how somebody speaks."""


class Interpreter:
    """All dialects of one rollout: finds the one in which a request was made."""

    def __init__(self) -> None:
        self._dialects = [make() for make in DIALECTS.values()]

    def find(self, path: str, headers: Mapping[str, str], query: Mapping[str, str]) -> tuple[Dialect, Place | None]:
        """The dialect of a request, and what is served at its path."""
        places = [(dialect, dialect.find(path, query)) for dialect in self._dialects]
        served = [each for each in places if each[1] is not None]
        if len(served) == 1:
            return served[0]
        known = [each for each in served or places if each[0].recognises(headers, query)]
        return (known or served or places)[0]


def chat_request(call: Call) -> dict[str, Any]:
    """The request of a call as a chat completion: `messages` and, if there are any, `tools`.

    Raises BadRequest if what was recorded is no request of its dialect.
    """
    if call.dialect not in DIALECTS:
        raise BadRequest(f"there is no dialect {call.dialect!r}")
    return DIALECTS[call.dialect]().chat_form(call.request)
