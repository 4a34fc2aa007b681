"""The interface of every sandbox. A backend is one file; `paddock.testing.sandbox` checks it.

Inside, the home is `/home/user` and the work folder `/home/user/workdir`. A backend that cannot put them there (the
process fallback) has them elsewhere, and `localize` rewrites texts to match.
"""

from __future__ import annotations

import re
import signal
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from paddock.errors import SandboxError
from paddock.sandbox.guest.entry import HOME, Entry
from paddock.sandbox.network.policy import NO_NETWORK, NetworkPolicy

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from paddock.limits import SandboxLimits
    from paddock.sandbox.images.image import Image
    from paddock.sandbox.network.connections import ConnectionRecord
    from paddock.sandbox.socket_owners import SocketOwnerFinder

ResultT = TypeVar("ResultT")

WORKDIR = HOME / "workdir"
USER_PROGRAMS = HOME / ".local" / "bin"
"""Where pip puts programs for a user who is not root. Without an image, it is the last folder of the agent's PATH."""
LOGS = PurePosixPath("/logs")
TESTS = PurePosixPath("/tests")


def host_folder(sandbox_id: str) -> Path:
    """The folder on the host for the files of the sandbox with this id, if it needs any.

    The path depends on the id only, so it can be stored before the sandbox exists.
    """
    return Path(tempfile.gettempdir()).resolve() / f"paddock-{sandbox_id}"


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the host, mounted read-only inside."""

    source: Path
    target: PurePosixPath
    programs: tuple[str, ...] = ()
    """Files in it that need libraries of the host. In a sandbox on an image, copies that bring them replace these."""
    writable: bool = False
    """Mounted for writing instead. bwrap sandboxes on an image only."""


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
    """Whether all other processes inside are killed when it ends."""
    guarded: tuple[PurePosixPath, ...] = ()
    """The files in which the `last` command writes its result, in a sandbox with tests. When it ends, the guest
    checks whether processes are left, and whether the files or their folder were replaced or locked. Then
    `Completed.tampered` has the reason."""

    user: str = ""
    """Who runs it in a sandbox on an image: `NAME`, `UID`, `NAME:GROUP` or `UID:GID`. Empty: the image's user."""

    @property
    def words(self) -> list[str]:
        """The program and its arguments; a text runs in a shell."""
        return ["/bin/sh", "-c", self.argv] if isinstance(self.argv, str) else list(self.argv)


