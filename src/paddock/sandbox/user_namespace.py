"""Which user and group ids a sandbox on an image has, and how a program of ours acts with them.

With a `range`, every id of the image is an id of its own on the host: chown, setuid and services with users of their
own work. With a `single` one, everything inside belongs to one id of the host, and ownership is only pretended.

root maps a range by itself. Another user needs the setuid programs newuidmap and newgidmap, and a range in
`/etc/subuid` and `/etc/subgid`. Its own id is then root inside, so that it can reach its own folders, and the other
ids come from the range. Files of layers belong to these ids: such a user can change and remove them in a user
namespace only (`run_in_namespace`, `call_in_namespace`).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pwd
import select
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from paddock.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Sequence

CLONE_NEWUSER = 0x10000000
PR_SET_DUMPABLE = 4
NOBODY = 65534
LARGEST_RANGE = 65536
SMALLEST_RANGE = NOBODY + 1
"""Images have files and processes of `nobody`."""
ROOT_BASE = 0x7000_0000
"""The first id that root uses: above the ids that systemd gives to containers, below 2**31."""
PROBE_SECONDS = 60.0
MAP_SECONDS = 60.0
SUBID_HINT = (
    "install the package uidmap and give the user a range: "
    "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER"
)


@dataclass(frozen=True, slots=True)
class IdRange:
    """Ids inside, and the ids of the host that they are."""

    inside: int
    outside: int
    count: int

    def __str__(self) -> str:
        return f"{self.inside} {self.outside} {self.count}"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who root and the other users of a sandbox on an image are on the host."""

    kind: Literal["range", "single"]
    uids: tuple[IdRange, ...]
    gids: tuple[IdRange, ...]
    reason: str = ""
    """Why it is no range."""

    @property
    def key(self) -> str:
        """Names the owners of files on disk: layers of one key can be used by every identity with the same key."""
        return f"{self.kind}-{self.host_uid(0)}-{self.uids[-1].outside}"

    def __str__(self) -> str:
        if self.kind == "range":
            return f"a range of {sum(one.count for one in self.uids)} user ids"
        return "one user id: changes of owners are pretended, commands run as root only"

    def host_uid(self, inside: int) -> int | None:
        """The id on the host of a user inside; None for one that this identity cannot have."""
        return self._host_id(self.uids, inside)

    def host_gid(self, inside: int) -> int | None:
        return self._host_id(self.gids, inside)

    def _host_id(self, ranges: tuple[IdRange, ...], inside: int) -> int | None:
        if self.kind == "single":
            return ranges[0].outside
        for one in ranges:
            if one.inside <= inside < one.inside + one.count:
                return one.outside + inside - one.inside
        return None


@cache
def find_identity() -> Identity:
    """The best identity for this process: a range if it can be mapped, which is tried, else a single id."""
    reason = ""
    try:
        identity = _root_range() if os.geteuid() == 0 else _subordinate_range()
        run_in_namespace(["/bin/true"], identity, timeout=PROBE_SECONDS)
        return identity
    except SandboxError as error:
        reason = f"{error.message} ({error.hint})" if error.hint else error.message
    user, group = (NOBODY, NOBODY) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    return Identity("single", (IdRange(0, user, 1),), (IdRange(0, group, 1),), reason)


# -- ranges -------------------------------------------------------------------------------------------


def _root_range() -> Identity:
    """A range that root may map: any in the initial user namespace, else what its own namespace has beside root."""
    ranges = []
    for name in ("uid_map", "gid_map"):
        lines = [tuple(map(int, line.split())) for line in Path("/proc/self", name).read_text().splitlines()]
        candidates = [
            (max(first, 1), first + count - max(first, 1)) for first, _, count in lines if first + count > 1
        ]
        if any(first <= ROOT_BASE and first + count >= ROOT_BASE + LARGEST_RANGE for first, count in candidates):
            ranges.append(IdRange(0, ROOT_BASE, LARGEST_RANGE))
            continue
        first, count = max(candidates, key=lambda candidate: candidate[1], default=(0, 0))
        if count < SMALLEST_RANGE:
            raise SandboxError(f"this container has only {count} ids", hint="give it a range of 65536 ids or more")
        ranges.append(IdRange(0, first, min(count, LARGEST_RANGE)))
    return Identity("range", (ranges[0],), (ranges[1],))


def _subordinate_range() -> Identity:
    missing = [name for name in ("newuidmap", "newgidmap") if shutil.which(name) is None]
    if missing:
        raise SandboxError(f"{' and '.join(missing)} is not installed", hint=SUBID_HINT)
    uids, gids = (_read_subordinate_ids(path) for path in ("/etc/subuid", "/etc/subgid"))
    return Identity("range", (IdRange(0, os.geteuid(), 1), uids), (IdRange(0, os.getegid(), 1), gids))


def _read_subordinate_ids(path: str) -> IdRange:
    user = os.geteuid()
    try:
        names = {pwd.getpwuid(user).pw_name, str(user)}
    except KeyError:
        names = {str(user)}
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise SandboxError(f"{path} cannot be read: {error.strerror}", hint=SUBID_HINT) from error
    counts: dict[int, int] = {}
    for line in lines:
        name, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if name in names and first.isdigit() and count.strip().isdigit():
            counts[int(first)] = int(count)
    first_id = max(counts, key=lambda candidate: counts[candidate], default=0)
    if counts.get(first_id, 0) < SMALLEST_RANGE:
        raise SandboxError(f"{path} has no range of {SMALLEST_RANGE} ids for {max(names)}", hint=SUBID_HINT)
    return IdRange(1, first_id, min(counts[first_id], LARGEST_RANGE))


