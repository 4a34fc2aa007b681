"""The records that a question found: all of them, read in pages when they are looked at.

Which rollouts they are is decided once, by their keys (8 bytes each). Rollouts that begin meanwhile change nothing,
and a store of any size is read in little memory. A rollout that was deleted meanwhile is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, overload

from paddock.errors import StoreError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator

    from paddock.rollouts.record import RolloutRecord

PAGE_ROWS = 100


class Listing(Sequence["RolloutRecord"]):
    """Use it while its store is open; `list(...)` of it keeps the records."""

    def __init__(self, keys: array[int], read: Callable[[Sequence[int]], list[RolloutRecord]]) -> None:
        self._keys = keys
        self._read = read

    def __iter__(self) -> Iterator[RolloutRecord]:
        starts = range(0, len(self._keys), PAGE_ROWS)
        return chain.from_iterable(self._read(self._keys[start : start + PAGE_ROWS]) for start in starts)

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> RolloutRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Listing: ...
    def __getitem__(self, index: int | slice) -> RolloutRecord | Listing:
        if isinstance(index, slice):
            return Listing(self._keys[index], self._read)
        found = self._read([self._keys[index]])
        if not found:
            raise StoreError("that rollout was deleted meanwhile", hint="list them again")
        return found[0]

    def __eq__(self, other: object) -> bool:
        """With another listing, or with a list of records."""
        return list(self) == list(other) if isinstance(other, Listing | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Listing({len(self)} rollouts)"
