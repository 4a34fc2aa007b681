"""Requests that E2B's clients need, added to the guest: files by path, uploads, downloads, and watched folders.

Other than in `paddock.sandbox.guest.files`, links are followed: this guest has no more rights than the commands
beside it. Runs inside the sandbox, from source text, with the standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import struct

from paddock.sandbox.guest.main import main as run_guest
from paddock.sandbox.guest.multiplexer import DEFERRED, GuestError, GuestStream
from paddock.sandbox.guest.usage import resident_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from paddock.sandbox.guest.main import Guest
    from paddock.sandbox.guest.multiplexer import Request

IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 2, 4, 8, 64, 128, 256, 512
IN_ONLYDIR, IN_ISDIR, IN_IGNORED = 0x01000000, 0x40000000, 0x8000
WATCHED_EVENTS = IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE
EVENT_KINDS = (
    (IN_CREATE | IN_MOVED_TO, "CREATE"),
    (IN_MODIFY, "WRITE"),
    (IN_DELETE, "REMOVE"),
    (IN_MOVED_FROM, "RENAME"),
    (IN_ATTRIB, "CHMOD"),
)
INOTIFY_EVENT = struct.Struct("iIII")
ATTRIBUTE_PREFIX = "user.e2b."
MOST_ENTRIES = 100_000


class E2bRequests:
    """Registers its handlers with a guest."""

    def __init__(self, guest: Guest) -> None:
        self._guest, self._multiplexer = guest, guest.multiplexer
        self._watches: dict[str, FolderWatch] = {}
        guest.multiplexer.handlers |= {
            "stat": self.stat,
            "entries": self.list_entries,
            "make_dir": self.make_dir,
            "move": self.move,
            "remove": self.remove,
            "open": self.open,
            "create": self.create,
            "metrics": self.report_metrics,
            "watch": self.watch,
            "unwatch": self.unwatch,
        }

    # -- entries --------------------------------------------------------------------------------------

    def stat(self, request: Request, path: str) -> Any:
        return describe_entry(self._absolute(path))

    def list_entries(self, request: Request, path: str, depth: int) -> Any:
        place = self._absolute(path)
        if not os.path.isdir(place):
            os.stat(place)
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory", path)
        entries: list[dict[str, Any]] = []
        collect_entries(place, depth, entries)
        return entries

    def make_dir(self, request: Request, path: str) -> Any:
        place = self._absolute(path)
        if os.path.isdir(place):
            raise FileExistsError(errno.EEXIST, "directory already exists", path)
        os.makedirs(place)
        return describe_entry(place)

    def move(self, request: Request, source: str, destination: str) -> Any:
        place = self._absolute(destination)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.rename(self._absolute(source), place)
        return describe_entry(place)

    def remove(self, request: Request, path: str) -> Any:
        place = self._absolute(path)
        if os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place)
        elif os.path.lexists(place):
            os.unlink(place)

    def open(self, request: Request, path: str, into: int) -> Any:
        """Send a file as a stream. Returns its current size."""
        descriptor = os.open(self._absolute(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            kind = "is a directory" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
            raise IsADirectoryError(errno.EISDIR, kind, path)
        self._multiplexer.streams[into] = GuestStream(into, source=descriptor)
        return {"size": status.st_size}

    def create(self, request: Request, path: str, content: int, metadata: dict[str, str]) -> Any:
        """Answered when the stream `content` has been written to its end."""
        place = self._absolute(path)
        if os.path.isdir(place):
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
        stream = GuestStream(content, sink=os.open(place, flags, 0o644))
        self._multiplexer.streams[content] = stream

        def answer(failure: OSError | None) -> None:
            if failure is None:
                try:
                    for name, value in metadata.items():
                        os.setxattr(place, ATTRIBUTE_PREFIX + name.lower(), value.encode())
                except OSError as error:
                    failure = error
            if failure is not None:
                request.fail(failure)
            else:
                request.answer(describe_entry(place))

        stream.on_written = answer
        return DEFERRED

    def _absolute(self, path: str) -> str:
        """An absolute path. Relative paths, and those that begin with `~`, are below the home."""
        if "\0" in path:
            raise GuestError("a path cannot hold a zero byte")
        if path == "~" or path.startswith("~/"):
            path = self._guest.home + path[1:]
        return os.path.normpath(os.path.join(self._guest.home, path))

    def report_metrics(self, request: Request) -> Any:
        used = self._guest.report_usage(request)
        disk = os.statvfs(self._guest.home)
        return {
            "cpu_seconds": used["cpu_seconds"],
            "memory_bytes": sum(map(resident_memory, self._guest.usage.pids())),
            "disk_used": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            "disk_total": disk.f_blocks * disk.f_frsize,
        }

    # -- watching -------------------------------------------------------------------------------------

    def watch(self, request: Request, watch: str, path: str, recursive: bool, entries: bool) -> Any:
        place = self._absolute(path)
        if not os.path.isdir(place):
            os.stat(place)
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory", path)
        started = self._watches[watch] = FolderWatch(self._guest.libc, place, recursive)
        self._multiplexer.readers[started.descriptor] = lambda: self._report_changes(watch, started, entries)

    def unwatch(self, request: Request, watch: str) -> Any:
        stopped = self._watches.pop(watch, None)
        if stopped is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such watcher", watch)
        del self._multiplexer.readers[stopped.descriptor]
        os.close(stopped.descriptor)

    def _report_changes(self, watch: str, started: FolderWatch, entries: bool) -> None:
        for name, kind in started.read_events():
            entry = None
            if entries and kind not in ("REMOVE", "RENAME"):
                try:
                    entry = describe_entry(os.path.join(started.folder, name))
                except OSError:
                    entry = None
            self._multiplexer.send_event("changed", watch, name, kind, entry)


class FolderWatch:
    """Changes in a folder, read with inotify."""

    def __init__(self, libc: ctypes.CDLL, folder: str, recursive: bool) -> None:
        self._libc, self.folder, self._recursive = libc, folder, recursive
        self.descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._folders: dict[int, str] = {}
        self._add("")

    def _add(self, below: str) -> None:
        path = os.path.join(self.folder, below) if below else self.folder
        number = self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), WATCHED_EVENTS | IN_ONLYDIR)
        if number < 0:
            if not below:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
            return
        self._folders[number] = below
        if self._recursive:
            for item in os.scandir(path):
                if item.is_dir(follow_symlinks=False):
                    self._add(os.path.join(below, item.name))

    def read_events(self) -> list[tuple[str, str]]:
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return []
        events, start = [], 0
        while start < len(data):
            number, mask, _, length = INOTIFY_EVENT.unpack_from(data, start)
            start += INOTIFY_EVENT.size + length
            if mask & IN_IGNORED:
                self._folders.pop(number, None)
                continue
            name = os.fsdecode(data[start - length : start].rstrip(b"\0"))
            path = os.path.join(self._folders.get(number, ""), name)
            events += [(path, kind) for bits, kind in EVENT_KINDS if mask & bits]
            if self._recursive and mask & IN_ISDIR and mask & (IN_CREATE | IN_MOVED_TO):
                self._add(path)
        return events


def collect_entries(folder: str, depth: int, entries: list[dict[str, Any]]) -> None:
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        try:
            entry = describe_entry(path)
        except FileNotFoundError:
            continue
        if len(entries) >= MOST_ENTRIES:
            raise GuestError(f"there are more than {MOST_ENTRIES} entries below it")
        entries.append(entry)
        if depth > 1 and entry["type"] == "directory" and entry["target"] is None:
            collect_entries(path, depth - 1, entries)


def describe_entry(path: str) -> dict[str, Any]:
    """The status of a path. A link has a target, and the type of what it leads to."""
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
        names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(ATTRIBUTE_PREFIX)]
        return {name[len(ATTRIBUTE_PREFIX) :]: os.getxattr(path, name).decode("utf-8", "replace") for name in names}
    except OSError:
        return {}


def kind_of(mode: int) -> str:
    return {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}.get(stat.S_IFMT(mode), "other")


def main() -> None:
    run_guest(E2bRequests)
