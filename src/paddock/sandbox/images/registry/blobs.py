"""Downloads blobs to files: verified, resumed where a download broke off, and once for all processes."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from contextlib import asynccontextmanager
from typing import IO, TYPE_CHECKING

from paddock.errors import ImageError
from paddock.retry import Backoff, Deadline, retry
from paddock.sandbox.images.registry.client import RegistryClient, RegistryUnavailable, WrongContent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    import aiohttp

    from paddock.sandbox.images.oci import Descriptor

CHUNK_BYTES = 1 << 20
LOCK_POLL_SECONDS = 0.1
STALLED_SECONDS = 60.0
"""A download that receives nothing for this long is broken off and resumed."""
BACKOFF = Backoff(first_seconds=0.5, longest_seconds=15.0, attempts=6)


@asynccontextmanager
async def locked_blob(
    folder: Path, digest: str, deadline: Deadline, is_unpacked: Callable[[], bool]
) -> AsyncIterator[IO[bytes]]:
    """The file of a download that is not complete, locked against other processes.

    It stays for the next attempt if the block is cancelled or the registry breaks off.
    """
    path = folder / f"{digest.removeprefix('sha256:')}.part"
    file = await _open_locked(path, deadline)
    is_wrong = False
    try:
        yield file
    except RegistryUnavailable:
        raise
    except ImageError:
        is_wrong = True
        raise
    finally:
        if is_wrong or is_unpacked():
            path.unlink(missing_ok=True)
        file.close()


async def _open_locked(path: Path, deadline: Deadline) -> IO[bytes]:
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had the lock before may have finished and deleted the file.
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()
        except BlockingIOError:
            file.close()
            if deadline.seconds_left < 0:
                raise ImageError(
                    f"another process is downloading {path.stem[:12]} for too long", hint="try again later"
                ) from None
            await asyncio.sleep(LOCK_POLL_SECONDS)
        except BaseException:
            file.close()
            raise


class BlobDownload:
    """One blob on its way into a file. Attempts continue where the last one ended."""

    def __init__(
        self,
        client: RegistryClient,
        repository: str,
        descriptor: Descriptor,
        file: IO[bytes],
        on_bytes: Callable[[int], None],
    ) -> None:
        self._client, self._repository, self._descriptor = client, repository, descriptor
        self._file, self._on_bytes = file, on_bytes
        self._hash = hashlib.sha256()
        self._size = 0

    async def run(self, deadline: Deadline) -> None:
        """Raises ImageError if the content is not that of the digest, or cannot be fetched in time."""
        await asyncio.to_thread(self._read_present)
        await retry(
            self._attempt,
            errors=RegistryUnavailable,
            deadline=deadline,
            backoff=BACKOFF,
            may_retry=lambda _: True,
            counts=lambda error: not error.has_progressed,
        )
        digest = f"sha256:{self._hash.hexdigest()}"
        if digest != self._descriptor.digest:
            await asyncio.to_thread(self._restart)
            raise WrongContent(f"{self._client.host} sent {digest} instead of {self._descriptor.digest}")

    def _read_present(self) -> None:
        self._file.seek(0)
        while chunk := self._file.read(CHUNK_BYTES):
            self._hash.update(chunk)
            self._size += len(chunk)
        if self._size > self._descriptor.size:
            self._restart()
        self._on_bytes(self._size)

    def _restart(self) -> None:
        self._on_bytes(-self._size)
        self._file.seek(0)
        self._file.truncate()
        self._hash, self._size = hashlib.sha256(), 0

    async def _attempt(self, seconds: float) -> None:
        """Fetch what is missing. A connection that broke after a good part is replaced without a pause."""
        deadline = Deadline(seconds)
        while True:
            start = self._size
            try:
                return await self._fetch_rest(deadline.seconds_left)
            except RegistryUnavailable:
                if self._size - start < CHUNK_BYTES:
                    raise

    async def _fetch_rest(self, seconds: float) -> None:
        if self._size == self._descriptor.size:
            return
        start = self._size
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            async with (
                asyncio.timeout(seconds),
                self._client.get(self._repository, f"blobs/{self._descriptor.digest}", headers) as response,
            ):
                if start and not _continues(response, start):
                    await asyncio.to_thread(self._restart)
                    start = 0
                await self._receive(response)
        except TimeoutError as error:
            raise RegistryUnavailable(f"{self._client.host} is too slow") from error
        except RegistryUnavailable as error:
            error.has_progressed = self._size > start
            raise
        if self._size < self._descriptor.size:
            raise RegistryUnavailable(
                f"{self._client.host} sent {self._size} of {self._descriptor.size} bytes",
                has_progressed=self._size > start,
            )

    async def _receive(self, response: aiohttp.ClientResponse) -> None:
        pending = bytearray()
        try:
            async for chunk in response.content.iter_any():
                pending += chunk
                if self._size + len(pending) > self._descriptor.size:
                    pending.clear()
                    raise WrongContent(
                        f"{self._client.host} sends more than the {self._descriptor.size} bytes of a layer"
                    )
                if len(pending) >= CHUNK_BYTES:
                    content, pending = pending, bytearray()
                    await self._write(content)
        finally:
            # Also if the connection broke: each attempt gets further than the one before.
            await self._write(pending)

    async def _write(self, content: bytearray) -> None:
        await asyncio.to_thread(self._write_blocking, content)
        self._on_bytes(len(content))

    def _write_blocking(self, content: bytearray) -> None:
        try:
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise ImageError(f"a layer cannot be stored: {error.strerror}", hint="free space on the disk") from error
        self._hash.update(content)
        self._size += len(content)


def _continues(response: aiohttp.ClientResponse, start: int) -> bool:
    """Whether an answer begins where we asked it to. Servers may ignore a range."""
    return response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
