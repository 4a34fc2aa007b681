"""Protections that hold for the tests of a verifier, and for everything that they start, without their cooperation.

The tests run programs of the agent under their own user. So a reward is accepted only if nothing but the tests can
have decided it: the reward folder is a mount point that nobody can rename, nothing in `/proc` can be written, system
calls that reach into another process are refused, no process outlives the tests, and the reward file and its folder
look at the end as a plain write leaves them. What this cannot prevent is what `paddock-run` is for.
"""

from __future__ import annotations

import ctypes
import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CLONE_NEWNS = 0x00020000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
CAP_SETPCAP, CAP_SYS_ADMIN = 8, 21
PR_CAPBSET_DROP = 24
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 22, 38, 47, 4
CAPABILITY_VERSION = 0x20080522
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_WRITE_FILE, LANDLOCK_REFER = 1 << 1, 1 << 13
SETTLE_SECONDS = 1.0
"""A process that ends within this time after the tests, such as a `tee` of their output, is no violation."""
LONGEST_REWARD_BYTES = 1 << 16
HIDDEN_PATHS = (
    *("/tests", "/home/user/tests", "/logs", "/home/user/logs"),
    *("/tmp", "/home/tmp", "/var/tmp", "/dev/shm", "/dev/fd", "/proc"),
)
"""Folders in which tests keep answers, also those that they compute while they run."""
MOST_NAMED_PROCESSES = 5

libc = ctypes.CDLL(None, use_errno=True)


def check_call(result: int, what: str) -> None:
    """Raise the errno of a C function that failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    check_call(libc.mount(*words, ctypes.c_ulong(flags), options.encode()), target)


def protect_mounts(home: str) -> None:
    """Make every folder on the path to the reward a mount point, and `/proc` read-only. Needs CAP_SYS_ADMIN."""
    check_call(libc.unshare(CLONE_NEWNS), "a mount namespace")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    for folder in (home, home + "/logs", home + "/logs/verifier"):
        mount(folder, folder, None, MS_BIND)
    mount("none", "/proc", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def drop_capabilities() -> None:
    """In a new process: it and all that it starts have no capability, and cannot get any."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in (CAP_SYS_ADMIN, CAP_SETPCAP):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    head, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    check_call(libc.capset(head, none), "capset")


def confine(filters: list[bytes]) -> None:
    """In a new process of the tests: no writing to `/proc`, and no system call that a filter refuses."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    forbid_writing_to_proc()
    for program in filters:
        install_filter(program)


def install_filter(program: bytes) -> None:
    """Install a seccomp filter in this process; all that it starts inherits it."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = FilterHeader(len(program) // 8, ctypes.addressof(instructions))
    check_call(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(header), 0, 0), "a seccomp filter")


class FilterHeader(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_void_p))


