"""The first program of ours in a sandbox that is somewhere else: commands, files and connections over one line.

A sandbox behind somebody's API has one thing in common with all others: a command can be started in it, and its
input and output can be reached. This is that command. It runs from source text (see `bundle`), with the standard
library only, and does for its owner what the supervisor does, without descriptors that could be handed over:
what they would carry goes over the line in numbered streams. So nothing inside has to reach the host, and the
host needs no address.

When the line ends, the owner is gone: everything is killed.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import tarfile
import termios
import time

from paddock.rollouts.sandbox import files, guard
from paddock.rollouts.sandbox.supervisor import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    Supervisor,
    descendants,
    libc,
    lower,
)
from paddock.rollouts.sandbox.switchboard import Stream, Switchboard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 38, 24
MOST_CAPABILITIES = 64
KILL_DEADLINE = 4.0


class Steward(Switchboard, Supervisor):  # type: ignore[misc]
    def __init__(self, incoming: int, outgoing: int, *, text: bool) -> None:
        Switchboard.__init__(self, incoming, outgoing, text=text)
        Supervisor.__init__(self, None)  # type: ignore[arg-type]
        self.user: int | None = None
        self.filter = b""
        self.on_terminal = False
        self.watched[self.wake] = lambda: os.read(self.wake, 4096)

    # -- what the owner asks for ----------------------------------------------------------------------

    def do_begin(
        self,
        number: int,
        home: str,
        folders: list[str],
        logs: str,
        user: int | None,
        seccomp: str,
        links: dict[str, str],
        **settings: Any,
    ) -> Any:
        """Make the sandbox ready. Without a user everything runs as whoever runs this."""
        self.home, self.settings = home, {**settings, "home": home, "place": home}
        self.alone = os.getpid() == 1
        self.user = user if os.geteuid() == 0 else None
        self.filter = base64.b64decode(seccomp)
        self.guard = guard if settings.get("guard") else None
        os.umask(0o022)
        if not self.alone:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # From here on nobody inside can look into this process or trace it.
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        self.lay_logs(home, logs)
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
            self.hand_over(folder)
        for path, target in links.items():
            if not os.path.lexists(path):
                os.symlink(target, path)
        self.limit()
        return {"pid": os.getpid(), "user": self.user if self.user is not None else os.geteuid(), "alone": self.alone}

    def lay_logs(self, home: str, logs: str) -> None:
        """`/logs` and the folder `logs` of the home are one: whichever is there already is the real one."""
        below = os.path.join(home, "logs")
        if os.path.isdir(logs) and not os.path.islink(logs):
            if not os.path.lexists(below):
                os.symlink(logs, below)
        else:
            os.makedirs(below, exist_ok=True)
            self.hand_over(below)
            if not os.path.lexists(logs) and os.access(os.path.dirname(logs), os.W_OK):
                os.symlink(below, logs)

    def hand_over(self, path: str) -> None:
        if self.user is not None:
            os.chown(path, self.user, self.user)

    def limit(self) -> None:
        settings = self.settings
        files_most = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        lower(resource.RLIMIT_CORE, 0, 0)
        space = max(8 << 30, 2 * settings["memory_bytes"])
        lower(resource.RLIMIT_AS, space, space)
        lower(resource.RLIMIT_FSIZE, settings["disk_bytes"], settings["disk_bytes"])
        lower(resource.RLIMIT_NOFILE, min(4096, files_most), files_most)
        if settings["cpus"]:
            most = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, most[: settings["cpus"]])

    def do_spawn(  # type: ignore[override]
        self,
        number: int,
        argv: list[str],
        cwd: str,
        env: dict[str, str],
        last: bool,
        guarded: list[str],
        stdin: int,
        stdout: int,
        stderr: int,
        terminal: list[int] | None = None,
    ) -> Any:
        self.refuse_when_over()
        given, streams = self.terminal_ends(stdout, terminal) if terminal else self.pipe_ends(stdin, stdout, stderr)
        self.on_terminal = bool(terminal)
        try:
            words, _ = Supervisor.do_spawn(self, number, given, argv, cwd, env, last, guarded)
        except OSError:
            for stream in streams:
                self.close(stream)
            raise
        finally:
            for descriptor in set(given):
                os.close(descriptor)
        for stream in streams:
            self.streams[stream.number] = stream
        return {"pid": int(words)}

    def pipe_ends(self, stdin: int, stdout: int, stderr: int) -> tuple[list[int], list[Stream]]:
        given, streams = [], []
        if stdin:
            read, write = os.pipe()
            given.append(read)
            streams.append(Stream(stdin, sink=write))
        for number in (stdout, stderr):
            read, write = os.pipe()
            given.append(write)
            streams.append(Stream(number, source=read))
        for stream in streams:
            os.set_blocking(stream.sink if stream.source is None else stream.source, False)  # type: ignore[arg-type]
        return given, streams

    def terminal_ends(self, number: int, size: list[int]) -> tuple[list[int], list[Stream]]:
        master, slave = os.openpty()
        os.set_blocking(master, False)
        set_size(master, *size)
        stream = Stream(number, source=master, sink=os.dup(master))
        stream.terminal = True
        return [slave, slave, slave], [stream]

    def ready(self) -> None:
        if self.on_terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        # Where memory runs out, what was started goes first, and the steward stays to tell of it.
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        if self.user is not None:
            lower(resource.RLIMIT_NPROC, self.settings["processes"] + 1, self.settings["processes"] + 1)
            for capability in range(MOST_CAPABILITIES):
                libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if self.filter:
            guard.install_filter(self.filter)
        if self.guard is not None:
            guard.confine([base64.b64decode(text) for text in self.settings["filters"]])

    def do_resize(self, number: int, stream: int, rows: int, cols: int) -> Any:
        found = self.streams.get(stream)
        if found is None or found.source is None:
            raise OSError(errno.ENOENT, "there is no such terminal")
        set_size(found.source, rows, cols)

    def do_signal(self, number: int, pid: int, signal: int) -> Any:  # type: ignore[override]
        Supervisor.do_signal(self, number, [], pid, signal)

    def do_usage(self, number: int) -> Any:  # type: ignore[override]
        self.look()
        return {"cpu_seconds": self.cpu_seconds, "peak_memory_bytes": self.peak_memory}

    def do_end(self, number: int) -> Any:
        """Kill everything but this. What was written stays readable as long as this runs."""
        used = self.do_usage(number)
        self.end_all()
        return used

    def end_all(self) -> None:
        self.over = True
        for port in list(self.listening):
            self.do_unlisten(0, port)
        self.kill_all()
        self.pump()

    # -- files: no link is followed -------------------------------------------------------------------

    def do_read(self, number: int, root: str, parts: list[str], limit: int, into: int) -> Any:
        self.give(into, self.within(root, lambda top: files.read_file(top, parts, limit)))

    def do_write(self, number: int, root: str, parts: list[str], mode: int, content: int) -> Any:
        data = self.letter(content)
        self.within(root, lambda top: files.write_file(top, parts, data, mode))

    def do_list(self, number: int, root: str, parts: list[str], limit: int) -> Any:
        found = self.within(root, lambda top: files.list_folder(top, parts, limit))
        return [[entry.path, entry.kind, entry.size, entry.mode] for entry in found]

    def do_pack(self, number: int, root: str, parts: list[str], limit: int, into: int) -> Any:
        self.give(into, self.within(root, lambda top: files.pack_folder(top, parts, limit)))

    def do_unpack(self, number: int, root: str, parts: list[str], content: int) -> Any:
        data = self.letter(content)
        self.within(root, lambda top: files.unpack_folder(top, parts, data))

    def within(self, root: str, act: Callable[[int], Any]) -> Any:
        """Act in a folder with the rights of whoever runs the commands, so that new files are theirs."""
        if self.user is not None:
            libc.setfsgid(self.user)
            libc.setfsuid(self.user)
        try:
            top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return act(top)
            finally:
                os.close(top)
        finally:
            if self.user is not None:
                libc.setfsuid(0)
                libc.setfsgid(0)

    def do_lay_out(self, number: int, archive: str, targets: list[str], otherwise: str) -> Any:
        """Put what was uploaded where it belongs, for reading only. Answers with where it is now."""
        places = []
        for position, target in enumerate(targets):
            try:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                reachable = os.access(os.path.dirname(target), os.W_OK)
            except OSError:
                reachable = False
            instead = os.path.join(otherwise, str(position), os.path.basename(target))
            places.append(target if reachable else instead)
        with tarfile.open(archive) as members:
            for member in members:
                first, _, rest = member.name.partition("/")
                member.name = rest or "."
                lay_member(members, member, places[int(first)], rest)
        os.unlink(archive)
        for place in places:
            make_read_only(place)
        return places

    # -- the line -------------------------------------------------------------------------------------

    def serve(self) -> None:
        while not self.gone:
            poll = select.poll()
            for descriptor, events in self.interests().items():
                poll.register(descriptor, events)
            wait = None if self.look_at is None else max(0, int((self.look_at - time.monotonic()) * 1000) + 1)
            for descriptor, events in poll.poll(wait):
                self.happened(descriptor, events)
            self.flush()
            self.reap()
            if self.look_at is not None and time.monotonic() >= self.look_at and not self.over:
                over = self.look()
                if over is not None:
                    self.write({"event": ["over", over, str(self.cpu_seconds), str(self.peak_memory)]})
                    self.end_all()

    # -- what the supervisor tells --------------------------------------------------------------------

    def send(self, text: str, descriptor: int | None = None) -> None:
        self.pump()
        self.write({"event": text.split(" ")[1:]})

    def disk_is_over(self, now: float) -> bool:
        """The size of its filesystem is the limit: one that is somebody else's cannot be measured from inside."""
        return False

    def kill_all(self) -> None:
        deadline = time.monotonic() + KILL_DEADLINE
        while time.monotonic() < deadline:
            for pid in ["-1"] if self.alone else descendants(str(os.getpid())):
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.reap()
            if not self.jobs and not self.pids():
                return
            time.sleep(0.002)


