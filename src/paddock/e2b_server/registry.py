"""The sandboxes of a server: created, ended when their time is over. Each is recorded before it exists."""

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

from paddock.e2b_server.served_sandbox import ServedSandbox
from paddock.errors import CapacityReached, RequestError, SandboxError
from paddock.limits import MEBIBYTE, SandboxLimits
from paddock.rollouts.sandboxes import owned_sandbox
from paddock.sandbox import find_backend
from paddock.sandbox.base import TESTS, Mount, SandboxSpec
from paddock.sandbox.bundle import remote_program
from paddock.sandbox.e2b import LIMITS_METADATA
from paddock.sandbox.nested_guest import start_nested_guest
from paddock.shielded import run_shielded
from paddock.store import SandboxEntry

if TYPE_CHECKING:
    from paddock.sandbox.images.image import Image
    from paddock.store import Store

logger = logging.getLogger("paddock.e2b")

HOST_TEMPLATES = ("base", "code-interpreter-v1")
"""E2B's own names. Sandboxes have the programs of this machine. Every other template is the name of an image."""
GUEST_MODULE = "e2b_server.guest_requests"
OPEN_SECONDS = 30.0
DEFAULT_LIFE_SECONDS = 300
LONGEST_LIFE_SECONDS = 24 * 3600
DEFAULT_LIMITS = SandboxLimits(cpu_seconds=24 * 3600.0, processes=2048)
HEADROOM_FACTOR = 1.25
"""Our own client also watches memory and processor time, and reports which of them was exceeded: it must be first."""


class SandboxRegistry:
    """All sandboxes of one server."""

    def __init__(
        self, store: Store, *, backend: str, consent: bool, most: int, limits: SandboxLimits | None = None
    ) -> None:
        self.backend, self.most = backend, most
        self.limits = limits or DEFAULT_LIMITS
        self._store, self._consent = store, consent
        self._sandboxes: dict[str, ServedSandbox] = {}
        self._stacks: dict[str, AsyncExitStack] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._opening = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="paddock-e2b-"))
        self._folder.chmod(0o755)
        store.record_sandbox(SandboxEntry(self._folder.name, "front", paths=[str(self._folder)]))

    def find(self, sandbox_id: str | None) -> ServedSandbox | None:
        served = self._sandboxes.get(sandbox_id or "")
        return served if served is not None and served.alive else None

    def all(self) -> list[ServedSandbox]:
        return sorted(
            (served for served in self._sandboxes.values() if served.alive), key=lambda served: served.started_at
        )

    async def create(
        self, *, template: str, seconds: int | None, metadata: dict[str, str], envs: dict[str, str]
    ) -> ServedSandbox:
        """A new sandbox, ready to be used. Raises CapacityReached, SandboxError, ImageError for a template that is no
        image, or RequestError for bad limits."""
        limits = requested_limits(metadata, self.limits)
        if len(self._sandboxes) + self._opening >= self.most:
            raise CapacityReached(f"{self.most} sandboxes run already", hint="kill some, or raise --max-sandboxes")
        self._opening += 1
        stack = AsyncExitStack()
        try:
            image = await self.find_image(template)
            tests: Path | None = None
            if image is None:
                tests = self._folder / secrets.token_hex(8)
                tests.mkdir(mode=0o755)
                stack.callback(shutil.rmtree, tests, ignore_errors=True)
            spec = SandboxSpec(limits, mounts=(Mount(tests, TESTS),) if tests is not None else (), image=image)
            sandbox = await stack.enter_async_context(
                owned_sandbox(
                    self._store, self.backend, spec, rollout_id=None, consent=self._consent, timeout=OPEN_SECONDS
                )
            )
            transport = await start_nested_guest(sandbox, remote_program(GUEST_MODULE), timeout=OPEN_SECONDS)
            served = ServedSandbox(
                sandbox,
                transport,
                tests_folder=tests,
                image=image,
                template=template,
                metadata=metadata,
                envs=envs,
            )
            stack.push_async_callback(served.close)
            await served.begin()
        except BaseException:
            await run_shielded(stack.aclose())
            raise
        finally:
            self._opening -= 1
        self._sandboxes[served.id], self._stacks[served.id] = served, stack
        self.prolong(served, seconds if seconds is not None else DEFAULT_LIFE_SECONDS)
        self._run_in_background(self._forget_ended(served))
        return served

    async def find_image(self, template: str) -> Image | None:
        """The image that a template stands for; None for those that have the programs of this machine.

        Raises ImageError if there is none, SandboxError if the backend of this server opens no images."""
        if template in HOST_TEMPLATES:
            return None
        return await find_backend(self.backend).image_provider().get(template)

    async def _forget_ended(self, served: ServedSandbox) -> None:
        """Remove a sandbox that ends by itself, because it exceeded a limit."""
        await served.has_ended.wait()
        await self.kill(served.id)

    def prolong(self, served: ServedSandbox, seconds: int, *, only_longer: bool = False) -> None:
        """Set the end of a sandbox to `seconds` from now. `only_longer`: unless it ends later already."""
        if not 0 <= seconds <= LONGEST_LIFE_SECONDS:
            raise RequestError(f"a timeout of {seconds} s is not between 0 and {LONGEST_LIFE_SECONDS}")
        until = time.time() + seconds
        if only_longer and until <= served.end_at:
            return
        served.end_at = until
        if (timer := self._timers.pop(served.id, None)) is not None:
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._timers[served.id] = loop.call_later(seconds, lambda: self._run_in_background(self._expire(served.id)))

    async def _expire(self, sandbox_id: str) -> None:
        logger.info("sandbox %s has reached its timeout", sandbox_id)
        await self.kill(sandbox_id)

    def _run_in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def kill(self, sandbox_id: str) -> bool:
        """Whether there was one to kill; it is gone when this returns."""
        served = self._sandboxes.pop(sandbox_id, None)
        stack = self._stacks.pop(sandbox_id, None)
        timer = self._timers.pop(sandbox_id, None)
        if timer is not None:
            timer.cancel()
        if served is None or stack is None:
            return False
        served.alive = False
        try:
            await run_shielded(stack.aclose())
        except SandboxError as error:
            logger.warning("sandbox %s: %s", sandbox_id, error.message)
        return True

    async def close(self) -> None:
        """End all sandboxes."""
        await asyncio.gather(*(self.kill(sandbox_id) for sandbox_id in list(self._sandboxes)))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._store.end_sandbox(self._folder.name)


def requested_limits(metadata: dict[str, str], most: SandboxLimits) -> SandboxLimits:
    """The limits of the server, lowered to those that our own client asks for."""
    if LIMITS_METADATA not in metadata:
        return most
    try:
        requested = {str(name): float(value) for name, value in orjson.loads(metadata[LIMITS_METADATA]).items()}
    except (ValueError, AttributeError, TypeError):
        raise RequestError(f"the metadata {LIMITS_METADATA} is not a JSON object of numbers") from None
    room = 256 * MEBIBYTE
    changes: dict[str, Any] = {}
    with contextlib.suppress(KeyError):
        changes["memory_bytes"] = min(most.memory_bytes, int(requested["memory_bytes"] * HEADROOM_FACTOR) + room)
    with contextlib.suppress(KeyError):
        changes["cpu_seconds"] = min(most.cpu_seconds, requested["cpu_seconds"] * HEADROOM_FACTOR + 5)
    for name, extra in (("processes", 0), ("disk_bytes", 0)):
        if name in requested:
            changes[name] = min(getattr(most, name), int(requested[name]) + extra)
    if requested.get("cpus"):
        changes["cpus"] = int(requested["cpus"])
    return replace(most, **changes)
