"""A plain client for each dialect of the proxy, for the conformance suite `paddock.testing.dialects`.

Every module defines one `DialectClient` with the name of the module, which is the name of its dialect. Clients do no
IO, and share no code with the proxy, so that both cannot be wrong in the same way.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paddock.loading import class_named

Entries = list[dict[str, Any]]
"""A part of a conversation, in the form of a dialect."""
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = "bash"


@dataclass(frozen=True, slots=True)
class ClientToolCall:
    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class ClientReply:
    """A reply, in no dialect."""

    text: str = ""
    thinking: str = ""
    calls: list[ClientToolCall] = field(default_factory=list)
    reason: str = ""
    """`stop`, `length` or `calls`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """An HTTP request."""

    path: str
    body: dict[str, Any]


class DialectClient(ABC):
    """A client of one dialect, as the SDK of that API would behave."""

    name: ClassVar[str]
    """The name of the module and of the dialect."""
    conversation_field: ClassVar[str] = "messages"
    """The field of a request with the conversation."""
    system_field: ClassVar[str | None] = None
    """The field of a request with the system prompt, if it has one."""

    @abstractmethod
    def auth_headers(self, key: str) -> dict[str, str]:
        """The headers with the API key."""

    @abstractmethod
    def request(self, conversation: Entries, *, stream: bool = False, tools: bool = True) -> ClientRequest:
        """A request with this conversation."""

    @abstractmethod
    def force_tool(self, request: ClientRequest) -> None:
        """Change a request so that the model must call the tool."""

    @abstractmethod
    def count_request(self, request: ClientRequest) -> ClientRequest:
        """Ask for the number of tokens of a request instead of its answer."""

    @abstractmethod
    def read_count(self, document: dict[str, Any]) -> int:
        """The number of tokens in the answer to a count request."""

    @abstractmethod
    def models_url(self, url: str) -> str:
        """The URL of the list of models."""

    @abstractmethod
    def read_models(self, document: dict[str, Any]) -> list[str]:
        """The names in the answer to a request for models."""

    @abstractmethod
    def user_turn(self, text: str, image: str | None = None) -> Entries:
        """What the user says, perhaps with a picture."""

    @abstractmethod
    def reply_turn(self, document: dict[str, Any]) -> Entries:
        """A reply, as a program sends it back."""

    @abstractmethod
    def result_turn(self, calls: list[ClientToolCall], texts: list[str], image: str | None = None) -> Entries:
        """The results of tool calls, in the order of the calls."""

    @abstractmethod
    def read_reply(self, document: dict[str, Any]) -> ClientReply:
        """The reply in a document."""

    @abstractmethod
    def assemble(self, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        """The document that the events of a stream add up to."""

    @abstractmethod
    def read_error(self, document: dict[str, Any]) -> str:
        """The message of an error; raises KeyError or TypeError if the document has the wrong form."""

    @abstractmethod
    def is_overflow(self, document: dict[str, Any]) -> bool:
        """Whether a program with this dialect recognizes that its conversation is too long."""


# The modules import this package: what they use is defined above this line.
CLIENTS: dict[str, DialectClient] = {
    module.name: class_named(DialectClient, f"{__name__}.{module.name}", module.name)()
    for module in pkgutil.iter_modules(__path__)
}
