"""What runs inside a guest: the steward, and files as E2B's clients see them.

Other than for the host's own reads, links are followed here: this has no more rights than what runs beside it.
Like the steward it runs from source text, with the standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import struct

from paddock.errors import SandboxError
from paddock.rollouts.sandbox.steward import Steward
from paddock.rollouts.sandbox.steward import main as run
from paddock.rollouts.sandbox.supervisor import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, libc
from paddock.rollouts.sandbox.switchboard import Later, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 2, 4, 8, 64, 128, 256, 512
IN_ONLYDIR, IN_ISDIR, IN_IGNORED = 0x01000000, 0x40000000, 0x8000
WANTED = IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE
KINDS = (
    (IN_CREATE | IN_MOVED_TO, "CREATE"),
    (IN_MODIFY, "WRITE"),
    (IN_DELETE, "REMOVE"),
    (IN_MOVED_FROM, "RENAME"),
    (IN_ATTRIB, "CHMOD"),
)
NOTICE = struct.Struct("iIII")
MARK = "user.e2b."
MOST_ENTRIES = 100_000


class Inner(Steward):
    def __init__(self, incoming: int, outgoing: int, *, text: bool) -> None:
        super().__init__(incoming, outgoing, text=text)
        self.watches: dict[str, Watch] = {}

    def do_prepare(self, number: int, home: str, folders: list[str]) -> Any:
        """Without limits of its own: those of the sandbox around it hold."""
        self.home, self.alone = home, False
        self.settings = {"memory_bytes": 1 << 62, "cpu_seconds": 1e12, "processes": 1 << 30}
        os.umask(0o022)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
        os.chdir(home)
        return {"pid": os.getpid()}

    def ready(self) -> None:
        self.user, self.filter = None, b""
        super().ready()

    # -- entries --------------------------------------------------------------------------------------

    def do_stat(self, number: int, path: str) -> Any:
        return entry(self.placed(path))

    def do_entries(self, number: int, path: str, depth: int) -> Any:
        place = self.placed(path)
        if not os.path.isdir(place):
            os.stat(place)
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory", path)
        found: list[dict[str, Any]] = []
        collect(place, depth, found)
        return found

    def do_make_dir(self, number: int, path: str) -> Any:
        place = self.placed(path)
        if os.path.isdir(place):
            raise FileExistsError(errno.EEXIST, "directory already exists", path)
        os.makedirs(place)
        return entry(place)

    def do_move(self, number: int, source: str, destination: str) -> Any:
        place = self.placed(destination)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.rename(self.placed(source), place)
        return entry(place)

    def do_remove(self, number: int, path: str) -> Any:
        place = self.placed(path)
        if os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place)
        elif os.path.lexists(place):
            os.unlink(place)

    def do_open(self, number: int, path: str, into: int) -> Any:
        """Send a file as a stream. Answers with how long it is now."""
        descriptor = os.open(self.placed(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            kind = "is a directory" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
            raise IsADirectoryError(errno.EISDIR, kind, path)
        self.streams[into] = Stream(into, source=descriptor)
        return {"size": status.st_size}

    def do_create(self, number: int, path: str, content: int, metadata: dict[str, str]) -> Any:
        """Answered when the stream `content` has been written to its end."""
        place = self.placed(path)
        if os.path.isdir(place):
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
        stream = Stream(content, sink=os.open(place, flags, 0o644))
        self.streams[content] = stream

        def finished(failure: OSError | None) -> None:
            if failure is None:
                try:
                    for name, value in metadata.items():
                        os.setxattr(place, MARK + name.lower(), value.encode())
                except OSError as error:
                    failure = error
            if failure is not None:
                self.fail(number, failure)
            else:
                self.write({"number": number, "answer": entry(place)})

        stream.finished = finished
        return Later

    def placed(self, path: str) -> str:
        """Relative paths, and those that begin with `~`, are below the home."""
        if "\0" in path:
            raise SandboxError("a path cannot hold a zero byte")
        if path == "~" or path.startswith("~/"):
            path = self.home + path[1:]
        return os.path.normpath(os.path.join(self.home, path))

    def do_metrics(self, number: int) -> Any:
        used = self.do_usage(number)
        disk = os.statvfs(self.home)
        return {
            "cpu_seconds": used["cpu_seconds"],
            "memory_bytes": sum(resident(pid) for pid in self.pids()),
            "disk_used": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            "disk_total": disk.f_blocks * disk.f_frsize,
        }

    # -- watching -------------------------------------------------------------------------------------

    def do_watch(self, number: int, watch: str, path: str, recursive: bool, entries: bool) -> Any:
        place = self.placed(path)
        if not os.path.isdir(place):
            os.stat(place)
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory", path)
        made = self.watches[watch] = Watch(place, recursive)
        self.watched[made.descriptor] = lambda: self.noticed(watch, made, entries)

    def do_unwatch(self, number: int, watch: str) -> Any:
        found = self.watches.pop(watch, None)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such watcher", watch)
        del self.watched[found.descriptor]
        os.close(found.descriptor)

    def noticed(self, watch: str, made: Watch, entries: bool) -> None:
        for name, kind in made.events():
            about = None
            if entries and kind not in ("REMOVE", "RENAME"):
                try:
                    about = entry(os.path.join(made.place, name))
                except OSError:
                    about = None
            self.write({"event": ["changed", watch, name, kind, about]})


class Watch:
    """Changes in a folder, as the kernel tells them."""

    def __init__(self, place: str, recursive: bool) -> None:
        self.place, self.recursive = place, recursive
        self.descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.folders: dict[int, str] = {}
        self.add("")

    def add(self, below: str) -> None:
        path = os.path.join(self.place, below) if below else self.place
        number = libc.inotify_add_watch(self.descriptor, os.fsencode(path), WANTED | IN_ONLYDIR)
        if number < 0:
            if not below:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
            return
        self.folders[number] = below
        if self.recursive:
            for item in os.scandir(path):
                if item.is_dir(follow_symlinks=False):
                    self.add(os.path.join(below, item.name))

    def events(self) -> list[tuple[str, str]]:
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return []
        found, start = [], 0
        while start < len(data):
            number, mask, _, length = NOTICE.unpack_from(data, start)
            start += NOTICE.size + length
            if mask & IN_IGNORED:
                self.folders.pop(number, None)
                continue
            name = os.fsdecode(data[start - length : start].rstrip(b"\0"))
            path = os.path.join(self.folders.get(number, ""), name)
            found += [(path, kind) for bits, kind in KINDS if mask & bits]
            if self.recursive and mask & IN_ISDIR and mask & (IN_CREATE | IN_MOVED_TO):
                self.add(path)
        return found


def collect(place: str, depth: int, found: list[dict[str, Any]]) -> None:
    for name in sorted(os.listdir(place)):
        path = os.path.join(place, name)
        try:
            about = entry(path)
        except FileNotFoundError:
            continue
        if len(found) >= MOST_ENTRIES:
            raise SandboxError(f"there are more than {MOST_ENTRIES} entries below it")
        found.append(about)
        if depth > 1 and about["type"] == "directory" and about["target"] is None:
            collect(path, depth - 1, found)


def entry(path: str) -> dict[str, Any]:
    """What there is to say about a path. A link is told by its target; its kind is that of what it leads to."""
    status = os.lstat(path)
    target = None
    kind = kind_of(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        target = os.path.realpath(path)
        try:
            kind = kind_of(os.stat(path).st_mode)
        except OSError:
            kind = "symlink"
    return {
        "path": path,
        "type": kind,
        "size": status.st_size,
        "mode": stat.S_IMODE(status.st_mode),
        "permissions": stat.filemode(status.st_mode),
        "modified": status.st_mtime_ns,
        "target": target,
        "metadata": metadata_of(path),
    }


def metadata_of(path: str) -> dict[str, str]:
    try:
        names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(MARK)]
        return {name[len(MARK) :]: os.getxattr(path, name).decode("utf-8", "replace") for name in names}
    except OSError:
        return {}


def kind_of(mode: int) -> str:
    return {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}.get(stat.S_IFMT(mode), "other")


def resident(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def main() -> None:
    run(Inner)
