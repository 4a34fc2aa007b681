"""The guests of a front: made, kept until their time is over, ended. Each is in the ledger from before it exists."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from paddock.errors import CapacityReached, RequestError, SandboxError
from paddock.rollouts.e2b.guest import Guest
from paddock.rollouts.ledger import owned_sandbox
from paddock.rollouts.limits import MEBIBYTE, SandboxLimits
from paddock.rollouts.sandbox.base import TESTS, Mount, SandboxSpec
from paddock.rollouts.sandbox.bundle import program
from paddock.rollouts.sandbox.inside import call_from
from paddock.rollouts.store import SandboxEntry
from paddock.rollouts.unhurried import unhurried

if TYPE_CHECKING:
    from paddock.rollouts.store import Store

logger = logging.getLogger("paddock.e2b")

INNER = "rollouts.e2b.inner"
OPEN_TIMEOUT = 30.0
DEFAULT_SECONDS = 300
MOST_SECONDS = 24 * 3600
MOST = SandboxLimits(cpu_seconds=24 * 3600.0, processes=2048)
"""What a guest may use unless the front says otherwise."""
LIMITS = "paddock-limits"
"""The key of a guest's metadata under which our own client asks for limits. E2B itself has none to ask for."""
HEADROOM = 1.25
"""Our own client watches memory and processor time itself, and tells which of them was used up: it comes first."""


class Guests:
    """All sandboxes of one front."""

    def __init__(
        self, store: Store, *, backend: str, consent: bool, most: int, limits: SandboxLimits | None = None
    ) -> None:
        self.backend, self.most = backend, most
        self.limits = limits or MOST
        self._store, self._consent = store, consent
        self._guests: dict[str, Guest] = {}
        self._stacks: dict[str, AsyncExitStack] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._making = 0
        self._endings: set[asyncio.Task[None]] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="paddock-e2b-"))
        self._folder.chmod(0o755)
        store.note_sandbox(SandboxEntry(self._folder.name, "front", paths=[str(self._folder)]))

    def find(self, guest_id: str | None) -> Guest | None:
        guest = self._guests.get(guest_id or "")
        return guest if guest is not None and guest.alive else None

    def all(self) -> list[Guest]:
        return sorted((guest for guest in self._guests.values() if guest.alive), key=lambda guest: guest.started_at)

    async def create(
        self, *, template: str, seconds: int | None, metadata: dict[str, str], envs: dict[str, str]
    ) -> Guest:
        """A new guest, ready to be used. Raises CapacityReached, SandboxError, or RequestError for bad limits."""
        limits = asked_limits(metadata, self.limits)
        if len(self._guests) + self._making >= self.most:
            raise CapacityReached(f"{self.most} sandboxes run already", hint="kill some, or raise --max-sandboxes")
        self._making += 1
        stack = AsyncExitStack()
        try:
            staged = self._folder / secrets.token_hex(8)
            staged.mkdir(mode=0o755)
            stack.callback(shutil.rmtree, staged, ignore_errors=True)
            spec = SandboxSpec(limits, mounts=(Mount(staged, TESTS),))
            sandbox = await stack.enter_async_context(
                owned_sandbox(
                    self._store, self.backend, spec, rollout_id=None, consent=self._consent, timeout=OPEN_TIMEOUT
                )
            )
            guest = Guest(sandbox, template=template, metadata=metadata, envs=envs)
            guest.staged = staged
            stack.push_async_callback(guest.close)
            await guest.begin(await call_from(sandbox, program(INNER), timeout=OPEN_TIMEOUT))
        except BaseException:
            await unhurried(stack.aclose())
            raise
        finally:
            self._making -= 1
        self._guests[guest.id], self._stacks[guest.id] = guest, stack
        self.keep(guest, seconds if seconds is not None else DEFAULT_SECONDS)
        self._later(self._follow(guest))
        return guest

    async def _follow(self, guest: Guest) -> None:
        """A guest whose sandbox ends by itself (it used too much) is forgotten."""
        await guest.gone.wait()
        await self.kill(guest.id)

    def keep(self, guest: Guest, seconds: int, *, only_longer: bool = False) -> None:
        """Let it live so many seconds from now on."""
        if not 0 <= seconds <= MOST_SECONDS:
            raise RequestError(f"a timeout of {seconds} s is not between 0 and {MOST_SECONDS}")
        until = time.time() + seconds
        if only_longer and until <= guest.end_at:
            return
        guest.end_at = until
        if (before := self._timers.pop(guest.id, None)) is not None:
            before.cancel()
        loop = asyncio.get_running_loop()
        self._timers[guest.id] = loop.call_later(seconds, lambda: self._later(self._expire(guest.id)))

    async def _expire(self, guest_id: str) -> None:
        logger.info("sandbox %s has reached its timeout", guest_id)
        await self.kill(guest_id)

    def _later(self, work: Any) -> None:
        ending = asyncio.ensure_future(work)
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def kill(self, guest_id: str) -> bool:
        """Whether there was one to kill; it is gone when this returns."""
        guest = self._guests.pop(guest_id, None)
        stack = self._stacks.pop(guest_id, None)
        timer = self._timers.pop(guest_id, None)
        if timer is not None:
            timer.cancel()
        if guest is None or stack is None:
            return False
        guest.alive = False
        try:
            await unhurried(stack.aclose())
        except SandboxError as error:
            logger.warning("sandbox %s: %s", guest_id, error.message)
        return True

    async def close(self) -> None:
        """End all guests."""
        await asyncio.gather(*(self.kill(guest_id) for guest_id in list(self._guests)))
        for ending in list(self._endings):
            ending.cancel()
        await asyncio.gather(*self._endings, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._store.end_sandbox(self._folder.name)


def asked_limits(metadata: dict[str, str], most: SandboxLimits) -> SandboxLimits:
    """The limits of the front, lowered to those that our own client asks for."""
    if LIMITS not in metadata:
        return most
    try:
        asked = {str(name): float(value) for name, value in orjson.loads(metadata[LIMITS]).items()}
    except (ValueError, AttributeError, TypeError):
        raise RequestError(f"the metadata {LIMITS} is not a JSON object of numbers") from None
    room = 256 * MEBIBYTE
    changes: dict[str, Any] = {}
    with contextlib.suppress(KeyError):
        changes["memory_bytes"] = min(most.memory_bytes, int(asked["memory_bytes"] * HEADROOM) + room)
    with contextlib.suppress(KeyError):
        changes["cpu_seconds"] = min(most.cpu_seconds, asked["cpu_seconds"] * HEADROOM + 5)
    for name, extra in (("processes", 0), ("disk_bytes", 0)):
        if name in asked:
            changes[name] = min(getattr(most, name), int(asked[name]) + extra)
    if asked.get("cpus"):
        changes["cpus"] = int(asked["cpus"])
    return replace(most, **changes)
