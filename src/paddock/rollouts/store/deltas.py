"""What two sequences share at both ends. Works on bytes and on lists; knows nothing of what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

Items = TypeVar("Items", bytes, list[bytes])


@dataclass(frozen=True, slots=True)
class Shared:
    """How many items at the front and at the back are those of the base."""

    head: int
    tail: int


def shared(base: Items, items: Items, *, width: int = 1) -> Shared:
    """What `items` have in common with `base`, in whole units of `width` items."""
    head = common_prefix(base, items)
    head -= head % width
    tail = _common_suffix(base, items, most=min(len(base), len(items)) - head)
    return Shared(head, tail - tail % width)


def middle(items: Items, kept: Shared) -> Items:
    """What has to be stored of `items` beside the base."""
    return items[kept.head : len(items) - kept.tail]


def join(base: Items, kept: Shared, new: Items) -> Items:
    """The sequence whose middle is `new`."""
    return base[: kept.head] + new + base[len(base) - kept.tail :]


def common_prefix(first: Items, second: Items) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        half = (low + high + 1) // 2
        if first[low:half] == second[low:half]:
            low = half
        else:
            high = half - 1
    return low


def _common_suffix(first: Items, second: Items, *, most: int) -> int:
    low, high = 0, most
    while low < high:
        half = (low + high + 1) // 2
        if first[len(first) - half : len(first) - low] == second[len(second) - half : len(second) - low]:
            low = half
        else:
            high = half - 1
    return low
