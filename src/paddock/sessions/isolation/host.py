"""The fork server: `python host.py LOADER SESSIONS_PER_PROCESS CONTROL_FD`.

Runs under any interpreter, so it imports the standard library only and knows nothing of environments.

LOADER is a file with `load(target)`. The server sends `target` first over the control socket, as a length and bytes.
`load` returns an object with `describe()`, a JSON object for the greeting line, and `open()`, which makes a session.
A session has `close()` and either `handle(kind, data)`, which returns bytes, or
`handle_async(number, kind, data, respond)`, which calls `respond` later, on any thread. An exception whose class is
called `Refused` means that the request was wrong and nothing was executed.

Commands on the control socket: `+NUMBER` passes the socket of a new session (SCM_RIGHTS), `kNUMBER` kills the process
of a session. When the control socket is closed, everything ends.

A frame on a session's socket is a HEADER (length, number, kind) and its data. The kind of a response is `opened`,
`ok`, `refused` or `failed`. When a child process ends, the last frame of each of its sessions is `died` with the wait
status. It may follow a frame that is incomplete.

With SESSIONS_PER_PROCESS 0 nothing is forked, and all sessions live in this process.
"""

import ctypes
import errno
import importlib.util
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import Any

HEADER = struct.Struct("!II8s")
COMMAND = struct.Struct("!cI")
NUMBER = struct.Struct("!I")
STATUS = struct.Struct("!i")
DIED = b"died"
OPENED = b"opened"
SHUTDOWN_SECONDS = 2.0
READ_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1


