"""A program: `python host.py LOADER SESSIONS_PER_PROCESS CONTROL`, the last the number of a descriptor.

LOADER is a file with `load(place)`; `place` comes first over the control socket, as a length and bytes. What it
returns has `describe()`, a JSON object told at the start, and `open()`, which makes a session. A session has
`close()` and either `ask(kind, data)`, which returns bytes, or `take(number, kind, data, respond)`, which calls
`respond` later, on any thread. An error called `Refused` means that a request was wrong and nothing was done.

On the control socket `+NUMBER` brings the socket of a new session, `kNUMBER` asks to end the process of a session. A
frame on a session's socket is a HEADER (length, number, kind) and its data. The kind of an answer is `opened`, `ok`,
`refused` or `failed`. When a child process ends, `died` with its wait status is the last frame of each of its
sessions, also behind a frame that broke off. When the control socket ends, so does everything.

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
ORDER = struct.Struct("!cI")
NUMBER = struct.Struct("!I")
STATUS = struct.Struct("!i")
DIED = b"died"
OPENED = b"opened"
PARTING_SECONDS = 2.0
PIECE = 1 << 16
PR_SET_PDEATHSIG = 1


def main() -> None:
    loader, per_process, descriptor = sys.argv[1:4]
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)
    sys.path[0] = os.getcwd()
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal or a service manager signals the whole group; the server says when it is over.
        # A function, because what an environment starts would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    try:
        (size,) = NUMBER.unpack(_exactly(control, NUMBER.size))
        hosted = load(loader).load(_exactly(control, size).decode())
        greeting: dict[str, Any] = {"about": hosted.describe()}
    except BaseException as error:
        greeting = {"error": f"{type(error).__name__}: {error}", "hint": getattr(error, "hint", None)}
        control.sendall(json.dumps(greeting).encode() + b"\n")
        sys.exit(1)
    control.sendall(json.dumps(greeting).encode() + b"\n")
    if int(per_process):
        ForkServer(hosted, control, int(per_process)).run()
    else:
        run_sessions(hosted, control, ORDER)
    os._exit(0)


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("paddock_hosted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _exactly(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = control.recv(size - len(data))
        if not piece:
            raise EOFError("the server is gone")
        data += piece
    return data


# -- the process that forks ---------------------------------------------------------------------------


class Child:
    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self.sessions: dict[int, socket.socket] = {}
        """Our own copy of each session's socket: it can be told how the child ended."""
        self.hung: set[int] = set()
        self.is_leaving = False


