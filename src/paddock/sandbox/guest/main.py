"""Entry of the guest: it prepares the sandbox, then serves its owner until the owner is gone.

Arguments: `socket FD OWNER` (a Unix socket and a pidfd of the owner, both inherited), `pipe` or `text` (standard
input and output, with frames as they are or as lines of base64), or `connect PORT SECRET` (a port on 127.0.0.1).

The guest ends everything when its connection ends, or when the owner's pidfd says that the owner ended: a process
that the owner forked may still hold a copy of its end of the socket.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import _socket
import ctypes
import os
import resource
import sys
import time

from paddock.sandbox.guest.commands import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, CommandRunner, lower_limit
from paddock.sandbox.guest.multiplexer import DEFERRED, Multiplexer
from paddock.sandbox.guest.transports import PipeTransport, SocketTransport
from paddock.sandbox.guest.usage import UsageWatch, find_descendants, read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from paddock.sandbox.guest.multiplexer import Request

PR_SET_CHILD_SUBREAPER = 36
AF_NETLINK, NETLINK_SOCK_DIAG = 16, 4
KILL_SECONDS = 4.0
MOST_FILES, SOFT_MOST_FILES = 65536, 4096
LEAST_ADDRESS_SPACE = 8 << 30
RUN_ADDRESS = "\0paddock-run"


class Guest:
    """One sandbox, seen from inside."""

    def __init__(self, multiplexer: Multiplexer) -> None:
        self.multiplexer = multiplexer
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.pid = os.getpid()
        self.is_init = self.pid == 1
        """Whether it is process 1 of a PID namespace: then its end is the end of all others."""
        self.settings: dict[str, Any] = {}
        self.home = ""
        self.user: int | None = None
        """Who commands run as, if the guest is root and they are not."""
        self.usage = UsageWatch({"limits": None, "home": ""}, is_init=self.is_init)
        self.commands = CommandRunner(self)
        self.verifier_policy: Any = None
        """The module, where it is needed: each import costs start-up time."""
        self.run_server: _socket.socket | None = None
        """Listens for `paddock-run`."""
        self.siblings: Any = None
        """Runs the commands of `paddock-run`, from the first one on."""
        self.mount_failure = ""
        multiplexer.handlers |= {
            "begin": self.begin,
            "spawn": self.commands.spawn,
            "signal": self.commands.signal,
            "resize": self.commands.resize,
            "usage": self.report_usage,
            "processes": self.list_processes,
            "end": self.end,
            "end_processes": self.end_processes,
            "diagnose": self.open_diagnosis,
        }
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        multiplexer.readers[self._wake] = lambda: os.read(self._wake, 4096)
        _signal.set_wakeup_fd(wake)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

    # -- preparing ------------------------------------------------------------------------------------

    def begin(self, request: Request, **settings: Any) -> Any:
        """Prepare the sandbox. A local owner gets a descriptor of the home folder."""
        self.settings, self.home = settings, settings["home"]
        self.user = settings.get("user") if os.geteuid() == 0 else None
        self.usage = UsageWatch(settings, is_init=self.is_init)
        os.umask(0o022)
        if not self.is_init:
            self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            _signal.signal(_signal.SIGTERM, self._leave)
        if settings.get("logs"):
            self._link_logs(settings["logs"])
        for folder in settings["folders"]:
            os.makedirs(folder, exist_ok=True)
            self._hand_over(folder)
        for path, target in settings.get("links", {}).items():
            if not os.path.lexists(path):
                os.symlink(target, path)
        if settings.get("oom_score"):
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write(str(settings["oom_score"]))
        # No process inside can read the memory of this one, or trace it, from here on.
        self.libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        if settings["limits"] is not None:
            self._limit_resources(settings["limits"])
        if settings.get("serves_files"):
            from paddock.sandbox.guest.files import FileRequests

            on_image = settings.get("root") == "/"
            self.multiplexer.handlers |= FileRequests(self.multiplexer, self.user, on_image=on_image).handlers()
        if self.multiplexer.transport.passes_descriptors:
            request.reply_descriptors = [
                os.open(settings.get("root") or self.home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            ]
        request.answer({"pid": self.pid})
        # Imported after the answer, so that it runs in parallel with the owner's next work.
        verifier = settings.get("verifier")
        if verifier or settings.get("seccomp_filter"):
            from paddock.sandbox.guest import verifier_policy

            self.verifier_policy = verifier_policy
        if verifier and verifier["has_siblings"]:
            self._protect_reward()
        return DEFERRED

    def _link_logs(self, logs: str) -> None:
        """Make `/logs` and the folder `logs` of the home one folder: whichever is there already is the real one."""
        below_home = os.path.join(self.home, "logs")
        if os.path.isdir(logs) and not os.path.islink(logs):
            if not os.path.lexists(below_home):
                os.symlink(logs, below_home)
        else:
            os.makedirs(below_home, exist_ok=True)
            self._hand_over(below_home)
            if not os.path.lexists(logs) and os.access(os.path.dirname(logs), os.W_OK):
                os.symlink(below_home, logs)

    def _hand_over(self, path: str) -> None:
        if self.user is not None:
            os.chown(path, self.user, self.user)

    def _limit_resources(self, limits: dict[str, Any]) -> None:
        """Limits that the kernel enforces. Commands inherit them."""
        address_space = max(LEAST_ADDRESS_SPACE, 2 * limits["memory_bytes"])
        files = min(MOST_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        lower_limit(resource.RLIMIT_CORE, 0)
        lower_limit(resource.RLIMIT_AS, address_space)
        lower_limit(resource.RLIMIT_FSIZE, limits["disk_bytes"])
        lower_limit(resource.RLIMIT_NOFILE, min(SOFT_MOST_FILES, files), files)
        if self.settings.get("has_user_namespace") and kernel_version() >= (5, 14):
            # Older kernels count all processes of the user on the whole machine.
            lower_limit(resource.RLIMIT_NPROC, limits["processes"] + 1)
        processors = sorted(os.sched_getaffinity(0))
        if limits["cpus"] and limits["cpus"] < len(processors):
            first = self.settings.get("first_processor", 0)
            os.sched_setaffinity(0, [processors[(first + n) % len(processors)] for n in range(limits["cpus"])])

    def _protect_reward(self) -> None:
        """Make the path to the reward mount points, and listen for `paddock-run` before anybody else can."""
        try:
            self.verifier_policy.protect_mounts(self.home)
        except OSError as error:
            self.mount_failure = f"this host forbids mounts inside of a sandbox ({error.strerror or error})"
            self.multiplexer.send_event("mounts_failed", self.mount_failure)
        server = _socket.socket(
            _socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
        )
        server.bind(RUN_ADDRESS)
        server.listen(128)
        self.run_server = server
        self.multiplexer.readers[server.fileno()] = self.serve_sibling

    def serve_sibling(self, descriptor: int | None = None) -> None:
        """Handle a new caller of `paddock-run`, or what one of them sends. Its module is imported with the first."""
        if self.siblings is None:
            from paddock.sandbox.guest.sibling_sandbox import SiblingSandboxes

            self.siblings = SiblingSandboxes(self)
        try:
            if descriptor is None:
                self.siblings.accept(self.run_server)
            else:
                self.siblings.receive(descriptor)
        except OSError as error:
            # No caller may end the guest: it could be a program of the agent.
            self.siblings.fail(f"paddock-run failed: {error.strerror or error}")
        self.usage.start()

    # -- requests -------------------------------------------------------------------------------------

    def report_usage(self, request: Request) -> Any:
        self.usage.measure()
        return {"cpu_seconds": self.usage.cpu_seconds, "peak_memory_bytes": self.usage.peak_memory}

    def list_processes(self, request: Request) -> list[str]:
        """The command lines of all processes but the guest. Those that have ended have none."""
        lines = (read(f"/proc/{pid}/cmdline") or b"" for pid in self.usage.pids())
        return [line.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace") for line in lines if line]

    def open_diagnosis(self, request: Request) -> None:
        """Hand over a netlink socket that lists the sockets of this network namespace."""
        diagnosis = _socket.socket(AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)
        request.reply_descriptors = [diagnosis.detach()]

    def end(self, request: Request) -> Any:
        """Kill everything but the guest. Files stay readable as long as it runs."""
        used = self.report_usage(request)
        self.end_all()
        return used

    def end_processes(self, request: Request) -> Any:
        """Kill everything but the guest. Afterwards commands can be started again, and what they use counts anew."""
        self.multiplexer.refuse_when_ended()
        used = self.report_usage(request)
        self.kill_all()
        self.multiplexer.pump()
        self.usage = UsageWatch(self.settings, is_init=self.is_init)
        return used

    def end_all(self) -> None:
        self.multiplexer.is_ended = True
        self.multiplexer.close_ports()
        self.kill_all()
        self.multiplexer.pump()

    # -- the loop -------------------------------------------------------------------------------------

    def serve(self) -> None:
        multiplexer, usage = self.multiplexer, self.usage
        while not multiplexer.is_closed:
            multiplexer.wait(usage.milliseconds_left())
            usage = self.usage
            self.commands.reap()
            if usage.is_due() and not multiplexer.is_ended:
                exceeded = usage.measure()
                if exceeded is not None:
                    multiplexer.send_event("limit", exceeded, usage.cpu_seconds, usage.peak_memory)
                    if not self.settings.get("serves_files"):
                        return
                    self.end_all()
            multiplexer.flush()

    def kill_others(self) -> None:
        """Send SIGKILL to every process but the guest, once. As process 1, `kill(-1)` reaches all others."""
        for pid in ["-1"] if self.is_init else find_descendants(str(self.pid)):
            try:
                os.kill(int(pid), _signal.SIGKILL)
            except ProcessLookupError:
                continue

    def kill_all(self) -> None:
        """Kill until no process is left. A guest that is not process 1 races with processes that fork."""
        deadline = time.monotonic() + KILL_SECONDS
        while time.monotonic() < deadline:
            self.kill_others()
            self.commands.reap()
            if not self.commands.running and not self.usage.pids():
                return
            time.sleep(0.002)

    def leave(self) -> None:
        if not self.is_init:
            self.kill_all()
        # Not a normal interpreter exit: that takes longer, and everything here ends with the process.
        os._exit(0)

    def _leave(self, *_: object) -> None:
        self.leave()


def kernel_version() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


def open_transport(kind: str, *arguments: str) -> SocketTransport | PipeTransport:
    if kind == "socket":
        return SocketTransport(_socket.socket(fileno=int(arguments[0])))
    if kind == "connect":
        connection = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        connection.connect(("127.0.0.1", int(arguments[0])))
        connection.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        connection.send(arguments[1].encode())
        incoming = connection.detach()
        return PipeTransport(incoming, os.dup(incoming), text=False)
    incoming, outgoing = os.dup(0), os.dup(1)
    # No command can write to the connection: from here on the standard descriptors are those of /dev/null.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return PipeTransport(incoming, outgoing, text=kind == "text")


def close_others(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor not in keep:
            try:
                os.close(descriptor)
            except OSError:
                continue


def main(extension: Callable[[Guest], object] | None = None) -> None:
    """Serve until the owner is gone. An `extension` adds handlers of its own."""
    kind, *arguments = sys.argv[1:]
    transport = open_transport(kind, *arguments)
    owner = int(arguments[1]) if kind == "socket" else -1
    close_others({transport.incoming, transport.outgoing, owner})
    multiplexer = Multiplexer(transport)
    guest = Guest(multiplexer)
    for descriptor in {transport.incoming, transport.outgoing, owner} - {-1}:
        os.set_inheritable(descriptor, False)
    if owner >= 0:
        multiplexer.readers[owner] = guest.leave
        if guest.is_init:
            # The parent is bubblewrap's outer process. Without it nobody reports the end of this one.
            guest.libc.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
    if extension is not None:
        extension(guest)
    try:
        guest.serve()
    except Exception:
        sys.excepthook(*sys.exc_info())
    guest.leave()


if __name__ == "__main__":
    main()
