"""A server for as long as a block lasts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddock.config import Access
from running import Running


@contextmanager
def serving(make: Any, **limits: Any) -> Iterator[Running]:
    server = Running(make, "fast", "simulation", Access(), {}, limits)
    try:
        yield server
    finally:
        server.stop()