def map_ids(pid: int, identity: Identity) -> None:
    """Give the user namespace of process `pid`, which has no ids yet, those of a range. Raises SandboxError."""
    for program, ranges in (("newgidmap", identity.gids), ("newuidmap", identity.uids)):
        if os.geteuid() == 0:
            path = Path(f"/proc/{pid}", program[3] + "id_map")
            try:
                path.write_text("".join(f"{one}\n" for one in ranges))
            except OSError as error:
                raise SandboxError(f"{path.name} of a user namespace cannot be written: {error.strerror}") from error
            continue
        words = [word for one in ranges for word in str(one).split()]
        try:
            subprocess.run(
                [program, str(pid), *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=MAP_SECONDS,
                check=True,
            )
        except subprocess.CalledProcessError as error:
            raise SandboxError(f"{program} failed: {error.stderr.strip()}", hint=SUBID_HINT) from error
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(f"{program} failed: {error}", hint=SUBID_HINT) from error


# -- programs of ours in a user namespace -------------------------------------------------------------


def call_in_namespace(
    function: str,
    arguments: Sequence[str] = (),
    identity: Identity | None = None,
    *,
    pass_fds: Sequence[int] = (),
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    timeout: float,
) -> bytes:
    """What `function` (`package.module:name`) writes to standard output, called as root of a user namespace.

    Raises SandboxError with what it writes to standard error if it fails. Blocks. Hand over folders as descriptors:
    where this process is root, the one inside is another user, and may not be able to enter their paths.
    """
    process = start_in_namespace(function, arguments, identity, pass_fds=pass_fds, stdin=stdin)
    return _finish(process, function, timeout)


def run_in_namespace(argv: Sequence[str], identity: Identity | None = None, *, timeout: float) -> bytes:
    """The standard output of a program that runs as root of a user namespace. Otherwise as `call_in_namespace`."""
    process = start_in_namespace(f"{__name__}:execute", argv, identity)
    return _finish(process, argv[0], timeout)


def start_in_namespace(
    function: str,
    arguments: Sequence[str] = (),
    identity: Identity | None = None,
    *,
    pass_fds: Sequence[int] = (),
    stdin: int | IO[bytes] = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """The process that calls `function`, with pipes for both outputs. The caller waits for it, or kills it."""
    identity = identity or find_identity()
    ready, ready_inside = os.pipe()
    go_inside, go = os.pipe()
    owner = os.pidfd_open(os.getpid())
    own = [str(ready_inside), str(go_inside), str(owner), identity.kind, str(identity.host_uid(0))]
    process = None
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *own, str(identity.host_gid(0)), function, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[ready_inside, go_inside, owner, *pass_fds],
        )
        os.close(ready_inside)
        ready_inside = -1
        if not select.select([ready], [], [], PROBE_SECONDS)[0]:
            raise SandboxError(f"the program for {function} did not start within {PROBE_SECONDS:g} s")
        # Without the byte it has ended. Its standard error has the reason, which whoever waits for it reports.
        if os.read(ready, 1) and identity.kind == "range":
            map_ids(process.pid, identity)
        os.write(go, b"1")
        return process
    except BrokenPipeError:
        assert process is not None
        return process
    except BaseException:
        if process is not None:
            process.kill()
            process.communicate()
        raise
    finally:
        for descriptor in (ready, ready_inside, go_inside, go, owner):
            if descriptor >= 0:
                os.close(descriptor)


def _finish(process: subprocess.Popen[bytes], name: str, timeout: float) -> bytes:
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise SandboxError(f"{name} did not end within {timeout:g} s in a user namespace") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if process.returncode != 0:
        words = errors.decode("utf-8", "replace").strip().splitlines()
        raise SandboxError(f"{name} failed in a user namespace: {words[-1] if words else process.returncode}")
    return output


def execute(*argv: str) -> None:
    os.execvp(argv[0], argv)


def _enter(ready: int, go: int, kind: str, uid: int, gid: int) -> None:
    """In the new process: become root of a new user namespace."""
    if kind == "single" and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    libc = ctypes.CDLL(None, use_errno=True)
    # The change of the user made the process undumpable: its files in /proc belong to root then.
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    if libc.unshare(CLONE_NEWUSER) != 0:
        sys.exit(f"no user namespace can be made: {os.strerror(ctypes.get_errno())}")
    os.write(ready, b"1")
    os.close(ready)
    if not os.read(go, 1):
        sys.exit("the ids of the user namespace were not mapped")
    os.close(go)
    if kind == "single":
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    else:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _end_with(owner: int) -> None:
    select.select([owner], [], [])
    os._exit(1)


def main() -> None:
    ready, go, owner, kind, uid, gid, place, *arguments = sys.argv[1:]
    module, _, name = place.partition(":")
    # Imported before: as another user it may not be able to read the modules.
    function = execute if module == __spec__.name else getattr(importlib.import_module(module), name)
    _enter(int(ready), int(go), kind, int(uid), int(gid))
    threading.Thread(target=_end_with, args=(int(owner),), daemon=True).start()
    function(*arguments)


if __name__ == "__main__":
    main()
