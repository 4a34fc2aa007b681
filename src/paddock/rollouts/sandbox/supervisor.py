"""The first process of a sandbox: starts commands, reaps what ends, watches the limits.

It runs from its source text in a bare interpreter (Python 3.8 or later, standard library only), so it
knows nothing of Paddock and needs no file of the host. The owner of the sandbox talks to it over a
socket that keeps messages apart. A request is a marshalled (number, name, arguments), an answer is text:
the number and words, or the number, `!`, an errno and a reason. Number 0 tells of something that happened.
When the socket ends, the owner is gone: everything is killed.
"""

# `_signal` and `_socket` instead of `signal` and `socket`: those import enum, a third of the whole start.
from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import _socket
import ctypes
import errno
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
AF_NETLINK, NETLINK_SOCK_DIAG = 16, 4
DESCRIPTOR = 4
MOST_DESCRIPTORS = 3
LONGEST_REQUEST = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
LOOK_EVERY, LOOK_CLOSELY, LOOK_AT_LEAST = 0.25, 0.05, 2.0
DISK_EVERY = 1.0
SHARE_OF_LOOKING = 20
KILL_DEADLINE = 4.0
MOST_FILES_PER_BYTE = 1 / 4096
FEWEST_FILES = 100_000

libc = ctypes.CDLL(None, use_errno=True)