def main() -> None:
    loader, sessions_per_process, descriptor = sys.argv[1:4]
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)
    sys.path[0] = os.getcwd()
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal or a service manager signals the whole group; the server decides when this process ends.
        # A function, because processes that an environment starts would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    try:
        (size,) = NUMBER.unpack(receive_exactly(control, NUMBER.size))
        loaded = load(loader).load(receive_exactly(control, size).decode())
        greeting: dict[str, Any] = {"description": loaded.describe()}
    except BaseException as error:
        greeting = {"error": f"{type(error).__name__}: {error}", "hint": getattr(error, "hint", None)}
        control.sendall(json.dumps(greeting).encode() + b"\n")
        sys.exit(1)
    control.sendall(json.dumps(greeting).encode() + b"\n")
    if int(sessions_per_process):
        ForkServer(loaded, control, int(sessions_per_process)).run()
    else:
        run_sessions(loaded, control, COMMAND)
    os._exit(0)


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("paddock_hosted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError if the connection ends before."""
    parts = []
    while size:
        piece = connection.recv(min(size, 1 << 20))
        if not piece:
            raise EOFError("its connection broke off")
        parts.append(piece)
        size -= len(piece)
    return b"".join(parts)


# -- the fork server ---------------------------------------------------------------------------


class Child:
    """A child process that runs sessions."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self.sessions: dict[int, socket.socket] = {}
        """Our own copy of each session's socket, to report how the child ended."""
        self.hung: set[int] = set()
        self.is_retired = False


class ForkServer:
    """Forks children and reports how they ended. It has one thread and runs no code of an environment."""

    def __init__(self, loaded: Any, control: socket.socket, sessions_per_process: int) -> None:
        self.loaded = loaded
        self.control = control
        self.sessions_per_process = sessions_per_process
        self.children: dict[int, Child] = {}
        self.selector = selectors.DefaultSelector()
        self.wakeup_read, self.wakeup_write = os.pipe()
        # Loaded before the fork: a forked child must not load a library.
        self.libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def run(self) -> None:
        for end in (self.wakeup_read, self.wakeup_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.control, selectors.EVENT_READ, None)
        self.selector.register(self.wakeup_read, selectors.EVENT_READ, None)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.control:
                    if not self.read_command():
                        self.shut_down()
                        return
                elif key.fileobj == self.wakeup_read:
                    self.reap()
                elif key.data is None:
                    self.drain(key.fileobj)
                elif key.data.pid in self.children:
                    self.read_child_message(key.data)

    def read_command(self) -> bool:
        """Execute one command of the server. False if the control socket is closed."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, COMMAND.size, 1)
        except OSError:
            return False
        if len(data) < COMMAND.size:
            return False
        command, number = COMMAND.unpack(data)
        if command == b"k":
            self.kill(number)
        elif descriptors:
            self.assign(number, socket.socket(fileno=descriptors[0]))
        return True

    def assign(self, number: int, channel: socket.socket) -> None:
        """Pass a session's socket to a child that has room for it, or to a new child."""
        candidates = (
            c
            for c in self.children.values()
            if len(c.sessions) < self.sessions_per_process and not c.is_retired and not c.hung
        )
        try:
            child = next(candidates, None) or self.fork()
            socket.send_fds(child.control, [NUMBER.pack(number)], [channel.fileno()])
        except OSError as error:
            print(f"no process for a session: {error}", file=sys.stderr, flush=True)
            channel.close()
            return
        child.sessions[number] = channel

    def fork(self) -> Child:
        parent_end, child_end = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError:
            parent_end.close()
            child_end.close()
            raise
        if pid == 0:
            self.run_child(parent_end, child_end)
        child_end.close()
        child = self.children[pid] = Child(pid, parent_end)
        self.selector.register(parent_end, selectors.EVENT_READ, child)
        return child

    def run_child(self, parent_end: socket.socket, child_end: socket.socket) -> None:
        try:
            os.setpgid(0, 0)
            if self.libc is not None:
                self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            parent_end.close()
            self.control.close()
            sockets = [key.fileobj for key in self.selector.get_map().values()]
            self.selector.close()
            os.close(self.wakeup_read)
            os.close(self.wakeup_write)
            for sibling in self.children.values():
                sibling.control.close()
                for channel in sibling.sessions.values():
                    channel.close()
            for inherited in sockets:
                if isinstance(inherited, socket.socket):
                    inherited.close()
            if hasattr(self.loaded, "after_fork"):
                self.loaded.after_fork()
            run_sessions(self.loaded, child_end, NUMBER)
        except BaseException as error:
            print(f"a process for sessions failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def read_child_message(self, child: Child) -> None:
        """A child reports the end of a session, or closes its control socket."""
        try:
            data = child.control.recv(NUMBER.size)
        except OSError:
            data = b""
        if len(data) < NUMBER.size:
            self.retire(child)
            return
        (number,) = NUMBER.unpack(data)
        channel = child.sessions.pop(number, None)
        if channel is not None:
            channel.close()
        child.hung.discard(number)
        if not child.sessions:
            self.retire(child)
        elif child.hung.issuperset(child.sessions):
            kill_group(child.pid)

    def retire(self, child: Child) -> None:
        if not child.is_retired:
            child.is_retired = True
            self.selector.unregister(child.control)
            child.control.close()

    def kill(self, number: int) -> None:
        """End the process of a session, unless others live in it: then as soon as they have ended."""
        for child in list(self.children.values()):
            if number in child.sessions:
                child.hung.add(number)
                if child.hung.issuperset(child.sessions):
                    kill_group(child.pid)

    def reap(self) -> None:
        try:
            while os.read(self.wakeup_read, 4096):
                pass
        except BlockingIOError:
            pass
        for child in list(self.children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                del self.children[pid]
                self.retire(child)
                # Nobody else would end the processes that it started.
                kill_group(pid)
                for number, channel in child.sessions.items():
                    report_exit(channel, number, status)
                    # Not closed before the server has: a request that is just being sent would break the connection
                    # before the report is read.
                    self.selector.register(channel, selectors.EVENT_READ, None)

    def drain(self, channel: Any) -> None:
        """Discard requests that arrive after the `died` frame; close the socket when the server has."""
        try:
            data = channel.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(channel)
            channel.close()

    def shut_down(self) -> None:
        for child in self.children.values():
            self.retire(child)
        deadline = time.monotonic() + 2 * SHUTDOWN_SECONDS
        while self.children and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.01)
        for child in self.children.values():
            kill_group(child.pid)


def report_exit(channel: socket.socket, number: int, status: int) -> None:
    with suppress(OSError):
        channel.setblocking(False)
        channel.send(HEADER.pack(STATUS.size, number, DIED) + STATUS.pack(status))
        channel.shutdown(socket.SHUT_WR)


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


# -- the process of the sessions --------------------------------------------------------------------


def run_sessions(loaded: Any, control: socket.socket, command: struct.Struct) -> None:
    """Run a thread for each session whose socket arrives on `control`, until `control` is closed."""
    threads: list[threading.Thread] = []
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, command.size, 1)
        except OSError:
            break
        if not data:
            break
        (number,) = command.unpack(data)[-1:]
        threads = [thread for thread in threads if thread.is_alive()]
        for descriptor in descriptors:
            report_end = (lambda n=number: control.send(NUMBER.pack(n))) if command is NUMBER else (lambda: None)
            arguments = (loaded, socket.socket(fileno=descriptor), report_end)
            thread = threading.Thread(target=serve_session, args=arguments, daemon=True)
            thread.start()
            threads.append(thread)
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))