class Job(ABC):
    """A command running in the background."""

    pid: int
    """As seen inside the sandbox."""
    output_bytes: int
    """How much it has written to both outputs so far, what was dropped included."""

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
    """An isolated place for commands and files. Use it as an async context manager: leaving the block removes it.

    Methods raise SandboxError if the sandbox itself fails or has ended.
    """

    backend: ClassVar[str]
    isolates: ClassVar[bool]
    """Whether it isolates the host and its network from the commands. A backend that does not needs consent."""
    supports_images: ClassVar[bool] = False
    """Whether its root can be an image (`SandboxSpec.image`)."""
    supports_dockerfiles: ClassVar[bool] = False
    """Whether it can build that image from a Dockerfile."""
    supports_layers: ClassVar[bool] = False
    """Whether a sandbox can be opened on the files of another one that has ended (`SandboxSpec.extra_layers`).
    A backend with images that cannot has `end_processes`."""

    supports_snapshots: ClassVar[bool] = False
    """Whether its files can be looked at often while commands run (`with_folder`)."""

    id: str
    host_pid: int | None
    """The process on the host with which the sandbox ends. It is stored, so that recovery can kill it."""

    runtime_python: str | None = None
    """The interpreter inside that comes from the host, on an image. None: the programs of the host are inside."""

    @property
    def home(self) -> PurePosixPath:
        """The home folder of commands."""
        return HOME

    @property
    def workdir(self) -> PurePosixPath:
        """The work folder, where commands start by default."""
        return self.home / "workdir"

    def localize(self, text: str) -> str:
        """`text` with the standard paths replaced by where they are in this backend."""
        return text

    async def exec(self, command: Command, *, timeout: float) -> Completed:
        """Run to the end, or to the timeout."""
        job = await self.start(command)
        return await job.wait(timeout)

    @abstractmethod
    async def start(self, command: Command) -> Job:
        """Start a command and return at once. Raises SandboxError if the sandbox is gone."""

    def set_user(self, user: str) -> None:
        """Who runs those commands from now on that do not name a user. On an image only."""
        raise SandboxError("a user can only be chosen in a sandbox on an image", hint="leave it out")

    def check_user(self, user: str) -> None:
        """Raises SandboxError if commands cannot run as this user, who is not root."""
        raise SandboxError("a user can only be chosen in a sandbox on an image", hint="leave it out")

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

    async def with_folder(self, path: str | PurePosixPath, work: Callable[[int], ResultT]) -> ResultT:
        """What `work` returns for a descriptor of the folder. It is called on a thread, with the rights of the owner
        of the files. Also works after `kill`, until `close`."""
        raise SandboxError(f"the files of a {self.backend} sandbox are not on this machine", hint="use pack")

    @abstractmethod
    async def pack(self, path: str | PurePosixPath, *, limit: int, exclude: Sequence[str] = ()) -> bytes:
        """A folder as a tar archive (files, folders and links as links; owners, times and special files
        left out; names sorted, so that equal folders give equal bytes). Also works after `kill`.

        A file gives an archive whose only member is `.`. `exclude` has shell patterns of what is left out, as in
        `tar --exclude`. Raises FileNotFoundError, or SandboxError; its `data` has `limit` for an archive above it."""

    @abstractmethod
    async def unpack(self, path: str | PurePosixPath, archive: bytes) -> None:
        """The reverse of `pack`, below `path`. Refuses members that lead outside."""

    @abstractmethod
    async def expose(self, port: int) -> tuple[socket.socket, int]:
        """A listening socket that processes inside reach at 127.0.0.1 and the returned port.
        It is the port asked for wherever the sandbox has a network of its own."""

    @abstractmethod
    async def set_network(self, policy: NetworkPolicy, *, phase: str = "") -> None:
        """What programs inside may connect to from now on. Connections under another policy are cut.

        `phase` is for the records: build, setup, agent or verifier. Certificates of this machine are inside only if
        the sandbox was opened with a network."""

    @property
    @abstractmethod
    def connections(self) -> tuple[ConnectionRecord, ...]:
        """Every connection through the egress proxy so far, and every refused one. Also after `close`."""

    @abstractmethod
    def on_connection(self, report: Callable[[ConnectionRecord], None]) -> None:
        """Call `report` with each connection that ends or is refused from now on."""

    async def socket_owner_finder(self) -> SocketOwnerFinder | None:
        """Finds the processes inside that hold a connection to an exposed port; None where the backend cannot.
        It is closed with the sandbox."""
        return None

    @abstractmethod
    async def dial(self, port: int, *, timeout: float = 10.0) -> socket.socket:
        """A non-blocking socket connected to 127.0.0.1:`port` inside."""

    @abstractmethod
    async def list_processes(self) -> Sequence[str]:
        """The command lines of the processes that run inside."""

    @abstractmethod
    async def kill(self) -> None:
        """End every process inside and wait until they are gone. Its files stay readable."""

    async def end_processes(self) -> None:
        """End every process inside and wait until they are gone. Commands can be started again afterwards."""
        raise SandboxError(f"a {self.backend} sandbox ends with its processes", hint="open another one")

    @abstractmethod
    async def close(self) -> None:
        """Kill, and give everything back."""

    @property
    def limits_enforced(self) -> Mapping[str, str]:
        """How each limit is enforced here: `memory`, `cpus`, `processes` and `disk`."""
        return {}

    @property
    def user_ids(self) -> str:
        """Which user ids of the host the users of the image are, in words. Empty without an image."""
        return ""

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
    image: Image | None = None
    """The root of the sandbox. None: the programs of this host, read-only."""
    writable_layer: Path | None = None
    """A folder on disk that collects what is written to the root of an image. None: memory, given back at the end.
    `FOLDER.work` beside it is used by the kernel as long as the sandbox runs."""
    extra_layers: tuple[Path, ...] = ()
    """More layers on top of the image, lowest first: for example the writable layer of a sandbox that has ended, so
    that another one has its files. They are only read."""
    network: NetworkPolicy = NO_NETWORK
    """Of the first phase. `Sandbox.set_network` changes it."""
    phase: str = ""
    """The name of the first phase, for the records of connections."""


class PathMapping:
    """Rewrites paths in texts to where they are. What lies below `keep` was rewritten before, and stays."""

    def __init__(self, places: Mapping[str, str], *, keep: str) -> None:
        self._places = dict(places)
        names = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True))
        # `keep` comes first and stays: what was rewritten once is not rewritten again.
        self._pattern = re.compile(rf"{re.escape(keep)}|(?<![\w./~-])(?:{names})(?![\w.-])")

    def localize(self, text: str) -> str:
        """Replace the standard paths in a text by those of this machine."""
        if not self._places:
            return text
        return self._pattern.sub(lambda match: self._places.get(match[0], match[0]), text)
