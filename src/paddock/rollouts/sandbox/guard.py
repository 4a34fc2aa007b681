"""What holds for the tests of a verifier, and for everything that they start, without their cooperation.

The tests run programs of the agent under their own user. So a reward is accepted only if nothing but the tests can
have decided it: the reward folder is a mount point that nobody can rename, nothing in `/proc` can be written, system
calls that reach into another process are refused, nothing runs on when the tests end, and the reward file and its
folder look at the end as a plain write leaves them. What this cannot prevent is what `paddock-run` is for.

Runs in the guest, from source text, as a part of the supervisor (Python 3.8 or later, standard library only).
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
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
CAP_SETPCAP, CAP_SYS_ADMIN = 8, 21
PR_CAPBSET_DROP = 24
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 22, 38, 47, 4
CAPABILITY_VERSION = 0x20080522
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_WRITE_FILE, LANDLOCK_REFER = 1 << 1, 1 << 13
SETTLE_SECONDS = 1.0
"""What ends by itself within this time after the tests, such as a `tee` of their output, is not held against them."""
LONGEST_REWARD = 1 << 16
HIDDEN = (
    *("/tests", "/home/user/tests", "/logs", "/home/user/logs"),
    *("/tmp", "/home/tmp", "/var/tmp", "/dev/shm", "/dev/fd", "/proc"),
)
"""Where tests keep answers, also those that they work out while they run."""
NAMED = 5

libc = ctypes.CDLL(None, use_errno=True)


def call(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    call(libc.mount(*words, ctypes.c_ulong(flags), options.encode()), target)


def fence(home: str) -> None:
    """Make the way to the reward folder mount points, and `/proc` read-only. Needs CAP_SYS_ADMIN."""
    call(libc.unshare(CLONE_NEWNS), "a mount namespace")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    for folder in (home, home + "/logs", home + "/logs/verifier"):
        mount(folder, folder, None, MS_BIND)
    mount("none", "/proc", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def drop_capabilities() -> None:
    """Before a command: it and all that it starts have none, and no way to get any."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in (CAP_SYS_ADMIN, CAP_SETPCAP):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    head, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    call(libc.capset(head, none), "giving up capabilities")


