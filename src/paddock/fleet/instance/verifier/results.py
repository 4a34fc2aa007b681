"""Values that a verifier gets back. An async verifier may await them, or use them as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

_awaitable = False


def results_are_awaitable(yes: bool) -> None:
    """Say once per process which kind of verifier runs in it."""
    global _awaitable
    _awaitable = yes


def given(value: Any) -> Any:
    """`value` itself, or for an async verifier something equal to it that can be awaited too."""
    if not _awaitable:
        return value
    if value is None:
        return _Nothing()
    kind = _KINDS.get(type(value))
    return kind(value) if kind is not None else value


class Awaited:
    """Awaiting it gives the thing itself."""

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self


class Count(int):
    """How many rows there are."""

    @property
    def value(self) -> int:
        return int(self)

    def assert_eq(self, expected: int) -> Count:
        return self._hold(self == expected, f"{expected}")

    def assert_gt(self, threshold: int) -> Count:
        return self._hold(self > threshold, f"more than {threshold}")

    def assert_between(self, low: int, high: int) -> Count:
        return self._hold(low <= self <= high, f"{low} to {high}")

    def _hold(self, holds: bool, wanted: str) -> Count:
        if not holds:
            raise AssertionError(f"expected {wanted} rows, found {int(self)}")
        return self


class _AwaitedList(list[Any], Awaited):
    pass


class _AwaitedDict(dict[str, Any], Awaited):
    pass


class _AwaitedCount(Count, Awaited):
    pass


class _Nothing(Awaited):
    """None cannot be awaited; this is as false, and awaiting it gives None."""

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None

    def __hash__(self) -> int:
        return hash(None)

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()


_KINDS: dict[type, type] = {list: _AwaitedList, dict: _AwaitedDict, Count: _AwaitedCount}
