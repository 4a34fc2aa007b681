"""Runs `layer_jobs` in processes of their own, as root of a user namespace (`sandbox.user_namespace`).

Files of a layer can belong to any user of the image, so an ordinary user can write, read and remove them only there.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time
from typing import IO, TYPE_CHECKING, Any, TypeVar

from paddock.errors import ImageError, SandboxError
from paddock.sandbox.images.layer_unpack import UnpackResult
from paddock.sandbox.user_namespace import Identity, start_in_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paddock.sandbox.images.layer_stream import UnpackLimits

ResultT = TypeVar("ResultT")
CANCEL_POLL_SECONDS = 0.1
RIGHTS_SECONDS = 60.0

JOBS = "paddock.sandbox.images.layer_jobs"


class LayerWorker:
    """One child process with one job. Leaving the block kills it if it still works."""

    def __init__(
        self,
        function: str,
        arguments: Sequence[str],
        identity: Identity,
        *,
        pass_fds: Sequence[int],
        stdin: int | IO[bytes] = subprocess.DEVNULL,
    ) -> None:
        try:
            self.process = start_in_namespace(
                f"{JOBS}:{function}", arguments, identity, pass_fds=pass_fds, stdin=stdin
            )
        except SandboxError as error:
            raise ImageError(f"layers cannot be worked on: {error}", hint=error.hint or "paddock doctor") from error

    def __enter__(self) -> LayerWorker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def result(self, timeout: float, cancelled: threading.Event | None = None) -> dict[str, Any]:
        """The answer. Raises ImageError with the child's error, or if there is no answer in time."""
        ends_at = time.monotonic() + timeout
        while True:
            try:
                output, errors = self.process.communicate(timeout=CANCEL_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if cancelled is not None and cancelled.is_set():
                    raise ImageError("working on a layer was cancelled") from None
                if time.monotonic() > ends_at:
                    raise ImageError(
                        f"a layer was not finished within {timeout:g} s", hint="the disk may be slow"
                    ) from None
        try:
            answer: dict[str, Any] = json.loads(output)
        except ValueError:
            last_line = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
            reason = last_line or f"exit code {self.process.returncode}"
            raise ImageError(f"the program that works on layers ended: {reason}", hint="paddock doctor") from None
        if "error" in answer:
            raise ImageError(answer["error"], hint=answer["hint"])
        return answer


def call_worker(
    function: str,
    arguments: Sequence[str],
    identity: Identity,
    *,
    pass_fds: Sequence[int],
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    timeout: float,
    cancelled: threading.Event | None = None,
) -> dict[str, Any]:
    """Run a function of `layer_jobs` to its end. Blocks."""
    with LayerWorker(function, arguments, identity, pass_fds=pass_fds, stdin=stdin) as worker:
        return worker.result(timeout, cancelled)


async def run_cancellable(work: Callable[[threading.Event], ResultT]) -> ResultT:
    """Run blocking work in a thread. If the caller is cancelled, set the event and wait until the work ends."""
    cancelled = threading.Event()
    task = asyncio.ensure_future(asyncio.to_thread(work, cancelled))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancelled.set()
        await asyncio.wait([task])
        # Read, so that asyncio does not report it as never retrieved.
        task.exception()
        raise


def unpack_in_namespace(
    archive: int | IO[bytes],
    folder: int,
    identity: Identity,
    limits: UnpackLimits,
    *,
    timeout: float,
    cancelled: threading.Event | None = None,
) -> UnpackResult:
    """Unpack `archive`, a file or a pipe, into the open `folder`. Blocks. Raises ImageError."""
    arguments = [str(folder), *(str(limit) for limit in limit_values(limits)), str(id_count(identity))]
    answer = call_worker(
        "unpack", arguments, identity, pass_fds=[folder], stdin=archive, timeout=timeout, cancelled=cancelled
    )
    return UnpackResult(**answer)


def set_rights(folder: Path, identity: Identity, mode: int, uid: int, gid: int) -> None:
    """Give a folder of the store an owner and a mode. Owners have no effect where there is only one id. Blocks."""
    if identity.kind == "single":
        uid = gid = 0
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        words = [str(number) for number in (descriptor, mode, uid, gid)]
        call_worker("set_rights", words, identity, pass_fds=[descriptor], timeout=RIGHTS_SECONDS)
    finally:
        os.close(descriptor)


def limit_values(limits: UnpackLimits) -> tuple[int, int, int, int]:
    return limits.max_bytes, limits.max_entries, limits.max_ratio, limits.ratio_from_bytes


def id_count(identity: Identity) -> int:
    """How many ids an image can use. 0: everything belongs to one."""
    return 0 if identity.kind == "single" else identity.uids[-1].inside + identity.uids[-1].count