class Supervisor:
    def __init__(self, control: _socket.socket) -> None:
        self.control = control
        self.jobs: dict[int, int] = {}
        self.last = 0
        self.guard: Any = None
        """The module that protects the reward, in the sandbox of a verifier."""
        self.rewards: Any = None
        self.apart: Any = None
        """Runs what `paddock-run` is asked for, from the first command on."""
        self.run_requests: _socket.socket | None = None
        self.unfenced = ""
        self.cpu_seconds = 0.0
        self.peak_memory = 0
        self.look_at: float | None = None
        self.disk_at = 0.0
        self.wake, wake_write = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_write, False)
        _signal.set_wakeup_fd(wake_write)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

    def begin(self) -> bool:
        """Take the settings and answer with the home folder. False if the owner is gone already."""
        request, _ = self.receive()
        if request is None:
            return False
        number, _, self.settings = request
        settings = self.settings
        self.home = settings["home"]
        self.alone = settings["alone"]
        os.umask(0o022)
        for folder in settings["folders"]:
            os.makedirs(folder, exist_ok=True)
        if not self.alone:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            _signal.signal(_signal.SIGTERM, self.leave)
        self.limit()
        home = os.open(self.home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.send(f"{number} {os.getpid()}", home)
        os.close(home)
        # After the answer, and before any command: the owner has other things to do meanwhile.
        if settings.get("guard"):
            self.guard = load("guard", settings["guard"])
        if settings.get("apart"):
            self.fence()
        return True

    def fence(self) -> None:
        """Protect the way to the reward, and listen for `paddock-run` before anybody else can."""
        try:
            self.guard.fence(self.home)
        except OSError as error:
            self.unfenced = f"this host forbids mounts inside of a sandbox ({error.strerror or error})"
            self.send(f"0 unfenced {self.unfenced}")
        self.run_requests = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_NONBLOCK)
        self.run_requests.bind("\0paddock-run")
        self.run_requests.listen(128)

    def limit(self) -> None:
        """Limits that the kernel keeps. They are ours, and so those of all that we start."""
        settings = self.settings
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
        # From here on nobody inside can look into this process or trace it.
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        space = max(8 << 30, 2 * settings["memory_bytes"])
        files = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        lower(resource.RLIMIT_CORE, 0, 0)
        lower(resource.RLIMIT_AS, space, space)
        lower(resource.RLIMIT_FSIZE, settings["disk_bytes"], settings["disk_bytes"])
        lower(resource.RLIMIT_NOFILE, min(4096, files), files)
        if self.alone and kernel() >= (5, 14):
            # Older kernels count all processes of the user on the whole machine.
            lower(resource.RLIMIT_NPROC, settings["processes"] + 1, settings["processes"] + 1)
        if settings["cpus"]:
            os.sched_setaffinity(0, settings["cpus"])

    def serve(self) -> None:
        poll = self.poll = select.poll()
        poll.register(self.control.fileno(), select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        if self.run_requests is not None:
            poll.register(self.run_requests.fileno(), select.POLLIN)
        while True:
            wait = None if self.look_at is None else max(0, int((self.look_at - time.monotonic()) * 1000) + 1)
            for descriptor, _ in poll.poll(wait):
                if descriptor == self.wake:
                    os.read(self.wake, 4096)
                elif descriptor != self.control.fileno():
                    self.run_apart(descriptor)
                elif not self.answer():
                    return
            self.reap()
            if self.look_at is not None and time.monotonic() >= self.look_at:
                over = self.look()
                if over is not None:
                    self.send(f"0 over {over} {self.cpu_seconds:.3f} {self.peak_memory}")
                    return

    def run_apart(self, descriptor: int) -> None:
        """Something about `paddock-run`. Its part of this program is compiled when it is needed: few tests use it."""
        if self.apart is None:
            self.apart = load("apart", self.settings["apart"]).Apart(self)
        try:
            if self.run_requests is not None and descriptor == self.run_requests.fileno():
                self.apart.accept(self.run_requests)
            elif descriptor in self.apart.callers:
                self.apart.heard(descriptor)
        except OSError as error:
            # No caller may end the supervisor: it could be a program of the agent.
            self.apart.fail(f"paddock-run failed: {error.strerror or error}")
        if self.look_at is None:
            self.look_at = time.monotonic() + LOOK_CLOSELY

    # -- requests -------------------------------------------------------------------------------------

    def answer(self) -> bool:
        """Carry out one request. False if there will be no more."""
        request, descriptors = self.receive()
        if request is None:
            return False
        number, name, arguments = request
        given: int | None = None
        try:
            words, given = getattr(self, "do_" + name)(number, descriptors, **arguments)
            self.send(f"{number} {words}", given)
        except OSError as error:
            self.send(f"{number} ! {error.errno or 0} {error.strerror or error}")
        finally:
            for descriptor in descriptors if given is None else [*descriptors, given]:
                os.close(descriptor)
        return True

    def do_spawn(
        self,
        number: int,
        given: list[int],
        argv: list[str],
        cwd: str,
        env: dict[str, str],
        last: bool,
        guarded: list[str],
    ) -> Any:
        rewards = self.guard.Rewards(guarded) if guarded else None
        pid = self.fork(given, argv, cwd, env)
        self.jobs[pid] = number
        if last:
            self.last, self.rewards = pid, rewards
        if self.look_at is None:
            self.look_at = time.monotonic() + LOOK_CLOSELY
        return str(pid), None

    def fork(self, given: list[int], argv: list[str], cwd: str, env: dict[str, str]) -> int:
        """The new process, when it can be signalled: before, it has no group, and our own handlers."""
        waiting, held = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(held)
            os.close(waiting)
            raise
        if pid == 0:
            try:
                self.become(given, held, argv, cwd, env)
            finally:
                os._exit(127)
        os.close(held)
        os.read(waiting, 1)
        os.close(waiting)
        return pid

    def become(self, given: list[int], held: int, argv: list[str], cwd: str, env: dict[str, str]) -> None:
        """In the new process: turn into the command, or say on its standard error why that is impossible."""
        os.setsid()
        stdin, stdout, stderr = given if len(given) == 3 else [os.open(os.devnull, os.O_RDONLY), *given]
        for number, descriptor in enumerate((stdin, stdout, stderr)):
            os.dup2(descriptor, number)
        _signal.set_wakeup_fd(-1)
        for ignored in (_signal.SIGCHLD, _signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGTERM):
            _signal.signal(ignored, _signal.SIG_DFL)
        os.close(held)
        if not self.alone:
            libc.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
        self.ready()
        subject = cwd
        try:
            os.chdir(cwd)
            subject = argv[0]
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(2, f"{subject}: {error.strerror}\n".encode("utf-8", "replace"))
            os._exit(126 if error.errno == errno.EACCES else 127)

    def ready(self) -> None:
        """In the new process, last of all."""
        if self.run_requests is not None:
            self.guard.drop_capabilities()
            self.guard.confine(self.settings["filters"])

    def do_signal(self, number: int, given: list[int], pid: int, signal: int) -> Any:
        # After the end of its first process a group can live on; without any, its number may be another's by now.
        if pid in self.jobs or any(group_of(member) == pid for member in self.pids()):
            os.killpg(pid, signal)
        return "done", None

    def do_listen(self, number: int, given: list[int], port: int) -> Any:
        listening = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK)
        try:
            listening.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen(128)
            return str(listening.getsockname()[1]), os.dup(listening.fileno())
        finally:
            listening.close()

    def do_connect(self, number: int, given: list[int], port: int) -> Any:
        """The socket may still be connecting: whoever gets it waits for that."""
        connecting = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK)
        try:
            failure = connecting.connect_ex(("127.0.0.1", port))
            if failure not in (0, errno.EINPROGRESS):
                raise OSError(failure, os.strerror(failure))
            return "connecting", os.dup(connecting.fileno())
        finally:
            connecting.close()

    def do_diagnose(self, number: int, given: list[int]) -> Any:
        """A netlink socket that tells which sockets there are in this network."""
        asking = _socket.socket(AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)
        try:
            return "diagnosing", os.dup(asking.fileno())
        finally:
            asking.close()

    def do_usage(self, number: int, given: list[int]) -> Any:
        self.look()
        return f"{self.cpu_seconds:.3f} {self.peak_memory}", None

    # -- processes ------------------------------------------------------------------------------------

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.look_at = None
                return
            if pid == 0:
                return
            number = self.jobs.pop(pid, None)
            doubt = self.end_with_last() if pid == self.last else ""
            if number is not None:
                signalled = os.WIFSIGNALED(status)
                code = 128 + os.WTERMSIG(status) if signalled else os.WEXITSTATUS(status)
                self.send(f"0 exit {number} {code}{' signalled' * signalled}{doubt and ' tampered ' + doubt}")
            elif self.apart is not None:
                self.apart.ended(pid, status)

    def end_with_last(self) -> str:
        """End what the last command left behind. Says why what its guarded files say cannot be trusted, if so."""
        doubt = ""
        helpers: set[int] = set()
        if self.apart is not None:
            self.apart.end_all()
            helpers, doubt = self.apart.helpers, self.apart.failure
        if self.rewards is not None:
            found = self.rewards.doubt(lambda: [pid for pid in self.pids() if int(pid) not in helpers])
            doubt, self.rewards = doubt or found, None
        self.end_others()
        return doubt

    def end_others(self) -> None:
        """Everything but us, at once: as process 1 we are spared by our own signal to all."""
        self.last = 0
        for pid in ["-1"] if self.alone else descendants(str(os.getpid())):
            try:
                os.kill(int(pid), _signal.SIGKILL)
            except ProcessLookupError:
                continue

    def pids(self) -> list[str]:
        if self.alone:
            return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return descendants(str(os.getpid()))

    def look(self) -> str | None:
        """Sum up what all processes use. Returns the name of a limit that is broken."""
        began = time.monotonic()
        settings = self.settings
        memory = ticks = tasks = 0
        pids = self.pids()
        for pid in pids:
            stat = read(f"/proc/{pid}/stat")
            if stat is None:
                continue
            fields = stat[stat.rindex(b")") + 2 :].split()
            ticks += sum(int(time) for time in fields[11:15])
            tasks += int(fields[17])
            memory += int(fields[21]) * PAGE
        if memory > settings["memory_bytes"]:
            # Pages that processes share were counted for each of them; this counts them once, at a price.
            memory = min(memory, sum(proportional_memory(pid) for pid in pids))
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = ticks / TICKS + reaped.ru_utime + reaped.ru_stime
        self.cpu_seconds = max(self.cpu_seconds, used)
        self.peak_memory = max(self.peak_memory, memory, reaped.ru_maxrss * 1024)
        now = time.monotonic()
        pause = LOOK_CLOSELY if memory > settings["memory_bytes"] / 2 else LOOK_EVERY
        if self.look_at is not None:
            self.look_at = now + max(pause, min(LOOK_AT_LEAST, SHARE_OF_LOOKING * (now - began)))
        if memory > settings["memory_bytes"]:
            return "memory"
        if self.cpu_seconds > settings["cpu_seconds"]:
            return "cpu"
        if tasks > settings["processes"] + 1:
            return "processes"
        return "disk" if now >= self.disk_at and self.disk_is_over(now) else None

    def disk_is_over(self, now: float) -> bool:
        most: int = self.settings["disk_bytes"]
        if self.alone:
            # The size of the filesystem is its limit. Only the number of files has none.
            found = os.statvfs(self.home)
            return found.f_files - found.f_ffree > max(FEWEST_FILES, most * MOST_FILES_PER_BYTE)
        used = disk_use(self.settings["place"])
        self.disk_at = now + max(DISK_EVERY, SHARE_OF_LOOKING * (time.monotonic() - now))
        return used > most

    def leave(self, *_: object) -> None:
        self.kill_all()
        os._exit(0)

    def kill_all(self) -> None:
        """End everything but us. As process 1 our own end does the same, and leaves nobody out."""
        if self.alone:
            return
        deadline = time.monotonic() + KILL_DEADLINE
        while time.monotonic() < deadline:
            for pid in descendants(str(os.getpid())):
                try:
                    os.kill(int(pid), _signal.SIGKILL)
                except ProcessLookupError:
                    continue
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.002)

    # -- the socket -----------------------------------------------------------------------------------

    def receive(self) -> tuple[Any, list[int]]:
        room = _socket.CMSG_SPACE(MOST_DESCRIPTORS * DESCRIPTOR)
        try:
            data, ancillary, _, _ = self.control.recvmsg(LONGEST_REQUEST, room, _socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return None, []
        given = [
            int.from_bytes(content[start : start + DESCRIPTOR], sys.byteorder)
            for _, _, content in ancillary
            for start in range(0, len(content) - DESCRIPTOR + 1, DESCRIPTOR)
        ]
        return (marshal.loads(data) if data else None), given

    def send(self, text: str, descriptor: int | None = None) -> None:
        packed = b"" if descriptor is None else descriptor.to_bytes(DESCRIPTOR, sys.byteorder)
        ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)] if packed else []
        try:
            self.control.sendmsg([text.encode("utf-8", "replace")], ancillary)
        except ConnectionError:
            self.leave()


