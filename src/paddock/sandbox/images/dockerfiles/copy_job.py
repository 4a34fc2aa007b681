"""Runs `layer_copy` in its process, feeds it the files, and ends it if the build is cancelled."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paddock.errors import ImageError
from paddock.sandbox.images.dockerfiles.layer_copy import detached_mount
from paddock.sandbox.user_namespace import Identity, start_in_namespace

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import IO

    from paddock.sandbox.images.dockerfiles.layer_copy import CopyRequest

FUNCTION = "paddock.sandbox.images.dockerfiles.layer_copy:run_copy"
UNUSED = -1


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """The folder of the store, and in it the layers below and the folder of the new layer."""

    folder: Path
    layers: Sequence[Path]
    staged: Path
    identity: Identity


class CopyJob:
    """One copy into a staged layer."""

    def __init__(
        self,
        target: CopyTarget,
        request: CopyRequest,
        *,
        source_layers: Sequence[Path] | None = None,
        write_files: Callable[[IO[bytes]], None] | None = None,
    ) -> None:
        self._target = target
        self._request = request
        self._source_layers = source_layers
        self._write_files = write_files
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cancelled = threading.Event()

    async def run(self, timeout: float) -> None:
        """Raises ImageError. A cancellation kills the process and is raised when it is gone."""
        task = asyncio.ensure_future(asyncio.to_thread(self._run, timeout))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            self._is_cancelled.set()
            while not task.done():
                if self._process is not None:
                    self._process.kill()
                await asyncio.wait([task], timeout=0.05)
            with suppress(ImageError):
                task.result()
            raise

    def _run(self, timeout: float) -> None:
        target = self._target
        with ExitStack() as stack:
            store_mount = None
            if os.geteuid() == 0:
                store_mount = detached_mount(str(target.folder))
                stack.callback(os.close, store_mount)
            request = replace(
                self._request,
                store_folder=str(target.folder),
                store_mount=store_mount,
                layers=self._below_store(target.layers),
                upper=self._below_store([target.staged])[0],
                work=self._below_store([self._make_work_folder()])[0],
                source_layers=None if self._source_layers is None else self._below_store(self._source_layers),
                fakes_owners=target.identity.kind == "single",
            )
            self._execute(request, [] if store_mount is None else [store_mount], timeout)

    def _below_store(self, paths: Sequence[Path]) -> tuple[str, ...]:
        return tuple(str(path.relative_to(self._target.folder)) for path in paths)

    def _make_work_folder(self) -> Path:
        """The folder that an overlay needs beside its upper one. The store removes it."""
        work = self._target.staged.parent / "work"
        work.mkdir(exist_ok=True)
        if os.geteuid() == 0:
            identity = self._target.identity
            os.chown(work, identity.host_uid(0) or 0, identity.host_gid(0) or 0)
        return work

    def _execute(self, request: CopyRequest, folders: list[int], timeout: float) -> None:
        reading, writing = os.pipe()
        try:
            process = self._process = start_in_namespace(
                FUNCTION, [request.to_json()], self._target.identity, pass_fds=folders, stdin=reading
            )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError), os.fdopen(writing, "wb") as output:
                if self._write_files is not None and not self._is_cancelled.is_set():
                    self._write_files(output)
            output_text, errors = process.communicate()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()
                process.communicate()
        self._check_answer(output_text, errors, process.returncode)

    def _check_answer(self, output: bytes, errors: bytes, exit_code: int) -> None:
        try:
            answer = json.loads(output)
        except ValueError:
            words = errors.decode("utf-8", "replace").strip().splitlines()
            reason = words[-1] if words else f"exit code {exit_code}"
            raise ImageError(f"the files could not be copied: {reason}", hint="paddock doctor") from None
        if "error" in answer:
            raise ImageError(answer["error"], hint=answer["hint"])
