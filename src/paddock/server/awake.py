"""Waiting awake: a client may answer sooner than a thread falls asleep and is woken."""

from __future__ import annotations

import os
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

FoundT = TypeVar("FoundT")

AWAKE = 0.0002
"""For how long, in seconds."""
CAN_SPARE_A_CORE = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


def is_quick(began: float) -> bool:
    """Whether what comes now is worth having been awake for since `began`, and so will be the next."""
    return CAN_SPARE_A_CORE and monotonic() - began < AWAKE


def wait_awake(look: Callable[[], list[FoundT]]) -> list[FoundT]:
    """Look again and again; empty-handed if nothing came soon."""
    until = monotonic() + AWAKE
    found: list[FoundT] = []
    while not found and monotonic() < until:
        found = look()
    return found
