"""The fork server: forks a child for each run, kills it at its deadline, and reports its exit status.

Run as a program with the file descriptor of a socket. Each message on it is a `RUN_HEADER` (seconds, bytes of
memory) with the three sockets of a run: request and answer, standard output, exit status. The fork server itself
never touches a verifier's code. When the socket is closed it ends, with every child.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Imported before the first fork, so that every child has these modules already.
from paddock.fleet.instance.verifier import EXIT_NOT_RUN, RUN_HEADER, restrictions
from paddock.fleet.instance.verifier.child import run

SOCKETS_PER_RUN = 3


@dataclass(slots=True)
class VerifierChild:
    """A forked process that runs one verifier."""

    pid: int
    exit_status: socket.socket
    """Where its exit status is reported. The runner closes its end when it gives up the run."""
    deadline: float
    timed_out: bool = False

    def kill(self) -> None:
        for send_signal in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                send_signal(self.pid, signal.SIGKILL)


class VerifierForkServer:
    """Forks a process for each verifier, and reports how it ends."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, VerifierChild] = {}
        self.syscall_filter = restrictions.build_filter()
        self.readable_folders = restrictions.readable_folders()
        # SIGCHLD writes to this pair, so that `poll` returns when a child ends.
        self.wakeup, wakeup_writer = socket.socketpair()
        self.wakeup.setblocking(False)
        wakeup_writer.setblocking(False)
        self._wakeup_writer = wakeup_writer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> None:
        """Until the control socket is closed."""
        gc.collect()
        gc.freeze()
        while True:
            poller = select.poll()
            poller.register(self.control, select.POLLIN)
            poller.register(self.wakeup, select.POLLIN)
            for child in self.children.values():
                poller.register(child.exit_status, 0)
            ready = {descriptor for descriptor, _ in poller.poll(self._milliseconds_to_deadline())}
            if self.wakeup.fileno() in ready:
                with suppress(BlockingIOError):
                    self.wakeup.recv(4096)
            self._reap()
            for child in self.children.values():
                is_overdue = time.monotonic() >= child.deadline
                child.timed_out = child.timed_out or is_overdue
                # A closed socket means that the runner has given up the run.
                if is_overdue or child.exit_status.fileno() in ready:
                    child.kill()
            if self.control.fileno() in ready and not self._start_run():
                return

    def close(self) -> None:
        for child in self.children.values():
            child.kill()
        self._kill_orphans()

    def _milliseconds_to_deadline(self) -> float | None:
        if not self.children:
            return None
        soonest = min(child.deadline for child in self.children.values())
        return max(0.0, soonest - time.monotonic()) * 1000 + 1

    def _start_run(self) -> bool:
        """Fork a child for the next message. False when the control socket was closed."""
        message, descriptors, _, _ = socket.recv_fds(self.control, RUN_HEADER.size, SOCKETS_PER_RUN)
        if len(message) < RUN_HEADER.size:
            return False
        seconds, memory_bytes = RUN_HEADER.unpack(message)
        answer, stdout, exit_status = descriptors
        pid = os.fork()
        if pid == 0:
            self._become_child(answer, stdout, int(memory_bytes), seconds)
        os.close(answer)
        os.close(stdout)
        self.children[pid] = VerifierChild(pid, socket.socket(fileno=exit_status), time.monotonic() + seconds)
        return True

    def _become_child(self, answer: int, stdout: int, memory_bytes: int, seconds: float) -> None:
        """Never returns, so that no code of the fork server runs on in the child."""
        code = EXIT_NOT_RUN
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(stdout, 1)
            os.dup2(0, 2)
            connection = os.dup2(answer, 3)
            os.closerange(4, 4096)
            code = run(connection, lambda: self._restrict(memory_bytes, seconds))
        finally:
            os._exit(code)

    def _restrict(self, memory_bytes: int, seconds: float) -> None:
        has_filter = self.syscall_filter is not None
        restrictions.limit_resources(memory_bytes, int(seconds) + 1, has_filter=has_filter)
        restrictions.restrict_reading(self.readable_folders)
        if self.syscall_filter is not None and not restrictions.install_filter(self.syscall_filter):
            raise PermissionError("the kernel refuses a seccomp filter")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.children.pop(pid, None)
            if child is not None:
                self._kill_orphans()
                _report_exit(child, status)

    def _kill_orphans(self) -> None:
        """Kill the processes that an ended child left. As subreaper, this process is their parent now."""
        try:
            pids = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
        except OSError:
            return
        for pid in map(int, pids):
            if pid not in self.children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _report_exit(child: VerifierChild, status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    name = signal.Signals(-code).name if code < 0 else None
    document = {"code": code if code >= 0 else None, "signal": name, "timed_out": child.timed_out}
    with suppress(OSError):
        child.exit_status.sendall(json.dumps(document).encode())
    child.exit_status.close()


def main() -> None:
    server = VerifierForkServer(socket.socket(fileno=int(sys.argv[1])))
    restrictions.become_subreaper()
    if server.syscall_filter is None:
        print("verifiers run with resource limits, but without a seccomp filter on this machine", file=sys.stderr)
    try:
        server.serve()
    finally:
        server.close()


if __name__ == "__main__":
    main()
