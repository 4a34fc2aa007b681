"""Run a command of the agent for the tests, in a sandbox of its own: paddock-run [--max-output BYTES] CMD...

Input, output and exit code are those of the command: 127 if there is no such program, 126 if it cannot be run,
128 + N after signal N. With 125 it was not run at all; the tests then have no reward. The program of the same name
inside a verifier's sandbox is this text, with an interpreter put in front.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import _socket
import fcntl
import os
import select
import stat
import sys

USAGE = "usage: paddock-run [--max-output BYTES] CMD..."
NO_ANSWER = "the sandbox does not answer: only the tests can use it, and only while they run"
NOT_RUN = 125
SEALS = 1 | 2 | 4 | 8
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE."""
PASSED_ON = (1, 2, 3, 10, 12, 14, 15, 18)
MAX_ANSWER_BYTES = 4096

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def fail(reason: str) -> NoReturn:
    os.write(2, f"paddock-run: {reason}\n".encode("utf-8", "replace"))
    os._exit(NOT_RUN)


def parse(words: list[str]) -> tuple[int | None, list[str]]:
    most = None
    if words[:1] == ["--max-output"]:
        if len(words) < 2 or not words[1].isdigit():
            fail(USAGE)
        most, words = int(words[1]), words[2:]
    if words[:1] == ["--"]:
        words = words[1:]
    if not words or words[0].startswith("--"):
        fail(USAGE)
    return most, words


def request(line: _socket.socket, words: list[str], standard: tuple[int, int, int]) -> None:
    descriptors = b"".join(one.to_bytes(4, sys.byteorder) for one in standard)
    text = "\0".join((os.getcwd(), *words)).encode("utf-8", "surrogateescape")
    line.sendmsg([text], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])


def private_input() -> int:
    """The descriptor that the command gets as its input. A file of the tests is replaced by a sealed copy (memfd).

    A process with an open file can open it again for writing through `/proc/self/fd`, and read all of it.
    """
    if not stat.S_ISREG(os.fstat(0).st_mode):
        return 0
    position = os.lseek(0, 0, os.SEEK_CUR)
    left = os.fstat(0).st_size - position
    if position > 0 and left > 0:
        # The tests have read a part of it, as in a loop over cases. Unsealed, the server refuses it.
        return 0
    copy = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    while left > 0:
        sent = os.sendfile(copy, 0, position, left)
        if not sent:
            break
        position, left = position + sent, left - sent
    os.lseek(copy, 0, os.SEEK_SET)
    fcntl.fcntl(copy, fcntl.F_ADD_SEALS, SEALS)
    return copy


def private_outputs() -> tuple[dict[int, int], tuple[int, int]]:
    """Pipes for the outputs of the command: where each is read and written to, and its ends for the command.

    An output of the tests could be read, truncated or made to fail by everybody who has it. Two outputs that are the
    same file share a pipe, so that they keep their order.
    """
    out, out_inside = os.pipe()
    if os.path.sameopenfile(1, 2):
        return {out: 1}, (out_inside, out_inside)
    err, err_inside = os.pipe()
    return {out: 1, err: 2}, (out_inside, err_inside)


def relay(line: _socket.socket, sources: dict[int, int], most: int | None) -> int:
    """Hand output on until all of it has ended, or one has given more than `most` bytes: then the command ends."""
    poll = select.poll()
    poll.register(line.fileno(), select.POLLIN)
    passed = dict.fromkeys(sources, 0)
    for source in sources:
        poll.register(source, select.POLLIN)
    code: int | None = None
    while passed or code is None:
        for descriptor, _ in poll.poll():
            if descriptor == line.fileno():
                code = ended(line)
                poll.unregister(line.fileno())
                continue
            data = os.read(descriptor, 65536)
            write_all(sources[descriptor], data if most is None else data[: most - passed[descriptor]])
            passed[descriptor] += len(data)
            if most is not None and passed[descriptor] > most:
                write_all(2, f"paddock-run: ended after {most} bytes of output\n".encode())
                return 128 + int(_signal.SIGKILL)
            if not data:
                poll.unregister(descriptor)
                del passed[descriptor]
    return code


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`. If the reader is gone, exit as after SIGPIPE, which also ends the command."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            writable = select.poll()
            writable.register(descriptor, select.POLLOUT)
            writable.poll()
        except BrokenPipeError:
            os._exit(128 + int(_signal.SIGPIPE))
        except OSError as error:
            fail(f"its output cannot be written: {error.strerror}")


def ended(line: _socket.socket) -> int:
    """The exit code of the command."""
    kind, _, words = line.recv(MAX_ANSWER_BYTES).decode("utf-8", "replace").partition(" ")
    if kind == "refused":
        fail(words)
    if kind != "exit":
        fail(NO_ANSWER)
    return int(words)


def open_standard() -> None:
    """Where the caller has closed an input or output, nothing of ours may take its number."""
    while True:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened > 2:
            os.close(opened)
            return
        os.set_inheritable(opened, True)


def main() -> None:
    open_standard()
    most, words = parse(sys.argv[1:])
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    for number in PASSED_ON:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, lambda number, _: line.send(str(number).encode()))
    try:
        sources, outputs = private_outputs()
        line.connect("\0paddock-run")
        request(line, words, (private_input(), *outputs))
    except ConnectionError:
        fail(NO_ANSWER)
    except OSError as error:
        fail(f"the command cannot be run in a sandbox of its own: {error.strerror}")
    for inside in set(outputs):
        os.close(inside)
    try:
        code = relay(line, sources, most)
    except ConnectionError:
        fail(NO_ANSWER)
    os._exit(code)


if __name__ == "__main__":
    main()
