"""Server of `paddock-run`: runs each command in a sibling sandbox, inside the sandbox of the tests.

The command sees the work folder, with the same files, and the programs of the system. It has its own `/proc`, `/tmp`,
home and shared memory. It sees neither `/tests` nor `/logs`, nor any process of the tests. Its processes are in a PID
namespace below that of the guest, on the same filesystem and under the same user, so the limits of the sandbox count
them too. They all end with the command, and the command ends when its caller does.

The guest imports this module with the first command. Every request may come from a program of the agent.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import _socket
import errno
import fcntl
import os
import stat
import sys

from paddock.sandbox.guest import verifier_policy
from paddock.sandbox.guest.transports import close_descriptors, receive_descriptors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from paddock.sandbox.guest.main import Guest

CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWIPC = 0x00020000, 0x20000000, 0x08000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 1, 2, 4, 8, 4096, 16384
CLOSE_RANGE = 436
F_GET_SEALS, F_SEAL_WRITE = 1034, 8
LONGEST_REQUEST = 1 << 18
STANDARD_DESCRIPTORS = 3
MOST_RUNNING = 64
MOST_CALLERS = 256
FORWARDED_SIGNALS = frozenset((1, 2, 3, 10, 12, 14, 15, 18))
"""HUP, INT, QUIT, USR1, USR2, ALRM, TERM, CONT: signals to `paddock-run` that the command gets."""
ROOTS = "/home/.siblings"
FOLDERS = ("user", "user/workdir", "tmp", "shm")
REMOVE_SCRIPT = 'chmod -R u+rwX -- "$1"; exec rm -rf -- "$1"'


class SiblingSandboxes:
    """Runs the commands of `paddock-run`, each in a sandbox that sees neither the tests nor the reward."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._readers = guest.multiplexer.readers
        self._workdir = f"{guest.home}/workdir"
        self._refusal = guest.mount_failure
        """Why no command can be run, if so."""
        self.failure = ""
        """Why the reward is void: a command could not be run, or it misled the tests."""
        self._callers: dict[int, _socket.socket] = {}
        self._running: dict[int, int] = {}
        """The process that waits for each command, by the descriptor of its caller."""
        self._roots: dict[int, str] = {}
        self._links: dict[int, set[str]] = {}
        """The links to the tests before each command: the tests may make some for themselves."""
        self.helpers: set[int] = set()
        """Processes that remove folders; they are not processes of the tests."""
        self._count = 0

    # -- callers --------------------------------------------------------------------------------------

    def accept(self, listening: _socket.socket) -> None:
        descriptor, _ = listening._accept()  # type: ignore[attr-defined]
        caller = _socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        caller.setblocking(False)
        # A command in a sibling sandbox may not start another: it could exhaust what the tests need.
        if is_in_sibling(caller) or len(self._callers) >= MOST_CALLERS:
            caller.close()
            return
        self._callers[descriptor] = caller
        self._readers[descriptor] = lambda: self._guest.serve_sibling(descriptor)

    def receive(self, descriptor: int) -> None:
        """A request, a signal, or the end of a caller."""
        if descriptor not in self._callers:
            return
        try:
            data, received = receive_descriptors(self._callers[descriptor], LONGEST_REQUEST, STANDARD_DESCRIPTORS)
        except BlockingIOError:
            return
        try:
            if not data:
                self._forget_caller(descriptor)
            elif descriptor in self._running:
                self._forward_signal(self._running[descriptor], data)
            else:
                self._run(descriptor, data, received)
        finally:
            close_descriptors(received)

    def _forget_caller(self, descriptor: int) -> None:
        del self._readers[descriptor]
        self._callers.pop(descriptor).close()
        pid = self._running.pop(descriptor, None)
        if pid is not None:
            kill_group(pid)

    def _forward_signal(self, pid: int, data: bytes) -> None:
        if data.isdigit() and len(data) < 3 and int(data) in FORWARDED_SIGNALS:
            os.kill(pid, int(data))

    def _run(self, descriptor: int, data: bytes, received: list[int]) -> None:
        caller = self._callers[descriptor]
        cwd, *argv = data.decode("utf-8", "surrogateescape").split("\0")
        reason = self._refusal or self._check_request(cwd, argv, received)
        if not reason:
            try:
                self._running[descriptor] = self._start(cwd, argv, received)
                return
            except OSError as error:
                reason = describe_failure(error)
        self.fail(f"paddock-run failed: {reason}")
        send_answer(caller, f"refused {reason}")
        self._forget_caller(descriptor)

    def _check_request(self, cwd: str, argv: list[str], received: list[int]) -> str:
        """Why this cannot be run, or an empty text."""
        workdir = self._workdir
        if len(received) != STANDARD_DESCRIPTORS or not argv:
            return "the request is not complete"
        if len(self._running) >= MOST_RUNNING:
            return f"more than {MOST_RUNNING} commands at once"
        if cwd != workdir and not cwd.startswith(workdir + "/"):
            return f"it starts in {cwd}, but a command sees only {workdir}: change into it first"
        return next(filter(None, map(check_descriptor, received)), "")

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    # -- commands -------------------------------------------------------------------------------------

    def _start(self, cwd: str, argv: list[str], received: list[int]) -> int:
        """The process that waits for the command. Raises OSError with the reason if there can be none."""
        self._count += 1
        root = f"{ROOTS}/{self._count}"
        links = verifier_policy.find_links_to_the_tests(self._workdir)
        failures, failures_inside = os.pipe()
        try:
            for folder in (ROOTS, root, *(f"{root}/{name}" for name in FOLDERS)):
                os.makedirs(folder, exist_ok=True)
            os.chmod(f"{root}/tmp", 0o1777)
            os.chmod(f"{root}/shm", 0o1777)
            pid = os.fork()
        except OSError:
            close_descriptors([failures, failures_inside])
            raise
        if pid == 0:
            try:
                self._wait_outside([*received, failures_inside], root, cwd, argv)
            finally:
                os._exit(125)
        os.close(failures_inside)
        failure = os.read(failures, 4096).decode("utf-8", "replace")
        os.close(failures)
        self._roots[pid] = root
        self._links[pid] = links
        if failure:
            kill_group(pid)
            raise OSError(0, failure)
        return pid

    def _wait_outside(self, descriptors: list[int], root: str, cwd: str, argv: list[str]) -> None:
        """In a new process: fork process 1 of new namespaces, and exit with its exit code."""
        os.setsid()
        _signal.set_wakeup_fd(-1)
        for number in FORWARDED_SIGNALS:
            _signal.signal(number, _signal.SIG_IGN)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        # None of the guest's descriptors may stay open, least of all the socket to its owner.
        descriptors = [os.dup2(one, 100 + number) for number, one in enumerate(descriptors)]
        descriptors = [os.dup2(one, number) for number, one in enumerate(descriptors)]
        if verifier_policy.libc.syscall(CLOSE_RANGE, len(descriptors), 0xFFFFFFFF, 0) != 0:
            os.closerange(len(descriptors), 65536)
        try:
            flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC
            verifier_policy.check_call(verifier_policy.libc.unshare(flags), "new namespaces")
            pid = os.fork()
            if pid == 0:
                self._mount(root)
                verifier_policy.drop_capabilities()
                self._run_as_init(cwd, argv)
        except OSError as error:
            os.write(STANDARD_DESCRIPTORS, describe_failure(error).encode())
            os._exit(125)
        forward_signals(pid)
        os.close(STANDARD_DESCRIPTORS)
        os._exit(exit_code(os.waitpid(pid, 0)[1]))

    def _mount(self, root: str) -> None:
        """In the new mount namespace: hide what belongs to the tests."""
        mount = verifier_policy.mount
        workdir = os.open(self._workdir, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        mount(f"/proc/self/fd/{workdir}", f"{root}/user/workdir", None, MS_BIND)
        mount(f"{root}/shm", "/dev/shm", None, MS_BIND)
        mount(root, "/home", None, MS_BIND | MS_REC)
        mount("none", "/tests", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k,mode=0755")
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        os.close(workdir)

    def _run_as_init(self, cwd: str, argv: list[str]) -> None:
        """As process 1 of the namespace, whose end is the end of all in it: start the command and wait for it."""
        command = os.fork()
        if command == 0:
            try:
                self._become(cwd, argv)
            finally:
                os._exit(127)
        forward_signals(command)
        os.close(STANDARD_DESCRIPTORS)
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == command:
                os._exit(exit_code(status))

    def _become(self, cwd: str, argv: list[str]) -> None:
        for number in (*FORWARDED_SIGNALS, _signal.SIGPIPE, _signal.SIGXFSZ):
            _signal.signal(number, _signal.SIG_DFL)
        os.close(STANDARD_DESCRIPTORS)
        env = {**self._guest.settings["verifier"]["env"], "HOME": "/home/user", "PWD": cwd}
        subject = cwd
        try:
            os.chdir(cwd)
            subject = argv[0]
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(2, f"paddock-run: {subject}: {error.strerror}\n".encode("utf-8", "replace"))
            os._exit(126 if error.errno in (errno.EACCES, errno.ENOEXEC) else 127)

    # -- the end --------------------------------------------------------------------------------------

    def handle_exit(self, pid: int, status: int) -> None:
        """A child of the guest ended that is none of its commands."""
        self.helpers.discard(pid)
        self._check_links(pid)
        descriptor = next((one for one, running in self._running.items() if running == pid), None)
        if descriptor is not None:
            del self._running[descriptor]
            send_answer(self._callers[descriptor], f"exit {exit_code(status)}")
            self._forget_caller(descriptor)
        root = self._roots.pop(pid, None)
        if root is not None:
            self._remove(root)

    def _remove(self, root: str) -> None:
        """Remove what a command wrote outside of the work folder."""
        try:
            for name in (*reversed(FOLDERS), ""):
                os.rmdir(f"{root}/{name}")
        except OSError:
            try:
                pid = os.fork()
            except OSError:
                # There are too many processes: it stays, and counts for the disk limit.
                return
            if pid == 0:
                try:
                    os.execv("/bin/sh", ["sh", "-c", REMOVE_SCRIPT, "sh", root])
                finally:
                    os._exit(127)
            self.helpers.add(pid)

    def end_all(self) -> None:
        """The tests have ended: end every command that they left running."""
        for descriptor in list(self._callers):
            self._forget_caller(descriptor)
        for pid in list(self._links):
            self._check_links(pid)

    def _check_links(self, pid: int) -> None:
        """After a command: a file that it was to write must not be a link to a file of the tests."""
        before = self._links.pop(pid, None)
        if before is None:
            return
        added = sorted(verifier_policy.find_links_to_the_tests(self._workdir) - before)
        if added:
            name, target = added[0][len(self._workdir) + 1 :], verifier_policy.link_target(added[0])
            self.fail(f"a program that the tests ran made {name} a link to {target}")


def describe_failure(error: OSError) -> str:
    if error.errno == errno.EAGAIN:
        return "the sandbox has too many processes (a command takes three beside its own): run fewer at once"
    return error.strerror or str(error)


def check_descriptor(descriptor: int) -> str:
    """Why this may not be an input or output of a command: it could reach a file of the tests through it."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        return "a folder cannot be its input or output"
    if stat.S_ISREG(mode) and not is_sealed(descriptor):
        return "the tests have read a part of the file that is its input; it could read the rest: give it < /dev/null"
    return ""


def is_sealed(descriptor: int) -> bool:
    """Whether it is a sealed copy of a file, as `paddock-run` makes one."""
    try:
        return bool(fcntl.fcntl(descriptor, F_GET_SEALS) & F_SEAL_WRITE)
    except OSError:
        return False


def is_in_sibling(caller: _socket.socket) -> bool:
    """Whether it is a process of a command that runs here, in a namespace below ours."""
    peer = int.from_bytes(caller.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)[:4], sys.byteorder)
    try:
        with open(f"/proc/{peer}/status") as file:
            return any(line.startswith("NSpid:") and len(line.split()) > 2 for line in file)
    except OSError:
        return True


def send_answer(caller: _socket.socket, text: str) -> None:
    try:
        caller.send(text.encode("utf-8", "replace"))
    except OSError:
        return


def kill_group(pid: int) -> None:
    """Kill the process that waits and process 1 of the namespace, and with that everything in it."""
    try:
        os.killpg(pid, _signal.SIGKILL)
    except ProcessLookupError:
        return


def forward_signals(pid: int) -> None:
    for number in FORWARDED_SIGNALS:
        _signal.signal(number, lambda number, _: os.kill(pid, number))


def exit_code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
