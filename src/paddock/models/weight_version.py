"""The weight version of the model, as the trainer sets it. A version that the engine reports takes precedence."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    Version: TypeAlias = str | int | None


class Weights:
    """A version that a trainer sets, or a function that returns it. Every call records the version it began with."""

    def __init__(self, version: Version | Callable[[], Version] = None) -> None:
        self._version = version

    def __repr__(self) -> str:
        return f"Weights({self.current()!r})"

    @classmethod
    def of(cls, value: Weights | Version | Callable[[], Version]) -> Weights:
        return value if isinstance(value, Weights) else cls(value)

    def set(self, version: Version) -> None:
        """From now on calls begin with this version."""
        self._version = version

    def advance(self, version: int) -> None:
        """Like `set`, but only to a newer version: requests of several loops may arrive in any order."""
        current = self.current()
        if current is None or not current.isdigit() or int(current) < version:
            self.set(version)

    def current(self) -> str | None:
        version = self._version() if callable(self._version) else self._version
        return None if version is None else str(version)
