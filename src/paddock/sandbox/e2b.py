"""Sandboxes at E2B, or at any server that speaks its API (`paddock e2b up` is one), through E2B's own SDK.

A sandbox there cannot reach this machine, and this machine needs no address: the guest runs inside as a background
command, and everything, the model's port included, goes over that command's input and output.

Where the template has a root user (E2B's have), the guest runs as root and everything else as the user, who cannot
become root again. Where there is none, both are the same user, and an agent that kills the guest only loses its own
sandbox.

Read from the environment: what E2B's SDK reads (`E2B_API_KEY`, `E2B_DOMAIN`, …), and `PADDOCK_E2B_TEMPLATE`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import shlex
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from paddock.config import PADDOCK_E2B_TEMPLATE
from paddock.distribution import install_command
from paddock.errors import SandboxError
from paddock.sandbox.base import TESTS
from paddock.sandbox.bundle import remote_program
from paddock.sandbox.guest.files import inner_parts
from paddock.sandbox.remote import MOUNTS_FOLDER, RemoteSandbox, pack_mounts

if TYPE_CHECKING:
    from paddock.sandbox.base import Mount, SandboxSpec
    from paddock.sandbox.connection import GuestConnection
    from paddock.sandbox.guest_sandbox import GuestSandbox
    from paddock.sandbox.images.provider import ImageProvider
    from paddock.sandbox.transports import ByteChannel

logger = logging.getLogger(__name__)

TEMPLATE = "base"
TIMEOUT_SECONDS = 600
"""E2B ends a sandbox after this time unless it is renewed, so one whose owner died does not stay."""
RENEW_SECONDS = 120.0
ID_METADATA = "paddock-sandbox"
LIMITS_METADATA = "paddock-limits"
"""The metadata with which we ask our own server (`e2b_server`) for limits. E2B's API has no parameter for them."""
LIMIT_NAMES = ("memory_bytes", "cpu_seconds", "processes", "disk_bytes", "cpus")
"""Limits that our own server enforces. E2B enforces those of the template."""
ARCHIVE = "/tmp/.paddock-mounts"
LONGEST_INPUT_BYTES = 1 << 20
CLEAN_UP_SECONDS = 60.0
INSTALL_HINT = install_command("e2b")


def sdk() -> Any:
    """E2B's package. Raises SandboxError if it is not installed."""
    try:
        import e2b
    except ModuleNotFoundError as error:
        raise SandboxError("the e2b backend needs E2B's SDK", hint=INSTALL_HINT, fails_for_all=True) from error
    return e2b


