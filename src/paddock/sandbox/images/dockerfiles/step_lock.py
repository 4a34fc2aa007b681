"""One builder per step, over all tasks and processes: the others wait, and then use the layer that it made."""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

POLL_SECONDS = 0.05


@asynccontextmanager
async def lock_step(folder: Path, name: str) -> AsyncIterator[None]:
    """Hold the lock `name`. The wait ends with the caller's deadline; a holder that dies loses the lock."""
    path = folder / name
    descriptor = await _acquire(path)
    try:
        yield
    finally:
        # Removed while it is held: whoever opened it before sees that it is another file, and opens the new one.
        with suppress(FileNotFoundError):
            path.unlink()
        os.close(descriptor)


async def _acquire(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        await asyncio.sleep(POLL_SECONDS)