def load(name: str, part: tuple[str, bytes, bytes]) -> Any:
    """A further part of this program. Its code saves the time to compile it where both sides run the same Python."""
    text, magic, code = part
    module = type(sys)(name)
    same = magic == sys.modules["_frozen_importlib_external"].MAGIC_NUMBER
    exec(marshal.loads(code) if same else compile(text, name, "exec"), module.__dict__)
    return module


def lower(kind: int, soft: int, hard: int) -> None:
    """Set a limit, but never above what we were given."""
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


def read(path: str) -> bytes | None:
    """The content of a file below /proc; None when its process is gone or not ours to look at."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(8192)
    except OSError:
        return None


def group_of(pid: str) -> int | None:
    stat = read(f"/proc/{pid}/stat")
    return int(stat[stat.rindex(b")") + 2 :].split()[2]) if stat else None


def proportional_memory(pid: str) -> int:
    content = read(f"/proc/{pid}/smaps_rollup")
    lines = content.split(b"\n") if content else []
    found = next((line.split() for line in lines if line.startswith(b"Pss:")), None)
    if found is not None:
        return int(found[1]) * 1024
    statm = read(f"/proc/{pid}/statm")
    return int(statm.split()[1]) * PAGE if statm else 0


def descendants(pid: str) -> list[str]:
    found: list[str] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for task in tasks:
            children = (read(f"/proc/{parent}/task/{task}/children") or b"").decode().split()
            found += children
            waiting += children
    return found


def disk_use(folder: str) -> int:
    used = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                used += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return used


def main() -> None:
    control = _socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != control.fileno():
            try:
                os.close(int(name))
            except OSError:
                continue
    supervisor = Supervisor(control)
    if supervisor.begin():
        supervisor.serve()
        supervisor.kill_all()
    # Without the long way out of an interpreter: everything here ends with us.
    os._exit(0)


if __name__ == "__main__":
    main()
