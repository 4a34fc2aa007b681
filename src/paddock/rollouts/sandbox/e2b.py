"""Sandboxes at E2B, or at any server that speaks its API (`paddock e2b up` is one), through E2B's own SDK.

A sandbox there cannot reach this machine, and this machine needs no address: the steward runs inside as a
background command, and everything, the model's port included, goes over that command's input and output.

Where the template has a root user (E2B's have), the steward runs as root and everything else as the user, without
a way to become root again. Where there is none, both are the same user, and an agent that kills the steward only
loses its own sandbox.

Read from the environment: what E2B's SDK reads (`E2B_API_KEY`, `E2B_DOMAIN`, …), and `PADDOCK_E2B_TEMPLATE`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import shlex
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from paddock.distribution import install_command
from paddock.errors import SandboxError
from paddock.rollouts.sandbox.base import HOME, TESTS
from paddock.rollouts.sandbox.bundle import program
from paddock.rollouts.sandbox.files import inner_parts
from paddock.rollouts.sandbox.remote import RemoteSandbox, pack_mounts

if TYPE_CHECKING:
    from paddock.rollouts.sandbox.channel import Channel, Line

logger = logging.getLogger(__name__)

TEMPLATE = "base"
KEPT_SECONDS = 600
"""A sandbox whose owner dies ends by itself after so long: this is renewed all the time."""
RENEW_SECONDS = 120.0
MARK = "paddock-sandbox"
LIMITS = "paddock-limits"
ASKED = ("memory_bytes", "cpu_seconds", "processes", "disk_bytes", "cpus")
"""Limits that our own server keeps. E2B's are those of the template."""
ARCHIVE = "/tmp/.paddock-mounts"
LONGEST_INPUT = 1 << 20
CLEAN_UP_SECONDS = 60.0
EXTRA = install_command("e2b")


def sdk() -> Any:
    """E2B's package. Raises SandboxError if it is not installed."""
    try:
        import e2b
    except ModuleNotFoundError as error:
        raise SandboxError("the e2b backend needs E2B's SDK", hint=EXTRA, keeps_all_out=True) from error
    return e2b


