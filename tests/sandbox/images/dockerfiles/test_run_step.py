"""Commands of a build: what they connect to is reported."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paddock.sandbox import available
from paddock.sandbox.images.build import build_image
from paddock.sandbox.images.store import default_store
from paddock.sandbox.network.policy import NetworkPolicy
from sandbox.image_roots import make_image

if TYPE_CHECKING:
    from paddock.sandbox.images.dockerfiles.events import BuildEvent

BWRAP_MISSING = available("bwrap")
pytestmark = pytest.mark.skipif(BWRAP_MISSING is not None, reason=str(BWRAP_MISSING))
ASK = (
    "import socket; proxy = socket.create_connection(('127.0.0.1', 7001)); "
    "proxy.sendall(b'GET http://refused.example/ HTTP/1.1\\r\\nHost: refused.example\\r\\n\\r\\n'); proxy.recv(100)"
)


def test_connections_of_a_build_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_IMAGES", str(tmp_path / "images"))
    make_image(tmp_path)
    events: list[BuildEvent] = []
    asyncio.run(
        build_image(
            f'FROM small\nRUN /run/paddock/runtime/bin/python3 -I -S -c "{ASK}"\n',
            {},
            network=NetworkPolicy("allowlist", ("allowed.example",)),
            timeout=30.0,
            store=default_store(),
            on_progress=events.append,
        )
    )
    (connection,) = [event.connection for event in events if event.connection is not None]
    assert (connection.host, connection.allowed, connection.phase) == ("refused.example", False, "build")