class ChannelLost(Exception):
    """The server has closed the socket of this session."""


def serve_session(loaded: Any, channel: socket.socket, report_end: Any) -> None:
    """Serve one session on this thread, from its first frame to its `close`."""
    # os.read and os.write: buffered files and socket methods cost more than most steps.
    session: Any = None
    descriptor, buffer = channel.fileno(), b""
    writing, process = threading.Lock(), os.getpid()

    def respond(number: int, kind: bytes, data: bytes) -> None:
        if os.getpid() != process:
            # The environment forked, and the copy came back here. Only the original may answer.
            os._exit(0)
        frame = HEADER.pack(len(data), number, kind) + data
        with writing:
            if channel.fileno() < 0:
                raise ChannelLost
            try:
                written = os.write(descriptor, frame)
                if written < len(frame):
                    channel.sendall(frame[written:])
            except OSError as error:
                if error.errno == errno.EBADF:
                    # The environment closed descriptors that are not its own: no response can be sent any more.
                    with suppress(OSError):
                        os.write(2, b"an environment closed the connection of its session\n")
                    os._exit(1)
                raise ChannelLost from error

    try:
        while piece := os.read(descriptor, READ_BYTES):
            buffer = buffer + piece if buffer else piece
            while len(buffer) >= HEADER.size:
                size, number, kind = HEADER.unpack_from(buffer)
                end = HEADER.size + size
                if len(buffer) < end:
                    # Read the rest of a long frame at once, or each piece would be copied again and again.
                    buffer += receive_exactly(channel, end - len(buffer))
                data, buffer = buffer[HEADER.size : end], buffer[end:]
                kind = kind.rstrip(b"\0")
                try:
                    if kind == b"open":
                        session = loaded.open()
                        respond(number, OPENED, b"")
                    elif hasattr(session, "handle_async"):
                        session.handle_async(number, kind, data, respond)
                    else:
                        respond(number, b"ok", session.handle(kind, data))
                except ChannelLost:
                    raise
                except BaseException as error:
                    respond(number, *failure_response(error))
    except (OSError, EOFError, ChannelLost):
        pass
    finally:
        if session is not None:
            try:
                session.close()
            except BaseException as error:
                print(f"close failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        with writing:
            channel.close()
        with suppress(OSError):
            report_end()


def failure_response(error: BaseException) -> tuple[bytes, bytes]:
    """Kind and data of the response to a request that failed."""
    kind = type(error).__name__
    if kind == "Refused":
        return b"refused", json.dumps(error.args[0], default=str).encode()
    return b"failed", json.dumps({"type": kind, "message": str(error)}, default=str).encode()


if __name__ == "__main__":
    main()