class ForkServer:
    """Forks children and reports how they ended. It has one thread and runs no code of an environment."""

    def __init__(self, hosted: Any, control: socket.socket, per_process: int) -> None:
        self.hosted = hosted
        self.control = control
        self.per_process = per_process
        self.children: dict[int, Child] = {}
        self.selector = selectors.DefaultSelector()
        self.woken, self.wake = os.pipe()
        # Found before the fork, for a child must not load a library.
        self.libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def run(self) -> None:
        for end in (self.woken, self.wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.control, selectors.EVENT_READ, None)
        self.selector.register(self.woken, selectors.EVENT_READ, None)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.control:
                    if not self.obey():
                        self.leave()
                        return
                elif key.fileobj == self.woken:
                    self.reap()
                elif key.data is None:
                    self.part(key.fileobj)
                elif key.data.pid in self.children:
                    self.hear(key.data)

    def obey(self) -> bool:
        """Carry out one order of the server. False if it is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, ORDER.size, 1)
        except OSError:
            return False
        if len(data) < ORDER.size:
            return False
        order, number = ORDER.unpack(data)
        if order == b"k":
            self.kill(number)
        elif descriptors:
            self.place(number, socket.socket(fileno=descriptors[0]))
        return True

    def place(self, number: int, link: socket.socket) -> None:
        """Give a session to a child that has room for it, or to a new one."""
        room = (
            c
            for c in self.children.values()
            if len(c.sessions) < self.per_process and not c.is_leaving and not c.hung
        )
        try:
            child = next(room, None) or self.fork()
            socket.send_fds(child.control, [NUMBER.pack(number)], [link.fileno()])
        except OSError as error:
            print(f"no process for a session: {error}", file=sys.stderr, flush=True)
            link.close()
            return
        child.sessions[number] = link

    def fork(self) -> Child:
        near, far = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError:
            near.close()
            far.close()
            raise
        if pid == 0:
            self.be_child(near, far)
        far.close()
        child = self.children[pid] = Child(pid, near)
        self.selector.register(near, selectors.EVENT_READ, child)
        return child

    def be_child(self, near: socket.socket, far: socket.socket) -> None:
        try:
            os.setpgid(0, 0)
            if self.libc is not None:
                self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            near.close()
            self.control.close()
            opened = [key.fileobj for key in self.selector.get_map().values()]
            self.selector.close()
            os.close(self.woken)
            os.close(self.wake)
            for other in self.children.values():
                other.control.close()
                for link in other.sessions.values():
                    link.close()
            for each in opened:
                if isinstance(each, socket.socket):
                    each.close()
            if hasattr(self.hosted, "after_fork"):
                self.hosted.after_fork()
            run_sessions(self.hosted, far, NUMBER)
        except BaseException as error:
            print(f"a process for sessions failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def hear(self, child: Child) -> None:
        """A session of a child has ended, or the child is about to."""
        try:
            data = child.control.recv(NUMBER.size)
        except OSError:
            data = b""
        if len(data) < NUMBER.size:
            self.dismiss(child)
            return
        (number,) = NUMBER.unpack(data)
        link = child.sessions.pop(number, None)
        if link is not None:
            link.close()
        child.hung.discard(number)
        if not child.sessions:
            self.dismiss(child)
        elif child.hung.issuperset(child.sessions):
            end_group(child.pid)

    def dismiss(self, child: Child) -> None:
        if not child.is_leaving:
            child.is_leaving = True
            self.selector.unregister(child.control)
            child.control.close()

    def kill(self, number: int) -> None:
        """End the process of a session, unless others live in it: then as soon as they have ended."""
        for child in list(self.children.values()):
            if number in child.sessions:
                child.hung.add(number)
                if child.hung.issuperset(child.sessions):
                    end_group(child.pid)

    def reap(self) -> None:
        try:
            while os.read(self.woken, 4096):
                pass
        except BlockingIOError:
            pass
        for child in list(self.children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                del self.children[pid]
                self.dismiss(child)
                # What it started has nobody who would end it.
                end_group(pid)
                for number, link in child.sessions.items():
                    report(link, number, status)
                    # Not closed before the server has: a request that is just being sent would break the connection
                    # before the report is read.
                    self.selector.register(link, selectors.EVENT_READ, None)

    def part(self, link: Any) -> None:
        """A session that was told of the end of its process sends what nobody will carry out, or is closed."""
        try:
            data = link.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(link)
            link.close()

    def leave(self) -> None:
        for child in self.children.values():
            self.dismiss(child)
        deadline = time.monotonic() + 2 * PARTING_SECONDS
        while self.children and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.01)
        for child in self.children.values():
            end_group(child.pid)


def report(link: socket.socket, number: int, status: int) -> None:
    with suppress(OSError):
        link.setblocking(False)
        link.send(HEADER.pack(STATUS.size, number, DIED) + STATUS.pack(status))
        link.shutdown(socket.SHUT_WR)


def end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


# -- the process that has sessions --------------------------------------------------------------------


def run_sessions(hosted: Any, control: socket.socket, order: struct.Struct) -> None:
    """A thread for each session that the control socket brings, until it ends."""
    threads: list[threading.Thread] = []
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, order.size, 1)
        except OSError:
            break
        if not data:
            break
        (number,) = order.unpack(data)[-1:]
        threads = [thread for thread in threads if thread.is_alive()]
        for descriptor in descriptors:
            ended = (lambda n=number: control.send(NUMBER.pack(n))) if order is NUMBER else (lambda: None)
            arguments = (hosted, socket.socket(fileno=descriptor), ended)
            thread = threading.Thread(target=serve, args=arguments, daemon=True)
            thread.start()
            threads.append(thread)
    deadline = time.monotonic() + PARTING_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))


class LinkLost(Exception):
    """The server does not listen to this session any more."""


def serve(hosted: Any, link: socket.socket, ended: Any) -> None:
    """One session, on this thread from its beginning to its end."""
    # Plain reads and writes: what buffers and sockets do beside them costs more than most steps.
    session: Any = None
    descriptor, held = link.fileno(), b""
    writing, process = threading.Lock(), os.getpid()

    def respond(number: int, kind: bytes, data: bytes) -> None:
        if os.getpid() != process:
            # The environment forked, and the copy came back here. Only the original may answer.
            os._exit(0)
        frame = HEADER.pack(len(data), number, kind) + data
        with writing:
            if link.fileno() < 0:
                raise LinkLost
            try:
                written = os.write(descriptor, frame)
                if written < len(frame):
                    link.sendall(frame[written:])
            except OSError as error:
                if error.errno == errno.EBADF:
                    # The environment closed descriptors that are not its own: nobody else can be told of it.
                    with suppress(OSError):
                        os.write(2, b"an environment closed the connection of its session\n")
                    os._exit(1)
                raise LinkLost from error

    try:
        while piece := os.read(descriptor, PIECE):
            held = held + piece if held else piece
            while len(held) >= HEADER.size:
                size, number, kind = HEADER.unpack_from(held)
                end = HEADER.size + size
                if len(held) < end:
                    # Read the rest of a long frame at once, or each piece would be copied again and again.
                    held += read_exactly(descriptor, end - len(held))
                data, held = held[HEADER.size : end], held[end:]
                kind = kind.rstrip(b"\0")
                try:
                    if kind == b"open":
                        session = hosted.open()
                        respond(number, OPENED, b"")
                    elif hasattr(session, "take"):
                        session.take(number, kind, data, respond)
                    else:
                        respond(number, b"ok", session.ask(kind, data))
                except LinkLost:
                    raise
                except BaseException as error:
                    respond(number, *failure(error))
    except (OSError, EOFError, LinkLost):
        pass
    finally:
        if session is not None:
            try:
                session.close()
            except BaseException as error:
                print(f"close failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        with writing:
            link.close()
        with suppress(OSError):
            ended()


def read_exactly(descriptor: int, size: int) -> bytes:
    parts = []
    while size:
        piece = os.read(descriptor, min(size, 1 << 20))
        if not piece:
            raise EOFError
        parts.append(piece)
        size -= len(piece)
    return b"".join(parts)


def failure(error: BaseException) -> tuple[bytes, bytes]:
    """The kind and data of the answer to a request that failed."""
    kind = type(error).__name__
    if kind == "Refused":
        return b"refused", json.dumps(error.args[0], default=str).encode()
    return b"failed", json.dumps({"type": kind, "message": str(error)}, default=str).encode()


if __name__ == "__main__":
    main()
