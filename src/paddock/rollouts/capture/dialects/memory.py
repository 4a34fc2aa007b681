"""What was said in one rollout, for dialects in which a request may continue an earlier answer by its id. No IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Remembered:
    """One exchange."""

    previous: str | None
    items: list[dict[str, Any]]
    """What was given and what came out, without what the previous one holds."""
    answer: dict[str, Any]
    frame: dict[str, Any]
    """Whatever else the dialect needs to go on."""


class Memory:
    def __init__(self) -> None:
        self._known: dict[str, Remembered] = {}

    def get(self, answer_id: Any) -> Remembered | None:
        return self._known.get(answer_id) if isinstance(answer_id, str) else None

    def history(self, answer_id: str | None) -> list[dict[str, Any]]:
        """Everything up to an answer that is known."""
        chain = []
        while answer_id is not None:
            known = self._known[answer_id]
            chain.append(known.items)
            answer_id = known.previous
        return [item for items in reversed(chain) for item in items]

    def keep(
        self,
        answer: dict[str, Any],
        previous: str | None,
        whole: list[dict[str, Any]],
        said: list[dict[str, Any]],
        frame: dict[str, Any] | None = None,
    ) -> None:
        """Remember an answer to a `whole` conversation. Only what it adds to the previous one takes space."""
        items = whole[len(self.history(previous)) :] + said
        self._known[answer["id"]] = Remembered(previous, items, answer, frame or {})
