"""What every sandbox can do. A backend is one file; `paddock.testing.sandbox` checks it.

Inside, the home is `/home/user` and the work folder `/home/user/workdir`. A backend that cannot
put them there (the process fallback) says where they are, and `localize` rewrites text to match.
"""

from __future__ import annotations

import signal
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Mapping, Sequence

    from paddock.rollouts.limits import SandboxLimits
    from paddock.rollouts.sandbox.callers import CallerFinder

HOME = PurePosixPath("/home/user")
WORKDIR = HOME / "workdir"
LOGS = PurePosixPath("/logs")
TESTS = PurePosixPath("/tests")


def host_folder(sandbox_id: str) -> Path:
    """Where the sandbox with this id keeps what it needs on the host, if it needs anything there.

    It is known before the sandbox is made, so that a ledger can name it first.
    """
    return Path(tempfile.gettempdir()).resolve() / f"paddock-{sandbox_id}"


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the host, seen read-only inside."""

    source: Path
    target: PurePosixPath


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended. A command that fails is a result, not an exception."""

    exit_code: int | None
    """The exit status, 128 + N after signal N, None if the command was ended by us."""
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    """Some output was dropped to keep to `SandboxLimits.output_bytes`."""
    killed_for: str | None = None
    """`memory`, `cpu`, `processes` or `disk` when the sandbox was ended for using too much of it."""
    tampered: str | None = None
    """Why the guarded files cannot be trusted, if so: see `Command.guarded`."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. A plain string runs in `sh -c`."""

    argv: Sequence[str] | str
    cwd: PurePosixPath = WORKDIR
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    last: bool = False
    """Whether everything else inside ends with it, in the same instant."""
    guarded: tuple[PurePosixPath, ...] = ()
    """Files in which the `last` command says its result, in a sandbox with tests. Its end is examined: whether it
    left something running or stopped, and whether anybody replaced or locked the files or their folder."""

    @property
    def words(self) -> list[str]:
        return ["/bin/sh", "-c", self.argv] if isinstance(self.argv, str) else list(self.argv)


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder or link below a listed folder."""

    path: str
    """Relative to the listed folder."""
    kind: str
    """`file`, `folder`, `link` or `other`."""
    size: int
    mode: int


class Job(ABC):
    """A command running in the background."""

    pid: int
    """As seen inside the sandbox."""

    @abstractmethod
    def lines(self) -> AsyncIterator[bytes]:
        """Each line of standard output as it comes, without its newline; ends with the output."""

    @abstractmethod
    async def wait(self, timeout: float | None = None) -> Completed:
        """How it ended. At the timeout it is killed and reported with `timed_out`."""

    @abstractmethod
    async def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal it and all that it started in its process group."""

    @abstractmethod
    def tail(self, count: int = 4096) -> str:
        """The last `count` bytes of both outputs so far, as text."""


class Sandbox(ABC):
    """One closed place. Use it as an async context manager: it is gone when the block ends.

    Raises SandboxError when the sandbox itself fails or is already dead.
    """

    backend: ClassVar[str]
    isolates: ClassVar[bool]
    """Whether the host and its network are out of reach. A backend without it runs only with consent."""

    id: str
    host_pid: int | None
    """The process on the host whose end is the end of the sandbox, for the ledger."""

    @property
    def home(self) -> PurePosixPath:
        return HOME

    @property
    def workdir(self) -> PurePosixPath:
        return self.home / "workdir"

    def localize(self, text: str) -> str:
        """`text` with the standard paths replaced by where they are in this backend."""
        return text

    async def exec(self, command: Command, *, timeout: float) -> Completed:
        """Run to the end, or to the timeout."""
        job = await self.start(command)
        return await job.wait(timeout)

    @abstractmethod
    async def start(self, command: Command) -> Job: ...

    @abstractmethod
    async def write(self, path: str | PurePosixPath, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file below the home or the logs, with its folders. No symlink on the way is followed."""

    @abstractmethod
    async def read(self, path: str | PurePosixPath, *, limit: int = 64 * 1024 * 1024) -> bytes:
        """Raises FileNotFoundError, or SandboxError for a link, a special file or one above `limit`.
        Also works after `kill`, until `close`."""

    @abstractmethod
    async def list(self, path: str | PurePosixPath, *, limit: int = 100_000) -> list[Entry]:
        """Everything below a folder, links not followed. Also works after `kill`, until `close`."""

    @abstractmethod
    async def pack(self, path: str | PurePosixPath, *, limit: int) -> bytes:
        """A folder as a tar archive (files, folders and links as links; owners, times and special files
        left out; names sorted, so that equal folders give equal bytes). Also works after `kill`."""

    @abstractmethod
    async def unpack(self, path: str | PurePosixPath, archive: bytes) -> None:
        """The reverse of `pack`, below `path`. Refuses members that lead outside."""

    @abstractmethod
    async def expose(self, port: int) -> tuple[socket.socket, int]:
        """A listening socket that processes inside reach at 127.0.0.1 and the returned port.
        It is the port asked for wherever the sandbox has a network of its own."""

    async def caller_finder(self) -> CallerFinder | None:
        """Tells which processes inside hold a connection to an exposed port; None where the backend cannot.
        It is closed with the sandbox."""
        return None

    @abstractmethod
    async def dial(self, port: int, *, timeout: float = 10.0) -> socket.socket:
        """A non-blocking socket connected to 127.0.0.1:`port` inside."""

    @abstractmethod
    async def kill(self) -> None:
        """End every process inside and wait until they are gone. Its files stay readable."""

    @abstractmethod
    async def close(self) -> None:
        """Kill, and give everything back."""

    @abstractmethod
    def usage(self) -> dict[str, Any]:
        """`cpu_seconds`, `peak_memory_bytes` and `killed_for`, as far as known."""

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is made of."""

    limits: SandboxLimits
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    readonly_tests: Mapping[str, bytes] = field(default_factory=dict)
    """Files seen read-only below `/tests`, for the verifier."""
