"""A model endpoint as a value: where it is, what to ask for, and the key that stays on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server."""

    url: str
    """The base that `/chat/completions` is added to, as in `http://host:8000/v1`."""
    name: str
    """The model's name there."""
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    label: str | None = None
    """What the user asked for (`replay:script.json`, `vllm://org/repo`); shown instead of the URL."""
    engine: str | None = None
    """`vllm`, `sglang`, `llamacpp` or `openai` where it is known; None lets the capture find out."""

    @property
    def shown(self) -> str:
        return self.label or self.name