class E2bSandbox(RemoteSandbox):
    backend = "e2b"
    supports_images = True

    _remote: Any = None
    _renewing: asyncio.Task[None] | None = None
    _root = False
    _is_requested = False
    """Whether a sandbox was requested: it may have been created even if no answer arrived."""

    @classmethod
    def class_for(cls, spec: SandboxSpec) -> type[GuestSandbox]:
        if spec.image is None:
            return cls
        from paddock.sandbox.e2b_image import ImageE2bSandbox

        return ImageE2bSandbox

    @classmethod
    def image_provider(cls) -> ImageProvider:
        from paddock.sandbox.e2b_image import TemplateImages

        return TemplateImages()

    @property
    def template(self) -> str:
        return PADDOCK_E2B_TEMPLATE.read() or TEMPLATE

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """What is uploaded."""
        return self.spec.mounts

    async def prepare_guest(self) -> str:
        """The Python inside with which the guest starts."""
        return "python3"

    async def connect(self) -> ByteChannel:
        e2b = sdk()
        limits = {name: value for name in LIMIT_NAMES if (value := getattr(self.spec.limits, name)) is not None}
        self._is_requested = True
        try:
            self._remote = await e2b.AsyncSandbox.create(
                self.template,
                timeout=TIMEOUT_SECONDS,
                metadata={ID_METADATA: self.id, LIMITS_METADATA: orjson.dumps(limits).decode()},
                allow_internet_access=False,
            )
            self._renewing = asyncio.ensure_future(self._renew())
            self._root = await self._has_root(e2b)
            return await self._start_guest(await self.prepare_guest())
        except Exception as error:
            raise to_sandbox_error(e2b, error) from error

    async def _has_root(self, e2b: Any) -> bool:
        try:
            await self._remote.commands.run("true", user="root")
        except (e2b.InvalidArgumentException, e2b.AuthenticationException, e2b.CommandExitException):
            return False
        return True

    async def _start_guest(self, python: str) -> E2bCommandChannel:
        channel = E2bCommandChannel(self._remote)
        argv = ["exec", python, "-I", "-S", "-c", remote_program(), "text"]
        await channel.start(shlex.join(argv), user="root" if self._root else None)
        return channel

    async def upload_content(self, connection: GuestConnection) -> None:
        e2b = sdk()
        try:
            for name, content in self.spec.readonly_tests.items():
                parts = inner_parts(name)
                mode = "755" if parts[-1] == "test.sh" else "644"
                path = str(TESTS.joinpath(*parts))
                # As root, so that nothing inside can change them. Our own server accepts that without a root user.
                metadata = None if self._root else {"paddock-mode": mode}
                await self._remote.files.write(path, content, user="root", metadata=metadata)
                if self._root:
                    await self._remote.commands.run(f"chmod {mode} {shlex.quote(path)}", user="root")
            if self.mounts:
                await self._upload_mounts()
        except Exception as error:
            raise to_sandbox_error(e2b, error) from error
        if self.mounts:
            targets = [str(mount.target) for mount in self.mounts]
            arguments = {"archive": ARCHIVE, "targets": targets, "fallback": str(MOUNTS_FOLDER)}
            self.localize_mounts(targets, await connection.ask("place_mounts", arguments, timeout=None))

    async def _upload_mounts(self) -> None:
        # Where the server is near, compressing takes longer than it saves.
        compress = not self._remote.envd_api_url.startswith("http:")
        owner = "root" if self._root else None
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(pack_mounts, self.mounts, file, compress=compress)
            await self._remote.files.write(ARCHIVE, file, user=owner, request_timeout=0)

    async def _renew(self) -> None:
        """Extend the timeout of the sandbox regularly, as long as the owner runs."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._remote.set_timeout(TIMEOUT_SECONDS)
            except Exception as error:
                logger.warning("sandbox %s could not be prolonged: %s", self.id, error)

    async def destroy(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        remote, self._remote = self._remote, None
        is_requested, self._is_requested = self._is_requested, False
        if remote is not None:
            try:
                await remote.kill()
            except Exception as error:
                raise to_sandbox_error(sdk(), error) from error
        elif is_requested:
            await kill_by_metadata(self.id)

    @classmethod
    def end_orphan(cls, sandbox_id: str) -> bool:
        asyncio.run(asyncio.wait_for(kill_by_metadata(sandbox_id), CLEAN_UP_SECONDS))
        return True


async def kill_by_metadata(sandbox_id: str) -> None:
    """Kill every sandbox whose metadata names this id."""
    e2b = sdk()
    try:
        pages = e2b.AsyncSandbox.list(query=e2b.SandboxQuery(metadata={ID_METADATA: sandbox_id}))
        while pages.has_next:
            for sandbox in await pages.next_items():
                await e2b.AsyncSandbox.kill(sandbox.sandbox_id)
    except Exception as error:
        raise to_sandbox_error(e2b, error) from error


def to_sandbox_error(e2b: Any, error: Exception) -> Exception:
    """An error of the SDK as SandboxError; any other as it is."""
    if isinstance(error, e2b.AuthenticationException):
        return SandboxError(f"E2B refuses: {error}", hint="set E2B_API_KEY", fails_for_all=True)
    if isinstance(error, e2b.SandboxException) or type(error).__module__.startswith(("e2b", "httpx", "connectrpc")):
        return SandboxError(f"E2B: {type(error).__name__}: {error}")
    return error


class E2bCommandChannel:
    """The input and output of a command at E2B. The SDK reads output as text, so frames arrive as base64."""

    def __init__(self, remote: Any) -> None:
        self._remote = remote
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._partial_line = ""
        self._stderr: list[str] = []
        self._handle: Any = None
        self._waiting: asyncio.Task[None] | None = None

    async def start(self, command: str, *, user: str | None) -> None:
        self._handle = await self._remote.commands.run(
            command,
            background=True,
            stdin=True,
            user=user,
            timeout=0,
            on_stdout=self._receive_text,
            on_stderr=self._stderr.append,
            retain_output=False,
        )
        self._waiting = asyncio.ensure_future(self._wait_for_end())

    def _receive_text(self, text: str) -> None:
        *lines, self._partial_line = (self._partial_line + text).split("\n")
        with suppress(binascii.Error):
            for line in lines:
                self._received.put_nowait(base64.b64decode(line))

    async def _wait_for_end(self) -> None:
        try:
            await self._handle.wait()
        except Exception as error:
            stderr = "".join(self._stderr)[-500:].strip()
            logger.debug("the guest at E2B ended: %s %s", error, stderr)
        finally:
            self._received.put_nowait(b"")

    async def receive(self) -> bytes:
        return await self._received.get()

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), LONGEST_INPUT_BYTES):
            try:
                await self._remote.commands.send_stdin(self._handle.pid, data[start : start + LONGEST_INPUT_BYTES])
            except Exception as error:
                raise SandboxError(f"E2B: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._waiting is not None:
            with suppress(Exception):
                await self._handle.disconnect()
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