class E2bSandbox(RemoteSandbox):
    backend = "e2b"

    _remote: Any = None
    _renewing: asyncio.Task[None] | None = None
    _root = False
    _asked = False
    """Whether a sandbox was asked for: one may have been made even if no answer came."""

    async def connect(self) -> Line:
        e2b = sdk()
        asked = {name: value for name in ASKED if (value := getattr(self.spec.limits, name)) is not None}
        self._asked = True
        try:
            self._remote = await e2b.AsyncSandbox.create(
                os.environ.get("PADDOCK_E2B_TEMPLATE") or TEMPLATE,
                timeout=KEPT_SECONDS,
                metadata={MARK: self.id, LIMITS: orjson.dumps(asked).decode()},
                allow_internet_access=False,
            )
            self._renewing = asyncio.ensure_future(self._renew())
            self._root = await self._has_root(e2b)
            return await self._start_steward()
        except Exception as error:
            raise told(e2b, error) from error

    async def _has_root(self, e2b: Any) -> bool:
        try:
            await self._remote.commands.run("true", user="root")
        except (e2b.InvalidArgumentException, e2b.AuthenticationException, e2b.CommandExitException):
            return False
        return True

    async def _start_steward(self) -> CommandLine:
        line = CommandLine(self._remote)
        words = ["exec", "python3", "-I", "-S", "-c", program(), "text"]
        await line.start(shlex.join(words), user="root" if self._root else None)
        return line

    async def furnish(self, channel: Channel) -> None:
        e2b = sdk()
        try:
            for name, content in self.spec.readonly_tests.items():
                parts = inner_parts(name)
                mode = "755" if parts[-1] == "test.sh" else "644"
                path = str(TESTS.joinpath(*parts))
                # As root, and so that nothing inside can change them. Our own server does without a root user.
                marks = None if self._root else {"paddock-mode": mode}
                await self._remote.files.write(path, content, user="root", metadata=marks)
                if self._root:
                    await self._remote.commands.run(f"chmod {mode} {shlex.quote(path)}", user="root")
            if self.spec.mounts:
                await self._bring_mounts()
        except Exception as error:
            raise told(e2b, error) from error
        if self.spec.mounts:
            targets = [str(mount.target) for mount in self.spec.mounts]
            arguments = {"archive": ARCHIVE, "targets": targets, "otherwise": str(HOME / ".paddock-mounts")}
            self.localize_mounts(await channel.ask("lay_out", arguments, timeout=None))

    async def _bring_mounts(self) -> None:
        # Packing small takes longer than sending more does where the server is near.
        small = not self._remote.envd_api_url.startswith("http:")
        owner = "root" if self._root else None
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(pack_mounts, self.spec.mounts, file, small=small)
            await self._remote.files.write(ARCHIVE, file, user=owner, request_timeout=0)

    async def _renew(self) -> None:
        """Keep it as long as we are there."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._remote.set_timeout(KEPT_SECONDS)
            except Exception as error:
                logger.warning("sandbox %s could not be kept longer: %s", self.id, error)

    async def destroy(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        remote, self._remote = self._remote, None
        asked, self._asked = self._asked, False
        if remote is not None:
            try:
                await remote.kill()
            except Exception as error:
                raise told(sdk(), error) from error
        elif asked:
            await end_marked(self.id)

    @classmethod
    def end_leftover(cls, sandbox_id: str) -> bool:
        asyncio.run(asyncio.wait_for(end_marked(sandbox_id), CLEAN_UP_SECONDS))
        return True


async def end_marked(sandbox_id: str) -> None:
    """Kill every sandbox that bears this mark."""
    e2b = sdk()
    try:
        pages = e2b.AsyncSandbox.list(query=e2b.SandboxQuery(metadata={MARK: sandbox_id}))
        while pages.has_next:
            for found in await pages.next_items():
                await e2b.AsyncSandbox.kill(found.sandbox_id)
    except Exception as error:
        raise told(e2b, error) from error


def told(e2b: Any, error: Exception) -> Exception:
    """An error of the SDK as one of ours; anything else as it is."""
    if isinstance(error, e2b.AuthenticationException):
        return SandboxError(f"E2B refuses: {error}", hint="set E2B_API_KEY", keeps_all_out=True)
    if isinstance(error, e2b.SandboxException) or type(error).__module__.startswith(("e2b", "httpx", "connectrpc")):
        return SandboxError(f"E2B: {type(error).__name__}: {error}")
    return error


class CommandLine:
    """A line over the input and output of a command at E2B. The SDK reads output as text: frames come as base64."""

    def __init__(self, remote: Any) -> None:
        self._remote = remote
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self._rest = ""
        self._said: list[str] = []
        self._handle: Any = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, command: str, *, user: str | None) -> None:
        self._handle = await self._remote.commands.run(
            command,
            background=True,
            stdin=True,
            user=user,
            timeout=0,
            on_stdout=self._heard,
            on_stderr=self._said.append,
            retain_output=False,
        )
        self._watching = asyncio.ensure_future(self._watch())

    def _heard(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        with suppress(binascii.Error):
            for line in lines:
                self._arrived.put_nowait(base64.b64decode(line))

    async def _watch(self) -> None:
        try:
            await self._handle.wait()
        except Exception as error:
            said = "".join(self._said)[-500:].strip()
            logger.debug("the steward at E2B ended: %s %s", error, said)
        finally:
            self._arrived.put_nowait(b"")

    async def receive(self) -> bytes:
        return await self._arrived.get()

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), LONGEST_INPUT):
            try:
                await self._remote.commands.send_stdin(self._handle.pid, data[start : start + LONGEST_INPUT])
            except Exception as error:
                raise SandboxError(f"E2B: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._watching is not None:
            with suppress(Exception):
                await self._handle.disconnect()
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
