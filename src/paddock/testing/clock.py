"""A clock that stands still until a test moves it."""

from __future__ import annotations


class FakeClock:
    """Call it for the seconds, as `time.monotonic` is called; `advance` lets time pass."""

    def __init__(self, start: float = 1000.0) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now

    def __repr__(self) -> str:
        return f"FakeClock({self.now:g})"

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass. Time does not run backwards: raises ValueError below 0."""
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds} s")
        self.now += seconds
