import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Helper modules assert too: without this a failure of theirs is a bare AssertionError.
pytest.register_assert_rewrite("agents", "client", "fleet", "rollouts", "sandbox", "running", "wire")

from environments import LIVES, Watched  # noqa: E402

LEASES = tempfile.TemporaryDirectory(prefix="paddock-leases-", ignore_cleanup_errors=True)
"""Tests leave no lease for the user's next process, and find none of the user's."""
os.environ["PADDOCK_FLEET_LEASES"] = LEASES.name

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell that starts the tests in the background ignores it for them, and the programs of a test inherit that."""

settings.register_profile("paddock", deadline=None, max_examples=100, database=None)
settings.load_profile("paddock")


class FakeClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(scope="module", autouse=True)
def children_before() -> None:
    """So that tests which look for processes left behind tell their own from those of the whole run."""
    played = sys.modules.get("rollouts.played")
    if played is not None:
        played.remember_children()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def lives() -> Iterator[list[Watched]]:
    """Every watched environment that the test builds."""
    LIVES.clear()
    yield LIVES
    LIVES.clear()