def confine(filters: list[bytes]) -> None:
    """Before a command of the tests: no writing to `/proc`, and no system call that a filter refuses."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    forbid_writing_to_proc()
    for program in filters:
        install_filter(program)


def install_filter(program: bytes) -> None:
    """Refuse the system calls that the filter refuses, in this process and all that come from it."""
    held = ctypes.create_string_buffer(program, len(program))
    head = Filter(len(program) // 8, ctypes.addressof(held))
    call(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(head), 0, 0), "a filter of system calls")


class Filter(ctypes.Structure):
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


class Rewards:
    """The files in which a command says its result, from before it starts until they are read."""

    def __init__(self, paths: list[str]) -> None:
        self.place = os.path.dirname(paths[0])
        self.names = [os.path.basename(path) for path in paths]
        self.folder = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.first = os.fstat(self.folder)

    def doubt(self, pids: Callable[[], list[str]]) -> str:
        """After the command: why what the files say cannot be trusted, or nothing."""
        try:
            before = [self.state(name) for name in (*self.names, ".")]
            left = settle(pids)
            if left:
                return f"when the tests ended, {', '.join(left)}: tests must end what they start"
            if [self.state(name) for name in (*self.names, ".")] != before:
                return "the reward was changed after the tests had ended"
            return self.wrong_folder() or next(filter(None, map(self.wrong_file, self.names)), "")
        finally:
            os.close(self.folder)

    def state(self, name: str) -> object:
        try:
            found = os.stat(name, dir_fd=self.folder, follow_symlinks=False)
        except OSError:
            return None
        if stat.S_ISDIR(found.st_mode):
            return found.st_ino, found.st_mode
        content = b""
        if stat.S_ISREG(found.st_mode):
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.folder)
            except OSError:
                return None
            content = os.read(descriptor, LONGEST_REWARD)
            os.close(descriptor)
        return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns, content

    def wrong_folder(self) -> str:
        first = self.first
        try:
            now = os.stat(self.place)
        except OSError:
            return "the folder of the reward is gone"
        if (now.st_dev, now.st_ino) != (first.st_dev, first.st_ino) or now.st_nlink < 1:
            return "the folder of the reward was replaced"
        if now.st_uid != first.st_uid:
            return "the folder of the reward belongs to somebody else"
        if now.st_mode & 0o700 != 0o700:
            return (
                f"the folder of the reward has the mode {stat.S_IMODE(now.st_mode):04o}: its owner cannot write in it"
            )
        return ""

    def wrong_file(self, name: str) -> str:
        try:
            found = os.stat(name, dir_fd=self.folder, follow_symlinks=False)
        except OSError:
            return ""
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is {'a link' if stat.S_ISLNK(found.st_mode) else 'not a regular file'}"
        if found.st_nlink != 1:
            return f"{name} has {found.st_nlink} hard links"
        if found.st_uid != self.first.st_uid:
            return f"{name} belongs to somebody else"
        if found.st_mode & 0o600 != 0o600:
            return f"{name} has the mode {stat.S_IMODE(found.st_mode):04o}: its owner cannot write to it"
        return ""


def leads_to_the_tests(folder: str, target: str) -> bool:
    """Whether a link in this folder leads to the tests, their logs or temporary files, or to a folder above them.

    Tests that compare a file of the work folder with the right answer must not find the right answer there. Of links
    over links every single one is judged, so it takes no more than its text. Upwards from a name could be anywhere.
    """
    place = [] if target.startswith("/") else folder.split("/")[1:]
    goes_down = False
    for part in target.split("/"):
        if part == "..":
            if goes_down:
                return True
            place = place[:-1]
        elif part not in ("", "."):
            goes_down = True
            place = [*place, part]
    path = "".join("/" + part for part in place) + "/"
    return any((hidden + "/").startswith(path) or path.startswith(hidden + "/") for hidden in HIDDEN)


def links_to_the_tests(folder: str) -> set[str]:
    """All such links below a folder."""
    links: set[str] = set()
    folders = [folder]
    while folders:
        place = folders.pop()
        for entry in entries(place):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif entry.is_symlink() and leads_to_the_tests(place, link_target(entry.path)):
                links.add(entry.path)
    return links


def link_target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        # Another program removed it meanwhile.
        return ""


def entries(folder: str) -> list[os.DirEntry[str]]:
    """Also of a folder that can be entered but not listed; of one that went away, none."""
    try:
        return list_unlocked(folder)
    except OSError:
        return []


def list_unlocked(folder: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except PermissionError:
        mode = stat.S_IMODE(os.stat(folder, follow_symlinks=False).st_mode)
        os.chmod(folder, mode | 0o500)
        try:
            return list(os.scandir(folder))
        finally:
            os.chmod(folder, mode)


def settle(pids: Callable[[], list[str]]) -> list[str]:
    """What does not end by itself, in words."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        left = list(filter(None, map(alive, pids())))
        if not left or time.monotonic() > deadline:
            return left[:NAMED]
        time.sleep(0.005)


def alive(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            content = file.read(4096)
    except OSError:
        return ""
    name = "".join(letter if letter.isalnum() or letter in "-_." else "?" for letter in comm(content))
    state = content[content.rindex(b")") + 2 : content.rindex(b")") + 3]
    if state in (b"Z", b"X"):
        return ""
    return f"process {pid} ({name}) was {'stopped' if state in (b'T', b't') else 'still running'}"


def comm(content: bytes) -> str:
    return content[content.index(b"(") + 1 : content.rindex(b")")].decode("ascii", "replace")
