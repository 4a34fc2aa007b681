"""The store of a rollout on a node: its sandboxes are noted on the node, everything else goes to the driver's.

What it is told is packed on the store's own thread and sent a few times a second. Of several states of a record that
wait only the last is sent.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.errors import StoreError
from paddock.rollouts.store import Store
from paddock.rollouts.store.blobs import digest_of
from paddock.scale.link import Message

if TYPE_CHECKING:
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.store.database import Database
    from paddock.rollouts.trace import Call, Event
    from paddock.scale.link import Link

SEND_EVERY = 0.05
CHUNK_BYTES = 1 << 20


def node_folder() -> Path:
    """Where this machine notes the sandboxes of rollouts that drivers place on it."""
    folder = Path(tempfile.gettempdir()) / f"paddock-node-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise StoreError(f"{folder} belongs to somebody else", hint="remove it, or set TMPDIR for this node")
    return folder


class Outbox:
    """What waits to be sent. Anything may be put from any thread, until it is sealed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, bytes]] = []
        self.sealed = False
        """Whether nothing comes after what was put before."""
        self._filled = asyncio.Event()

    def put(self, kind: str, value: Any = None, raw: bytes = b"") -> None:
        frame = Message(kind, value, raw).frame()
        with self._lock:
            if self.sealed:
                return
            if kind == "record":
                self._waiting = [waiting for waiting in self._waiting if waiting[0] != kind]
            self._waiting.append((kind, frame))
        self._loop.call_soon_threadsafe(self._filled.set)

    def seal(self) -> None:
        with self._lock:
            self.sealed = True

    def take(self) -> list[bytes]:
        with self._lock:
            frames = [frame for _, frame in self._waiting]
            self._waiting = []
        self._filled.clear()
        return frames

    async def pump(self, link: Link) -> None:
        """Send what is put, for ever. Raises LinkLost."""
        while True:
            await self._filled.wait()
            await asyncio.sleep(SEND_EVERY)
            await self.flush(link)

    async def flush(self, link: Link) -> None:
        for frame in self.take():
            link.post_frames([frame])
            await link.drain()


class NodeStore(Store):
    """Tell it where to send with `outbox`, before anything is written."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.outbox: Outbox | None = None
        self._events = 0

    def begin(self, record: RolloutRecord) -> None:
        """The driver has begun it already."""
        self.update(record)

    def update(self, record: RolloutRecord) -> None:
        self._put("record", values_of(record))

    def finish(self, record: RolloutRecord) -> bool:
        self._put("finish", values_of(record))
        assert self.outbox is not None
        self.outbox.seal()
        return True

    def save_call(self, rollout_id: str, call: Call) -> None:
        self._put("call", values_of(call))

    def add_event(self, rollout_id: str, event: Event) -> int:
        self._put("event", values_of(event))
        self._events += 1
        return self._events

    def put_blob(self, data: bytes) -> str:
        for start in range(0, len(data), CHUNK_BYTES):
            self._put("chunk", None, data[start : start + CHUNK_BYTES])
        digest = digest_of(data)
        self._put("blob", digest)
        return digest

    def _put(self, kind: str, value: Any, raw: bytes = b"") -> None:
        assert self.outbox is not None, "nobody was named to send to"
        self.outbox.put(kind, value, raw)


def values_of(kept: Any) -> dict[str, Any]:
    return {field.name: getattr(kept, field.name) for field in fields(kept)}
