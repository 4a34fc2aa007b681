"""Token ids that begin as an earlier prompt does, kept as what they add to it.

Prompts of a conversation grow call by call. Whoever only asks how long one is, what it adds, or whether it goes on
from the one before never builds the whole of it; whoever asks more gets an array, built once.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, overload

ID_BYTES = 4


def ids_array(data: bytes) -> array[int]:
    """Ids of four bytes each, the lowest first, without an object for each."""
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


class Prompt(Sequence[int]):
    """Ids in little pieces: the first `head` of `base`, then those packed in `added`."""

    __slots__ = ("_base", "_head", "_size", "_whole", "added")

    def __init__(self, added: bytes, base: Prompt | None = None, head: int = 0) -> None:
        self.added = added
        self._base = base
        self._head = head
        self._size = head + len(added) // ID_BYTES
        self._whole: array[int] | None = None

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> array[int]: ...
    def __getitem__(self, key: int | slice) -> int | array[int]:
        if isinstance(key, slice) and key.stop is None and key.step is None and (key.start or 0) >= self._head:
            return ids_array(self.added[(key.start - self._head) * ID_BYTES if key.start else 0 :])
        return self.whole()[key]

    def __eq__(self, other: object) -> bool:
        return self is other or self.whole() == (other.whole() if isinstance(other, Prompt) else other)

    __hash__ = None  # type: ignore[assignment]

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        return self.whole().index(value, start, self._size if stop is None else stop)

    def whole(self) -> array[int]:
        """All ids."""
        if self._whole is None:
            self._whole = ids_array(self.tobytes())
        return self._whole

    def tobytes(self) -> bytes:
        pieces: list[bytes] = []
        current, wanted = self, self._size
        while True:
            pieces.append(current.added[: max(wanted - current._head, 0) * ID_BYTES])
            wanted = min(wanted, current._head)
            if current._base is None:
                return b"".join(reversed(pieces))
            current = current._base

    def begins_with(self, prompt: Sequence[int], completion: Sequence[int]) -> bool:
        """Are these ids the whole of `prompt`, then the whole of `completion`, and then perhaps more?"""
        size = len(prompt)
        if self._base is prompt and self._head == size and isinstance(completion, array):
            return self.added.startswith(completion.tobytes())
        return begins_with(self.whole(), prompt, completion)


def begins_with(ids: Sequence[int], prompt: Sequence[int], completion: Sequence[int]) -> bool:
    """The same for any sequences of one kind."""
    if isinstance(ids, Prompt):
        return ids.begins_with(prompt, completion)
    size = len(prompt)
    known: Any = prompt.whole() if isinstance(prompt, Prompt) else prompt
    return ids[:size] == known and ids[size : size + len(completion)] == completion
