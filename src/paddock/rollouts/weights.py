"""Which weights the model has now, as whoever trains it says. Engines that tell it themselves are believed first."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    Version: TypeAlias = str | int | None


class Weights:
    """A version that a trainer sets, or a function that knows it. Every call keeps the version it began with."""

    def __init__(self, version: Version | Callable[[], Version] = None) -> None:
        self._version = version

    def __repr__(self) -> str:
        return f"Weights({self.current()!r})"

    @classmethod
    def of(cls, told: Weights | Version | Callable[[], Version]) -> Weights:
        return told if isinstance(told, Weights) else cls(told)

    def set(self, version: Version) -> None:
        """From now on calls begin with this version."""
        self._version = version

    def current(self) -> str | None:
        version = self._version() if callable(self._version) else self._version
        return None if version is None else str(version)
