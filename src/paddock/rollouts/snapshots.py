"""Snapshots of the work folder of one rollout: one when each model call begins, and one at the end of each step.

The agent waits for its answer meanwhile, so the folder is read while the model is asked, and the answer is held back
until it was read. Calls that begin while it is read share the scan that follows. Whatever goes wrong is recorded as
the reason why there is no snapshot, and never ends the rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from paddock.errors import PaddockError, SandboxError
from paddock.rollouts.folder_changes import readable_path
from paddock.sandbox.folder_scan import FolderScan, ScanOptions, scan_folder
from paddock.store.packing import decode, encode
from paddock.store.snapshots import CallSnapshot, encode_changes

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.capture.trace import Call
    from paddock.limits import SnapshotLimits
    from paddock.rollouts.recorder import RolloutRecorder
    from paddock.sandbox.base import Sandbox
    from paddock.sandbox.folder_scan import FileState

logger = logging.getLogger("paddock.rollout")

READ_SECONDS = 4.0
"""How long the answer to a call is held back at most, shorter than what `Capture.stop` waits for a call."""
NAMED_PATHS = 50
"""The most paths that the record names of those that were left out."""
SECRET = "it contains a secret of the run"


class WorkFolderSnapshots:
    """`begin` takes a snapshot, `wait_saved` waits for it, and `finish` takes the one at the end of a step."""

    def __init__(
        self, find_sandbox: Callable[[], Sandbox | None], recorder: RolloutRecorder, limits: SnapshotLimits
    ) -> None:
        """`find_sandbox` gives the sandbox of the current step."""
        self._find_sandbox = find_sandbox
        self._recorder = recorder
        self._limits = limits
        self._reading: asyncio.Future[FolderScan] | None = None
        """The thread that reads the folder, even if nobody waits for it any more."""
        self._turn = asyncio.Lock()
        """Held while the folder is read."""
        self._next_scan: asyncio.Future[FolderScan] | None = None
        """The scan that has not begun yet, for all calls that begin before it does."""
        self._saving: asyncio.Future[None] | None = None
        """The latest of the snapshots that are being stored, one after the other."""
        self._of_call: dict[str, asyncio.Future[None]] = {}
        """The snapshots of the calls that are not stored yet."""
        self._last_scan = FolderScan()
        self._stored: dict[str, FileState] = {}
        """The folder as the stored snapshots have it."""
        self._latest: str | None = None
        """The call, or the step, of the last stored snapshot."""
        self._unstored: dict[str, bytes] = {}
        """Contents that could not be stored: the next snapshot needs them too."""
        self._digests: set[str] = set()
        """Digests of the contents that are stored."""
        self._bytes = 0
        self._saved = 0
        self._seconds = 0.0
        self._left_out: dict[str, str] = {}
        self._problems: Counter[str] = Counter()
        self._ends: dict[str, dict[str, Any]] = {}

    def begin(self, call: Call) -> asyncio.Future[None]:
        """Take the snapshot of a call that begins. The future is done when the folder was read, and never fails."""
        if self._next_scan is None:
            self._next_scan = asyncio.ensure_future(self._scan_in_turn())
        scan = self._next_scan
        self._of_call[call.id] = asyncio.ensure_future(self._save_call(call, scan))
        return asyncio.ensure_future(_wait_quietly(scan))

    async def wait_saved(self, call: Call) -> None:
        """Wait until a call has its snapshot, or the reason why it has none."""
        if (saving := self._of_call.pop(call.id, None)) is not None:
            await asyncio.wait([saving])

    async def finish(self, step: str = "") -> None:
        """The snapshot of what the last call of a step changed."""
        name = f"end of {step}" if step else "end"
        snapshot = await self._save(name, asyncio.ensure_future(self._scan_in_turn()))
        self._ends[name] = snapshot.to_json()

    def to_json(self) -> dict[str, Any]:
        """What the record of the rollout has about them."""
        named = sorted(self._left_out.items())[:NAMED_PATHS]
        return {
            "saved": self._saved,
            "bytes": self._bytes,
            "seconds": round(self._seconds, 4),
            "left_out": self._recorder.mask.value({readable_path(path): reason for path, reason in named}),
            "problems": dict(self._problems),
            "ends": dict(self._ends),
        }

    # -- one snapshot -------------------------------------------------------------------------------

    async def _save_call(self, call: Call, scan: asyncio.Future[FolderScan]) -> None:
        call.snapshot = (await self._save(call.id, scan)).to_json()

    async def _save(self, name: str, scan: asyncio.Future[FolderScan]) -> CallSnapshot:
        """Store the difference to the snapshot before, once that one is stored."""
        before, done = self._saving, asyncio.get_running_loop().create_future()
        self._saving = done
        try:
            result = await asyncio.shield(scan)
            if before is not None:
                await asyncio.shield(before)
            return await self._store_changes(name, result)
        except (PaddockError, OSError) as error:
            problem = self._recorder.mask.text(str(error))
        except Exception as error:
            logger.exception("the snapshot at %s of %s failed", name, self._recorder.record.rollout_id)
            problem = f"{type(error).__name__}: {error}"
        finally:
            done.set_result(None)
        self._problems[problem] += 1
        return CallSnapshot(problem=problem)

    async def _store_changes(self, name: str, scan: FolderScan) -> CallSnapshot:
        states = {path: entry.state for path, entry in scan.entries.items()}
        changes: dict[str, FileState | None] = {
            path: state for path, state in states.items() if is_other(self._stored.get(path), state)
        }
        changes |= dict.fromkeys(self._stored.keys() - states.keys())
        digest = None
        if changes:
            encoded = self._encode(changes)
            digest = hashlib.sha256(encoded).hexdigest()
            self._unstored |= scan.contents
            contents, store = {**self._unstored, digest: encoded}, self._recorder.store
            await store.run(store.put_snapshot, self._recorder.record.rollout_id, contents)
            self._digests.update(self._unstored)
            self._bytes += sum(map(len, self._unstored.values()))
            self._unstored = {}
            scan.contents.clear()
        since, self._latest, self._stored = self._latest, name, states
        self._left_out.update(scan.left_out)
        unread = ((path, state.reason) for path, state in changes.items() if state is not None and state.reason)
        self._left_out.update((path, reason or "") for path, reason in unread)
        self._saved += 1
        return CallSnapshot(since, digest, len(changes))

    def _encode(self, changes: dict[str, FileState | None]) -> bytes:
        encoded = encode_changes(changes)
        return encode(self._recorder.mask.value(decode(encoded))) if self._recorder.mask.is_in(encoded) else encoded

    async def _scan_in_turn(self) -> FolderScan:
        async with self._turn:
            self._next_scan = None
            return await self._read_folder()

    async def _read_folder(self) -> FolderScan:
        """Raises SandboxError if the folder cannot be read in time."""
        if self._reading is not None and not self._reading.done():
            raise SandboxError("the snapshot before is still being read")
        sandbox = self._find_sandbox()
        if sandbox is None:
            raise SandboxError("there is no work folder")
        options = ScanOptions(
            file_bytes=self._limits.file_bytes,
            total_bytes=self._limits.total_bytes - self._bytes,
            stored=self._digests,
            refuse=self._find_secret,
        )
        work = partial(scan_folder, earlier=self._last_scan, options=options)
        reading = self._reading = asyncio.ensure_future(sandbox.with_folder(sandbox.workdir, work))
        # Nobody may be left to see how a thread that took too long ended.
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        began = time.monotonic()
        try:
            async with asyncio.timeout(READ_SECONDS):
                scan = await asyncio.shield(reading)
        except TimeoutError:
            raise SandboxError(f"the work folder was not read within {READ_SECONDS:g} s") from None
        finally:
            self._seconds += time.monotonic() - began
        self._last_scan = scan
        return scan

    def _find_secret(self, content: bytes) -> str | None:
        return SECRET if self._recorder.mask.is_in(content) else None


def is_other(stored: FileState | None, state: FileState) -> bool:
    """Whether an entry has changed. An unchanged one is mostly the same object, because scans take it over."""
    return stored is not state and stored != state


async def _wait_quietly(scan: asyncio.Future[FolderScan]) -> None:
    """Wait until a scan has ended, however it did."""
    await asyncio.wait([scan])
