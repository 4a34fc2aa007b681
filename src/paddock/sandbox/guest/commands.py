"""Commands of the owner: they are started, signalled, and reported when they end."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import errno
import os
import resource

from paddock.sandbox.guest.multiplexer import GuestStream
from paddock.sandbox.guest.transports import close_descriptors
from paddock.sandbox.guest.usage import process_group

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from paddock.sandbox.guest.main import Guest
    from paddock.sandbox.guest.multiplexer import Request

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITIES = 64


class CommandRunner:
    """Starts the commands that the host requests, and reports how they end."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._multiplexer = guest.multiplexer
        self.running: dict[int, int] = {}
        """The number of the request that started it, by pid."""
        self.last_pid = 0
        """The command whose end is the end of everything inside."""
        self.reward_files: Any = None

    # -- requests -------------------------------------------------------------------------------------

    def spawn(
        self,
        request: Request,
        argv: list[str],
        cwd: str,
        env: dict[str, str],
        last: bool = False,
        guarded: list[str] | None = None,
        streams: list[int] | None = None,
        terminal: list[int] | None = None,
        user: str = "",
        home: str = "",
        owned: list[str] | None = None,
    ) -> Any:
        """Start a command. Its standard descriptors came with the request, or are made for the numbered `streams`.

        It runs as `user`, in whose `home` the paths `owned` then belong to that user."""
        multiplexer = self._multiplexer
        multiplexer.refuse_when_ended()
        reward_files = self._guest.verifier_policy.RewardFiles(guarded) if guarded else None
        opened: list[GuestStream] = []
        descriptors = request.descriptors
        if streams is not None:
            descriptors, opened = open_terminal(streams[1], terminal) if terminal else open_pipes(*streams)
        try:
            login = (user, home, owned or [])
            pid = self._fork(descriptors, argv, cwd, env, bool(terminal), login)
        except OSError:
            for stream in opened:
                multiplexer.close_stream(stream)
            raise
        finally:
            if streams is not None:
                close_descriptors(list(set(descriptors)))
        for stream in opened:
            multiplexer.streams[stream.number] = stream
        self.running[pid] = request.number
        if last:
            self.last_pid, self.reward_files = pid, reward_files
        self._guest.usage.start()
        return {"pid": pid}

    def signal(self, request: Request, pid: int, signal: int) -> None:
        # A process group can outlive its first process. Without any member, its number may belong to another one.
        if pid in self.running or any(process_group(member) == pid for member in self._guest.usage.pids()):
            os.killpg(pid, signal)

    def resize(self, request: Request, stream: int, rows: int, cols: int) -> None:
        terminal = self._multiplexer.streams.get(stream)
        if terminal is None or terminal.source is None:
            raise OSError(errno.ENOENT, "there is no such terminal")
        set_terminal_size(terminal.source, rows, cols)

    # -- the new process ------------------------------------------------------------------------------

    def _fork(
        self,
        descriptors: list[int],
        argv: list[str],
        cwd: str,
        env: dict[str, str],
        has_terminal: bool,
        login: tuple[str, str, list[str]],
    ) -> int:
        """The new process, once it can be signalled: before, it has no process group, and our signal handlers."""
        ready, ready_inside = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            close_descriptors([ready_inside, ready])
            raise
        if pid == 0:
            try:
                self._become(descriptors, ready_inside, argv, cwd, env, has_terminal, login)
            finally:
                os._exit(127)
        os.close(ready_inside)
        os.read(ready, 1)
        os.close(ready)
        return pid

    def _become(
        self,
        descriptors: list[int],
        ready: int,
        argv: list[str],
        cwd: str,
        env: dict[str, str],
        has_terminal: bool,
        login: tuple[str, str, list[str]],
    ) -> None:
        """In the new process: execute the command, or write to its standard error why that is impossible."""
        os.setsid()
        if len(descriptors) < 3:
            descriptors = [os.open(os.devnull, os.O_RDONLY), *descriptors]
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        _signal.set_wakeup_fd(-1)
        for number in (_signal.SIGCHLD, _signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGTERM):
            _signal.signal(number, _signal.SIG_DFL)
        os.close(ready)
        self._confine(has_terminal)
        subject = f"user {login[0]}"
        try:
            if login[0]:
                from paddock.sandbox.guest.users import become_user

                become_user(*login, env)
            subject = cwd
            os.chdir(cwd)
            subject = argv[0]
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(2, f"{subject}: {error.strerror}\n".encode("utf-8", "replace"))
            os._exit(126 if error.errno == errno.EACCES else 127)

    def _confine(self, has_terminal: bool) -> None:
        """In the new process, last of all: give up what a command may not have."""
        guest, settings = self._guest, self._guest.settings
        prctl = guest.libc.prctl
        if not guest.is_init:
            prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guest.pid:  # it died before the call
                os._exit(127)
        if has_terminal:
            take_terminal()
        if settings.get("command_oom_score"):
            # Where memory runs out, commands are killed first, and the guest stays to report it.
            prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write(str(settings["command_oom_score"]))
        if guest.user is not None:
            lower_limit(resource.RLIMIT_NPROC, settings["limits"]["processes"] + 1)
            for capability in range(CAPABILITIES):
                prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
            os.setgroups([])
            os.setresgid(guest.user, guest.user, guest.user)
            os.setresuid(guest.user, guest.user, guest.user)
        if settings.get("no_new_privileges"):
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        policy, verifier = guest.verifier_policy, settings.get("verifier") or {}
        if settings.get("seccomp_filter"):
            policy.install_filter(settings["seccomp_filter"])
        if guest.run_server is not None:
            policy.drop_capabilities()
        if verifier.get("is_confined"):
            policy.confine(verifier["seccomp_filters"])

    # -- the end --------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Collect processes that ended, and report those that are commands."""
        guest = self._guest
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                guest.usage.next_at = None
                return
            if pid == 0:
                return
            number = self.running.pop(pid, None)
            tampered = self._end_with_last() if pid == self.last_pid else ""
            if number is not None:
                is_signalled = os.WIFSIGNALED(status)
                code = 128 + os.WTERMSIG(status) if is_signalled else os.WEXITSTATUS(status)
                self._multiplexer.send_event("exit", number, code, is_signalled, tampered)
            elif guest.siblings is not None:
                guest.siblings.handle_exit(pid, status)

    def _end_with_last(self) -> str:
        """End what the last command left behind. Returns why its guarded files cannot be trusted, or nothing."""
        guest, reason = self._guest, ""
        helpers: set[int] = set()
        if guest.siblings is not None:
            guest.siblings.end_all()
            helpers, reason = guest.siblings.helpers, guest.siblings.failure
        if self.reward_files is not None:
            tampered = self.reward_files.check(lambda: [pid for pid in guest.usage.pids() if int(pid) not in helpers])
            reason, self.reward_files = reason or tampered, None
        self.last_pid = 0
        guest.kill_all()
        return reason


def open_pipes(stdin: int, stdout: int, stderr: int) -> tuple[list[int], list[GuestStream]]:
    """Descriptors for a command, and the streams that they are connected to. Number 0 is no input."""
    descriptors, streams = [], []
    if stdin:
        read, write = os.pipe()
        os.set_blocking(write, False)
        descriptors.append(read)
        streams.append(GuestStream(stdin, sink=write))
    for number in (stdout, stderr):
        read, write = os.pipe()
        os.set_blocking(read, False)
        descriptors.append(write)
        streams.append(GuestStream(number, source=read))
    return descriptors, streams


def open_terminal(number: int, size: list[int]) -> tuple[list[int], list[GuestStream]]:
    master, slave = os.openpty()
    os.set_blocking(master, False)
    set_terminal_size(master, *size)
    stream = GuestStream(number, source=master, sink=os.dup(master))
    stream.is_terminal = True
    return [slave, slave, slave], [stream]


def set_terminal_size(descriptor: int, rows: int, cols: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def lower_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit, but never above what the guest itself was given."""
    hard = soft if hard is None else hard
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))
