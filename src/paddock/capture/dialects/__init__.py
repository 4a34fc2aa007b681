"""The APIs with which agents call a model. One module per dialect; none of them does IO.

Every module of this package that has no leading underscore, except the shared ones, defines one `Dialect` with the
name of the module. A module with a leading underscore is a part of one dialect.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from paddock.capture.dialects.base import Dialect
from paddock.capture.errors import BadRequest
from paddock.capture.recorded.tool_results import replace_results
from paddock.loading import class_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.capture.dialects.base import Route
    from paddock.capture.trace import Call

SHARED_MODULES = ("base", "block_writer", "chat_builder")
FALLBACK = "chat"
"""Answers a request that no dialect recognizes."""


DIALECTS: dict[str, type[Dialect]] = {
    module.name: class_named(Dialect, f"{__name__}.{module.name}", module.name)
    for module in pkgutil.iter_modules(__path__)
    if module.name not in SHARED_MODULES and not module.name.startswith("_")
}


class DialectRouter:
    """All dialects of one rollout: finds the dialect of a request."""

    def __init__(self) -> None:
        names = sorted(DIALECTS, key=lambda name: name != FALLBACK)
        self._dialects = [DIALECTS[name]() for name in names]

    def find(self, path: str, headers: Mapping[str, str], query: Mapping[str, str]) -> tuple[Dialect, Route | None]:
        """The dialect of a request, and the route of its path; None if no dialect has the path."""
        routes = [(dialect, dialect.find_route(path, query)) for dialect in self._dialects]
        served = [each for each in routes if each[1] is not None]
        if len(served) == 1:
            return served[0]
        matching = [each for each in served or routes if each[0].matches(headers, query)]
        return (matching or served or routes)[0]


def chat_request(call: Call) -> dict[str, Any]:
    """What the model got, as a chat completion: `messages` and, if there are any, `tools`.

    Raises BadRequest if the recorded body is no request of its dialect.
    """
    chat = agent_request(call)
    if call.tool_results:
        chat["messages"], _ = replace_results(chat["messages"], call.tool_results)
    return chat


def agent_request(call: Call) -> dict[str, Any]:
    """The request as the agent sent it, as a chat completion. Tool results of an edit are not in it.

    Raises BadRequest.
    """
    if call.dialect not in DIALECTS:
        raise BadRequest(f"there is no dialect {call.dialect!r}")
    return DIALECTS[call.dialect]().to_chat(call.request)
