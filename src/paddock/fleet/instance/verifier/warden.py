"""The warden: forks a child for each run, ends it in time, and tells what became of it.

Run as a program with the number of a socket. Each message on it is an order (seconds, bytes of memory) with the
three connections of a run: request and answer, standard output, verdict. The warden itself never touches a
verifier's code. It ends, with every child, when the socket is closed.
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

# Imported here, so that every child has them already.
from paddock.fleet.instance.verifier import NOT_RUN, ORDER, jail
from paddock.fleet.instance.verifier.child import run

CONNECTIONS = 3


@dataclass(slots=True)
class Child:
    pid: int
    verdict: socket.socket
    deadline: float
    timed_out: bool = False

    def kill(self) -> None:
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)


class Warden:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, Child] = {}
        self.filter = jail.program()
        self.folders = jail.readable_folders()
        self.woken, waker = socket.socketpair()
        self.woken.setblocking(False)
        waker.setblocking(False)
        self._waker = waker
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> None:
        """Until the control socket is closed."""
        gc.collect()
        gc.freeze()
        while True:
            poller = select.poll()
            poller.register(self.control, select.POLLIN)
            poller.register(self.woken, select.POLLIN)
            for child in self.children.values():
                poller.register(child.verdict, 0)
            ready = {handle for handle, _ in poller.poll(self._until_next_deadline())}
            if self.woken.fileno() in ready:
                with suppress(BlockingIOError):
                    self.woken.recv(4096)
            self._reap()
            for child in self.children.values():
                # A caller that is gone has closed its end.
                overdue = time.monotonic() >= child.deadline
                child.timed_out = child.timed_out or overdue
                if overdue or child.verdict.fileno() in ready:
                    child.kill()
            if self.control.fileno() in ready and not self._take_order():
                return

    def end(self) -> None:
        for child in self.children.values():
            child.kill()
        self._kill_orphans()

    def _until_next_deadline(self) -> float | None:
        if not self.children:
            return None
        soonest = min(child.deadline for child in self.children.values())
        return max(0.0, soonest - time.monotonic()) * 1000 + 1

    def _take_order(self) -> bool:
        message, handles, _, _ = socket.recv_fds(self.control, ORDER.size, CONNECTIONS)
        if len(message) < ORDER.size:
            return False
        seconds, memory_bytes = ORDER.unpack(message)
        answer, stdout, verdict = handles
        pid = os.fork()
        if pid == 0:
            self._become_child(answer, stdout, int(memory_bytes), seconds)
        os.close(answer)
        os.close(stdout)
        self.children[pid] = Child(pid, socket.socket(fileno=verdict), time.monotonic() + seconds)
        return True

    def _become_child(self, answer: int, stdout: int, memory_bytes: int, seconds: float) -> None:
        """Never returns. Whatever happens, nothing of the warden runs on in the child."""
        code = NOT_RUN
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(stdout, 1)
            os.dup2(0, 2)
            kept = os.dup2(answer, 3)
            os.closerange(4, 4096)
            code = run(kept, lambda: self._shut_in(memory_bytes, seconds))
        finally:
            os._exit(code)

    def _shut_in(self, memory_bytes: int, seconds: float) -> None:
        jail.limit_resources(memory_bytes, int(seconds) + 1, jailed=self.filter is not None)
        jail.restrict_reading(self.folders)
        if self.filter is not None and not jail.filter_calls(self.filter):
            raise PermissionError("the kernel takes no filter of system calls")

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
                _tell(child, status)

    def _kill_orphans(self) -> None:
        """What a child has started and left is ours now, and must not go on."""
        try:
            found = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
        except OSError:
            return
        for pid in map(int, found):
            if pid not in self.children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _tell(child: Child, status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    name = signal.Signals(-code).name if code < 0 else None
    verdict = {"code": code if code >= 0 else None, "signal": name, "timed_out": child.timed_out}
    with suppress(OSError):
        child.verdict.sendall(json.dumps(verdict).encode())
    child.verdict.close()


def main() -> None:
    warden = Warden(socket.socket(fileno=int(sys.argv[1])))
    jail.adopt_orphans()
    if warden.filter is None:
        print("verifiers run with limits, but without a filter of system calls on this machine", file=sys.stderr)
    try:
        warden.serve()
    finally:
        warden.end()


if __name__ == "__main__":
    main()
