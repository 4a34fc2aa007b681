"""Runs the commands of `paddock-run`: each in a sandbox of its own inside that of the tests.

It sees the work folder, with the same files, and the programs of the system. It has its own `/proc`, `/tmp`, home and
shared memory. It sees neither `/tests` nor `/logs`, nor any process of the tests. Its processes are in a namespace
below that of the supervisor, on the same filesystem and under the same user, so the limits of the sandbox count them
too. They all end with the command, and the command ends when its caller does.

A part of the supervisor, compiled when the first command comes. Everything that arrives here may be the agent's.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import _socket
import errno
import fcntl
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWIPC = 0x00020000, 0x20000000, 0x08000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 1, 2, 4, 8, 4096, 16384
CLOSE_RANGE = 436
F_GET_SEALS, F_SEAL_WRITE = 1034, 8
LONGEST_REQUEST = 1 << 18
STANDARD = 3
MOST_AT_ONCE = 64
MOST_CALLERS = 256
PASSED_ON = frozenset((1, 2, 3, 10, 12, 14, 15, 18))
"""HUP, INT, QUIT, USR1, USR2, ALRM, TERM, CONT: signals to `paddock-run` that the command gets."""
ROOMS = "/home/.apart"
FOLDERS = ("user", "user/workdir", "tmp", "shm")
CLEAR = 'chmod -R u+rwX -- "$1"; exec rm -rf -- "$1"'


class Apart:
    def __init__(self, supervisor: Any) -> None:
        self.supervisor = supervisor
        self.guard = supervisor.guard
        self.work = f"{supervisor.home}/workdir"
        self.refusal = supervisor.unfenced
        """Why no command can be run, if so."""
        self.failure = ""
        """Why the reward says nothing: a command could not be run, or it led the tests astray."""
        self.callers: dict[int, _socket.socket] = {}
        self.runs: dict[int, int] = {}
        """The process of each command, by the descriptor of its caller."""
        self.rooms: dict[int, str] = {}
        self.links: dict[int, set[str]] = {}
        """The links to the tests that there were before a command: the tests may make some for themselves."""
        self.helpers: set[int] = set()
        self.count = 0

    # -- callers --------------------------------------------------------------------------------------

    def accept(self, listening: _socket.socket) -> None:
        descriptor, _ = listening._accept()  # type: ignore[attr-defined]
        caller = _socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        caller.setblocking(False)
        # A command that runs here may not come back: it could exhaust what the tests need.
        if is_inside(caller) or len(self.callers) >= MOST_CALLERS:
            caller.close()
            return
        self.callers[descriptor] = caller
        self.supervisor.poll.register(descriptor, 1)

    def heard(self, descriptor: int) -> None:
        """A request, a signal, or the end of a caller."""
        caller = self.callers[descriptor]
        room = _socket.CMSG_SPACE(STANDARD * 4)
        try:
            data, ancillary, _, _ = caller.recvmsg(LONGEST_REQUEST, room, _socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        given = [
            int.from_bytes(content[start : start + 4], sys.byteorder)
            for _, _, content in ancillary
            for start in range(0, len(content) - 3, 4)
        ]
        try:
            if not data:
                self.leave(descriptor)
            elif descriptor in self.runs:
                self.signal(self.runs[descriptor], data)
            else:
                self.begin(descriptor, data, given)
        finally:
            for one in given:
                os.close(one)

    def leave(self, descriptor: int) -> None:
        self.supervisor.poll.unregister(descriptor)
        self.callers.pop(descriptor).close()
        pid = self.runs.pop(descriptor, None)
        if pid is not None:
            end_group(pid)

    def signal(self, pid: int, data: bytes) -> None:
        if data.isdigit() and len(data) < 3 and int(data) in PASSED_ON:
            os.kill(pid, int(data))

    def begin(self, descriptor: int, data: bytes, given: list[int]) -> None:
        caller = self.callers[descriptor]
        cwd, *argv = data.decode("utf-8", "surrogateescape").split("\0")
        reason = self.refusal or self.unfit(cwd, argv, given)
        if not reason:
            try:
                self.runs[descriptor] = self.start(cwd, argv, given)
                return
            except OSError as error:
                reason = reason_of(error)
        self.refuse(caller, reason)
        self.leave(descriptor)

    def unfit(self, cwd: str, argv: list[str], given: list[int]) -> str:
        """Why this cannot be run, or nothing."""
        work = self.work
        if len(given) != STANDARD or not argv:
            return "the request is not complete"
        if len(self.runs) >= MOST_AT_ONCE:
            return f"more than {MOST_AT_ONCE} commands at once"
        if cwd != work and not cwd.startswith(work + "/"):
            return f"it starts in {cwd}, but a command sees only {work}: change into it first"
        return next(filter(None, map(unfit_descriptor, given)), "")

    def refuse(self, caller: _socket.socket, reason: str) -> None:
        self.fail(f"paddock-run failed: {reason}")
        answer(caller, f"refused {reason}")

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    # -- commands -------------------------------------------------------------------------------------

    def start(self, cwd: str, argv: list[str], given: list[int]) -> int:
        """The process that waits for the command. Raises OSError with the reason if there can be none."""
        self.count += 1
        room = f"{ROOMS}/{self.count}"
        links = self.guard.links_to_the_tests(self.work)
        waiting, held = os.pipe()
        try:
            for folder in (ROOMS, room, *(f"{room}/{name}" for name in FOLDERS)):
                os.makedirs(folder, exist_ok=True)
            os.chmod(f"{room}/tmp", 0o1777)
            os.chmod(f"{room}/shm", 0o1777)
            pid = os.fork()
        except OSError:
            os.close(waiting)
            os.close(held)
            raise
        if pid == 0:
            try:
                self.wait_outside(given, held, room, cwd, argv)
            finally:
                os._exit(125)
        os.close(held)
        failure = os.read(waiting, 4096).decode("utf-8", "replace")
        os.close(waiting)
        self.rooms[pid] = room
        self.links[pid] = links
        if failure:
            end_group(pid)
            raise OSError(0, failure)
        return pid

    def wait_outside(self, given: list[int], held: int, room: str, cwd: str, argv: list[str]) -> None:
        """In a new process: let another be the first of new namespaces, and end as that ends."""
        os.setsid()
        _signal.set_wakeup_fd(-1)
        for number in PASSED_ON:
            _signal.signal(number, _signal.SIG_IGN)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        # Not one of the supervisor's descriptors may be left, least of all the socket to its owner.
        given = [os.dup2(one, 100 + place) for place, one in enumerate([*given, held])]
        given = [os.dup2(one, place) for place, one in enumerate(given)]
        if self.guard.libc.syscall(CLOSE_RANGE, len(given), 0xFFFFFFFF, 0) != 0:
            os.closerange(len(given), 65536)
        try:
            self.guard.call(self.guard.libc.unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC), "new namespaces")
            pid = os.fork()
            if pid == 0:
                self.build(room)
                self.guard.drop_capabilities()
                self.be_first(cwd, argv)
        except OSError as error:
            os.write(STANDARD, reason_of(error).encode())
            os._exit(125)
        pass_signals_on(pid)
        os.close(STANDARD)
        os._exit(exit_code(os.waitpid(pid, 0)[1]))

    def build(self, room: str) -> None:
        mount, home = self.guard.mount, self.supervisor.home
        work = os.open(f"{home}/workdir", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        mount(f"/proc/self/fd/{work}", f"{room}/user/workdir", None, MS_BIND)
        mount(f"{room}/shm", "/dev/shm", None, MS_BIND)
        mount(room, "/home", None, MS_BIND | MS_REC)
        mount("none", "/tests", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k,mode=0755")
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        os.close(work)

    def be_first(self, cwd: str, argv: list[str]) -> None:
        """As process 1 of the namespace, whose end is the end of all in it: start the command and wait for it."""
        command = os.fork()
        if command == 0:
            try:
                self.become(cwd, argv)
            finally:
                os._exit(127)
        pass_signals_on(command)
        os.close(STANDARD)
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == command:
                os._exit(exit_code(status))

    def become(self, cwd: str, argv: list[str]) -> None:
        for number in (*PASSED_ON, _signal.SIGPIPE, _signal.SIGXFSZ):
            _signal.signal(number, _signal.SIG_DFL)
        os.close(STANDARD)
        env = {**self.supervisor.settings["env"], "HOME": "/home/user", "PWD": cwd}
        subject = cwd
        try:
            os.chdir(cwd)
            subject = argv[0]
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(2, f"paddock-run: {subject}: {error.strerror}\n".encode("utf-8", "replace"))
            os._exit(126 if error.errno in (errno.EACCES, errno.ENOEXEC) else 127)

    # -- the end --------------------------------------------------------------------------------------

    def ended(self, pid: int, status: int) -> None:
        """A child of the supervisor ended that is none of its jobs."""
        self.helpers.discard(pid)
        self.look_for_links(pid)
        descriptor = next((one for one, run in self.runs.items() if run == pid), None)
        if descriptor is not None:
            del self.runs[descriptor]
            answer(self.callers[descriptor], f"exit {exit_code(status)}")
            self.leave(descriptor)
        room = self.rooms.pop(pid, None)
        if room is not None:
            self.clear(room)

    def clear(self, room: str) -> None:
        """Give back what a command wrote outside of the work folder."""
        try:
            for name in (*reversed(FOLDERS), ""):
                os.rmdir(f"{room}/{name}")
        except OSError:
            try:
                pid = os.fork()
            except OSError:
                # There are too many processes: it stays, and counts for the disk limit.
                return
            if pid == 0:
                try:
                    os.execv("/bin/sh", ["sh", "-c", CLEAR, "sh", room])
                finally:
                    os._exit(127)
            self.helpers.add(pid)

    def end_all(self) -> None:
        """With the tests: what they had running here can have touched nothing of theirs."""
        for descriptor in list(self.callers):
            self.leave(descriptor)
        for pid in list(self.links):
            self.look_for_links(pid)

    def look_for_links(self, pid: int) -> None:
        """After a command: tests that open a file which it was to write must not get one of their own."""
        before = self.links.pop(pid, None)
        if before is None:
            return
        made = sorted(self.guard.links_to_the_tests(self.work) - before)
        if made:
            name = made[0][len(self.work) + 1 :]
            self.fail(f"a program that the tests ran made {name} a link to {self.guard.link_target(made[0])}")


def reason_of(error: OSError) -> str:
    if error.errno == errno.EAGAIN:
        return "the sandbox has too many processes (a command takes three beside its own): run fewer at once"
    return error.strerror or str(error)


def unfit_descriptor(descriptor: int) -> str:
    """Why a command may not have this as its input or output: it could reach a file of the tests through it."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        return "a folder cannot be its input or output"
    if stat.S_ISREG(mode) and not is_sealed(descriptor):
        return "the tests have read a part of the file that is its input; it could read the rest: give it < /dev/null"
    return ""


def is_sealed(descriptor: int) -> bool:
    """Whether it is a copy that nobody can change, as `paddock-run` makes one of a file."""
    try:
        return bool(fcntl.fcntl(descriptor, F_GET_SEALS) & F_SEAL_WRITE)
    except OSError:
        return False


def is_inside(caller: _socket.socket) -> bool:
    """Whether it is a process of a command that runs here, in a namespace below ours."""
    peer = int.from_bytes(caller.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)[:4], sys.byteorder)
    try:
        with open(f"/proc/{peer}/status") as file:
            return any(line.startswith("NSpid:") and len(line.split()) > 2 for line in file)
    except OSError:
        return True


def answer(caller: _socket.socket, words: str) -> None:
    try:
        caller.send(words.encode("utf-8", "replace"))
    except OSError:
        return


def end_group(pid: int) -> None:
    """Kill the process that waits and the first of the namespace, and with that everything in it."""
    try:
        os.killpg(pid, _signal.SIGKILL)
    except ProcessLookupError:
        return


def pass_signals_on(to: int) -> None:
    for number in PASSED_ON:
        _signal.signal(number, lambda number, _: os.kill(to, number))


def exit_code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
