"""Masks secrets: every text that is stored, logged or sent to the agent goes through a `Mask`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.models.endpoint import Endpoint

SHORTEST_SECRET = 6
"""Servers without a key often get a word like `EMPTY`; masking it would change ordinary text."""
REPLACEMENT = "***"


class Mask:
    """Replaces each of its secrets by `***`."""

    def __init__(self, secrets: Iterable[str]) -> None:
        usable = sorted({secret for secret in secrets if len(secret) >= SHORTEST_SECRET}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, usable))) if usable else None
        self._encoded = [orjson.dumps(secret)[1:-1] for secret in usable]

    @classmethod
    def of_endpoint(cls, endpoint: Endpoint, secrets: Iterable[str] = ()) -> Mask:
        return cls([endpoint.api_key or "", *map(str, endpoint.headers.values()), *secrets])

    def text(self, text: str) -> str:
        return self._pattern.sub(REPLACEMENT, text) if self._pattern else text

    def is_in(self, encoded: bytes) -> bool:
        """Whether this JSON, as orjson writes it, holds a secret."""
        return any(secret in encoded for secret in self._encoded)

    def value(self, value: Any) -> Any:
        """The same value with every text in it masked."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        return value
