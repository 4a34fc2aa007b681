from collections.abc import Iterator

import pytest

from environments import Watched
from running import Serve, servers
from server.worker_processes import worker_server

__all__ = ["worker_server"]


@pytest.fixture(params=["fast", "asgi"])
def serve(request: pytest.FixtureRequest, lives: list[Watched]) -> Iterator[Serve]:
    """Starts servers on both socket paths; at the end every environment was closed exactly once."""
    yield from servers(request.param, lives)


@pytest.fixture
def serve_fast(lives: list[Watched]) -> Iterator[Serve]:
    """The same for what does not depend on the socket path."""
    yield from servers("fast", lives)