def forbid_writing_to_proc() -> bool:
    """With Landlock. False if the kernel has none, or one that cannot allow renames between folders (version 1)."""
    if libc.syscall(LANDLOCK_CREATE, None, 0, 1) < 2:
        return False
    access = LANDLOCK_WRITE_FILE | LANDLOCK_REFER
    handled = access.to_bytes(8, "little")
    ruleset = libc.syscall(LANDLOCK_CREATE, handled, len(handled), 0)
    if ruleset < 0:
        return False
    try:
        for name in os.listdir("/"):
            path = "/" + name
            if name == "proc" or os.path.islink(path) or not os.path.isdir(path):
                continue
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            libc.syscall(LANDLOCK_ADD, ruleset, 1, handled + folder.to_bytes(4, "little"), 0)
            os.close(folder)
        return bool(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


class RewardFiles:
    """The files in which a command writes its result, from before it starts until they are read."""

    def __init__(self, paths: list[str]) -> None:
        self._path = os.path.dirname(paths[0])
        self._names = [os.path.basename(path) for path in paths]
        self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folder_status = os.fstat(self._folder)

    def check(self, pids: Callable[[], list[str]]) -> str:
        """After the command: why the files cannot be trusted, or an empty text."""
        try:
            before = [self._state(name) for name in (*self._names, ".")]
            running = wait_for_exits(pids)
            if running:
                return f"when the tests ended, {', '.join(running)}: tests must end what they start"
            if [self._state(name) for name in (*self._names, ".")] != before:
                return "the reward was changed after the tests had ended"
            return self._check_folder() or next(filter(None, map(self._check_file, self._names)), "")
        finally:
            os.close(self._folder)

    def _state(self, name: str) -> object:
        try:
            status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return None
        if stat.S_ISDIR(status.st_mode):
            return status.st_ino, status.st_mode
        content = b""
        if stat.S_ISREG(status.st_mode):
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._folder)
            except OSError:
                return None
            content = os.read(descriptor, LONGEST_REWARD_BYTES)
            os.close(descriptor)
        return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, content

    def _check_folder(self) -> str:
        before = self._folder_status
        try:
            now = os.stat(self._path)
        except OSError:
            return "the folder of the reward is gone"
        if (now.st_dev, now.st_ino) != (before.st_dev, before.st_ino) or now.st_nlink < 1:
            return "the folder of the reward was replaced"
        if now.st_uid != before.st_uid:
            return "the folder of the reward belongs to another user"
        if now.st_mode & 0o700 != 0o700:
            return (
                f"the folder of the reward has the mode {stat.S_IMODE(now.st_mode):04o}: its owner cannot write in it"
            )
        return ""

    def _check_file(self, name: str) -> str:
        try:
            status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return ""
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is {'a link' if stat.S_ISLNK(status.st_mode) else 'not a regular file'}"
        if status.st_nlink != 1:
            return f"{name} has {status.st_nlink} hard links"
        if status.st_uid != self._folder_status.st_uid:
            return f"{name} belongs to another user"
        if status.st_mode & 0o600 != 0o600:
            return f"{name} has the mode {stat.S_IMODE(status.st_mode):04o}: its owner cannot write to it"
        return ""


def leads_to_the_tests(folder: str, target: str) -> bool:
    """Whether a link in this folder leads to the tests, their logs or temporary files, or to a folder above them.

    Tests that compare a file of the work folder with the right answer must not find the right answer there. Each link
    is judged by its text alone, because a chain of links is judged link by link. A target that goes up after a name
    could lead anywhere (the name may be a link), so it is refused.
    """
    parts = [] if target.startswith("/") else folder.split("/")[1:]
    goes_down = False
    for part in target.split("/"):
        if part == "..":
            if goes_down:
                return True
            parts = parts[:-1]
        elif part not in ("", "."):
            goes_down = True
            parts = [*parts, part]
    path = "".join("/" + part for part in parts) + "/"
    return any((hidden + "/").startswith(path) or path.startswith(hidden + "/") for hidden in HIDDEN_PATHS)


def find_links_to_the_tests(folder: str) -> set[str]:
    """All such links below a folder."""
    links: set[str] = set()
    unvisited = [folder]
    while unvisited:
        current = unvisited.pop()
        for entry in list_entries(current):
            if entry.is_dir(follow_symlinks=False):
                unvisited.append(entry.path)
            elif entry.is_symlink() and leads_to_the_tests(current, link_target(entry.path)):
                links.add(entry.path)
    return links


def link_target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        # Another program removed it meanwhile.
        return ""


def list_entries(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder, also if its mode forbids to list it; none if it was removed."""
    try:
        return list_despite_mode(folder)
    except OSError:
        return []


def list_despite_mode(folder: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except PermissionError:
        mode = stat.S_IMODE(os.stat(folder, follow_symlinks=False).st_mode)
        os.chmod(folder, mode | 0o500)
        try:
            return list(os.scandir(folder))
        finally:
            os.chmod(folder, mode)


def wait_for_exits(pids: Callable[[], list[str]]) -> list[str]:
    """Give processes a moment to end. Returns a description of those that do not."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        running = list(filter(None, map(describe_process, pids())))
        if not running or time.monotonic() > deadline:
            return running[:MOST_NAMED_PROCESSES]
        time.sleep(0.005)


def describe_process(pid: str) -> str:
    """A process that has not ended, in words; an empty text if it has."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            content = file.read(4096)
    except OSError:
        return ""
    command = content[content.index(b"(") + 1 : content.rindex(b")")].decode("ascii", "replace")
    name = "".join(letter if letter.isalnum() or letter in "-_." else "?" for letter in command)
    state = content[content.rindex(b")") + 2 : content.rindex(b")") + 3]
    if state in (b"Z", b"X"):
        return ""
    return f"process {pid} ({name}) was {'stopped' if state in (b'T', b't') else 'still running'}"