def set_size(descriptor: int, rows: int, cols: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def lay_member(members: tarfile.TarFile, member: tarfile.TarInfo, place: str, rest: str) -> None:
    """One entry of our own archive; its first part was the position of the place it belongs to."""
    path = os.path.join(place, rest) if rest else place
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if member.isdir():
        os.makedirs(path, exist_ok=True)
    elif member.issym():
        os.symlink(member.linkname, path)
    elif (content := members.extractfile(member)) is not None:
        with open(path, "wb") as file:
            while chunk := content.read(1 << 20):
                file.write(chunk)
        os.chmod(path, 0o555 if member.mode & 0o111 else 0o444)


def make_read_only(place: str) -> None:
    for folder, _, _ in os.walk(place, topdown=False):
        os.chmod(folder, 0o555)


def main(kind: type[Steward] = Steward) -> None:
    """Arguments: `text`, `binary`, or `connect PORT WORD`."""
    if sys.argv[1] == "connect":
        connection = socket.create_connection(("127.0.0.1", int(sys.argv[2])), 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(sys.argv[3].encode())
        incoming = connection.detach()
        outgoing = os.dup(incoming)
    else:
        # What runs inside cannot write to the line: the standard descriptors lead nowhere from here on.
        incoming, outgoing = os.dup(0), os.dup(1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere, 1)
    steward = kind(incoming, outgoing, text=sys.argv[1] == "text")
    try:
        steward.serve()
        steward.kill_all()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
